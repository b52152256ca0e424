"""The queue of runs of several workers, and what closing leaves of it."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.cluster import _run
from aioreplica.collectives import no_data
from aioreplica.errors import ContextError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.test_multi_worker_shrink import lose
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.mark.asyncio
async def test_a_run_that_waited_while_the_strategy_was_closed_does_not_begin() -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        workers, order = strategy._runtime.workers, []

        async def queued() -> None:
            async with workers.run("queued"):
                order.append("queued")

        async with workers.run("first"):
            waiting = asyncio.ensure_future(queued())
            await idle()
            closing = asyncio.ensure_future(workers.aclose())
            await idle()
            order.append("closed")
        with pytest.raises(ContextError, match="was closed while queued waited"):
            await waiting
        await closing
        assert order == ["closed"]

    await on_workers(1, 1, program)


@pytest.mark.asyncio
async def test_closing_leaves_no_timer_that_would_break_what_is_opened_again() -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        workers = strategy._runtime.workers
        async with workers.operation("meet", "") as turn:
            await turn.exchange(b"", no_data)
        await workers.aclose()
        loop: Any = asyncio.get_running_loop()
        assert [timer for timer in loop._scheduled if not timer.cancelled()] == []

    await on_workers(1, 1, program)


@pytest.mark.asyncio
async def test_others_that_are_late_are_told_by_what_a_worker_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_run, "CLOSING_S", 1e-3)

    async def step(rank: int) -> None:
        await ar.get_replica_context().barrier()
        if not rank:
            raise OSError("the data is broken")
        while not made[1]._runtime.workers._communicator.has_failed:  # computes for long
            await asyncio.sleep(0)
        await ar.get_replica_context().barrier()

    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        await strategy.run(step, (strategy._runtime.workers.rank,))

    made = strategies(2, 1)
    first, second = await outcomes(made, [program] * 2)

    assert isinstance(first, OSError)
    assert isinstance(second, WorkerLostError)
    assert "OSError: the data is broken" in str(second)


@pytest.mark.asyncio
async def test_closing_waits_no_longer_for_what_was_begun_before_than_for_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_run, "CLOSING_S", 1e-3)
    is_closed = asyncio.Event()

    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        workers = strategy._runtime.workers
        async with workers.operation("meet", "") as turn:
            await turn.exchange(b"", no_data)
        if workers.rank:  # computes for long
            await is_closed.wait()
            return
        async with workers.operation("meet again", "") as turn:
            turn.exchange(b"", no_data).cancel()
        await strategy.aclose()
        is_closed.set()

    await on_workers(2, 1, program)

    text = (
        "worker 0 was closed without the others: Worker 0 ended the group: worker 0: TimeoutError"
    )
    assert any(text in record.getMessage() for record in caplog.records)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_lost", [False, True])
async def test_closing_without_a_worker_that_is_lost_is_logged(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        workers = strategy._runtime.workers
        async with workers.operation("meet", "") as turn:
            await turn.exchange(b"", no_data)
        if workers.rank and is_lost:
            lose(strategy)
        else:
            await strategy.aclose()

    await on_workers(2, 1, program)

    told = [record.getMessage() for record in caplog.records if record.name == "aioreplica.cluster"]
    text = "worker 0 was closed without the others: Worker 1 is gone"
    assert any(text in each for each in told) == is_lost
    assert bool(told) == is_lost
