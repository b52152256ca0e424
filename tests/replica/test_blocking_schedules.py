"""Blocking collectives under many schedules; each test says how many it explores."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, StallError
from aioreplica.replica import BlockingContext

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def context() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def blocking() -> BlockingContext:
    return context().blocking


def my_id() -> int:
    return context().replica_id_in_sync_group


def in_replicas(
    step: Callable[[], Any], options: ar.RunOptions | None = None
) -> Callable[[], Awaitable[tuple[Any, ...]]]:
    """Return a program that runs a step on three replicas and returns the local results."""

    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy(DEVICES) as strategy:
            return strategy.local_results(await strategy.run(step, options=options))

    return main


async def add_slowly(strategy: ar.Strategy, value: ar.PerReplica) -> int:
    await asyncio.sleep(0)
    return sum(value.values)


def rounds() -> list[Any]:
    """Meet in collectives of each kind; the last one to arrive differs from round to round."""
    own, results = my_id(), list[Any]()
    for i in range(3):
        results.append(float(blocking().all_reduce("sum", np.float32(10 * i + own))))
        results.append(blocking().all_gather(np.array([own]), 0).tolist())
    results += [blocking().merge_call(add_slowly, (own,)), blocking().any(own == 2)]
    return results


EXPECTED = [3.0, [0, 1, 2], 33.0, [0, 1, 2], 63.0, [0, 1, 2], 3, True]


# --- meeting ----------------------------------------------------------------------------------


@pytest.mark.xslow
@pytest.mark.explore(schedules=300)
async def test_collectives_do_not_depend_on_who_comes_last() -> None:
    assert await in_replicas(rounds)() == (EXPECTED,) * 3


def test_a_plain_step_can_be_cancelled_at_every_moment() -> None:
    report = art.cancel_everywhere(in_replicas(rounds))  # type: ignore[arg-type]

    report.check()
    assert report.schedules_run > 10


@pytest.mark.slow
def test_two_replicas_meet_in_every_schedule() -> None:
    async def main() -> None:
        def step() -> int:
            return blocking().all_reduce("sum", my_id()) + blocking().all_reduce("max", 1)

        async with ar.MirroredStrategy(DEVICES[:2]) as strategy:
            assert strategy.local_results(await strategy.run(step)) == (2, 2)

    report = art.exhaustive(main, limit=2_000)
    report.check()
    assert report.schedules_run > 10


@pytest.mark.explore(schedules=100)
async def test_groups_meet_by_themselves() -> None:
    def step() -> list[int]:
        own, results = my_id(), list[int]()
        for members in ([0, 1], [1, 2], [0, 2]):
            if own in members:
                results.append(blocking().group(members).all_reduce("sum", own))
        return [*results, blocking().all_reduce("sum", own)]

    assert await in_replicas(step)() == ([1, 2, 3], [1, 3, 3], [3, 2, 3])


@pytest.mark.explore(schedules=100)
async def test_a_failing_merge_is_raised_by_every_thread_that_waits() -> None:
    def fail(strategy: ar.Strategy, value: Any) -> None:
        raise LookupError("no such merge")

    def step() -> int:
        with suppress(LookupError):
            blocking().merge_call(fail, (my_id(),))
        return blocking().all_reduce("sum", 1)

    assert await in_replicas(step)() == (3, 3, 3)


@pytest.mark.explore(schedules=150)
async def test_awaited_and_blocking_twins_meet() -> None:
    async def step() -> int:
        ctx = context()
        if my_id() == 1:
            return await ctx.all_reduce("sum", 1)
        reduced: int = await ctx.run_on_device(lambda: ctx.blocking.all_reduce("sum", 1))
        return reduced + await ctx.run_on_device(int)

    assert await in_replicas(step)() == (3, 3, 3)


@pytest.mark.explore(schedules=150)
async def test_a_lane_serves_other_runs_while_an_op_waits_for_the_loop() -> None:
    """Two runs hold the same devices, in opposite orders, each in an op that waits."""

    async def step() -> int:
        ctx = context()
        await ctx.run_on_device(int)
        total: int = await ctx.run_on_device(lambda: ctx.blocking.all_reduce("sum", my_id()))
        return total

    async with (
        ar.MirroredStrategy(DEVICES[:2]) as one,
        ar.MirroredStrategy(DEVICES[1::-1]) as other,
    ):
        results = await asyncio.gather(one.run(step), other.run(step))
        assert [one.local_results(result) for result in results] == [(1, 1), (1, 1)]


# --- gangs ------------------------------------------------------------------------------------


@pytest.mark.xslow
@pytest.mark.explore(schedules=300)
async def test_gangs_never_hold_devices_crosswise() -> None:
    def step() -> int:
        return blocking().all_reduce("sum", 1) + blocking().all_reduce("sum", my_id())

    async with (
        ar.MirroredStrategy(DEVICES[:2]) as one,
        ar.MirroredStrategy(DEVICES[1::-1]) as other,
        ar.MirroredStrategy(DEVICES) as third,
    ):
        results = await asyncio.gather(
            one.run(step), other.run(step), third.run(step), one.run(step)
        )
        assert [r.values for r in results] == [(3, 3), (3, 3), (6, 6, 6), (3, 3)]


@pytest.mark.explore(schedules=150)
async def test_a_gang_is_cancelled_while_another_holds_its_devices() -> None:
    def step() -> int:
        return blocking().all_reduce("sum", 1)

    async with ar.MirroredStrategy(DEVICES[:2]) as strategy:
        runs = [asyncio.ensure_future(strategy.run(step)) for _ in range(3)]
        await asyncio.sleep(0)
        was_cancelled = runs[1].cancel()
        ended = await asyncio.gather(*runs, return_exceptions=True)
        second = asyncio.CancelledError if was_cancelled else ar.PerReplica
        assert [type(each) for each in ended] == [ar.PerReplica, second, ar.PerReplica]


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.explore(schedules=150)
async def test_a_replica_that_returns_while_others_wait_is_a_mismatch() -> None:
    def step() -> None:
        blocking().barrier()
        if my_id() != 1:
            blocking().barrier()

    with pytest.raises(MergeMismatchError) as caught:
        await in_replicas(step)()
    assert [row.state for row in caught.value.rows][1] == "returned"


@pytest.mark.explore(schedules=150)
async def test_different_collectives_are_a_mismatch() -> None:
    def step() -> None:
        if my_id() == 2:
            blocking().broadcast(1)
        blocking().all_reduce("sum", 1)

    with pytest.raises(MergeMismatchError, match="broadcast"):
        await in_replicas(step)()


@pytest.mark.explore(schedules=150)
async def test_a_failure_wakes_the_waiting_replicas() -> None:
    unwound = []

    def step() -> None:
        if my_id() == 0:
            raise ValueError("no data")
        try:
            blocking().barrier()
        except asyncio.CancelledError:
            unwound.append(my_id())
            raise

    with pytest.raises(ValueError, match="no data"):
        await in_replicas(step)()
    assert set(unwound) <= {1, 2}


@pytest.mark.explore(schedules=150)
async def test_cancelling_leaves_old_values_or_new_ones() -> None:
    async with ar.MirroredStrategy(DEVICES) as strategy:
        with strategy.scope():
            total = ar.Variable(0.0, aggregation="mean")

        def step() -> None:
            for _ in range(3):
                total.blocking.assign_add(1.0)

        run = asyncio.ensure_future(strategy.run(step))
        for _ in range(5):
            await asyncio.sleep(0)
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        await strategy.check_in_sync([total])
        assert float(total.value) in (0.0, 1.0, 2.0, 3.0)


@pytest.mark.explore(schedules=100)
async def test_a_collective_that_takes_too_long_is_a_stall() -> None:
    """Whoever is late waits for the host for an hour, beyond every patience."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    def step() -> None:
        if my_id() == 0:
            ar.outside_compilation(asyncio.sleep, 3600)
        blocking().all_reduce("sum", 1, ar.CommunicationOptions(timeout_seconds=30))

    with pytest.raises(StallError, match="all_reduce"):
        await in_replicas(step)()
    assert 30 <= loop.time() - start < 32


@pytest.mark.explore(schedules=100)
async def test_a_run_without_progress_is_a_stall() -> None:
    def step() -> None:
        if my_id():
            blocking().barrier()
        else:
            ar.outside_compilation(asyncio.sleep, 3600)

    with pytest.raises(StallError, match="barrier"):
        await in_replicas(step, ar.RunOptions(stall_timeout=20))()


def test_a_stall_shows_where_every_thread_is() -> None:
    def busy() -> None:
        threading.Event().wait(100)

    def step() -> None:
        if my_id() == 0:
            busy()
        blocking().barrier()

    with pytest.raises(StallError, match="device thread") as caught:
        art.run(in_replicas(step, ar.RunOptions(stall_timeout=20)))

    assert caught.value.rows[1].state == "waiting"
    assert "in busy" in caught.value.stacks[0]
    assert "in step" in caught.value.stacks[1]
