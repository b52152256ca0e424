"""The replica group under many schedules: meeting, mismatch, failure, cancellation, ops in flight.

Each test says how many schedules it explores; a failure prints a token that replays it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, StallError

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]

Step = Callable[[], Awaitable[Any]]


def in_replicas(step: Step) -> Callable[[], Awaitable[Any]]:
    """Return a program that runs a step on three replicas and returns the local results."""

    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy(DEVICES) as strategy:
            return strategy.local_results(await strategy.run(step))

    return main


def context() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def gather_values(strategy: ar.Strategy, value: ar.PerReplica) -> list[Any]:
    return list(value.values)


async def add_slowly(strategy: ar.Strategy, value: ar.PerReplica) -> int:
    await asyncio.sleep(0)
    return sum(value.values)


# --- meeting ----------------------------------------------------------------------------------


@pytest.mark.explore(schedules=150)
async def test_merges_do_not_depend_on_who_comes_first() -> None:
    async def step() -> list[Any]:
        ctx, results = context(), []
        for i in range(3):
            own = 10 * i + ctx.replica_id_in_sync_group
            await ctx.run_on_device(int)
            results.append(await ctx.merge_call(gather_values, (own,)))
        return results

    for result in await in_replicas(step)():
        assert result == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


@pytest.mark.explore(schedules=150)
async def test_asynchronous_merges_release_every_replica_once() -> None:
    async def step() -> tuple[int, Any, bool]:
        ctx = context()
        own = ctx.replica_id_in_sync_group
        total = await ctx.merge_call(add_slowly, (own,))
        mean = await ctx.all_reduce("mean", np.float32(own))
        return total, float(mean), await ctx.any(own == 2)

    assert await in_replicas(step)() == ((3, 1.0, True),) * 3


@pytest.mark.explore(schedules=100)
async def test_concurrent_runs_do_not_meet_each_other() -> None:
    async def step(offset: int) -> int:
        ctx = context()
        await ctx.run_on_device(int)
        return await ctx.merge_call(add_slowly, (offset + ctx.replica_id_in_sync_group,))

    async with ar.MirroredStrategy(DEVICES) as strategy:
        runs = [strategy.run(step, args=(offset,)) for offset in (0, 100)]
        low, high = await asyncio.gather(*runs)
        assert strategy.local_results(low) == (3, 3, 3)
        assert strategy.local_results(high) == (303, 303, 303)


# --- mismatch and failure ---------------------------------------------------------------------


@pytest.mark.explore(schedules=200)
async def test_a_replica_that_returns_early_is_a_mismatch_in_every_order() -> None:
    async def step() -> None:
        ctx = context()
        if ctx.replica_id_in_sync_group != 1:
            await ctx.run_on_device(int)
            await ctx.barrier()

    with pytest.raises(MergeMismatchError, match="Replica 1 returned while"):
        await in_replicas(step)()


@pytest.mark.explore(schedules=200)
async def test_the_failing_replicas_error_wins_in_every_order() -> None:
    ended = []

    async def step() -> None:
        ctx = context()
        try:
            await ctx.run_on_device(int)
            if ctx.replica_id_in_sync_group == 2:
                raise ValueError("on purpose")
            await ctx.barrier()
        finally:
            ended.append(ctx.replica_id_in_sync_group)

    with pytest.raises(ValueError, match="on purpose"):
        await in_replicas(step)()
    assert 2 in ended  # the others may have been cancelled before they began


@pytest.mark.explore(schedules=150)
async def test_a_stalled_run_ends_in_every_order() -> None:
    async def step() -> None:
        ctx = context()
        if ctx.replica_id_in_sync_group == 0:
            await asyncio.Event().wait()
        await ctx.barrier()

    async with ar.MirroredStrategy(DEVICES) as strategy:
        with pytest.raises(StallError):
            await strategy.run(step, options=ar.RunOptions(stall_timeout=5))


# --- ops in flight ----------------------------------------------------------------------------


@pytest.mark.explore(schedules=200)
async def test_no_op_is_in_flight_when_a_failed_run_has_ended() -> None:
    in_flight: list[str] = []

    async def step() -> None:
        ctx = context()
        name = str(ctx.replica_id_in_sync_group)
        ops = asyncio.gather(*[ctx.run_on_device(in_flight.append, name) for _ in range(2)])
        if ctx.replica_id_in_sync_group == 0:
            raise ValueError("on purpose")
        await ops

    async with ar.MirroredStrategy(DEVICES) as strategy:
        with suppress(ValueError):
            await strategy.run(step)
        seen = len(in_flight)
        await asyncio.sleep(10)
        assert len(in_flight) == seen, "an op ran after its run"


def test_a_failing_device_fails_the_run_and_nothing_hangs() -> None:
    async def step() -> None:
        ctx = context()
        for _ in range(2):
            await ctx.run_on_device(int)
            await ctx.barrier()

    async def main() -> None:
        with suppress(ar.errors.DeviceError):
            await in_replicas(step)()

    faults = art.Faults().fail_op("cpu:1").slow_device("cpu:2", factor=500)
    art.explore(main, schedules=200, faults=faults).check()


# --- cancellation -----------------------------------------------------------------------------


async def collective_step() -> None:
    ctx = context()
    await ctx.run_on_device(int)
    await ctx.merge_call(add_slowly, (1,))
    await ctx.run_on_device(int)
    await ctx.barrier()


def test_a_run_can_be_cancelled_at_every_await() -> None:
    report = art.cancel_everywhere(in_replicas(collective_step))  # type: ignore[arg-type]

    report.check()
    assert report.schedules_run > 30


@pytest.mark.explore(schedules=250)
async def test_a_cancelled_run_ends_in_every_order() -> None:
    async with ar.MirroredStrategy(DEVICES) as strategy:
        task = asyncio.create_task(strategy.run(collective_step))
        for _ in range(4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert strategy.statistics().num_active == 0
        await strategy.run(collective_step)  # the strategy is as good as before


@pytest.mark.explore(schedules=250)
async def test_a_collective_given_up_is_a_mismatch_or_was_met() -> None:
    async def step() -> str:
        ctx = context()
        if ctx.replica_id_in_sync_group == 0:
            await asyncio.sleep(0.1)
        with suppress(TimeoutError):
            await asyncio.wait_for(ctx.barrier(), 0.1)
        return "met"

    try:
        assert await in_replicas(step)() == ("met",) * 3
    except MergeMismatchError as error:
        assert "withdrew from barrier #1" in str(error)  # noqa: PT017 - either may happen
