"""The event loop: which one runs, whether it is being closed, and waiting although cancelled."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio import runners
from collections.abc import Callable
from typing import Any

import anyio

from ..errors import ContextError, LoopMismatchError


def running_loop(what: str) -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop; `what` begins the error's text.

    Raises:
        ContextError: If no event loop is running, or trio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_run():
            raise ContextError(
                f"{what} needs an asyncio event loop, but trio is running. Use asyncio.run, or "
                "anyio.run(main, backend='asyncio')."
            ) from None
        raise ContextError(
            f"{what} needs a running event loop. Call it from a coroutine, for example under "
            "asyncio.run(main())."
        ) from None


def require_loop(loop: asyncio.AbstractEventLoop, what: object) -> None:
    """Check that the caller is on the event loop that something belongs to.

    Futures of another loop wake nobody here, or in another thread, which may wait for ever.

    Raises:
        LoopMismatchError: If it is not; `what` begins the error's text.
        ContextError: If no event loop is running.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = running_loop(f"{what}")  # which says why there is none
    if running is not loop:
        raise LoopMismatchError(
            f"{what} was awaited on {running!r}, but it belongs to {loop!r}. Await it there; from "
            "a coroutine of another thread with asyncio.wrap_future("
            "asyncio.run_coroutine_threadsafe(coroutine, loop))."
        )


def is_ctrl_c() -> bool:
    """Tell whether Ctrl-C has reached the runner of this event loop, see `is_interrupted`."""
    handler = signal.getsignal(signal.SIGINT)
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) and getattr(runner, "_interrupt_count", 0) > 0


def is_interrupted() -> bool:
    """Tell whether the interpreter is being interrupted or the running loop is being closed.

    True after Ctrl-C has reached `asyncio.Runner` (so also under `asyncio.run`, `anyio.run` and
    `uvloop.run`), and while a runner cancels all tasks of a loop that it is about to close.
    Neither is visible through public API; what is looked at here exists in CPython 3.11 to 3.14,
    and where it does not the answer is False, which means to wait.
    """
    if is_ctrl_c():
        return True
    closing = getattr(getattr(runners, "_cancel_all_tasks", None), "__code__", None)
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is closing:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the chain
    return False


async def wait_shielded(
    is_done: Callable[[], bool],
    new_waiter: Callable[[], asyncio.Future[None]],
    on_cancel: Callable[[asyncio.CancelledError], None] | None = None,
    *,
    through_interrupt: bool = False,
) -> bool:
    """Wait until `is_done()`, through every cancellation, without spinning.

    Args:
        is_done: Called before each wait.
        new_waiter: Gives a fresh future that is resolved when `is_done` may have become true.
        on_cancel: Called with each further cancellation.
        through_interrupt: Whether to wait although the interpreter is being interrupted: for what
            writes files. A second Ctrl-C is raised by asyncio itself.

    Returns:
        False if the interpreter is being interrupted: the caller must stop waiting, and does not
        have what it waited for.

    Cancellation:
        Swallowed: the caller is unwinding already and raises again afterwards. An anyio scope
        shields the wait, because level cancellation would otherwise wake it in every loop cycle.
    """
    with anyio.CancelScope(shield=True):
        while not is_done():
            if not through_interrupt and is_interrupted():
                return False
            try:
                await new_waiter()
            except asyncio.CancelledError as cancelled:
                if on_cancel is not None:
                    on_cancel(cancelled)
    return True


async def wait_until_done(
    future: asyncio.Future[Any],
    on_cancel: Callable[[asyncio.CancelledError], None] | None = None,
    *,
    through_interrupt: bool = False,
) -> bool:
    """Wait until a future is done, as `wait_shielded` does; what it raises is not raised here."""
    return await wait_shielded(
        future.done, lambda: new_waiter(future), on_cancel, through_interrupt=through_interrupt
    )


def new_waiter(future: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Make a future that is resolved when another one is done, and can be cancelled without it."""
    waiter: asyncio.Future[None] = future.get_loop().create_future()

    def wake(_future: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    return waiter
