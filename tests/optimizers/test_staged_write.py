"""StagedWrite: captured, computed, and committed in one go."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers._staged_write import SMALL_BYTES, StagedWrite
from aioreplica.values import CAN_COUNT_REFERENCES


def doubled(old: Any) -> Any:
    return tuple(2 * array for array in old)


def test_nothing_changes_before_it_is_published_and_everything_in_it() -> None:
    a, b = ar.Variable(1.0), ar.Variable([2.0, 3.0])
    write = StagedWrite([a, b])
    write.compute((a, b), doubled)
    assert (a.version, b.version) == (0, 0)

    write.publish()

    assert (a.version, b.version) == (1, 1)
    assert (a.value, b.value.tolist()) == (2.0, [4.0, 6.0])
    assert not b.value.flags.writeable


def test_it_is_refused_when_somebody_has_written_meanwhile() -> None:
    a, b = ar.Variable(1.0), ar.Variable(2.0)
    write = StagedWrite([a, b])
    write.compute((a,), doubled)
    write.compute((b,), doubled)
    a.store.write({a: (np.array(5.0),)})

    assert not write.publish()

    assert (a.value, b.value) == (5.0, 2.0)


def test_new_arrays_are_filled_in_later_and_published_read_only(
    triple: ar.MirroredStrategy,
) -> None:
    with triple.scope():
        w, slot = ar.Variable([0.0]), ar.Variable([1.0])
    write = StagedWrite([w, slot])

    [(old, new)] = write.begin((w, slot))
    assert [array.tolist() for array in old] == [[0.0], [1.0]]
    for array in new:
        array[:] = 7.0

    assert write.publish()
    assert [float(part[0]) for part in (*w.components, *slot.components)] == [7.0] * 6
    assert not w.value.flags.writeable


@pytest.mark.parametrize("num_rows", [2, SMALL_BYTES // 8])
def test_large_buffers_are_used_again_if_they_are_laid_out_in_rows(num_rows: int) -> None:
    w = ar.Variable(np.asfortranarray(np.ones((num_rows, 3))))
    [(_, [first])] = StagedWrite([w]).begin((w,))
    assert first.flags.c_contiguous

    seen = []
    for _ in range(6):
        write = StagedWrite([w])
        [(_, [new])] = write.begin((w,))
        new[...] = 0
        seen.append(new.ctypes.data)
        assert new.flags.c_contiguous
        write.publish()
        del new, write
    if CAN_COUNT_REFERENCES and num_rows > 2:
        assert len(set(seen[2:])) == 2


def test_shared_components_are_computed_once(triple: ar.MirroredStrategy) -> None:
    with triple.scope():
        w, slot = ar.Variable(0.0), ar.Variable(0.0)
    one, other = np.array(1.0), np.array(2.0)
    w.store.write({w: (one, other, one)})
    calls = []

    write = StagedWrite([w, slot])
    write.compute((w, slot), lambda old: calls.append(old) or doubled(old))
    write.publish()

    assert len(calls) == 2
    assert [float(component) for component in w.components] == [2.0, 4.0, 2.0]
    assert w.components[0] is w.components[2]


def test_a_replaced_value_goes_to_all_components(triple: ar.MirroredStrategy) -> None:
    with triple.scope():
        w = ar.Variable(np.float32(0.0))
    write = StagedWrite([])
    write.replace(w, 3)

    write.publish()

    assert [float(component) for component in w.components] == [3.0] * 3
    assert w.dtype == np.float32


def test_values_come_in_the_dtype_and_shape_of_their_variable() -> None:
    w = ar.Variable(np.float32([1.0]), name="w")
    write = StagedWrite([w])
    write.compute((w,), lambda old: (old[0].astype(np.float64),))
    write.publish()
    assert w.dtype == np.float32

    with pytest.raises(ValueError, match=r"'w' has shape \(2,\)"):
        write.compute((w,), lambda _: (np.ones(2),))
