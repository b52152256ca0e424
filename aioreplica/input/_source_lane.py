"""The thread of one source: a lane on which its iterator is made, advanced and closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar, final

from ..context import REGISTRY
from ..devices import CompletionQueue, Lane, Op, lane_table, run_on_lane

T = TypeVar("T")

JOIN_S = 0.5  # a bound only: an idle thread ends in microseconds


@final
class SourceLane:
    """One thread for a source that may block, from its first call to `close`.

    A thread of its own, not one of the host pool: a generator that holds an SQLite connection, or
    anything else that belongs to the thread that made it, works; and one that blocks for long
    keeps no thread from others.

    Args:
        kind: What its lane is called, before a number.
        writes_files: Whether a call that has begun is waited for in an interrupt, too.
    """

    __slots__ = ("_kind", "_lane", "_port", "_writes_files")

    def __init__(self, kind: str = "input", *, writes_files: bool = False) -> None:
        self._kind = kind
        self._writes_files = writes_files
        self._lane: Lane | None = None
        self._port: CompletionQueue | None = None

    @property
    def is_busy(self) -> bool:
        """True if a call runs that was given up because of an interrupt."""
        return self._lane is not None and self._lane.statistics().running > 0

    def run(self, fn: Callable[..., T], *args: Any) -> Op[T]:
        """Return an op that calls `fn` on the thread once it is awaited."""
        self._port = CompletionQueue.of_running_loop()
        if self._lane is None:
            number = next(REGISTRY.once("source_lanes", itertools.count))
            name = f"{self._kind}:{number}"
            lane_table().acquire((name,))
            self._lane = lane_table().lane(name, num_streams=1)
        op = run_on_lane(self._lane, self._port, fn, args, {})
        if self._writes_files:
            op.writes_files = True
        return op

    def close(self) -> None:
        """End the thread, and see it gone unless it is busy; idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            is_busy = lane.statistics().running > 0
            _end(lane)
            if not is_busy:
                lane.join(JOIN_S)

    def __del__(self) -> None:
        """End the thread of an owner that was dropped: soon, as the collector may be the caller."""
        lane, port = getattr(self, "_lane", None), getattr(self, "_port", None)
        if lane is None or port is None:
            return
        try:
            port.loop.call_soon_threadsafe(_end, lane)
        except RuntimeError:  # the event loop is closed
            _end(lane)


def _end(lane: Lane) -> None:
    lane_table().release((lane.name,))
