"""The handle of a collective that was started and completes without being awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context, copy_context
from types import FrameType
from typing import Any, final

from .._functions import is_async, require_finished, require_no_yield
from ..context import PLACE, Place
from ..devices import require_loop
from ..errors import ContextError
from ..tree import Tree
from ._errors import is_loop_running, no_blocking_handle_error, outlived_op_error
from ._meeting import Call, Collective, Generation, SyncGroup, new_call
from ._meeting_point import MeetingPoint, TaskWaiter, Waiter
from ._replica import Replica


@final
class Handle(Awaitable[Any]):
    """A reduction in flight, a future: `await handle` gives its result, as often as wanted.

    Got from `ctx.start_all_reduce`. Several may be in flight and be awaited in any order, also
    through `asyncio.wait`, `gather`, `wait_for`, `shield` and task groups. The arrays that were
    passed must not be written before the handle is done.

    Cancellation:
        A cancelled await gives up nothing: the value was handed over when the reduction was
        started, so the other replicas get theirs, and the handle can be awaited again. A handle
        whose result was never asked for is a RuntimeWarning at the end of the run, naming the
        call.
    """

    __slots__ = ("_call", "_callbacks", "_error", "_generation", "_place", "_point", "_replica")

    def __init__(
        self, point: MeetingPoint, replica: Replica, call: Call, place: Place | None
    ) -> None:
        self._point = point
        self._replica = replica
        self._call = call
        self._place = place
        self._generation: Generation | None = None
        self._error: BaseException | None = None
        self._callbacks: list[tuple[Callable[[Handle], object], Callable[[object], None]]] = []

    def begin(self) -> None:
        """Bring the call to the rendezvous, on the event loop; called once, by the library.

        Raises:
            CancelledError: If the run was aborted, or is now; then awaiting the handle does.
        """
        call = self._call
        is_posted = not call.sequence  # from a thread, which left the numbering to the loop
        try:
            if is_posted:
                call.sequence = self._replica.next_in(call.group)
            tell = self._point.observers.call_made
            if tell is not None:
                tell(call)
            self._generation = self._point.start(self._replica, call)
        except BaseException as error:
            self._error = error
            if is_posted:
                return
            raise
        self._replica.started[call] = None

    def fail(self, error: Exception) -> None:
        """Let the handle raise an error instead of beginning; called by the library."""
        self._error = error

    def describe(self) -> str:
        """Name the collective and where it was called."""
        return f"{self._call.collective.name} at {self._call.site}"

    def done(self) -> bool:
        """Tell whether awaiting would not have to wait."""
        if self._generation is None:
            return self._error is not None
        waiter = self._generation.waiter
        return self._generation.is_merged or (waiter is not None and waiter.done())

    def cancelled(self) -> bool:
        """Tell whether the run was ended before there was a result."""
        if self._generation is None:
            return isinstance(self._error, asyncio.CancelledError)
        waiter = self._generation.waiter
        return waiter is not None and waiter.cancelled()

    def result(self) -> Tree:
        """Return the result.

        Raises:
            asyncio.InvalidStateError: If there is none yet.
            asyncio.CancelledError: If the run was ended before.
            Exception: What the reduction raised.
        """
        generation = self._finished()
        return generation.look(self._call.position)

    def exception(self) -> BaseException | None:
        """Return what the reduction raised; None if it has a result.

        Raises:
            asyncio.InvalidStateError: If the reduction has not ended.
            asyncio.CancelledError: If the run was ended before.
        """
        return self._finished().error

    def add_done_callback(
        self, fn: Callable[[Handle], object], *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the reduction has ended, or soon if it has.

        Args:
            fn: A plain function.
            context: Context variables to call it in; None takes a copy of the caller's.

        Raises:
            TypeError: If `fn` is not a plain function.
            ContextError: If called on another thread than the event loop's.
            LoopMismatchError: If that thread runs an event loop of its own.
        """
        if not callable(fn) or is_async(fn):
            raise TypeError(f"add_done_callback needs a plain function, got {fn!r}.")
        require_no_yield(fn, "add_done_callback", "Make it a plain function.")
        generation = self._generation
        if not is_loop_running() or (generation is None and self._error is None):
            raise ContextError(
                f"A callback was added to the handle of {self._call.collective.name} on the thread "
                "that started it. Add it on the event loop, after the op has ended."
            )
        point, waiter = self._point, None if generation is None else generation.waiter
        loop = point.loop if waiter is None else waiter.get_loop()
        if loop is not None:
            require_loop(loop, self)

        def call(_waiter: object) -> None:
            require_finished(fn(self), fn, "add_done_callback")

        own = copy_context() if context is None else context
        self._replica.started.pop(self._call, None)
        if generation is None:  # it failed before it had begun
            asyncio.get_running_loop().call_soon(call, None, context=own)
            return
        if waiter is None:
            waiter = point.new_waiter(generation, self._call)
            if generation.is_merged:
                waiter.set_result(None)
        self._callbacks.append((fn, call))
        waiter.add_done_callback(call, context=own)

    def remove_done_callback(self, fn: Callable[[Handle], object]) -> int:
        """Take back a callback, every time it was added; return how often that was."""
        removed = [call for known, call in self._callbacks if known == fn]
        self._callbacks = [pair for pair in self._callbacks if pair[0] != fn]
        waiter = None if self._generation is None else self._generation.waiter
        if waiter is None:
            return 0
        return sum(waiter.remove_done_callback(call) for call in removed)

    def discard(self) -> None:
        """Give up the result, so that no warning says it is lost; the reduction continues."""
        self._replica.started.pop(self._call, None)

    def cancel(self) -> None:
        """The same as `discard`: a reduction that others take part in cannot be cancelled."""
        self.discard()

    def __await__(self) -> Generator[Any, Any, Any]:
        point, replica, is_here = self._point, self._replica, PLACE.get() is self._place
        if is_here and point.is_aborted:  # a child task may find out after the run
            raise asyncio.CancelledError
        if not is_here or replica.is_over:
            raise ContextError(
                f"The handle of {self._call.describe()}, started at {self._call.site}, was awaited "
                f"in {PLACE.get().describe()}. Await it in the step of the replica that started it."
            )
        replica.started.pop(self._call, None)
        if asyncio.get_running_loop() is not point.loop and point.loop is not None:
            require_loop(point.loop, self)
        generation = self._generation
        if generation is None:
            if self._error is None:
                raise ContextError(
                    f"The handle of {self.describe()} was awaited before the op that started it "
                    "has ended. Await the op, then the handle."
                )
            return self._finished()  # which says why there is none
        waiter = generation.waiter
        if not (generation.is_merged or (waiter is not None and waiter.done())):
            blocks = replica.work is None or asyncio.current_task(point.loop) is replica.work
            ended = point.wait_for_started(replica, generation, blocks=blocks)
            try:
                yield from generation.new_watcher(point.loop)
            except asyncio.CancelledError:
                yield from generation.unread().__await__()
                raise
            finally:
                ended()
        elif len(generation.calls) == 1 and generation.group.across is None:
            # Else the event loop has brought it.
            yield  # to the event loop, as every collective does
        if point.is_aborted or not generation.is_merged:
            raise asyncio.CancelledError
        if point.unseen:
            point.unseen.pop(generation, None)
        return generation.look(self._call.position)

    def _finished(self) -> Generation:
        """Return the generation, which has ended; what it raised has been seen."""
        self._replica.started.pop(self._call, None)
        if self._error is not None:
            raise self._error
        if self._generation is None or not self.done():
            raise asyncio.InvalidStateError("The reduction has not ended: await the handle.")
        if self.cancelled():
            raise asyncio.CancelledError
        self._point.unseen.pop(self._generation, None)
        return self._generation

    def __repr__(self) -> str:
        state = "done" if self.done() else "in flight"
        return f"<Handle of {self._call.describe()} | {state}>"


