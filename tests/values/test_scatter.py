"""Writes of IndexedSlices: rows added, replaced, compared, multiplied and divided."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import run_on_host

VERBS = [
    "assign_add", "assign_sub", "scatter_update", "scatter_min", "scatter_max", "scatter_mul",
    "scatter_div",
]  # fmt: skip


def naive(verb: str, old: Any, slices: ar.IndexedSlices) -> Any:
    """One row after the other, in Python; sums of one index are made first."""
    new = np.array(old)
    for row, index in zip(slices.values, slices.indices, strict=True):
        if verb == "scatter_update":
            new[index] = row
        else:
            ufuncs = {
                "assign_add": np.add, "assign_sub": np.subtract, "scatter_min": np.minimum,
                "scatter_max": np.maximum, "scatter_mul": np.multiply, "scatter_div": np.divide,
            }  # fmt: skip
            new[index] = ufuncs[verb](new[index], row)
    return new


def slices_of(rows: int = 5, dtype: str = "f4") -> ar.IndexedSlices:
    return ar.IndexedSlices(
        np.array([[8, 0.5], [3, 2], [0.25, 4]], dtype), [rows - 1, 0, rows - 1], (rows, 2)
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
async def test_outside_the_replicas(strategy: ar.Strategy, verb: str, dtype: str) -> None:
    with strategy.scope():
        variable = ar.Variable(np.arange(10).reshape(5, 2) + 1.0, dtype=dtype)
    held = variable.value
    expected = naive(verb, held, slices_of())

    written = await getattr(variable, verb)(slices_of())

    np.testing.assert_array_equal(variable.value, expected)
    assert written is variable.value
    assert variable.dtype == dtype
    assert not variable.value.flags.writeable
    assert held.tolist() == (np.arange(10).reshape(5, 2) + 1.0).tolist()


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_no_rows_change_nothing(verb: str) -> None:
    variable = ar.Variable([1.0, 2.0])
    await getattr(variable, verb)(ar.IndexedSlices([], [], (2,)))
    assert variable.value.tolist() == [1.0, 2.0]


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_in_a_replica_the_first_ones_rows_count(gang: ar.MirroredStrategy, verb: str) -> None:
    with gang.scope():
        variable = ar.Variable(np.ones((5, 2)), aggregation="only_first_replica")

    async def step(scale: float) -> Any:
        rows = slices_of(dtype="f8")
        own = ar.IndexedSlices(rows.values * scale, rows.indices, rows.dense_shape)
        return (await getattr(variable, verb)(own)) is variable.value

    scales = ar.PerReplica([float(i + 1) for i in range(gang.num_replicas_in_sync)])
    same = await gang.run(step, args=(scales,))

    assert all(same.values)
    np.testing.assert_array_equal(variable.value, naive(verb, np.ones((5, 2)), slices_of()))


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
async def test_rows_of_several_replicas_are_added_up_only(
    pair: ar.MirroredStrategy, aggregation: str
) -> None:
    with pair.scope():
        variable = ar.Variable(np.ones((5, 2)), aggregation=aggregation, name="table")

    async def step() -> None:
        await variable.scatter_max(slices_of())

    with pytest.raises(ValueError, match=r"'table' has aggregation .* cannot scatter_max it"):
        await pair.run(step)
    assert variable.version == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_on_read_in_a_replica_writes_the_own_component(
    pair: ar.MirroredStrategy, verb: str
) -> None:
    with pair.scope():
        variable = ar.Variable(np.ones((5, 2)), synchronization="on_read")

    async def step() -> None:
        if my_id() == 1:
            await getattr(variable, verb)(slices_of())

    await pair.run(step)

    first, second = variable.components
    assert first.tolist() == np.ones((5, 2)).tolist()
    np.testing.assert_array_equal(second, naive(verb, np.ones((5, 2)), slices_of()))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["assign_add", "scatter_mul", "scatter_div"])
async def test_a_total_written_outside_is_what_the_write_makes_of_it(
    pair: ar.MirroredStrategy, verb: str
) -> None:
    with pair.scope():
        total = ar.Variable(np.zeros((5, 2)), synchronization="on_read", aggregation="sum")
    total.store.write({total: (np.full((5, 2), 3.0), np.full((5, 2), 6.0))})

    written = await getattr(total, verb)(slices_of(dtype="f8"))

    np.testing.assert_array_equal(total.value, naive(verb, np.full((5, 2), 9.0), slices_of()))
    np.testing.assert_array_equal(written, total.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
async def test_a_total_has_no_minimum_outside(pair: ar.MirroredStrategy, aggregation: str) -> None:
    with pair.scope():
        total = ar.Variable(np.ones((5, 2)), synchronization="on_read", aggregation=aggregation)

    with pytest.raises(ValueError, match="scatter_min has no meaning outside the replicas"):
        await total.scatter_min(slices_of(dtype="f8"))


@pytest.mark.asyncio
async def test_plain_steps_write_through_blocking(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(np.ones((5, 2)), aggregation="only_first_replica")
        counts = ar.Variable(np.zeros(2), synchronization="on_read", aggregation="sum")

    def step() -> Any:
        one = ar.IndexedSlices([1.0], [my_id()], (2,))
        return [
            getattr(variable.blocking, verb)(slices_of(dtype="f8"))[0, 0]
            for verb in VERBS
            if verb.startswith("scatter")
        ], counts.blocking.scatter_max(one).tolist()

    seen, own = await pair.run(step)

    assert [value.values for value in seen] == [
        (3.0,) * 2,
        (3.0,) * 2,
        (3.0,) * 2,
        (9.0,) * 2,
        (3.0,) * 2,
    ]
    assert [part.values for part in own] == [(1.0, 0.0), (0.0, 1.0)]


@pytest.mark.asyncio
async def test_a_large_variable_is_written_on_the_host() -> None:
    rows = 5 * 2**17  # 5 MiB of float64
    variable = ar.Variable(np.ones((rows, 1)))
    slices = ar.IndexedSlices([[2.0], [3.0]], [1, 1], (rows, 1))
    await run_on_host(int)

    written = await variable.scatter_mul(slices)

    assert written is variable.value
    assert variable.value[:3].tolist() == [[1.0], [6.0], [1.0]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("initial", "verb", "slices", "error", "text"),
    [
        (np.ones(3), "assign_add", ar.IndexedSlices([1.0], [0], (2,)), ValueError, r"shape \(3,\)"),
        (
            np.ones(2, int),
            "scatter_mul",
            ar.IndexedSlices([1.0], [0], (2,)),
            ValueError,
            "cannot take",
        ),
        (np.ones(2, int), "scatter_div", ar.IndexedSlices([1], [0], (2,)), ValueError, "divided"),
        (np.ones(2), "scatter_min", np.ones(2), TypeError, "takes ar.IndexedSlices"),
        (np.ones(2), "assign", ar.IndexedSlices([1.0], [0], (2,)), ValueError, "scatter_update"),
    ],
    ids=["shape", "dtype", "integers", "no slices", "assign"],
)
async def test_invalid_scatters_are_refused(
    initial: Any, verb: str, slices: Any, error: type[Exception], text: str
) -> None:
    variable = ar.Variable(initial)
    with pytest.raises(error, match=text):
        await getattr(variable, verb)(slices)
    assert variable.version == 0


def my_id() -> int:
    context = ar.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group
