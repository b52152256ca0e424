"""Watches of time: one ends a run that makes no progress, one warns of replicas in a circle."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, final

from ._replica import Replica

CHECKS_PER_TIMEOUT = 8
MAX_DEPTH = 64
CIRCLE_S = 1.0
"""How long replicas may seem to wait for each other through handles before that is warned of."""
DEVICE_PROGRAM = "run_device_program"
"""The frame below which a device thread runs what the user wrote."""


@final
class StallWatch:
    """Calls `on_stall` once if `progress()` stays equal for `timeout_s` seconds.

    The watch looks eight times per timeout, so a stall is noticed at most an eighth late.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        progress: Callable[[], object],
        on_stall: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._progress = progress
        self._on_stall = on_stall
        self._seen = progress()
        self._since = loop.time()
        self._timer = loop.call_later(timeout_s / CHECKS_PER_TIMEOUT, self._look)

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        progress = self._progress()
        if progress != self._seen:
            self._seen, self._since = progress, now
        elif now - self._since >= self._timeout_s:
            self._on_stall(self._timeout_s)
            return
        left = self._since + self._timeout_s - now
        delay = min(self._timeout_s / CHECKS_PER_TIMEOUT, left)
        self._timer = self._loop.call_later(delay, self._look)


@final
class CircleWatch:
    """Calls `warn()` when a second has passed since the last `touch()`, until that returns true."""

    def __init__(self, loop: asyncio.AbstractEventLoop, warn: Callable[[], bool]) -> None:
        self._loop = loop
        self._warn = warn
        self._touched = 0.0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        """Count from now on."""
        self._touched = self._loop.time()
        if self._timer is None and not self._is_over:
            self._timer = self._loop.call_later(CIRCLE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        left = self._touched + CIRCLE_S - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._is_over = self._warn()


def format_stack(work: asyncio.Future[Any] | None) -> str:
    """Format the awaits of a task, outermost first; a future that is no task has no stack."""
    if work is None or work.done():
        return "  (ended)"
    if not isinstance(work, asyncio.Task):
        return "  (a plain function on its device thread)"
    lines = []
    awaited: Any = work.get_coro()
    for _ in range(MAX_DEPTH):
        frame: FrameType | None = getattr(awaited, "cr_frame", getattr(awaited, "gi_frame", None))
        if frame is None:
            break
        summary = traceback.extract_stack(frame, limit=1)[0]
        lines.append(f"  {summary.filename}:{summary.lineno} in {summary.name}: {summary.line}")
        awaited = getattr(awaited, "cr_await", getattr(awaited, "gi_yieldfrom", None))
    return "\n".join(lines) or "  (not started)"


def format_thread_stack(replica: Replica) -> str:
    """Format the frames of a replica's device thread, from the step function inwards."""
    if replica.work is None or replica.work.done():
        return "  (ended)"
    frame = None if replica.thread_id is None else sys._current_frames().get(replica.thread_id)
    if frame is None:
        return "  (not started: its device is busy)"
    found = traceback.extract_stack(frame, limit=MAX_DEPTH)
    starts = [i for i, summary in enumerate(found) if summary.name == DEVICE_PROGRAM]
    lines = found[starts[-1] + 1 :] if starts else found
    shown = [f"  {s.filename}:{s.lineno} in {s.name}: {s.line}" for s in lines]
    return "\n".join(["  (a plain function on its device thread)", *shown])
