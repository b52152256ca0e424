"""Tickets of examples and streams of records, and the signal that wakes those who wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import Self, final

from ..devices import require_loop, running_loop
from ..errors import AioReplicaError
from ._records import StepRecord


@final
class Ticket:
    """The receipt for one example; `await ticket` gives the first version that has learned it.

    Awaiting it raises PoisonedExampleError if the example was set aside, and ContextError if the
    learner was closed before its turn came; a journalled example is then learned by the next
    learner on the journal. Any number of tasks may wait, cancelling one leaves the example alone,
    and a ticket that is not awaited costs nothing.
    """

    __slots__ = (
        "__weakref__", "_failure", "_is_saved", "_loop", "_outcome", "_signal", "is_duplicate",
        "number",
    )  # fmt: skip

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.number: int | None = None
        """The place of the example in the order of learning, from 1; None until it is saved."""
        self.is_duplicate = False
        """Whether its idempotency key was known, so that nothing new was taken."""
        self._is_saved = False
        self._failure: Exception | None = None  # of taking it
        self._outcome: int | AioReplicaError | None = None
        self._signal: Signal | None = None  # made when someone waits

    @property
    def is_saved(self) -> bool:
        """True if the example is durable; without a journal, whether it was taken."""
        return self._is_saved

    @property
    def is_done(self) -> bool:
        """True if the example was learned or set aside, or never will be."""
        return self._outcome is not None or self._failure is not None

    async def saved(self) -> Ticket:
        """Wait until the example is durable; return the ticket.

        Raises:
            JournalError: If the journal could not keep it: it is not taken.
            KeyReusedError: If the key was given for another body before.
            ContextError: If the learner was closed meanwhile.

        Cancellation:
            Stops waiting. The example may be taken all the same: give it a key to ask again.
        """
        while not self._is_saved and self._failure is None:
            await self._changed()
        if self._failure is not None:
            raise self._failure
        return self

    def __await__(self) -> Generator[object, None, int]:
        """Wait until the example was learned; return the first version that has it."""
        return self._learned().__await__()

    async def _learned(self) -> int:
        await self.saved()
        while self._outcome is None:
            await self._changed()
        if isinstance(self._outcome, AioReplicaError):
            raise self._outcome
        return self._outcome

    # ---- for the learner -----------------------------------------------------------------

    def save(self, number: int, *, is_duplicate: bool = False) -> None:
        """Note that the example is durable, and its number."""
        self.number, self.is_duplicate, self._is_saved = number, is_duplicate, True
        self._wake()

    def refuse(self, error: Exception) -> None:
        """Note that the example is not taken."""
        if not self._is_saved and self._failure is None:
            self._failure = error
            self._wake()

    def settle(self, outcome: int | AioReplicaError) -> None:
        """Note the version that has learned it, or why none will."""
        if self._outcome is None:
            self._outcome = outcome
            self._wake()

    async def _changed(self) -> None:
        require_loop(self._loop, self)
        if self._signal is None:
            self._signal = Signal()
        await self._signal.wait()

    def _wake(self) -> None:
        if self._signal is not None:
            self._signal.give()

    def __repr__(self) -> str:
        if self._failure is not None:
            state = "refused"
        elif self._outcome is None:
            state = "saved" if self._is_saved else "not saved yet"
        elif isinstance(self._outcome, AioReplicaError):
            state = "not learned"
        else:
            state = f"in version {self._outcome}"
        return f"<Ticket {'-' if self.number is None else self.number} | {state}>"


@final
class RecordStream:
    """Records of a learner's steps, `async for record in stream`; got from `learner.records()`.

    It ends when the learner is closed. One that is dropped is forgotten by the learner.

    Attributes:
        num_dropped: How many records were dropped because the listener was slow.
    """

    __slots__ = ("__weakref__", "_buffer", "_is_closed", "_signal", "num_dropped")

    def __init__(self, buffer_size: int) -> None:
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}.")
        self.num_dropped = 0
        self._buffer: deque[StepRecord] = deque(maxlen=buffer_size)
        self._is_closed = False
        self._signal = Signal()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepRecord:
        while not self._buffer:
            if self._is_closed:
                raise StopAsyncIteration
            await self._signal.wait()
        return self._buffer.popleft()

    def add(self, record: StepRecord) -> None:
        """Put a record in; for the learner."""
        self.num_dropped += len(self._buffer) == self._buffer.maxlen
        self._buffer.append(record)
        self._signal.give()

    def close(self) -> None:
        """End the stream after the records that it has. Idempotent."""
        self._is_closed = True
        self._signal.give()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<RecordStream | {state}, {len(self._buffer)} kept, {self.num_dropped} dropped>"


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
