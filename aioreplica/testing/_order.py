"""Orders of collectives that only this schedule kept.

All collectives of a replica share one sequence, and replicas that number them differently do not
meet. Where two tasks of a replica make calls, something has to order them: a future that one sets
and the other awaits, a lock, the end of a task. If nothing does, another schedule may swap them,
even though this one has passed.

A call comes before another for certain if a chain of causes leads from the one to the other: a
task's steps follow each other, and a step follows the step that made it possible.
"""

from __future__ import annotations

from itertools import pairwise
from typing import final

from ._library import MadeCall


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
