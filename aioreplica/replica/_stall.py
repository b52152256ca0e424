"""Watches of time: one ends a run without progress, two warn of replicas that may wait for ever."""

from __future__ import annotations

import asyncio
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

from ..devices import lane_table
from ..errors import ReplicaRow
from ._errors import circle_text, quiet_text, with_activities
from ._meeting import WaitedFor
from ._replica import Replica

if TYPE_CHECKING:
    from ._group import ReplicaGroup
    from ._meeting_point import MeetingPoint

CHECKS_PER_TIMEOUT = 8
MAX_DEPTH = 64
CIRCLE_S = 1.0
"""How long replicas may seem to wait for each other through handles before that is warned of."""
QUIET_S = 10.0
"""How long replicas may wait in a collective while nothing happens before that is warned of."""
LOOKS_PER_QUIET = 4
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
        deadline = self._since + self._timeout_s
        if now >= deadline:
            self._on_stall(self._timeout_s)
            return
        # At a time, not after one: what is left may be too little to move a float.
        at = min(now + self._timeout_s / CHECKS_PER_TIMEOUT, deadline)
        self._timer = self._loop.call_at(at, self._look)


@final
class StartedWaits:
    """The waits of replicas for what they have started, and for messages.

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

    def begin(self, replica: Replica, generation: WaitedFor, *, blocks: bool) -> Callable[[], None]:
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
        point.observers.began_to_wait(generation)

        def ended() -> None:
            point.observers.ended_to_wait(generation)
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


@final
@dataclass(slots=True)
class _Quiet:
    """State of a run that has not changed for a while, and the waits in it that were warned of.

    Looks are counted: a loop that was blocked, or stopped, looks late and once.
    """

    seen: object
    since: float
    looks: int = 0
    warned: set[object] = field(default_factory=set)


@final
class QuietWatch:
    """Warning of replicas that wait in a collective while nothing happens, once for each wait.

    That a replica will never come, because it waits for a lock that one in the collective holds,
    cannot be known. One timer for all runs of a strategy looks at them now and then, and is armed
    while there are any: a watch of each wait would cost a small run a third of its time.

    Args:
        loop: The event loop of the runs.
        runs: Gives those in progress.

    Attributes:
        timer: When it looks next; None while it need not.
    """

    __slots__ = ("_loop", "_quiet", "_runs", "timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, runs: Callable[[], Collection[ReplicaGroup]]
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._quiet: WeakKeyDictionary[ReplicaGroup, _Quiet] = WeakKeyDictionary()
        self.timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Look soon, in a context of its own: that of the caller would be kept."""
        delay = QUIET_S / LOOKS_PER_QUIET
        self.timer = self._loop.call_later(delay, self._look, context=Context())

    def stop(self) -> None:
        """Look no more; idempotent."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def _look(self) -> None:
        self.timer = None
        runs = self._runs()
        if not runs:
            return  # the next run arms it
        self.arm()
        for run in sorted(runs, key=lambda run: run.step):
            self._look_at(run)

    def _look_at(self, run: ReplicaGroup) -> None:
        point, now = run.point, self._loop.time()
        with point.lock or nullcontext():
            rendezvous = point.rendezvous
            waits = {
                (generation.members, generation.sequence): generation
                for replica in run.replicas
                for generation in rendezvous.waits(replica.replica_id)
            }
            is_told = rendezvous.may_be_stuck()  # of that `StartedWaits` warns, sooner
            missing = [(key, generation.missing) for key, generation in waits.items()]
            seen = run.progress(), missing
            quiet = self._quiet.get(run)
            if quiet is None or quiet.seen != seen or _is_busy(run):
                warned = set() if quiet is None else quiet.warned
                self._quiet[run] = _Quiet(seen, now, warned=warned)
                return
        quiet.looks += 1
        if quiet.looks < LOOKS_PER_QUIET or is_told or point.is_aborted:
            return
        absent = None
        across = point.everyone.across
        have_come = not any(generation.missing for generation in waits.values())
        if have_come:
            absent = None if across is None else across.absent_workers()
            if not absent and (absent is not None or self._is_busy_beside(run)):
                return  # what all have come to may be at work
        new = waits.keys() - quiet.warned
        if new:
            quiet.warned.update(new)
            what = f"Step {run.step} of {run.fn_name}"
            text = quiet_text(what, rows_of(run), now - quiet.since, absent, is_merging=have_come)
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _is_busy_beside(self, run: ReplicaGroup) -> bool:
        """Tell whether a merge function that awaits may wait for something that makes progress."""
        own = sum(each.op is not None and not each.op.done() for each in run.replicas)
        lanes = lane_table().statistics().values()
        return len(self._runs()) > 1 or sum(lane.running + lane.queued for lane in lanes) > own


def _is_busy(run: ReplicaGroup) -> bool:
    """Tell whether an op is queued or runs, or a plain function that waits in no collective."""
    if not run.is_blocking:
        return bool(run.ops.pending)
    return any(
        replica.replica_id not in run.point.parked
        for replica in run.replicas
        if replica.op is not None and not replica.op.done()
    )


def rows_of(run: ReplicaGroup) -> tuple[ReplicaRow, ...]:
    """Describe every replica of a run, with what it waits for outside every collective."""
    rows = run.point.rows()
    if not run.is_blocking:
        return rows
    return with_activities(rows, [replica.activity for replica in run.replicas])


def format_stack(replica: Replica) -> str:
    """Format the awaits of a replica, outermost first; a future that is not a task has no stack."""
    work = replica.work
    if work is None or work.done():
        return "  (ended)"
    if not isinstance(work, asyncio.Task):
        return "  (a plain function on its device thread)"
    lines = []
    awaited: object = work.get_coro()
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
