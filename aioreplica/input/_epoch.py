"""Epochs over distributed datasets: from the first batch to the end, however one ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, final

from ..devices import OwnedTask
from ..errors import ContextError, LoopMismatchError
from ..replica import add_note_once, shown
from ._source import Item, Pass

LOGGER = logging.getLogger("aioreplica.input")

MAX_LEFT = 64

GoOn: TypeAlias = Callable[[int], Coroutine[Any, Any, int]]
"""Tells the other workers how many batches there are here for sure, and says how many all have."""


@final
class Epoch:
    """One pass over a distributed dataset, as a loop of the user's sees it.

    Args:
        items: Gives the batches; closed when the epoch ends.
        name: Names the epoch in messages.
        is_inline: Whether batches are made without waiting.
        is_managed: Whether its dataset was entered with `async with`.

    Attributes:
        name: The same.
        is_managed: The same.
        is_over: Whether it has ended, was closed or was broken off.
        is_exhausted: Whether its source has ended because there was no batch left.
        is_waiting: Whether a task waits for a batch right now.
        num_batches: How many it has in all, if that is sure; then workers are asked once.
        go_on: What is asked before a batch is given that is not agreed; None for a single worker.
        report: Makes a device loop say which of the batches it has read count as delivered by now.

    Invariants:
        * Nothing below refers to the iterator that the user holds, so that one can tell when it
          was dropped.
        * `_was_left` implies that batches are neither given out nor put back any more.
    """

    __slots__ = (
        "_asking",
        "_closing",
        "_error",
        "_is_closed",
        "_is_inline",
        "_items",
        "_loop",
        "_num_agreed",
        "_num_read",
        "_put_back",
        "_reason",
        "_unagreed",
        "_was_left",
        "go_on",
        "is_exhausted",
        "is_managed",
        "is_over",
        "is_waiting",
        "name",
        "num_batches",
        "report",
    )

    def __init__(self, items: Pass, name: str, *, is_inline: bool, is_managed: bool) -> None:
        self.name = name
        self.is_managed = is_managed
        self.is_over = False
        self.is_exhausted = False
        self.is_waiting = False
        self.num_batches: int | None = None
        self.go_on: GoOn | None = None
        self.report: Callable[[], None] | None = None
        self._items: Pass | None = items
        self._is_closed = False
        self._is_inline = is_inline
        self._loop = asyncio.get_running_loop()
        self._num_read = 0
        self._num_agreed = 0  # of the batches that come next: all workers have as many
        self._put_back: deque[Item] = deque()  # come before any other
        self._error: BaseException | None = None  # comes behind those
        self._was_left = False
        self._reason = ""
        self._closing: OwnedTask[None] | None = None
        self._asking: OwnedTask[int] | None = None  # how many batches all workers have
        self._unagreed: Item | None = None  # the batch that was asked for

    @property
    def is_closing(self) -> bool:
        """True if it is being closed in the background."""
        return self._closing is not None and not self._closing.is_done

    async def next(self, *, asks: bool = True) -> Item | None:
        """Return the next batch, or None at the end; then the source is closed.

        Args:
            asks: Whether to ask the other workers if they have it, too. If not, `was_read` follows.

        Raises:
            ContextError: If the epoch was ended by something else, or two tasks are in it.
            LoopMismatchError: If called on another event loop.
            RuntimeError: If the source raised StopAsyncIteration, or a CancelledError of its own.
            Exception: What the source raised, with a note that says where.
        """
        if self.is_over:
            if self._reason:
                raise ContextError(self._reason)
            return None
        if asyncio.get_running_loop() is not self._loop:
            raise LoopMismatchError(
                f"{self.name} began on {self._loop!r} and cannot continue on another event loop. "
                "Begin a new loop there."
            )
        if self.is_waiting:
            raise ContextError(
                f"Two tasks wait for the next batch of {self.name}. Let one of them iterate."
            )
        # The call before was cancelled while the workers agreed; asking again would be one
        # question more than the others have.
        if self._asking is not None:
            item, self._unagreed = self._unagreed, None
            item = await self._agreed(item)
            self._num_agreed += item is not None and not asks
            return await self._ended_or(item)
        item = self._put_back.popleft() if self._put_back else await self._read()
        if self.go_on is not None and asks:
            item = await self._agreed(item)
        return await self._ended_or(item)

    async def _read(self) -> Item | None:
        """Return the next batch of the source, None at its end."""
        if self._items is None:  # it has ended before, and batches were put back
            self.is_over = self._error is not None
            self._raise_error()
            return None
        self.is_waiting = True
        try:
            if self._is_inline:
                await asyncio.sleep(0)  # a loop without any wait would starve the others
            item = await anext(self._items, None)
        except (Exception, asyncio.CancelledError) as error:
            if self.is_over or _is_cancellation(error):
                raise
            misled = self._misled_by(error)
            if misled is None:
                await self._fail(error)
                raise
            await self._fail(misled)
            raise misled from misled.__cause__
        finally:
            self.is_waiting = False
        self._require_open()
        return item

    def _require_open(self) -> None:
        """Raise if another task has ended the epoch while this one waited."""
        if self.is_over:
            raise ContextError(self._reason or f"{self.name} was closed while a task waited in it.")

    async def _ended_or(self, item: Item | None) -> Item | None:
        """Count a batch, or end the epoch."""
        if item is None:
            self.is_exhausted = True
            self.is_over = True
            self._put_back.clear()  # another worker has no more
            await self._close_source()
            return None
        self._num_read += 1
        return item

    async def _agreed(self, item: Item | None) -> Item | None:
        """Return a batch if all workers have one; else the epoch is over on all of them.

        The question is not withdrawn if the wait is cancelled: then the next call waits for the
        answer, with the same batch.
        """
        assert self.go_on is not None  # the caller looked
        if item is not None and self._num_agreed:
            self._num_agreed -= 1
            return item
        asking, self._asking = self._asking, None
        if asking is None or _was_refused(asking):
            num_left = 0 if item is None else max(1, (self.num_batches or 0) - self._num_read)
            asking = OwnedTask(self.go_on(num_left), f"aioreplica input: {self.name}")
            asking.when_done(lambda _error: None)
        self.is_waiting = True
        try:
            await asking.done_or_cancelled()
        except asyncio.CancelledError:
            self._asking = asking
            self._unagreed = item
            raise
        finally:
            self.is_waiting = False
        # An answer may be good for several batches, which then come without asking.
        try:
            num_agreed = asking.task.result()
        except BaseException:
            if item is not None:
                self._put_back.appendleft(item)  # it was not given
            raise
        self._require_open()
        if not num_agreed:
            self.warn_of_rest(item)
            return None
        self._num_agreed = num_agreed - 1
        return item

    def warn_of_rest(self, item: Item | None = None) -> None:
        """Log if batches are left here that are not read, as another worker gives no more.

        Args:
            item: One that was read and is not given.
        """
        if item is not None or self._put_back:
            LOGGER.warning(
                "%s ends behind %d batches, since another worker gives no more. Those left here "
                "are not read in this epoch. Give all workers as many: with sharding='data', "
                "or files of equal length, as many for each worker.",
                self.name,
                self._num_read,
            )

    def was_read(self) -> None:
        """Count a batch that has come without asking: it may have been agreed on before."""
        self._num_agreed = max(0, self._num_agreed - 1)

    def put_back(
        self, items: Sequence[Item], error: BaseException | None, *, num_agreed: int = 0
    ) -> None:
        """Give these items again, in their order, and then the error, before anything else.

        Args:
            items: The batches.
            error: What the source raised behind them; None if it did not.
            num_agreed: On how many of them the workers had agreed.

        They are dropped if the epoch was left: another one has begun, or the dataset is closed.
        """
        if not self._was_left and (items or error is not None):
            self.is_over = self.is_exhausted = False
            self._num_read -= len(items)
            self._num_agreed += num_agreed
            self._put_back.extendleft(reversed(items))
            if error is not None:
                self._error = error  # else one of before still comes behind them

    async def aclose(self, reason: str = "") -> None:
        """End the epoch and wait until its source is closed; idempotent.

        Args:
            reason: What a task that still goes on with it is told; "" lets it end quietly.

        Raises:
            Exception: What closing the source raised.

        Cancellation:
            Raised again once the source is closed.
        """
        self._leave(reason)
        closing = self._closing
        await self._close_source()
        if closing is not None:
            await closing.ended()

    def leave(self, reason: str) -> None:
        """End the epoch without waiting: its source is closed in the background.

        From any thread, because the garbage collector may be the caller.
        """
        if self.is_over:
            self._was_left = True
            return
        self._leave(reason)
        try:
            self._loop.call_soon_threadsafe(self._close_in_background)
        except RuntimeError:  # the event loop is closed, and with it whatever the source had there
            return

    def _leave(self, reason: str) -> None:
        if not self.is_over:
            self._reason = reason
        self.is_over = self._was_left = True
        self._put_back.clear()
        self._error = None

    async def _close_source(self) -> None:
        items = self._items
        if self._loop is not asyncio.get_running_loop():
            self._items = None  # its event loop has ended, and its task with it
        elif items is not None:
            self._is_closed = True
            await items.aclose()
            self._items = None

    def _misled_by(self, error: BaseException) -> RuntimeError | None:
        """Return an error in place of one that the caller would take for something else."""
        meaning = "a cancellation of the loop, which was not asked for"
        if not isinstance(error, asyncio.CancelledError):
            cause = error.__cause__
            if not (isinstance(error, RuntimeError) and isinstance(cause, StopAsyncIteration)):
                return None
            error, meaning = cause, "an epoch that is over"  # a generator cannot raise it as it is
        misled = RuntimeError(
            f"The source of {self.name} raised {error!r}, which would look like {meaning}. Catch "
            "it in the source, and raise an error that says what happened."
        )
        misled.__cause__ = error
        return misled

    async def _fail(self, error: BaseException) -> None:
        """End the epoch because of an error of its source."""
        add_note_once(error, f"Raised in {self.name}, behind {self._num_read} batches.")
        self.is_over = True
        try:
            await self._close_source()
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            add_note_once(error, f"Closing the source failed too: {shown(second)}")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def _close_in_background(self) -> None:
        items = self._items
        if items is not None and not self._is_closed:
            self._closing = OwnedTask(items.aclose(), f"aioreplica input: closing {self.name}")
            self._closing.when_done(self._closed)

    def _closed(self, error: BaseException | None) -> None:
        self._items = None
        if error is not None:
            context = {"message": f"Closing {self.name} failed.", "exception": error}
            self._loop.call_exception_handler(context)

    def __repr__(self) -> str:
        return f"<Epoch {self.name} | {'over' if self.is_over else 'open'}>"


def _was_refused(asking: OwnedTask[int]) -> bool:
    """Return True if a question that nobody waited for any more was never sent."""
    task = asking.task
    return task.done() and not task.cancelled() and isinstance(task.exception(), ContextError)


def _is_cancellation(error: BaseException) -> bool:
    """Return True if `error` is a cancellation that was asked for, of the task that runs."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


