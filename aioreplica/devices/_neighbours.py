"""Neighbours: the lanes of as many devices as there are cores, each on a core of its own.

The thread of the event loop is one more than there are cores then. When it wakes two device threads
in a row, Linux finds one core idle, and often queues both threads there; the loop's own core goes
idle a moment later, but the second thread stays where it is until the first one's op has ended,
however long that takes. So a thread that begins an op moves neighbours that have been woken and do
not run yet away from its core. Nothing is pinned: an op may start threads of its own, which would
inherit that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from ._cores import find_getcpu, move_away

if TYPE_CHECKING:
    from ._lane import Lane

MOST = 16
"""With more lanes, looking at all of them at every op would cost more than it brings."""


@final
class Neighbours:
    """Knows the lanes that have to share the cores out among themselves.

    Attributes:
        lanes: Those; none where there are more cores, or fewer, than devices.
    """

    __slots__ = ("_getcpu", "lanes")

    def __init__(self) -> None:
        self.lanes: tuple[Lane, ...] = ()
        self._getcpu = find_getcpu()

    def settle(self, lanes: Iterable[Lane], num_cores: int) -> None:
        """Take note of the lanes of all devices in use."""
        found = tuple(lanes)
        is_crowded = len(found) == num_cores and 1 < num_cores <= MOST
        self.lanes = found if is_crowded and self._getcpu is not None else ()

    def make_room(self, mine: Lane) -> None:
        """Move neighbours that wait for the calling thread's core, which begins an op of `mine`."""
        for lane in self.lanes:
            if lane is not mine and lane.has_yet_to_run:
                thread_id = lane.native_id
                if thread_id is not None and self._getcpu is not None:
                    move_away(thread_id, self._getcpu())

    def __repr__(self) -> str:
        return f"<Neighbours | {len(self.lanes)} lanes>"
