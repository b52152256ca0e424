"""Orders of collectives that only this schedule kept.

All collectives of a replica share one sequence, and replicas that number them differently do not
meet. Where two tasks of a replica make calls, something has to order them: a future that one sets
and the other awaits, a lock, the end of a task. If nothing does, another schedule may swap them,
even though this one has passed.

A call comes before another for certain if a chain of causes leads from the one to the other: a
task's steps follow each other, and a step follows the step that made it possible.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any, final

from ..replica import MeetingPoint


@final
@dataclass(frozen=True, slots=True)
class MadeCall:
    """One call of a collective.

    Attributes:
        group: Identifies the run and the sync group it belongs to.
        replica_id: Who made it.
        sequence: Its number in the replica.
        what: Its collective and place.
        task: Identifies the task that made it.
        step: During which step of the schedule.
    """

    group: int
    replica_id: int
    sequence: int
    what: str
    task: int
    step: int


@final
class OrderWatch:
    """Notes causes and calls during a run; says afterwards which calls chance has ordered."""

    def __init__(self) -> None:
        self._causes: list[tuple[int, ...]] = []
        self._last: dict[int, int] = {}
        self._possible: dict[int, int] = {}
        self._num_made = 0
        self._made: dict[int, int] = {}
        self._calls: list[MadeCall] = []
        self._undo: Any = None

    def install(self) -> None:
        """Begin to watch calls."""
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
        task, step = id(asyncio.current_task()), len(self._causes) - 1
        group = id(call.group)  # of one run; calls are numbered in it
        self._calls.append(MadeCall(group, replica_id, call.sequence, what, task, step))

    def remove(self) -> None:
        """Stop watching; idempotent."""
        if self._undo is not None:
            MeetingPoint.meet, MeetingPoint.start = self._undo  # type: ignore[method-assign]
            self._undo = None

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
        by_replica: dict[tuple[int, int], list[MadeCall]] = {}
        for call in self._calls:
            by_replica.setdefault((call.group, call.replica_id), []).append(call)
        for calls in by_replica.values():
            calls.sort(key=lambda call: call.sequence)
            for first, second in pairwise(calls):
                if first.task != second.task and not self._leads_to(first.step, second.step):
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
