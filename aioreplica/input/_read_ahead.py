"""Reading ahead: one task pulls a stream into a bounded buffer while the loop's body runs."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import copy_context
from typing import Any, final

from ..devices import OwnedTask
from ..errors import ContextError
from ._stream import Item, Stream


@final
class ReadAheadStream(Stream):
    """Holds up to `size` items that were read but not asked for yet.

    Args:
        upstream: Opened, pulled and closed by the one task.
        size: The bound; when it is reached the task waits until an item is taken.
        label: Names the task.

    Invariants:
        * At most `size` items have been pulled beyond those handed out.
        * `_is_over` implies that the upstream is closed.

    Cancellation:
        A cancelled pull loses nothing: the next one gets the item.
    """

    def __init__(self, upstream: Stream, size: int, label: str) -> None:
        self._upstream = upstream
        self._size = size
        self._label = label
        self._buffer: deque[Item] = deque()
        self._task: OwnedTask[None] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_closing_upstream = False
        self._is_over = False
        self._is_closed = False

    @property
    def num_buffered(self) -> int:
        """How many items are there to be taken."""
        return len(self._buffer)

    async def pull(self) -> Item | None:
        """Return the next item, in the order they were read; errors come behind what preceded."""
        if self._task is None and not self._is_closed:
            self._task = OwnedTask(self._read(), f"aioreplica input: {self._label}")
        while not self._buffer:
            if self._is_over or self._is_closed:
                self._raise_error()
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item = self._buffer.popleft()
        _resolve(self._room)
        return item

    async def aclose(self) -> None:
        """Cancel the task, wait until it has ended, and with it the upstream.

        Raises:
            ContextError: If the upstream itself calls this, so the task would wait for itself.
            Exception: What closing the upstream raised.
        """
        _require_outside(self._task, self._label)
        self._is_closed = True
        self._buffer.clear()
        if self._task is None:
            await self._upstream.aclose()
            return
        if not self._is_closing_upstream:
            self._task.cancel()
        _resolve(self._waiting)
        has_ended = await self._task.ended()
        if has_ended and not self._is_over:  # it was cancelled before its first step
            self._is_over = True
            await self._upstream.aclose()
        self._raise_error()

    async def _read(self) -> None:
        try:
            while not self._is_closed:
                item = await self._upstream.pull()
                if item is None:
                    break
                self._buffer.append(item)
                item = None
                _resolve(self._waiting)
                while len(self._buffer) >= self._size and not self._is_closed:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever takes the next item
            if not (self._is_closed and isinstance(error, asyncio.CancelledError)):
                self._error = error
        self._is_closing_upstream = True
        try:
            await self._upstream.aclose()
        except BaseException as error:  # noqa: BLE001 - as above
            self._error = self._error or error
        self._is_over = True
        if self._is_closed:
            self._buffer.clear()
        _resolve(self._waiting)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame


@final
class OnDemandStream(Stream):
    """Pulls when it is asked to, so nothing is read ahead; each pull is a task while it lasts.

    The task lets a cancelled loop lose nothing, and lets another task close a stream that waits.

    Cancellation:
        The pull goes on; the next one gets its item.
    """

    def __init__(self, upstream: Stream, label: str) -> None:
        self._upstream = upstream
        self._label = label
        self._context = copy_context()  # one for all pulls, so that a generator keeps its own
        self._task: OwnedTask[Item | None] | None = None
        self._closing: OwnedTask[None] | None = None

    async def pull(self) -> Item | None:
        """Return the next item."""
        if self._closing is not None:
            return None
        task = self._task
        if task is None:
            name = f"aioreplica input: {self._label}"
            task = self._task = OwnedTask(self._upstream.pull(), name, context=self._context)
        await task.done_or_cancelled()
        if self._closing is not None:
            return None
        self._task = None
        return await task

    async def aclose(self) -> None:
        """Cancel the pull in progress, then close the upstream.

        Raises:
            ContextError: If the upstream itself calls this, so the pull would wait for itself.
            Exception: What closing the upstream raised.
        """
        _require_outside(self._task, self._label)
        is_first = self._closing is None
        if self._closing is None:
            name = f"aioreplica input: closing {self._label}"
            self._closing = OwnedTask(self._close(), name, context=self._context)
        await self._closing.ended()
        if is_first and self._closing.is_done:
            await self._closing

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            if not await self._task.ended():  # interrupted: it ends with the event loop
                return
        await self._upstream.aclose()


def _require_outside(task: OwnedTask[Any] | None, label: str) -> None:
    if task is not None and task.is_current:
        raise ContextError(
            f"{label} closes the loop that reads it, and would wait for its own end. Return from "
            "the source to end the epoch, or raise an error."
        )


def _resolve(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
