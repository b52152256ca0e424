"""Update: captured, computed, and committed in one go."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers._update import Update
from aioreplica.values import CAN_COUNT_REFERENCES


def doubled(old: Any) -> Any:
    return tuple(2 * array for array in old)


def test_nothing_changes_before_the_commit_and_everything_in_it() -> None:
    a, b = ar.Variable(1.0), ar.Variable([2.0, 3.0])
    update = Update([a, b])
    update.compute((a, b), doubled)
    assert (a.version, b.version) == (0, 0)

    update.commit()

    assert (a.version, b.version) == (1, 1)
    assert (a.value, b.value.tolist()) == (2.0, [4.0, 6.0])
    assert not b.value.flags.writeable


def test_it_is_refused_when_somebody_has_written_meanwhile() -> None:
    a, b = ar.Variable(1.0), ar.Variable(2.0)
    update = Update([a, b])
    update.compute((a,), doubled)
    update.compute((b,), doubled)
    a.commit((np.array(5.0),))

    assert not update.commit()

    assert (a.value, b.value) == (5.0, 2.0)


def test_new_arrays_are_filled_in_later_and_published_read_only(
    triple: ar.MirroredStrategy,
) -> None:
    with triple.scope():
        w, slot = ar.Variable([0.0]), ar.Variable([1.0])
    update = Update([w, slot])

    [column] = update.begin((w, slot))
    assert [array.tolist() for array in column.old] == [[0.0], [1.0]]
    for array in column.new:
        array[:] = 7.0

    assert update.commit()
    assert [float(part[0]) for part in (*w.components, *slot.components)] == [7.0] * 6
    assert not w.value.flags.writeable


def test_buffers_are_used_again_if_they_are_laid_out_in_rows() -> None:
    w = ar.Variable(np.asfortranarray(np.ones((2, 3))))
    first = Update([w]).begin((w,))[0].new[0]
    assert first.flags.c_contiguous

    seen = []
    for _ in range(6):
        update = Update([w])
        [column] = update.begin((w,))
        column.new[0][...] = 0
        seen.append(column.new[0].ctypes.data)
        assert column.new[0].flags.c_contiguous
        update.commit()
        del column, update
    assert not CAN_COUNT_REFERENCES or len(set(seen[2:])) == 2


def test_shared_components_are_computed_once(triple: ar.MirroredStrategy) -> None:
    with triple.scope():
        w, slot = ar.Variable(0.0), ar.Variable(0.0)
    one, other = np.array(1.0), np.array(2.0)
    w.commit((one, other, one))
    calls = []

    update = Update([w, slot])
    update.compute((w, slot), lambda old: calls.append(old) or doubled(old))
    update.commit()

    assert len(calls) == 2
    assert [float(component) for component in w.components] == [2.0, 4.0, 2.0]
    assert w.components[0] is w.components[2]


def test_a_replaced_value_goes_to_all_components(triple: ar.MirroredStrategy) -> None:
    with triple.scope():
        w = ar.Variable(np.float32(0.0))
    update = Update([])
    update.replace(w, 3)

    update.commit()

    assert [float(component) for component in w.components] == [3.0] * 3
    assert w.dtype == np.float32


def test_values_come_in_the_dtype_and_shape_of_their_variable() -> None:
    w = ar.Variable(np.float32([1.0]), name="w")
    update = Update([w])
    update.compute((w,), lambda old: (old[0].astype(np.float64),))
    update.commit()
    assert w.dtype == np.float32

    with pytest.raises(ValueError, match=r"'w' has shape \(2,\)"):
        update.compute((w,), lambda _: (np.ones(2),))
