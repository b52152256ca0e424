"""What replicas write together: rows, mixtures of rows and arrays, means of integers."""

from typing import Any

import pytest

import aioreplica as ar


def my_id() -> int:
    context = ar.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


async def written(pair: ar.MirroredStrategy, start: Any, aggregation: str, value: Any) -> Any:
    """Let each replica add `value(its id)`; return what the variable holds then."""
    with pair.scope():
        variable = ar.Variable(start, aggregation=aggregation)

    async def step() -> None:
        await variable.assign_add(value(my_id()))

    await pair.run(step)
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
