"""Waiting for something that goes on by itself, without being able to stop it."""

from __future__ import annotations

import asyncio
from typing import Any, final


@final
class Watch(asyncio.Future[None]):
    """Done when another future is; cancelling it leaves that one alone."""

    def __init__(self, watched: asyncio.Future[Any]) -> None:
        super().__init__(loop=watched.get_loop())
        watched.add_done_callback(self._pass_on)

    def _pass_on(self, watched: asyncio.Future[Any]) -> None:
        if self.done():
            return
        if watched.cancelled():
            self.cancel()
        else:
            self.set_result(None)


def is_blocked(work: asyncio.Future[Any] | None) -> bool:
    """Tell whether a task can do nothing until some watched future is done.

    Seen are a task that waits by itself (the running one is about to), one that awaits such a
    task, and `asyncio.gather` of such. Of other ways to wait nothing is known: the answer is no.
    Where a task does not say what it waits for (it is not public), the answer is no too.
    """
    if work is None or work.done():
        return False
    if isinstance(work, Watch) or work is asyncio.current_task():
        return True
    awaited = getattr(work, "_fut_waiter", None)
    if awaited is not None:
        return is_blocked(awaited)
    return any(is_blocked(child) for child in getattr(work, "_children", ()))
