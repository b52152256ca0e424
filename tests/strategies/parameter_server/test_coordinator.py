"""Who waits for room in the queue, and what a coordinator knows that is opened again."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from tests.parameter_server.coordinating import Gate, coordinating, hold, identity
from tests.sequencer import idle
from tests.strategies.parameter_server.opening import UNDER_WAY

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
async def test_what_still_runs_keeps_its_place_when_the_coordinator_is_opened_again() -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (_, coordinator):
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        await coordinator.aclose()
        async with coordinator:
            remotes = [await coordinator.schedule(identity, (i,)) for i in range(UNDER_WAY)]
            await idle()
            assert coordinator.statistics().queue_depth == 1  # as one place is taken
            gate.open()
            assert await coordinator.fetch(remotes) == [*range(UNDER_WAY)]
