"""What the library reports of a run: who waits in which of its calls, and which runs go on.

All of it comes through the observer protocol of `aioreplica.telemetry`, so nothing here depends on
how the library is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, final

from ..telemetry import ObservedCall, ObservedRun, ObservedWait, Observer, observe_everywhere
from ._participants import SimTask
from ._pools import PoolOp, PoolTable


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

    group: tuple[int, tuple[int, ...]]
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
        self._pools: PoolTable | None = None
        self._waits: dict[int, list[ObservedWait]] = {}
        self._runs: dict[int, list[ObservedRun]] = {}
        self._stop: Callable[[], None] | None = None

    def start(self, pools: PoolTable) -> None:
        """Begin to watch."""
        self._pools = pools
        self._stop = observe_everywhere(
            Observer(
                run_began=lambda run: self._begin(self._runs, run),
                run_ended=lambda run: self._end(self._runs, run),
                call_made=self._note,
                wait_began=lambda wait: self._begin(self._waits, wait),
                wait_ended=lambda wait: self._end(self._waits, wait),
            )
        )

    def stop(self) -> None:
        """Stop watching, and let go of everything; idempotent."""
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._waits.clear()
        self._runs.clear()

    def wait_of(self, participant: SimTask | PoolOp) -> ObservedWait | None:
        """Return what a task or an op waits for in the library; None if it does not."""
        waits = self._waits.get(participant.index)
        return waits[-1] if waits else None

    def works_of(self, participant: SimTask | PoolOp) -> Sequence[Any]:
        """Return the tasks or ops of the run that a task waits for; empty if it does not."""
        runs = self._runs.get(participant.index)
        return runs[-1].works if runs else ()

    def replica_of(self, op: PoolOp) -> int | None:
        """Return whose whole program an op is; None for other ops."""
        for runs in self._runs.values():
            for run in runs:
                for replica_id, work in enumerate(run.works):
                    if work is op.future:
                        return replica_id
        return None

    def _note(self, call: ObservedCall) -> None:
        what = f"{call.describe()} at {PurePath(call.file).name}:{call.line}"
        group = id(call.run), call.members
        self._made(MadeCall(group, call.replica_id, call.sequence, what))

    def _begin(self, going_on: dict[int, list[Any]], event: object) -> None:
        who = self._current()
        if who is not None:
            going_on.setdefault(who.index, []).append(event)

    def _end(self, going_on: dict[int, list[Any]], event: object) -> None:
        who = self._current()
        events = going_on.get(who.index, []) if who is not None else []
        if not _holds(events, event):  # ended by another one, as at a run's end
            events = next((each for each in going_on.values() if _holds(each, event)), [])
        events[:] = [each for each in events if each is not event]

    def _current(self) -> SimTask | PoolOp | None:
        """Return the op or the task whose step goes on."""
        assert self._pools is not None
        if self._pools.current_op is not None:
            return self._pools.current_op
        task = asyncio.current_task(self._pools.loop)
        return task if isinstance(task, SimTask) else None


def _holds(events: Sequence[object], event: object) -> bool:
    return any(each is event for each in events)
