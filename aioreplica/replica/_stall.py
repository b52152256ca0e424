"""Watches of time: one ends a run that makes no progress, one warns of replicas in a circle."""

from __future__ import annotations

import asyncio
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from ._meeting import Generation
from ._replica import Replica
from ._table import circle_text

if TYPE_CHECKING:
    from ._meeting_point import MeetingPoint

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
class StartedWaits:
    """The waits of replicas for what they have started.

    Whether a child task that waits blocks its replica cannot be known. If replicas may wait for
    each other in a circle for a second, a warning shows the table, once.

    Args:
        point: Where the replicas meet.
    """

    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
        self._num_of_children = 0
        self._touched = 0.0
        self._has_warned = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(
        self, replica: Replica, generation: Generation, *, blocks: bool
    ) -> Callable[[], None]:
        """Record that something of a replica waits; return how that ends.

        Raises:
            CancelledError: If the run is ended, because the replicas can never meet.
        """
        point, replica_id = self._point, replica.replica_id
        mismatch = point.rendezvous.wait_for_started(replica_id, generation, blocks=blocks)
        if mismatch is not None:
            point.run.abort_mismatch(mismatch)
            raise asyncio.CancelledError
        self._num_of_children += not blocks
        if self._num_of_children and point.loop is not None:
            self._touched = point.loop.time()
            if self._timer is None and not self._has_warned:
                self._timer = point.loop.call_later(CIRCLE_S, self._look, point.loop)
        point.began_to_wait(generation)

        def ended() -> None:
            point.ended_to_wait(generation)
            self._num_of_children -= not blocks
            mismatch = point.rendezvous.waited_for_started(replica_id, generation, blocks=blocks)
            if mismatch is not None:
                point.run.abort_mismatch(mismatch)

        return ended

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        left = self._touched + CIRCLE_S - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._look, loop)
            return
        point = self._point
        if not point.is_aborted and self._num_of_children and point.rendezvous.may_be_stuck():
            self._has_warned = True
            text = circle_text(point.rendezvous.rows(), point.everyone.step)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


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
