"""Handles and groups under many schedules; each test says how many it explores."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def context() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def in_replicas(step: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[tuple[Any, ...]]]:
    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy(DEVICES) as strategy:
            return strategy.local_results(await strategy.run(step))

    return main


async def overlapped() -> list[float]:
    """Start a reduction behind each device op, await them in another order."""
    ctx = context()
    own, handles = ctx.replica_id_in_sync_group, []
    for i in range(3):
        value = await ctx.run_on_device(np.full, 2, 10.0 * i + own)
        handles.append(ctx.start_all_reduce("sum", value))
    await ctx.barrier()
    return [float((await handles[i])[0]) for i in (2, 0, 1)]


@pytest.mark.explore(schedules=200)
async def test_handles_meet_by_the_order_of_their_start() -> None:
    assert await in_replicas(overlapped)() == ([63.0, 3.0, 33.0],) * 3


def test_a_step_with_handles_can_be_cancelled_at_every_await() -> None:
    report = art.cancel_everywhere(in_replicas(overlapped))  # type: ignore[arg-type]

    report.check()
    assert report.schedules_run > 10


@pytest.mark.explore(schedules=200)
async def test_an_await_that_is_given_up_takes_nothing_from_the_others() -> None:
    async def step() -> int:
        ctx = context()
        if ctx.replica_id_in_sync_group == 2:
            await asyncio.sleep(0.1)
        handle = ctx.start_all_reduce("sum", 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await handle
        return int(await handle)

    assert await in_replicas(step)() == (3, 3, 3)


@pytest.mark.explore(schedules=200)
async def test_groups_meet_beside_each_other() -> None:
    async def step() -> tuple[int, int]:
        ctx = context()
        own = ctx.replica_id_in_sync_group
        members = [0, 1] if own < 2 else [2]
        started = ctx.start_all_reduce("sum", 100 * own)
        await ctx.run_on_device(int)
        part = await ctx.group(members).all_reduce("sum", own + 1)
        return part, await started

    assert await in_replicas(step)() == ((3, 300), (3, 300), (3, 300))


@pytest.mark.explore(schedules=200)
async def test_groups_that_wait_for_each_other_are_found_in_every_order() -> None:
    async def step() -> None:
        ctx = context()
        own = ctx.replica_id_in_sync_group
        await ctx.run_on_device(int)
        await ctx.group([own, (own + 1) % 3]).barrier()

    with pytest.raises(MergeMismatchError, match="in group"):
        await in_replicas(step)()


def test_small_programs_with_a_handle_are_covered_completely() -> None:
    """All schedules with up to two preemptions."""

    async def step() -> int:
        ctx = context()
        handle = ctx.start_all_reduce("sum", 1)
        await ctx.barrier()
        return int(await handle)

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            assert strategy.local_results(await strategy.run(step)) == (2, 2)

    report = art.exhaustive(main)

    report.check()
    assert report.complete
