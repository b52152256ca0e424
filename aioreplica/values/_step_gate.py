"""The gate of a strategy's steps: closed while all its variables are read, or replaced, at once.

Invariants:
    * Who has closed the gate and finds it idle may look at everything between two steps until the
      next `await`: a step that wants to begin waits, and so does the caller of one that has ended,
      so that it does not take its next batch. A loop that takes one meanwhile waits, too.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, final

from ..context import PLACE

HELD_S = 10.0
"""How long a loop may be held before that is warned of."""
LOOKS_PER_HOLD = 4


@final
class StepGate:
    """Holds the steps of one strategy back.

    Attributes:
        running: The runs in progress.
        is_closed: Whether steps have to wait; looked at by each.
        next_step: Number of the next step.
    """

    __slots__ = ("_closers", "_idle", "_open", "is_closed", "next_step", "running")

    def __init__(self) -> None:
        self.running: set[Any] = set()  # Any: the replica layer lies above this one
        self.is_closed = False
        self.next_step = 0
        self._closers = 0
        self._open: list[asyncio.Future[None]] = []
        self._idle: list[asyncio.Future[None]] = []

    @property
    def holds_loops(self) -> bool:
        """True if a loop may not have its next batch: no step could begin with it.

        While one is under way it may: that step may wait for what the loop does with the batch.
        """
        if not self.is_closed or self.running:
            return False
        place = PLACE.get()
        return not (place.replica or place.in_merge or place.is_outside)

    async def opened(self) -> None:
        """Wait until the gate is open, unless the caller is part of a step under way.

        Cancellation:
            Stops waiting; nothing else changes.
        """
        place = PLACE.get()
        if place.in_merge or place.is_outside:
            return  # a step inside a step: what waits for idleness waits for this one too
        while self.is_closed:
            await _wait_in(self._open, lambda: not self.is_closed)

    async def loop_opened(self, name: str) -> None:
        """Wait as `opened` does, for a loop of this name.

        Warns:
            RuntimeWarning: If it is held for long: what is waited for may wait for the loop.

        Cancellation:
            Stops waiting; nothing else changes.
        """
        timer: asyncio.TimerHandle
        loop, num_looks = asyncio.get_running_loop(), 0

        def look() -> None:
            nonlocal timer, num_looks
            num_looks += 1  # a loop that was blocked looks late, and once
            if num_looks < LOOKS_PER_HOLD:
                timer = loop.call_later(HELD_S / LOOKS_PER_HOLD, look)
                return
            text = (
                f"{name} gets no batch since {HELD_S:g} s: a save or restore of several strategies "
                "holds it, until a step of another one has ended. If that step waits for what this "
                "loop does, none of them goes on: cancel the save or restore, and save each "
                "strategy by itself."
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)

        timer = loop.call_later(HELD_S / LOOKS_PER_HOLD, look)
        try:
            await self.opened()
        finally:
            timer.cancel()

    def close(self) -> None:
        """Hold steps back, until every `close` was followed by an `open`."""
        self._closers += 1
        self.is_closed = True

    def open(self) -> None:
        """Take one `close` back."""
        self._closers -= 1
        if self._closers == 0:
            self.is_closed = False
            _wake(self._open)

    async def idle(self) -> None:
        """Wait until no step is under way."""
        while self.running:
            await _wait_in(self._idle, lambda: not self.running)

    def step_ended(self) -> None:
        """Learn that a step has ended; needed while the gate is closed."""
        if not self.running:
            _wake(self._idle)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<StepGate | {state}, {len(self.running)} steps under way>"


@asynccontextmanager
async def between_steps(gates: Collection[StepGate]) -> AsyncIterator[None]:
    """Hold the steps of some strategies back for a block, entered when none is under way.

    The block must not wait, and code of several event loops must not use it at the same time.

    Cancellation:
        While steps under way are waited for, opens the gates again.
    """
    for gate in gates:
        gate.close()
    try:
        while any(gate.running for gate in gates):
            for gate in gates:
                await gate.idle()
        yield
    finally:
        for gate in gates:
            gate.open()


async def _wait_in(waiters: list[asyncio.Future[None]], is_over: Callable[[], bool]) -> None:
    future = asyncio.get_running_loop().create_future()
    waiters.append(future)  # before the look: loops of other threads wake those who are here
    try:
        if not is_over():
            await future
    finally:
        with suppress(ValueError):
            waiters.remove(future)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for future in tuple(waiters):
        with suppress(RuntimeError):  # its loop is closed, and the wait with it
            future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
