"""Observer of the library's runs: the calls in which replicas wait, in order of arrival.

All of it comes through the observer protocol of `aioreplica.telemetry`, so nothing here depends on
how the library is made.

All collectives of a replica share one sequence, and replicas that number them differently do not
meet. Where two tasks of a replica make calls, something has to order them: a future that one sets
and the other awaits, a lock, the end of a task. If nothing does, another schedule may swap them,
even though this one has passed. A call comes before another for certain if a chain of causes leads
from the one to the other: a task's steps follow each other, and a step follows the step that made
it possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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

    def works_of(self, participant: SimTask | PoolOp) -> Sequence[object]:
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


@final
class OrderWatch:
    """Notes causes and calls during a run; says afterwards which calls chance has ordered."""

    def __init__(self) -> None:
        self._causes: list[tuple[int, ...]] = []
        self._last: dict[int, int] = {}
        self._possible: dict[int, int] = {}
        self._num_made = 0
        self._made: dict[int, int] = {}
        self._calls: list[tuple[MadeCall, int, int]] = []  # and who made it, in which step

    def note(self, call: MadeCall, index: int) -> None:
        """Note a call that a participant makes in the current step."""
        self._calls.append((call, index, len(self._causes) - 1))

    def begin_step(self, index: int) -> None:
        """Note what a step follows: the participant's last one, and what made it possible."""
        number = len(self._causes)
        before = self._last.get(index, self._made.get(index, -1))
        causes = {before, self._possible.pop(index, -1)} - {-1}
        self._causes.append(tuple(causes))
        self._last[index] = number

    def end_step(self, num_made: int) -> None:
        """Note which participants the current step has made, as numbers below `num_made`."""
        for index in range(self._num_made, num_made):
            self._made[index] = len(self._causes) - 1
        self._num_made = num_made

    def became_possible(self, index: int) -> None:
        """Note that a participant's next step became possible during the current step."""
        self._possible[index] = len(self._causes) - 1

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each pair of calls that nothing orders."""
        found: dict[tuple[str, str], set[int]] = {}
        by_replica: dict[tuple[object, int], list[tuple[MadeCall, int, int]]] = {}
        for each in self._calls:
            by_replica.setdefault((each[0].group, each[0].replica_id), []).append(each)
        for calls in by_replica.values():
            calls.sort(key=lambda each: each[0].sequence)
            for (first, one, before), (second, other, after) in pairwise(calls):
                if one != other and not self._leads_to(before, after):
                    found.setdefault((first.what, second.what), set()).add(first.replica_id)
        return tuple(
            f"Replica{'s' if len(ids) > 1 else ''} {', '.join(map(str, sorted(ids)))}: two tasks "
            f"call {one} and {other}, and nothing but the schedule orders them. Await the one "
            "before the other is called, or make both calls in one task."
            for (one, other), ids in found.items()
        )

    def _leads_to(self, first: int, second: int) -> bool:
        """Tell whether a chain of causes leads from one step to another."""
        todo, seen = [second], set()
        while todo:
            step = todo.pop()
            if step == first:
                return True
            if step > first and step not in seen:
                seen.add(step)
                todo += self._causes[step]
        return False


def _holds(events: Sequence[object], event: object) -> bool:
    return any(each is event for each in events)
