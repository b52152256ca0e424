"""What replicas write together: rows, mixtures of rows and arrays, means of integers."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.strategies.workers import on_workers


def my_id() -> int:
    context = ar.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


async def written(
    strategy: ar.Strategy, start: Any, aggregation: str, value: Any, verb: str = "assign_add"
) -> Any:
    """Let each replica add `value(its id)`; return what the variable holds then."""
    with strategy.scope():
        variable = ar.Variable(start, aggregation=aggregation)

    async def step() -> None:
        await getattr(variable, verb)(value(my_id()))

    await strategy.run(step)
    return variable.value.tolist()


def rows(replica_id: int) -> ar.IndexedSlices:
    return ar.IndexedSlices([2.0 * (replica_id + 1)], [replica_id], (2,))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", [2.0, 4.0]), ("mean", [1.0, 2.0]), ("only_first_replica", [2.0, 0.0])],
)
async def test_rows_of_several_replicas(
    pair: ar.MirroredStrategy, aggregation: str, expected: list[float]
) -> None:
    assert await written(pair, [0.0, 0.0], aggregation, rows) == expected


@pytest.mark.asyncio
async def test_rows_of_one_replica_and_an_array_of_the_other(pair: ar.MirroredStrategy) -> None:
    def value(replica_id: int) -> Any:
        return rows(0) if replica_id == 0 else [10.0, 10.0]

    assert await written(pair, [0.0, 0.0], "sum", value) == [12.0, 10.0]


@pytest.mark.asyncio
async def test_the_mean_of_integers_is_rounded_once(pair: ar.MirroredStrategy) -> None:
    assert await written(pair, [0, 0], "mean", lambda i: [4 * i, 3 * i]) == [2, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["assign", "assign_add"])
@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
async def test_integers_beyond_float64_are_written_exactly(
    pair: ar.MirroredStrategy, dtype: str, aggregation: str, verb: str
) -> None:
    first = np.array([2**53 + 1, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    start = np.zeros(3, dtype)

    found = await written(pair, start, aggregation, lambda i: start if i else first, verb)

    assert found == first.tolist()


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
async def test_a_mean_of_integers_does_not_leave_their_range(num_replicas: int, dtype: str) -> None:
    limits = np.iinfo(dtype)
    values = np.array([limits.min, limits.max], dtype)
    rows = ar.IndexedSlices(values, [0, 1], (2,))

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) as strategy:
        for value in (values, rows):
            found = await written(strategy, np.zeros(2, dtype), "mean", lambda _, x=value: x)
            assert found == values.tolist()
        found = await written(strategy, values[1], "mean", lambda _: values[1], "assign")
        assert found == limits.max


@pytest.mark.asyncio
async def test_booleans_are_numbers_in_an_integer_variable_only(pair: ar.MirroredStrategy) -> None:
    assert await written(pair, 0, "sum", lambda _: True) == 2
    assert await written(pair, 0, "mean", lambda _: True) == 1
    assert await written(pair, False, "only_first_replica", lambda i: i == 0, "assign") is True
    for aggregation in ("sum", "mean"):
        with pytest.raises(ValueError, match="has dtype bool, cannot assign a value of dtype"):
            await written(pair, False, aggregation, lambda _: True, "assign")


def mixed_rows(replica_id: int) -> ar.IndexedSlices:
    return ar.IndexedSlices([3 + replica_id, 2], [0, 1 + replica_id], (3,))


@pytest.mark.asyncio
async def test_the_mean_of_rows_of_integers_is_rounded_once(pair: ar.MirroredStrategy) -> None:
    """A row of several replicas is rounded as a whole; one that a replica lacks counts as 0."""
    start = np.zeros(3, np.int32)

    for value in (mixed_rows, lambda i: mixed_rows(i).to_dense()):
        assert await written(pair, start, "mean", value) == [4, 1, 1]


@pytest.mark.asyncio
async def test_workers_write_integers_as_replicas_do() -> None:
    greatest = 2**63 - 1

    async def program(strategy: ar.Strategy) -> Any:
        assert await written(strategy, [0, 0, 0], "mean", mixed_rows) == [4, 1, 1]
        assert await written(strategy, 0, "mean", lambda _: greatest) == greatest
        for aggregation in ("sum", "only_first_replica"):
            found = await written(strategy, 0, aggregation, lambda i: 0 if i else 2**53 + 1)
            assert found == 2**53 + 1

    await on_workers(2, 1, program)


@pytest.mark.asyncio
async def test_the_mean_of_halves_is_rounded_once(pair: ar.MirroredStrategy) -> None:
    """Half of the least number of float16 is 0, or that number again."""
    least = float(np.finfo(np.float16).smallest_subnormal)
    start = np.zeros(2, np.float16)

    def value(_replica_id: int) -> ar.IndexedSlices:
        return ar.IndexedSlices(np.float16([least]), [1], (2,))

    assert await written(pair, start, "mean", value) == [0.0, least]


@pytest.mark.asyncio
async def test_rows_that_do_not_fit_are_an_error(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable([0.0, 0.0], name="w")

    with pytest.raises(ValueError, match=r"'w' has shape \(2,\).*dense shape \(3,\)"):
        await variable.assign_add(ar.IndexedSlices([1.0], [0], (3,)))


def test_a_variable_needs_a_value_and_a_name_that_is_text() -> None:
    name: Any = 3

    with pytest.raises(TypeError, match=r"^ar\.Variable\(\) missing"):
        ar.Variable()
    with pytest.raises(TypeError, match="must be a str, got 3"):
        ar.Variable(0.0, name=name)
