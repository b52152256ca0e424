"""A pass over a plain iterable, which may block: advanced on a thread of its own."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from enum import Enum
from typing import Any, final

from ._async_stream import AsyncStream
from ._resume import Stateful
from ._source_lane import SourceLane
from ._stream import Item, Start, Stream


class _Mark(Enum):
    END = "end"


@final
class LaneStream(Stream):
    """Makes, advances and closes an iterator on one thread.

    Args:
        make: Gives the iterable. If that turns out to be async only, it is read on the loop.
        start: Says where `own` goes on.
        own: The dataset, if it keeps its own state.
        label: Names the source in errors.
    """

    def __init__(
        self, make: Callable[[], Any], start: Start, own: Stateful | None, label: str
    ) -> None:
        self._make = make
        self._start = start
        self._own = own
        self._label = label
        self._own_state = start.own_state
        self._offset = 0 if own is None or start.own_state is None else start.offset
        self._lane = SourceLane()
        self._iterator: Iterator[Any] | None = None
        self._made_async: Any = None
        self._inner: AsyncStream | None = None
        self._is_closed = False

    async def pull(self) -> Item | None:
        """Return the next item, or None at the end."""
        if self._is_closed:
            return None
        if self._inner is not None:
            return await self._inner.pull()
        value = await self._lane.run(self._advance)
        if self._made_async is not None:
            self._inner = AsyncStream(lambda: self._made_async, self._start, self._own)
            return await self._inner.pull()
        if value is _Mark.END:
            return None
        self._offset += 1
        return Item(value, self._offset, self._own_state)

    async def aclose(self) -> None:
        """Close the iterator on its thread, then end the thread.

        A call that still runs because of an interrupt is left alone, and so is its iterator.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._inner is not None:
                await self._inner.aclose()
            elif self._iterator is not None and not self._lane.is_busy:
                await self._lane.run(self._close)
        finally:
            self._lane.close()

    def _advance(self) -> Any:
        """On the thread: make the iterator if there is none, and take an item."""
        if self._iterator is None:
            if self._own is not None and self._own_state is not None:
                self._own.load_state_dict(copy.deepcopy(self._own_state))
            made = self._make()
            if isinstance(made, AsyncIterable) and not isinstance(made, Iterable):
                self._made_async = made
                return None
            if not isinstance(made, Iterable):
                raise TypeError(
                    f"{self._label} returned {made!r} ({type(made).__name__}), which is no "
                    "iterable of batches."
                )
            self._iterator = iter(made)
        value = next(self._iterator, _Mark.END)
        if self._own is not None:
            self._own_state = copy.deepcopy(self._own.state_dict())
        return value

    def _close(self) -> None:
        """On the thread: close the iterator, and let it go."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
