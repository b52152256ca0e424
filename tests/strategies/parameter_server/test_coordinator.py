"""Who waits for room in the queue, and what a coordinator knows that is opened again."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import ClosureCancelledError, ContextError
from tests.parameter_server.coordinating import Gate, coordinating, hold, identity
from tests.sequencer import idle
from tests.strategies.parameter_server.opening import UNDER_WAY, until

MANY = 40
"""More than there are moments at which room is given away while the queue empties."""


@pytest.mark.asyncio
async def test_room_that_a_schedule_does_not_take_goes_to_the_next_one() -> None:
    """Closures that cannot be pickled used it up, and one behind them waited for ever."""
    gate = Gate()
    async with coordinating(num_workers=1, queue_size=1) as (_, coordinator):
        with pytest.raises(anyio.WouldBlock):  # noqa: PT012 (how many fit in is its own affair)
            for _ in range(MANY):
                coordinator.schedule_nowait(hold, (gate,))
        locks = [threading.Lock() for _ in range(MANY)]
        bad = [asyncio.ensure_future(coordinator.schedule(identity, (each,))) for each in locks]
        good = asyncio.ensure_future(coordinator.schedule(identity, (7,)))
        await idle()
        gate.open()
        errors = await asyncio.gather(*bad, return_exceptions=True)
        assert {type(error) for error in errors} == {TypeError}
        assert await (await good).fetch() == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("is_same", [True, False])
async def test_what_still_runs_keeps_its_place_when_a_coordinator_is_opened_again(
    *, is_same: bool
) -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (strategy, coordinator):
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        await coordinator.aclose()
        async with coordinator if is_same else ar.ClusterCoordinator(strategy) as again:
            remotes = [await again.schedule(identity, (i,)) for i in range(UNDER_WAY)]
            await idle()
            assert again.statistics().queue_depth == 1  # as one place is taken
            gate.open()
            assert await again.fetch(remotes) == [*range(UNDER_WAY)]


@pytest.mark.asyncio
async def test_the_result_of_what_still_runs_is_let_go_after_the_close() -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (_, coordinator):
        remote = await coordinator.schedule(hold, (gate,))
        await gate.reached()
        await coordinator.aclose()
        queue = coordinator._runner.queue
        (closure,) = queue.with_workers()
        assert closure.submission is not None
        gate.open()
        await until(lambda: not queue.with_workers())
        assert closure.submission is None
        with pytest.raises(ClosureCancelledError, match="coordinator was closed"):
            await remote.fetch()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_strategy_first", [True, False])
async def test_what_still_runs_is_followed_until_the_strategy_is_closed(
    *, is_strategy_first: bool
) -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (strategy, _):  # it keeps the engine open
        await strategy.servers.ready()
        async with (
            ar.ParameterServerStrategy(strategy.engine) as other,
            ar.ClusterCoordinator(other) as coordinator,
        ):
            await coordinator.schedule(hold, (gate,))
            await gate.reached()
            if is_strategy_first:
                await other.aclose()
            else:
                await coordinator.aclose()
                assert "closure 0 hold" in names_of_tasks()
        await idle()
        assert "closure 0 hold" not in names_of_tasks()
        assert "closure on worker-0" in names_of_tasks()
        gate.open()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_close_that_is_cancelled_is_done_all_the_same(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked, answer = Gate(), asyncio.Event(), asyncio.Event()

    async def report(*_args: object) -> list[object]:
        asked.set()
        await answer.wait()
        return []

    async with coordinating(num_workers=1) as (strategy, coordinator):
        if is_busy:
            await coordinator.schedule(hold, (gate,))
            await gate.reached()
        with monkeypatch.context() as slow:
            slow.setattr(strategy.servers, "report", report)
            closing = asyncio.ensure_future(coordinator.aclose())
            await asked.wait()
            closing.cancel()
            await idle()
            assert not closing.done()
            answer.set()
            with pytest.raises(asyncio.CancelledError):
                await closing
        assert strategy.coordinator is None
        assert "watch over closures" not in names_of_tasks()
        with pytest.raises(ContextError, match=r"coordinator of .* is closed"):
            await coordinator.join()
        gate.open()
        async with ar.ClusterCoordinator(strategy) as another:
            assert await (await another.schedule(identity, (7,))).fetch() == 7


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_task_left")
async def test_a_coordinator_that_was_not_closed_is_closed_with_its_strategy() -> None:
    async with ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy:
        coordinator = ar.ClusterCoordinator(strategy)
        assert await (await coordinator.schedule(identity, (7,))).fetch() == 7
    assert strategy.coordinator is None
    assert "watch over closures" not in names_of_tasks()
    async with strategy:
        again = ar.ClusterCoordinator(strategy)
        assert await (await again.schedule(identity, (8,))).fetch() == 8
        with pytest.raises(ContextError, match="is closed"):
            await coordinator.join()


def names_of_tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}
