"""One loop over a distributed dataset: from its first batch to its end, however it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ..devices import OwnedTask
from ..errors import ContextError, LoopMismatchError
from ._stream import Item, Stream


@final
class Loop:
    """A stream of batches that is being iterated over.

    Args:
        stream: Gives the batches; closed when the loop ends.
        name: Names the loop in messages.
        is_inline: Whether batches are made without waiting.

    Attributes:
        name: The same.
        is_over: Whether it has ended, was closed or was broken off.
        is_exhausted: Whether it has ended because there was no batch left.
        is_managed: Whether its dataset was entered with `async with`.
        report: Makes who reads ahead say which batches count as delivered by now, if that is known.

    Invariants:
        * Nothing below refers to the iterator that the user holds, so that one can tell when it
          was dropped.
    """

    __slots__ = (
        "_closing",
        "_is_closed",
        "_is_waiting",
        "_kept",
        "_kept_error",
        "_loop",
        "_num_delivered",
        "_reason",
        "_stream",
        "_yields",
        "is_exhausted",
        "is_managed",
        "is_over",
        "name",
        "report",
    )

    def __init__(self, stream: Stream, name: str, *, is_inline: bool, is_managed: bool) -> None:
        self._stream: Stream | None = stream
        self._is_closed = False
        self._yields = is_inline
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._num_delivered = 0
        self._reason = ""
        self._closing: OwnedTask[None] | None = None
        self._kept: deque[Item] = deque()  # put back: they come before any other
        self._kept_error: BaseException | None = None  # comes behind those
        self.report: Callable[[], None] | None = None
        self.name = name
        self.is_exhausted = False
        self.is_managed = is_managed
        self.is_over = False

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits for a batch right now."""
        return self._is_waiting

    @property
    def num_delivered(self) -> int:
        """How many batches the loop has got."""
        return self._num_delivered

    @property
    def is_closing(self) -> bool:
        """Whether it is being closed in the background."""
        return self._closing is not None and not self._closing.is_done

    async def next(self) -> Item | None:
        """Return the next batch, or None where the loop is over; then the stream is closed.

        Raises:
            ContextError: If the loop was ended by something else, or two tasks are in it.
            LoopMismatchError: If called on another event loop.
            RuntimeError: If the source raised StopAsyncIteration, or a CancelledError of its own.
            Exception: What the source raised, with a note that says where.
        """
        stream = self._stream
        if self.is_over:
            if self._reason:
                raise ContextError(self._reason)
            return None
        if asyncio.get_running_loop() is not self._loop:
            raise LoopMismatchError(
                f"{self.name} began on {self._loop!r} and cannot go on on another event loop. "
                "Begin a new loop there."
            )
        if self._is_waiting:
            raise ContextError(
                f"Two tasks wait for the next batch of {self.name}. Let one of them iterate."
            )
        if self._kept:
            return self._kept.popleft()
        if stream is None:  # it has ended, and what was put back is read
            self.is_over = True
            self._raise_kept()
            return None
        self._is_waiting = True
        try:
            if self._yields:
                await asyncio.sleep(0)  # a loop without any wait would starve the others
            item = await stream.pull()
        except (StopAsyncIteration, asyncio.CancelledError) as error:
            if self.is_over or _is_cancelled(error):
                raise
            failure = self._misleading(error)
            await self._fail(failure)
            raise failure from error
        except Exception as error:
            if not self.is_over:
                await self._fail(error)
            raise
        finally:
            self._is_waiting = False
        if self.is_over:  # closed by another task meanwhile
            raise ContextError(self._reason or f"{self.name} was closed while a task waited in it.")
        if item is None:
            self.is_exhausted = True
            await self.aclose()
            return None
        self._num_delivered += 1
        return item

    def put_back(self, items: Sequence[Item], error: BaseException | None) -> None:
        """Give these items again, in this order, and then the error; before anything else.

        They are dropped if something else has ended the loop: its place was left.
        """
        if (self.is_over and self._stream is not None) or self._reason:
            return
        if items or error is not None:
            self.is_over = False
            self._kept.extendleft(reversed(items))
            self._kept_error = error

    def _raise_kept(self) -> None:
        error, self._kept_error = self._kept_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    async def aclose(self, reason: str = "") -> None:
        """End the loop and wait until its source is closed; idempotent.

        Args:
            reason: What a task that still goes on with it is told; "" lets it end quietly.

        Raises:
            Exception: What closing the source raised.

        Cancellation:
            Raised again once the source is closed.
        """
        if not self.is_over:
            self._reason = reason
        self.is_over = True
        self._kept.clear()
        self._kept_error = None
        stream, closing = self._stream, self._closing
        if self._loop is not asyncio.get_running_loop():
            self._stream = None  # its event loop has ended, and its task with it
        if self._stream is not None and stream is not None:
            self._is_closed = True
            await stream.aclose()
            self._stream = None
        if closing is not None:
            await closing.ended()

    def leave(self, reason: str) -> None:
        """End the loop without waiting: its source is closed in the background.

        From any thread, because the garbage collector may be the caller.
        """
        if self.is_over:
            return
        self._reason = reason
        self.is_over = True
        try:
            self._loop.call_soon_threadsafe(self._close_in_background)
        except RuntimeError:  # the event loop is closed, and with it whatever the source had there
            return

    def _misleading(self, error: BaseException) -> RuntimeError:
        """Return an error in place of one that the caller would take for something else."""
        meaning = "an epoch that is over"
        if isinstance(error, asyncio.CancelledError):
            meaning = "a cancellation of the loop, which nobody asked for"
        return RuntimeError(
            f"The source of {self.name} raised {error!r}, which would look like {meaning}. Catch "
            "it in the source, and raise an error that says what happened."
        )

    async def _fail(self, error: Exception) -> None:
        """End the loop because of an error of its source."""
        error.add_note(f"Raised in {self.name}, behind {self._num_delivered} batches.")
        self.is_over = True
        try:
            await self.aclose()
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"Closing the source failed too: {second!r}")

    def _close_in_background(self) -> None:
        stream = self._stream
        if stream is not None and not self._is_closed:
            self._closing = OwnedTask(stream.aclose(), f"aioreplica input: closing {self.name}")
            self._closing.when_done(self._closed)

    def _closed(self, error: BaseException | None) -> None:
        self._stream = None
        if error is not None:
            context = {"message": f"Closing {self.name} failed.", "exception": error}
            self._loop.call_exception_handler(context)

    def __repr__(self) -> str:
        return f"<Loop {self.name} | {'over' if self.is_over else 'open'}>"


def _is_cancelled(error: BaseException) -> bool:
    """Whether `error` is a cancellation that was asked for, of the task that runs."""
    task = asyncio.current_task()
    is_asked_for = task is None or task.cancelling() > 0
    return isinstance(error, asyncio.CancelledError) and is_asked_for