@final
class OpenLoops:
    """The epochs over a strategy's datasets that have not ended: closed with the strategy.

    An epoch that was broken off outside `async with` is closed as soon as its iterator is dropped,
    and remembered, so that closing the strategy can warn of it.
    """

    __slots__ = ("_epochs", "_num_forgotten")

    def __init__(self) -> None:
        self._epochs: dict[Epoch, None] = {}  # a set in order
        self._num_forgotten = 0

    def add(self, epoch: Epoch) -> None:
        """Add an epoch that begins."""
        if len(self._epochs) >= MAX_LEFT:
            for left in [known for known in self._epochs if known.is_over and not known.is_closing]:
                del self._epochs[left]
                self._num_forgotten += not left.is_managed
        self._epochs[epoch] = None

    def discard(self, epoch: Epoch) -> None:
        """Remove an epoch that has ended properly."""
        self._epochs.pop(epoch, None)

    @property
    def num_open(self) -> int:
        """Number of epochs that go on, or were broken off and not closed."""
        return len(self._epochs) + self._num_forgotten

    def leave(self, reason: str) -> None:
        """End all epochs without waiting, as their event loop is closed."""
        for epoch in tuple(self._epochs):
            epoch.leave(reason)
        self._epochs.clear()
        self._num_forgotten = 0

    async def end(self, reason: str) -> None:
        """Close all epochs: those of a loop that goes on are told why, at their next batch."""
        while self._epochs:
            epoch, _ = self._epochs.popitem()
            await epoch.aclose(reason)

    async def aclose(self, label: str) -> None:
        """Close all epochs; warn of those that were left open. Idempotent.

        Raises:
            Exception: What closing a source raised; an ExceptionGroup if several did.

        Cancellation:
            Raised again once all are closed.
        """
        errors: list[BaseException] = []
        unmanaged = [epoch.name for epoch in self._epochs if not epoch.is_managed]
        num_left = len(unmanaged) + self._num_forgotten
        self._num_forgotten = 0
        while self._epochs:
            epoch, _ = self._epochs.popitem()
            try:
                await epoch.aclose(f"{epoch.name} was ended because {label} was closed.")
            except BaseException as error:  # noqa: BLE001 - raised below, once all are closed
                errors.append(error)
        if errors:
            _raise_all(errors, f"Closing loops of {label} failed.")
        if num_left:
            last = f" (the last one: {unmanaged[-1]})" if unmanaged else ""
            _warn(
                f"{num_left} loops over distributed datasets were broken off and not closed{last}. "
                "Write `async with strategy.distribute_dataset(...) as batches:` around such a "
                "loop."
            )


def _warn(text: str) -> None:
    """Warn, but never in place of an exception that is on its way already."""
    on_its_way = sys.exception()
    try:
        warnings.warn(text, ResourceWarning, stacklevel=4)
    except ResourceWarning:  # warnings are errors here
        if on_its_way is None:
            raise
        on_its_way.add_note(text)


def _raise_all(errors: list[BaseException], message: str) -> None:
    """Raise one error as it is, a cancellation first, and several as a group."""
    for error in errors:
        if len(errors) == 1 or not isinstance(error, Exception):
            raise error
    raise ExceptionGroup(message, [error for error in errors if isinstance(error, Exception)])
