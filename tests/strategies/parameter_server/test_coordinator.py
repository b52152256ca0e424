"""Who waits for room in the queue, beside others who take none after all."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from tests.parameter_server.coordinating import Gate, coordinating, hold, identity
from tests.sequencer import idle

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
