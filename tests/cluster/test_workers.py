"""The queue of runs of several workers, and what closing leaves of it."""

import asyncio
from typing import Any

import pytest

from aioreplica.collectives import no_data
from aioreplica.errors import ContextError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.workers import on_workers

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