def start(
    waiter: Waiter,
    collective: Collective,
    argument: object,
    args: tuple[object, ...],
    group: SyncGroup,
    position: int,
    frame: FrameType,
) -> Handle:
    """Start a collective, on the event loop or on a thread while an op of the replica runs.

    In a thread it is numbered on the event loop: in the order of the calls, and before the op is
    done. Until then the replica's other collectives are refused.

    Raises:
        ContextError: If called elsewhere, or the replica waits as a thread.
    """
    if not isinstance(waiter, TaskWaiter):
        raise no_blocking_handle_error()
    point, replica = waiter.point, waiter.replica
    if waiter.is_here:
        if group.is_partial:
            number = replica.next_in(group)
        else:
            number = replica.sequence = replica.sequence + 1
        call = new_call(collective, argument, args, None, group, position, number, frame)
        handle = Handle(point, replica, call, waiter.home)
        handle.begin()
        return handle
    held = waiter.hold()
    if held is None:
        raise waiter.misuse(collective.name)
    op, completions = held
    call = new_call(collective, argument, args, None, group, position, 0, frame)
    handle = Handle(point, replica, call, waiter.home)

    def begin() -> None:
        if op.is_done:
            handle.fail(outlived_op_error(handle.describe(), op.fn_name))
        else:
            handle.begin()

    op.synchronise(args)  # the array is read while the op goes on
    completions.call_soon(begin)
    return handle
