"""The task of a merge that takes longer than one step of its last replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, final

from ._collective import Parts, Pending


@final
class MergeTask:
    """Runs the rest of a merge, in replica 0's context variables.

    Args:
        pending: What is left to do.
        is_aborted: Asked before the first step: a merge of an aborted run does not begin.
        loop: The event loop of the run, None for the running one.
        context: The context variables to run in.
        on_end: Called with the ended task.

    Invariants:
        * What was never begun is closed, so nothing warns that it was not awaited.
    """

    __slots__ = ("_has_begun", "_is_aborted", "_on_end", "_pending", "_task")

    def __init__(
        self,
        pending: Pending,
        is_aborted: Callable[[], bool],
        loop: asyncio.AbstractEventLoop | None,
        context: Context,
        on_end: Callable[[asyncio.Future[Parts]], None],
    ) -> None:
        self._pending = pending
        self._is_aborted = is_aborted
        self._on_end = on_end
        self._has_begun = False
        self._task: asyncio.Task[Any] = asyncio.Task(self._finish(), loop=loop, context=context)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancel the merge; one that has not begun sees by itself that the run is aborted."""
        if self._has_begun:
            self._task.cancel()

    async def _finish(self) -> Parts:
        if self._is_aborted():
            raise asyncio.CancelledError
        self._has_begun = True
        return self._pending.to_parts(await self._pending.awaitable)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self._has_begun:
            self._pending.discard()
        self._on_end(task)


def error_of(ended: asyncio.Future[Any]) -> BaseException | None:
    """Return what a task ended with; its own CancelledError if it was cancelled."""
    try:
        return ended.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled
