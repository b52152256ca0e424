"""Ten thousand runs that succeed, fail and are cancelled leave nothing behind."""

import asyncio
import gc
import threading
import tracemalloc
from typing import Any

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica._gil import has_gil
from aioreplica.errors import AioReplicaError
from tests.conftest import mirrored

RUNS = 10_000
BATCH = 1_000
KINDS = 8


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def late(_strategy: ar.Strategy, _value: Any) -> None:
    await asyncio.sleep(0)


async def step(kind: int, data: np.ndarray) -> Any:
    ctx = me()
    first = ctx.replica_id_in_sync_group == 0
    await ctx.all_reduce("mean", data)
    match kind:
        case 0 if first:
            raise ValueError("one fails")
        case 1 if first:
            return None
        case 2:
            await ctx.merge_call(late, (data,))
        case 3:
            await ctx.run_on_device(np.sum, data)
        case 4 if first:
            ctx.barrier()
            return None
        case 5:
            await asyncio.Event().wait()
        case 6:
            raise KeyError(ctx.replica_id_in_sync_group)
    await ctx.barrier()
    return data


async def one_of_each(strategy: ar.Strategy, rounds: int) -> None:
    data = np.ones(1000)
    for number in range(rounds):
        kind = number % KINDS
        try:
            if kind == 5:
                task = asyncio.get_running_loop().create_task(strategy.run(step, (kind, data)))
                for _ in range(number % 11):
                    await asyncio.sleep(0)
                task.cancel()
                await task
            elif kind == 7:
                await strategy.run(np.sum, (data,))
            else:
                await strategy.run(step, (kind, data))
        except (ValueError, ExceptionGroup, AioReplicaError, asyncio.CancelledError):
            pass


def footprint() -> tuple[int, int, int, int]:
    """Tasks, threads, file descriptors and bytes of Python objects."""
    gc.collect()
    current, _ = tracemalloc.get_traced_memory()
    return len(asyncio.all_tasks()), threading.active_count(), psutil.Process().num_fds(), current


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_ten_thousand_runs_leave_nothing_behind() -> None:
    async with mirrored(3) as strategy:
        await one_of_each(strategy, BATCH)
        tracemalloc.start()
        try:
            await one_of_each(strategy, 200)  # the recorder's ring fills up once
            tasks, threads, files, memory = footprint()
            resident = psutil.Process().memory_info().rss
            await one_of_each(strategy, 2 * BATCH)
            after = footprint()
        finally:
            tracemalloc.stop()
        assert after[:3] == (tasks, threads, files)
        assert after[3] - memory < 100_000
        await one_of_each(strategy, RUNS - 3 * BATCH)
        assert footprint()[:3] == (tasks, threads, files)
        assert psutil.Process().memory_info().rss - resident < 20_000_000
        assert strategy.statistics().num_active == 0


@pytest.mark.skipif(not has_gil(), reason="other threads' references are counted later there")
@pytest.mark.asyncio
async def test_a_run_makes_no_reference_cycles() -> None:
    """Arrays go when the last reference goes, without waiting for the garbage collector."""
    async with mirrored(2) as strategy:
        await one_of_each(strategy, 2 * KINDS)
        gc.collect()
        gc.freeze()  # what other tests left, and somebody lets go of meanwhile, is not looked at
        gc.disable()
        try:
            for kind in (2, 3, 7, 8):
                for _ in range(5):
                    await strategy.run(
                        np.sum if kind == 7 else step,
                        (np.ones(10),) if kind == 7 else (kind, np.ones(10)),
                    )
                assert gc.collect() == 0, f"kind {kind} leaves cycles"
        finally:
            gc.enable()


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_strategies_opened_and_closed_leave_no_thread() -> None:
    async def once() -> None:
        async with mirrored(4) as strategy:
            await strategy.run(np.sum, (np.ones(10),))

    await once()
    before = threading.active_count()
    for _ in range(200):
        await once()
    for thread in threading.enumerate():
        if thread.name.startswith("aioreplica cpu"):
            thread.join(60)
    assert threading.active_count() <= before
