"""What the library reports of a run: who waits in which of its calls, and which runs go on.

The only module of the kit that looks into the library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any, Final, final

from ..replica import MeetingPoint
from ._points import frames_of, own_frame
from ._pools import PoolOp

MEETING_METHODS: Final = {
    "MeetingPoint.meet",
    "MeetingPoint.wait_for_started",
    "ThreadPoint.meet",
}
LIBRARY_WAITS: Final = {
    "Infeed.take": "the infeed",
    "ThreadFiller._fill": "room in the infeed",
    "SimLane.lend": "its lane, which it has lent to other ops",
}


@final
@dataclass(frozen=True, slots=True)
class LibraryWait:
    """What a replica waits for in a call of the library.

    Attributes:
        what: In words, such as "all_reduce #3 (SUM)" or "the infeed".
        missing: The replicas whose arrival is waited for.
        task: The task on the event loop that is waited for; None for other waits.
        is_collective: Whether other replicas are waited for, or the merge of what they brought.
    """

    what: str
    missing: tuple[int, ...] = ()
    task: asyncio.Future[Any] | None = None
    is_collective: bool = False


@final
@dataclass(frozen=True, slots=True)
class MadeCall:
    """One call of a collective.

    Attributes:
        group: Identifies the run and the group that it is numbered in.
        replica_id: The caller.
        sequence: Its number among those of its replica in the group.
        what: Its collective and place.
    """

    group: object
    replica_id: int
    sequence: int
    what: str


@final
class LibraryWatch:
    """Watches the library during one run.

    Args:
        made: Called with every call of a collective.
    """

    def __init__(self, made: Callable[[MadeCall], None]) -> None:
        self._made = made
        self._undo: Any = None

    def install(self) -> None:
        """Begin to watch."""
        meet, start = self._undo = MeetingPoint.meet, MeetingPoint.start

        async def noted_meet(point: MeetingPoint, seat: Any, call: Any) -> Any:
            self._note(seat.replica_id, call)
            return await meet(point, seat, call)

        def noted_start(point: MeetingPoint, seat: Any, call: Any) -> Any:
            self._note(seat.replica_id, call)
            return start(point, seat, call)

        MeetingPoint.meet = noted_meet  # type: ignore[method-assign, assignment]
        MeetingPoint.start = noted_start  # type: ignore[method-assign, assignment]

    def _note(self, replica_id: int, call: Any) -> None:
        what = f"{call.describe()} at {PurePath(call.file).name}:{call.line}"
        self._made(MadeCall(id(call.group), replica_id, call.sequence, what))

    def remove(self) -> None:
        """Stop watching; idempotent."""
        if self._undo is not None:
            MeetingPoint.meet, MeetingPoint.start = self._undo  # type: ignore[method-assign]
            self._undo = None

    def wait_of(self, participant: asyncio.Task[Any] | PoolOp) -> LibraryWait | None:
        """Return what a task or an op waits for in the library; None if it does not."""
        frames = frames_of(participant)
        own = own_frame(frames)
        inner = frames if own is None else frames[frames.index(own) + 1 :]
        missing = _missing(inner)
        for frame in reversed(inner):
            name, given = frame.f_code.co_qualname, frame.f_locals
            if name in MEETING_METHODS and "call" in given:
                return LibraryWait(given["call"].describe(), missing, is_collective=True)
            if name == "ThreadPoint.call_on_host":
                what = str(given["name"]).removeprefix("aioreplica ")
                return LibraryWait(what, (), given["call"].task)
            if name == "BlockingContext._meet_on_loop":
                return LibraryWait(given["collective"].name, missing, is_collective=True)
            if name in LIBRARY_WAITS:
                return LibraryWait(LIBRARY_WAITS[name])
        return None

    def run_of(self, participant: asyncio.Task[Any] | PoolOp) -> tuple[object, ...] | None:
        """Return the tasks or ops of the run that a task waits for; None if it does not."""
        frames = frames_of(participant)
        if not frames or frames[-1].f_code.co_qualname != "ReplicaGroup.wait":
            return None
        return tuple(seat.work for seat in frames[-1].f_locals["self"].seats)


def _missing(frames: list[FrameType]) -> tuple[int, ...]:
    for frame in reversed(frames):
        if frame.f_code.co_qualname in MEETING_METHODS | {"BridgedCall.wait"}:
            point = frame.f_locals["self"]
            point = getattr(point, "_point", point)
            rows = point.rendezvous.rows()
            return tuple(row.replica_id for row in rows if row.state != "waiting")
    return ()
