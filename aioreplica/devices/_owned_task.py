"""The task owner: background tasks of long-lived objects start here, and end with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Generic, TypeVar, final

from ._loop import new_waiter, require_loop, wait_until_done

T = TypeVar("T")


@final
class OwnedTask(Generic[T]):
    """A task that belongs to an object, which ends it before it goes itself.

    Args:
        work: What to run.
        name: Name of the task.
        context: Where to run it; None takes a copy of the caller's context.

    Made of a bare `asyncio.Task`: a task factory of the loop may start tasks at once, before the
    owner has stored them.
    """

    __slots__ = ("_task",)

    def __init__(
        self, work: Coroutine[object, None, T], name: str, *, context: Context | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.Task(work, loop=loop, name=name, context=context)

    @property
    def task(self) -> asyncio.Task[T]:
        """The task itself, for who looks at what a program waits for."""
        return self._task

    @property
    def is_done(self) -> bool:
        """True if the task has ended, in whatever way."""
        return self._task.done()

    @property
    def is_current(self) -> bool:
        """True if it is the task that asks: it must not wait for its own end."""
        return asyncio.current_task() is self._task

    def cancel(self) -> None:
        """Ask the task to end."""
        self._task.cancel()

    def when_done(self, fn: Callable[[BaseException | None], None]) -> None:
        """Call `fn` with the task's exception, or None, in the loop cycle after its end."""

        def tell(task: asyncio.Task[T]) -> None:
            fn(None if task.cancelled() else task.exception())

        self._task.add_done_callback(tell)

    async def done_or_cancelled(self) -> None:
        """Wait until the task has ended; cancelling the wait leaves the task alone."""
        if not self._task.done():
            require_loop(self._task.get_loop(), self)
            await new_waiter(self._task)

    async def ended(self, *, through_interrupt: bool = False) -> bool:
        """Wait until the task has ended; its exception is not raised.

        Args:
            through_interrupt: Whether to wait although the interpreter is being interrupted: for a
                task that ends with files written.

        Returns:
            False if the interpreter is being interrupted, so the task was left to the loop's end.

        Cancellation:
            Raised again once the task has ended.
        """
        if not self._task.done():
            require_loop(self._task.get_loop(), self)
        cancelled: list[asyncio.CancelledError] = []
        has_ended = await wait_until_done(
            self._task, cancelled.append, through_interrupt=through_interrupt
        )
        if has_ended and not self._task.cancelled():
            self._task.exception()  # looked at, so asyncio does not report it as forgotten
        if cancelled:
            raise cancelled[0]
        return has_ended

    def __await__(self) -> Generator[object, None, T]:
        """Wait for the result; cancelling the wait cancels the task."""
        return self._task.__await__()

    def __repr__(self) -> str:
        return f"<OwnedTask {self._task.get_name()} | {'done' if self.is_done else 'running'}>"
