"""A bounded stream of records for one listener: the oldest are dropped if it is slow."""

from __future__ import annotations

from collections import deque
from typing import Self, final

from ._records import StepRecord
from ._signal import Signal


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
