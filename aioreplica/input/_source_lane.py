"""The thread of one source: a lane on which its iterator is made, advanced and closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar, final

from ..context import REGISTRY
from ..devices import CompletionPort, Lane, Op, lane_table, run_on_lane

T = TypeVar("T")

JOIN_S = 0.5  # a bound only: an idle thread ends in microseconds


@final
class SourceLane:
    """One thread for a source that may block, from its first call to `close`.

    A thread of its own, not one of the host pool: a generator that holds an SQLite connection, or
    anything else that belongs to the thread that made it, works; and one that blocks for long
    keeps no thread from others.
    """

    __slots__ = ("_lane", "_name", "_port")

    def __init__(self) -> None:
        self._name = ""
        self._lane: Lane | None = None
        self._port: CompletionPort | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call runs that was given up because of an interrupt."""
        return self._lane is not None and self._lane.statistics().running > 0

    def run(self, fn: Callable[..., T], *args: Any) -> Op[T]:
        """Return an op that calls `fn` on the thread once it is awaited."""
        if self._lane is None or self._port is None:
            number = next(REGISTRY.once("source_lanes", itertools.count))
            self._name = f"input:{number}"
            self._port = CompletionPort.of_running_loop()
            lane_table().acquire((self._name,))
            self._lane = lane_table().lane(self._name, num_streams=1)
        return run_on_lane(self._lane, self._port, fn, args, {})

    def close(self) -> None:
        """End the thread, and see it gone unless it is busy; idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            is_busy = lane.statistics().running > 0
            lane_table().release((self._name,))
            if not is_busy:
                lane.join(JOIN_S)
