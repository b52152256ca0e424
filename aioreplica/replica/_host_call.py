"""One function that a device thread has the event loop run, and waits for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, final

from ..devices import Gate, OwnedTask, new_gate
from ._meeting_point import MeetingPoint


def call_on_host(
    point: MeetingPoint,
    fn: Callable[..., object],
    args: tuple[object, ...],
    context: Context,
    name: str,
) -> object:
    """Have the event loop run a plain or async function; return what it returns.

    Args:
        point: Where the replicas of the run meet.
        fn: The function.
        args: Its arguments.
        context: The context variables to run it in.
        name: What observers and stall reports call it.

    Raises:
        BaseException: What the function raises.

    Cancellation:
        A CancelledError once the run is aborted, or its event loop closed.
    """
    call = HostCall(fn, args, context, name, new_gate(point.loop))
    assert point.lock is not None  # device programs call this
    with point.lock:
        if point.is_aborted:
            raise asyncio.CancelledError
        point.host_calls[call.cancel] = None
    point.observers.began_to_wait(call)
    try:
        if not point.post(call.begin):
            raise asyncio.CancelledError
        call.wait()
    except asyncio.CancelledError:
        point.abandon()
        raise
    finally:
        point.observers.ended_to_wait(call)
        with point.lock:
            point.host_calls.pop(call.cancel, None)
    if point.is_aborted:
        raise asyncio.CancelledError
    return call.result()


@final
class HostCall:
    """A call on its way to the event loop and back.

    Args:
        fn: A plain or an async function.
        args: Its arguments.
        context: The context variables to run it in.
        name: Names the task of an async one.
        gate: Where the device thread waits.

    Invariants:
        * The gate is opened once, when nothing of the call runs any more.

    Cancellation:
        A call that has not begun never does. An async one is cancelled where it waits; the device
        thread is let go when it has ended.
    """

    __slots__ = (
        "_args", "_context", "_error", "_fn", "_gate", "_has_started", "_is_over", "_name",
        "_result", "_task",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...],
        context: Context,
        name: str,
        gate: Gate,
    ) -> None:
        self._fn = fn
        self._args = args
        self._context = context
        self._name = name
        self._gate = gate
        self._is_over = False
        self._has_started = False
        self._task: OwnedTask[Any] | None = None
        self._result: object = None
        self._error: BaseException | None = None

    # ---- for observers -------------------------------------------------------------------

    def describe(self) -> str:
        """Name what is waited for."""
        return self._name

    def missing_members(self) -> tuple[int, ...]:
        """Return none: no replica is waited for."""
        return ()

    def awaited(self) -> asyncio.Task[object] | None:
        """Return the task of an async function that has begun; None else."""
        return None if self._task is None else self._task.task

    # ---- on the device thread ------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the call has ended.

        Cancellation:
            A CancelledError once the event loop is closed.
        """
        self._gate.wait()

    def result(self) -> Any:
        """Return what the ended call returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._result

    # ---- on the event loop ---------------------------------------------------------------

    def begin(self) -> None:
        """Run the function; an async one continues in a task of its own."""
        if self._is_over:
            return
        try:
            result = self._context.run(self._fn, *self._args)
        except BaseException as error:
            self._end(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise  # as from a task: they are for the event loop too
            return
        if not isinstance(result, Awaitable):
            self._result = result
            self._end(None)
            return
        name = f"aioreplica {self._name}"
        self._task = OwnedTask(self._finish(result), name, context=self._context)
        self._task.when_done(lambda _error: self._finished(result))

    def cancel(self) -> None:
        """Keep the call from beginning, or cancel it where it waits; idempotent."""
        if self._task is not None:
            self._task.cancel()
        elif not self._is_over:
            self._end(asyncio.CancelledError())

    async def _finish(self, awaitable: Awaitable[object]) -> None:
        self._has_started = True
        try:
            self._result = await awaitable
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise

    def _finished(self, awaitable: Awaitable[object]) -> None:
        if not self._has_started:
            self._error = asyncio.CancelledError()
            if inspect.iscoroutine(awaitable):
                awaitable.close()
        self._end(self._error)

    def _end(self, error: BaseException | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._gate.open()
