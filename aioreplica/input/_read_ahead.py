"""Reading ahead: one task advances a pass into a bounded queue while the loop's body runs."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self, final

from ..devices import OwnedTask
from ..errors import ContextError
from ._source import Item, Pass


@final
class ReadAhead:
    """A pass of which up to `size` items are read that were not asked for yet.

    Args:
        items: The pass to read; advanced and closed by one task.
        size: The bound; when it is reached the task waits until an item is taken. With 0 an item is
            read when it is asked for.
        label: Names the task.

    Invariants:
        * At most `size` items have been read beyond those handed out and asked for.
        * `_is_over` implies that `items` is closed and let go.
        * The task is cancelled once at most: what it cleans up then is not cut off.

    Cancellation:
        A cancelled `anext` loses nothing: the next one gets the item.
    """

    def __init__(self, items: Pass, size: int, label: str) -> None:
        self._items: Pass | None = items  # until it is closed
        self._size = size
        self._label = label
        self._queue: deque[Item] = deque()
        self._task: OwnedTask[None] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_asked = False  # for an item that is not in the queue
        self._error: BaseException | None = None  # of an item: comes to who asks for it
        self._closing_error: BaseException | None = None
        self._is_closing_items = False
        self._is_over = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        """Return the next item, in the order they were read; errors come behind what preceded."""
        if self._task is None and not self._is_closed:
            self._task = OwnedTask(self._read(), f"aioreplica input: {self._label}")
        while not self._queue:
            if self._is_over or self._is_closed:
                self._raise_error()
                raise StopAsyncIteration
            self._is_asked = True
            _resolve(self._room)
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item = self._queue.popleft()
        self._is_asked = False
        _resolve(self._room)
        return item

    async def aclose(self) -> None:
        """Cancel the task, wait until it has ended, and with it the pass.

        An error of an item that was read ahead, and that nobody has asked for, is dropped with it.

        Raises:
            ContextError: If the source itself calls this, so the task would wait for itself.
            Exception: What closing the pass raised.
        """
        if self._task is not None and self._task.is_current:
            raise ContextError(
                f"{self._label} closes the loop that reads it, and would wait for its own end. "
                "Return from the source to end the epoch, or raise an error."
            )
        is_first, self._is_closed = not self._is_closed, True
        self._queue.clear()
        if self._task is None:
            await self._close_items()
            return
        if is_first and not self._is_closing_items:
            self._task.cancel()
        _resolve(self._waiting)
        has_ended = await self._task.ended()
        if has_ended and not self._is_over:  # it was cancelled before its first step
            await self._close_items()
        if isinstance(self._error, (Exception, asyncio.CancelledError)):
            self._error = None
        self._raise_error()

    async def _read(self) -> None:
        try:
            while not self._is_closed and self._items is not None:
                item = await anext(self._items, None)
                if item is None:
                    break
                self._queue.append(item)
                item = None
                _resolve(self._waiting)
                await self._has_room()
        except BaseException as error:  # noqa: BLE001 - raised where the next item is asked for
            if not self._is_closed:
                self._error = error
            elif not isinstance(error, asyncio.CancelledError):
                self._closing_error = error
        self._is_closing_items = True
        try:
            await self._close_items()
        except BaseException as error:  # noqa: BLE001 - as above
            self._closing_error = self._closing_error or error
        if self._is_closed:
            self._queue.clear()
        _resolve(self._waiting)

    async def _close_items(self) -> None:
        try:
            if self._items is not None:
                await self._items.aclose()
        finally:
            self._items = None
            self._is_over = True

    async def _has_room(self) -> None:
        while len(self._queue) >= self._size and not self._is_closed:
            if self._is_asked and not self._queue:
                return
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _raise_error(self) -> None:
        error = self._error or self._closing_error
        self._error = self._closing_error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame


def _resolve(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
