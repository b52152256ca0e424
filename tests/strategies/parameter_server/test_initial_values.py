"""Initial values that servers make for themselves, shard by shard."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.parameter_server.coordinating import add_one, coordinating

pytestmark = pytest.mark.asyncio


def rows(begin: int, end: int) -> Any:
    """Give rows that tell which they are."""
    return np.stack([np.arange(begin, end), np.full(end - begin, begin)], axis=1)


async def test_each_server_makes_its_rows() -> None:
    async with coordinating(variable_partitioner=ar.FixedShardsPartitioner(3)) as (strategy, _):
        with strategy.scope():
            table = ar.Variable(rows, shape=(7, 2), dtype="float32", name="table")
            assert (table.shape, str(table.dtype)) == ((7, 2), "float32")
        expected = np.concatenate([rows(0, 3), rows(3, 5), rows(5, 7)]).astype(np.float32)
        np.testing.assert_array_equal(await table.read(), expected)  # type: ignore[attr-defined]
        with strategy.scope():
            late = ar.Variable(rows, shape=(7, 2))  # when the servers run
        np.testing.assert_array_equal((await late.read())[:, 0], np.arange(7))  # type: ignore[attr-defined]


async def test_the_program_has_no_memory_for_them() -> None:
    num_bytes = 64 * 1024**2
    async with coordinating(num_ps=1) as (strategy, _):
        tracemalloc.start()
        try:
            with strategy.scope():
                table = ar.Variable(zeros, shape=(num_bytes // 8, 1), name="table")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert table.shape == (num_bytes // 8, 1)
        assert peak < num_bytes // 8


def zeros(begin: int, end: int) -> Any:
    return np.zeros((end - begin, 1))


async def test_a_checkpoint_that_is_restored_before_the_start_counts(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        async with coordinating() as (strategy, _):
            with strategy.scope():
                table = ar.Variable(rows, shape=(4, 2), name="table")
            await table.assign(np.ones((4, 2), int))
            await manager.save(1, {"table": table})
        engine = ar.cluster.LocalClosureEngine()
        async with ar.ParameterServerStrategy(engine, num_ps=2) as strategy:
            with strategy.scope():
                table = ar.Variable(rows, shape=(4, 2), name="table")
            await manager.restore({"table": table})
            np.testing.assert_array_equal(await table.read(), np.ones((4, 2)))  # type: ignore[attr-defined]


async def test_wrong_rows_are_told_before_anything_is_made() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            with pytest.raises(ValueError, match=r"rows 0 to 1 of variable 'a' .* \(1, 3\)"):
                ar.Variable(rows, shape=(4, 3), name="a")
            with pytest.raises(TypeError, match="must be a function"):
                ar.Variable(np.zeros(4), shape=(4,), name="a")
            with pytest.raises(ValueError, match="needs rows"):
                ar.Variable(rows, shape=(), name="a")
            count = ar.Variable(0.0, name="count")
        await coordinator.schedule(add_one, (count,))
        await coordinator.join()


async def test_an_error_on_a_server_is_raised_where_the_variable_is_used() -> None:
    async with coordinating(variable_partitioner=ar.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            table = ar.Variable(late_failure, shape=(6, 1), name="table")
        with pytest.raises(OSError, match="no such file of row 3"):
            await table.read()  # type: ignore[attr-defined]  # it is served


def late_failure(begin: int, end: int) -> Any:
    if begin:
        raise OSError(f"no such file of row {begin}")
    return zeros(begin, end)


async def test_other_strategies_call_it_once() -> None:
    calls: list[tuple[int, int]] = []

    def noted(begin: int, end: int) -> Any:
        calls.append((begin, end))
        return rows(begin, end)

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = ar.Variable(noted, shape=(3, 2))
        np.testing.assert_array_equal(table.value, rows(0, 3))
    assert calls == [(0, 3)]
