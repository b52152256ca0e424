"""A pass over an async iterable, advanced on the event loop."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any, final

from ._resume import Stateful
from ._stream import Item, Start, Stream


@final
class AsyncStream(Stream):
    """Pulls an async iterator, and closes it if it has `aclose`.

    Args:
        make: Gives the async iterable; called at the first pull.
        start: Says where `own` goes on.
        own: The dataset, if it keeps its own state.
    """

    def __init__(self, make: Callable[[], Any], start: Start, own: Stateful | None) -> None:
        self._make = make
        self._own = own
        self._own_state = start.own_state
        self._offset = 0 if own is None or start.own_state is None else start.offset
        self._iterator: AsyncIterator[Any] | None = None
        self._is_closed = False

    async def pull(self) -> Item | None:
        """Return the next item, or None at the end."""
        if self._iterator is None:
            if self._is_closed:
                return None
            if self._own is not None and self._own_state is not None:
                self._own.load_state_dict(copy.deepcopy(self._own_state))
            self._iterator = aiter(self._make())
        try:
            value = await anext(self._iterator)
        except StopAsyncIteration:
            return None
        self._offset += 1
        if self._own is not None:
            self._own_state = copy.deepcopy(self._own.state_dict())
        return Item(value, self._offset, self._own_state)

    async def aclose(self) -> None:
        """Close the iterator."""
        self._is_closed = True
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "aclose", None)
        if not callable(close):
            return
        try:
            await close()
        except BaseExceptionGroup as group:
            # A task group that is open over a `yield` reports that its generator was closed.
            rest = group.split(GeneratorExit)[1]
            if rest is not None:
                raise rest from None
