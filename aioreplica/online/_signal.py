"""A signal: tasks wait until something has changed, and look again."""

from __future__ import annotations

import asyncio
from typing import final

from ..devices import running_loop


@final
class Signal:
    """Wakes all who wait, each time it is given. What has changed is for them to find out."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, until: float | None = None) -> None:
        """Wait for the next signal, or until the loop's clock shows `until`.

        Cancellation:
            Stops waiting.
        """
        loop = running_loop("Online learning")
        waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, _resolve, waiter)
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def give(self) -> None:
        """Wake all who wait."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _resolve(waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
