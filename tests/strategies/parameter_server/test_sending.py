"""Closures that are sent together, and their results."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import ClosureCancelledError, LoopMismatchError, WorkerLostError
from tests.parameter_server.coordinating import Gate, coordinating, hold
from tests.strategies.parameter_server.opening import UNDER_WAY, fail, opened


def note_submitted(engine: LocalClosureEngine) -> list[int]:
    """Return a list that will tell how many closures were sent together each time."""
    submit, sizes = engine.submit, list[int]()

    def submit_and_note(worker: str, tasks: Any) -> Any:
        sizes.append(len(tasks))
        return submit(worker, tasks)

    engine.submit = submit_and_note  # type: ignore[method-assign]
    return sizes


@pytest.mark.asyncio
async def test_closures_that_come_together_are_sent_together() -> None:
    async with opened(1) as (strategy, coordinator):
        sizes = note_submitted(strategy.engine)
        together = [coordinator.schedule_nowait(abs, (-i,)) for i in range(5)]
        assert await coordinator.fetch(together) == [0, 1, 2, 3, 4]
        assert await (await coordinator.schedule(abs, (-5,))).fetch() == 5
        assert sizes == [5, 1]


@pytest.mark.asyncio
async def test_an_error_ends_the_closures_sent_with_it() -> None:
    async with opened(1) as (strategy, coordinator):
        sizes = note_submitted(strategy.engine)
        calls: list[Any] = [(abs, -1), (fail, ValueError), (abs, -2), (abs, -3)]
        remotes = [coordinator.schedule_nowait(fn, (argument,)) for fn, argument in calls]
        with pytest.raises(ValueError, match="no"):
            await coordinator.join()
        assert sizes == [4]
        assert await remotes[0].fetch() == 1
        with pytest.raises(ValueError, match="no"):
            await remotes[1].fetch()
        for remote in remotes[2:]:
            with pytest.raises(ClosureCancelledError):
                await remote.fetch()
        assert coordinator.statistics().num_cancelled == 2


@pytest.mark.asyncio
async def test_closures_that_cannot_be_sent_fail_together_once() -> None:
    async with opened(1) as (strategy, coordinator):

        def refuse(worker: str, tasks: Any) -> Any:
            raise OSError("no way out")

        submit, strategy.engine.submit = strategy.engine.submit, refuse
        remotes = [coordinator.schedule_nowait(abs, (-i,)) for i in range(3)]
        with pytest.raises(OSError, match="no way out"):
            await coordinator.join()
        with pytest.raises(OSError, match="no way out"):
            await remotes[0].fetch()
        for remote in remotes[1:]:
            with pytest.raises(ClosureCancelledError):
                await remote.fetch()
        statistics = coordinator.statistics()
        assert (statistics.num_failed, statistics.num_cancelled) == (1, 2)

        strategy.engine.submit = submit
        assert await (await coordinator.schedule(abs, (-7,))).fetch() == 7
        await coordinator.join()


@pytest.mark.asyncio
async def test_a_result_goes_when_it_was_fetched_or_cannot_be() -> None:
    gc.disable()  # what is in no circle goes at once
    try:
        async with opened(1) as (strategy, coordinator):
            made: list[weakref.ref[Any]] = []
            submit = strategy.engine.submit

            def submit_and_note(worker: str, tasks: Any) -> Any:
                submissions = submit(worker, tasks)
                made.extend(map(weakref.ref, submissions))
                return submissions

            strategy.engine.submit = submit_and_note
            await coordinator.schedule(str)
            kept = await coordinator.schedule(str)
            fetched = await coordinator.schedule(str)
            assert await fetched.fetch() is await fetched.fetch()
            await coordinator.join()
            await asyncio.sleep(0)  # tasks that have ended are forgotten in the next cycle
            assert [each() is None for each in made] == [True, False, True]
            assert await kept.fetch() == ""
    finally:
        gc.enable()


MAY_END = threading.Event()


def wait_for_the_end() -> bool:
    return MAY_END.wait(30)


@pytest.mark.asyncio
async def test_a_result_is_awaited_on_its_own_loop_until_it_is_there() -> None:
    """What it waits for would never wake another one."""

    def elsewhere(remote: Any) -> Any:
        return asyncio.run(remote.fetch())

    async with opened(1) as (_, coordinator):
        MAY_END.clear()
        remote = await coordinator.schedule(wait_for_the_end)
        with pytest.raises(LoopMismatchError, match="belongs to"):
            await asyncio.to_thread(elsewhere, remote)
        MAY_END.set()
        assert await remote.fetch()
        assert await asyncio.to_thread(elsewhere, remote)


@pytest.mark.asyncio
async def test_closures_that_wait_hear_of_a_lost_server_without_variables() -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (strategy, coordinator):
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        remotes = [await coordinator.schedule(abs, (-1,)) for _ in range(UNDER_WAY)]
        assert coordinator.statistics().queue_depth == 1
        strategy.engine.lose_server(1)  # type: ignore[attr-defined]  # it is a local one
        with pytest.raises(WorkerLostError):
            await strategy.servers.report(0)
        gate.open()
        with pytest.raises(WorkerLostError, match="server 1 was lost"):
            await coordinator.join()
        with pytest.raises(WorkerLostError, match="server 1 was lost"):
            await remotes[-1].fetch()
