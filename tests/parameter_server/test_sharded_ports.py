"""What TensorFlow tests of sharded variables and their partitioners, asked of these.

The facts are those of sharded_variable_test and of the partitioning in
parameter_server_strategy_v2_test. Left out is what belongs to graphs and saved models, and lists of
variables that a user makes a sharded one of: here the strategy makes it. Slices are those of the
whole array; a read of some rows takes their indices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import FixedShardsPartitioner, MinSizePartitioner
from aioreplica.errors import ContextError
from tests.parameter_server.coordinating import coordinating

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def made(strategy: Any, *values: Any, **options: Any) -> Any:
    with strategy.scope():
        variables = [ar.Variable(value, **options) for value in values]
    return variables[0] if len(variables) == 1 else variables


def parts(variable: Any) -> list[tuple[int, int, int]]:
    return [(each.server, each.begin, each.end) for each in variable.shards]


@pytest.mark.parametrize(
    "answer", [None, [], [0, 1, 1], [2, 2, 1], [2], [-1, 1, 1], "2", [1.5, 1, 1]], ids=str
)
async def test_answers_of_a_partitioner_are_checked(answer: Any) -> None:
    async with coordinating(variable_partitioner=lambda shape, dtype, axis=0: answer) as (s, _):
        with pytest.raises((ValueError, TypeError), match=r"partitioner .*variable 'variable'"):
            made(s, np.arange(8).reshape(2, 2, 2))


# ---- where the shards are ------------------------------------------------------------------------


async def test_without_a_partitioner_nothing_is_divided() -> None:
    async with coordinating() as (strategy, _):
        variable = made(strategy, np.arange(4))
        assert not isinstance(variable, ar.ShardedVariable)
        assert variable.num_shards == 1
        np.testing.assert_array_equal(await variable.read(), [0, 1, 2, 3])


async def test_two_shards_are_on_two_servers() -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(2)) as (strategy, _):
        first, second = made(
            strategy, np.arange(10).reshape(5, 2), lambda: np.arange(6).reshape(6, 1)
        )
        for variable in (first, second):
            assert isinstance(variable, ar.ShardedVariable)
        assert parts(first) == [(0, 0, 3), (1, 3, 5)]
        assert parts(second) == [(0, 0, 3), (1, 3, 6)]
        np.testing.assert_array_equal(await first.read(), np.arange(10).reshape(5, 2))
        np.testing.assert_array_equal(await second.read(), np.arange(6).reshape(6, 1))


async def test_more_shards_than_servers_go_round() -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(4)) as (strategy, _):
        variable = made(strategy, list(range(10)))
        assert parts(variable) == [(0, 0, 3), (1, 3, 6), (0, 6, 8), (1, 8, 10)]
        np.testing.assert_array_equal(await variable.read(), range(10))


async def test_more_shards_than_rows_are_as_many_as_rows() -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(4)) as (strategy, _):
        variable = made(strategy, [0, 1, 2])
        assert parts(variable) == [(0, 0, 1), (1, 1, 2), (0, 2, 3)]
        np.testing.assert_array_equal(await variable.read(), [0, 1, 2])


async def test_one_shard_is_a_whole_variable() -> None:
    partitioner = MinSizePartitioner(min_shard_bytes=64 << 20, max_shards=2)
    async with coordinating(variable_partitioner=partitioner) as (strategy, _):
        first, second = made(strategy, lambda: np.zeros(10, np.int64), np.arange(10))
        for variable, server in ((first, 0), (second, 1)):
            assert not isinstance(variable, ar.ShardedVariable)
            assert [each.server for each in variable.shards] == [server]
        np.testing.assert_array_equal(await second.read(), np.arange(10))


async def test_scalars_are_not_divided() -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(2)) as (strategy, _):
        assert made(strategy, 1.5).num_shards == 1


@pytest.mark.parametrize("dtype", [None, np.int64])
async def test_a_callable_with_and_without_dtype_is_divided(dtype: Any) -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(2)) as (strategy, _):
        variable = made(strategy, lambda: np.arange(4), dtype=dtype)
        assert parts(variable) == [(0, 0, 2), (1, 2, 4)]
        assert variable.dtype == np.int64


# ---- a sharded variable as one -------------------------------------------------------------------


async def test_a_sharded_variable_looks_like_the_whole() -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(2)) as (strategy, _):
        variable = made(strategy, np.array([0, 1]), name="s")
        assert (variable.name, variable.shape, variable.dtype) == ("s", (2,), np.dtype(np.int64))
        assert variable.num_shards == len(variable.shards) == 2
        assert "s" in repr(variable)
        with pytest.raises(ContextError, match=r"read\(\)"):
            _ = variable.value
        assert [each.name for each in strategy.trainable_variables] == ["s"]


WRITES = {
    "assign": ([[4, 4], [5, 5], [6, 6], [7, 7]], [[4, 4], [5, 5], [6, 6], [7, 7]]),
    "assign_add": ([[1, 1], [1, 1], [2, 2], [2, 2]], [[1, 1], [2, 2], [4, 4], [5, 5]]),
    "assign_sub": ([[0, 0], [1, 1], [1, 1], [3, 3]], [[0, 0], [0, 0], [1, 1], [0, 0]]),
}


def write(variable: Any, way: str, value: Any) -> Any:
    getattr(variable, way)(value)
    return variable.value


@pytest.mark.parametrize("place", ["coordinator", "closure"])
@pytest.mark.parametrize("way", WRITES)
async def test_writes_go_to_all_shards(way: str, place: str) -> None:
    value, expected = (np.array(each) for each in WRITES[way])
    partitioner = FixedShardsPartitioner(3)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        variable = made(strategy, np.array([[0, 0], [1, 1], [2, 2], [3, 3]]))
        if place == "coordinator":
            await getattr(variable, way)(value)
        else:
            remote = await coordinator.schedule(write, (variable, way, value))
            np.testing.assert_array_equal(await remote.fetch(), expected)
        np.testing.assert_array_equal(await variable.read(), expected)


@pytest.mark.parametrize("value", [[1, 2, 3], [[1, 2]], ["a", "b", "c", "d"]], ids=str)
async def test_a_write_that_does_not_fit_changes_nothing(value: Any) -> None:
    partitioner = FixedShardsPartitioner(3)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        variable = made(strategy, np.arange(4.0), name="table")
        with pytest.raises((ValueError, TypeError), match=r"table|shape|dtype|could not"):
            await variable.assign(np.array(value))
        await coordinator.schedule(write, (variable, "assign", np.array(value)))
        with pytest.raises((ValueError, TypeError), match=r"table|shape|dtype|could not"):
            await coordinator.join()
        np.testing.assert_array_equal(await variable.read(), np.arange(4.0))


ROWS = {
    "one": [5], "across": [2, 3, 5, 6], "twice": [1, 7, 1], "backwards": [7, 4, 0],
    "none": [], "all": list(range(8)), "negative": [-1, -8],
}  # fmt: skip


def look_up(variable: Any, rows: Any) -> Any:
    return variable.rows(np.array(rows, np.int64))


def look_up_in_a_loss(variable: Any, rows: Any) -> Any:
    return ar.autodiff.embedding_lookup(variable, np.array(rows, np.int64))


@pytest.mark.parametrize("rows", [each for each in ROWS if each != "negative"])
@pytest.mark.parametrize("place", ["read", "rows", "embedding_lookup"])
async def test_rows_are_looked_up(rows: str, place: str) -> None:
    whole, chosen = np.arange(1.0, 17.0).reshape(8, 2), np.array(ROWS[rows], np.int64)
    partitioner = FixedShardsPartitioner(3)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        variable = made(strategy, whole)
        if place == "read":
            found = await variable.read(chosen)
        else:
            fn = look_up if place == "rows" else look_up_in_a_loss
            found = await (await coordinator.schedule(fn, (variable, chosen))).fetch()
        np.testing.assert_array_equal(found, whole[chosen])


@pytest.mark.parametrize("rows", [[8], [-100], [[0.5]], ["a"]], ids=str)
async def test_rows_that_are_not_there_are_refused(rows: Any) -> None:
    async with coordinating(variable_partitioner=FixedShardsPartitioner(3)) as (strategy, _):
        variable = made(strategy, np.arange(16.0).reshape(8, 2), name="table")
        with pytest.raises((IndexError, ValueError, TypeError)):
            await variable.read(np.array(rows))


async def test_a_lookup_brings_its_rows_only() -> None:
    partitioner = FixedShardsPartitioner(3)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        variable = made(strategy, np.zeros((3000, 64)))
        for fn in (look_up, look_up_in_a_loss):
            before = coordinator.statistics().bytes_pulled
            await coordinator.schedule(fn, (variable, [0, 1500, 2999]))
            await coordinator.join()
            pulled = coordinator.statistics().bytes_pulled - before
            assert 3 * 64 * 8 <= pulled <= 2 * 3 * 64 * 8


def push_rows(variable: Any, slices: Any) -> None:
    variable.assign_add(slices)


def descend(optimizer: Any, variable: Any, slices: Any) -> None:
    optimizer.apply_gradients([(slices, variable)])


@pytest.mark.parametrize("fn", ["assign_add", "apply_gradients"])
async def test_rows_go_to_the_shards_they_touch_only(fn: str) -> None:
    partitioner = FixedShardsPartitioner(4)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            variable = ar.Variable(np.zeros((4000, 16)))
            optimizer = ar.optimizers.SGD(1.0)
        slices = ar.IndexedSlices(np.ones((3, 16)), [10, 10, 3999], (4000, 16))
        expected = np.zeros((4000, 16))
        expected[10], expected[3999] = (2, 1) if fn == "assign_add" else (-2, -1)
        if fn == "assign_add":
            await coordinator.schedule(push_rows, (variable, slices))
        else:
            await coordinator.schedule(descend, (optimizer, variable, slices))
        await coordinator.join()
        statistics = coordinator.statistics()

        np.testing.assert_array_equal(await variable.read(), expected)
        assert statistics.pushes == 2 + (fn == "apply_gradients")  # iterations are pushed, too
        assert statistics.bytes_pushed <= 2 * slices.nbytes


async def test_shapes_of_slices_are_checked() -> None:
    partitioner = FixedShardsPartitioner(2)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        variable = made(strategy, np.zeros((4, 2)), name="table")
        slices = ar.IndexedSlices(np.ones((1, 3)), [0], (4, 3))
        await coordinator.schedule(push_rows, (variable, slices))
        with pytest.raises(ValueError, match="table"):
            await coordinator.join()
        np.testing.assert_array_equal(await variable.read(), np.zeros((4, 2)))


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 3, 4, 8], ids=lambda n: f"to {n}")
@pytest.mark.parametrize("before", [1, 2, 4], ids=lambda n: f"{n}")
async def test_a_checkpoint_restores_into_other_numbers_of_shards(
    tmp_path: Path, before: int, after: int
) -> None:
    manager = ar.CheckpointManager(tmp_path)
    for num_shards in (before, after):
        partitioner = FixedShardsPartitioner(num_shards)
        async with coordinating(variable_partitioner=partitioner) as (strategy, _):
            variable = made(strategy, np.ones(4), name="w")
            if manager.latest() is None:
                await variable.assign([1.0, 2.0, 3.0, 4.0])
                await manager.save(1, {"w": variable})
                await variable.assign(np.zeros(4))
            await manager.restore({"w": variable})
            assert variable.num_shards == min(num_shards, 4)
            np.testing.assert_array_equal(await variable.read(), [1.0, 2.0, 3.0, 4.0])
    await manager.aclose()


def descend_densely(optimizer: Any, variable: Any, gradient: Any) -> None:
    optimizer.apply_gradients([(gradient, variable)])


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adam", "AdamW"])
async def test_slots_are_saved_with_their_variables(tmp_path: Path, name: str) -> None:
    found = []
    async with ar.CheckpointManager(tmp_path) as manager:
        for num_shards in (2, 3):
            partitioner = FixedShardsPartitioner(num_shards)
            async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
                with strategy.scope():
                    variable = ar.Variable(np.linspace(0, 1, 6), name="w")
                    optimizer = getattr(ar.optimizers, name)(0.1)
                state = {"w": variable, "optimizer": optimizer}
                if manager.latest() is None:
                    for _ in range(2):
                        await step(coordinator, optimizer, variable)
                    await manager.save(1, state)
                else:
                    await manager.restore(state)
                await step(coordinator, optimizer, variable)
                found.append(await variable.read())
    np.testing.assert_array_equal(found[0], found[1])


async def step(coordinator: Any, optimizer: Any, variable: Any) -> None:
    await coordinator.schedule(descend_densely, (optimizer, variable, np.arange(6.0) - 2))
    await coordinator.join()
