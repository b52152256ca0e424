"""Search of every schedule, branch by branch.

Every run follows a list of choices and then the default, which preempts no task; each other option
that it passes becomes a list of its own, unless it exceeds the bound. No two runs are the same, and
when no list is left every schedule within the bound has been run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from ._execute import Outcome
from ._participants import CLOCK, Participant
from ._runner import Runner
from ._schedule import CHOICES, Ranks, Schedule, is_outside, is_preemptible


@final
@dataclass(frozen=True, slots=True)
class Branch:
    """A list of choices still to be run.

    Attributes:
        choices: Pairs of a decision's number and a rank among its options.
        preemptions: How many of them preempt.
    """

    choices: tuple[tuple[int, int], ...]
    preemptions: int


@final
class Explorer:
    """Follows one branch and notes the branches that leave it.

    Args:
        branch: What to follow.
        max_preemptions: Branches beyond that are dropped; None where there is no bound.

    Attributes:
        found: The branches that leave it, after its last choice.
        was_cut: Whether a task that spins had to be stopped, so that not all was covered.
    """

    __slots__ = (
        "_bound", "_branch", "_choices", "_decision", "_first_new", "_ranks", "found", "was_cut"
    )  # fmt: skip

    def __init__(self, branch: Branch, max_preemptions: int | None) -> None:
        self._branch = branch
        self._bound = max_preemptions
        self._choices = dict(branch.choices)
        self._first_new = branch.choices[-1][0] + 1 if branch.choices else 0
        self._decision = 0
        self._ranks = Ranks()
        self.found: list[Branch] = []
        self.was_cut = False

    def __call__(self, options: list[Participant]) -> int:
        ranked = self._ranks.rank(options)
        decision = self._decision
        self._decision = decision + 1
        at = ranked[0]
        if decision >= self._first_new:
            self._branch_off(decision, [options[i] for i in ranked])
        else:
            at = ranked[self._choices.get(decision, 0)]
        self._ranks.took(options[at])
        return at

    def _branch_off(self, decision: int, ranked: list[Participant]) -> None:
        branch, spins = self._branch, self._ranks.is_spinning
        self.was_cut |= spins
        could_go_on = ranked[0].index == self._ranks.last and not spins
        for option in range(1, len(ranked)):
            if spins and ranked[option].index == self._ranks.last:
                continue  # to spin on is not tried: there is no end to it
            preempts = could_go_on and is_preemptible(ranked[option])
            preempts |= ranked[option].index == CLOCK and not is_outside(ranked[0])
            count = 0 if self._bound is None else branch.preemptions + preempts
            if self._bound is None or count <= self._bound:
                self.found.append(Branch((*branch.choices, (decision, option)), count))


@final
class Search:
    """Runs branch after branch, those with fewer preemptions first.

    Args:
        runner: Runs them.
        base: Its seed, fidelity and faults are those of all branches.
        max_preemptions: Bound on the preemptions of a schedule; None for no bound.
        limit: How many schedules at most.

    Attributes:
        num_run: How many schedules were run.
    """

    def __init__(
        self, runner: Runner, base: Schedule, max_preemptions: int | None, limit: int
    ) -> None:
        self._runner = runner
        self._base = replace(base, maker=CHOICES, length=0, choices=(), holds=())
        self._bound = max_preemptions
        self._limit = limit
        self._waiting: list[deque[Branch]] = [deque() for _ in range((max_preemptions or 0) + 1)]
        self._waiting[0].append(Branch((), 0))
        self._was_cut = False
        self.num_run = 0

    @property
    def is_complete(self) -> bool:
        """True if no branch is left, so that every schedule within the bound was run."""
        return not (any(self._waiting) or self._was_cut)

    def outcomes(self) -> Iterator[tuple[Schedule, Outcome]]:
        """Run schedules, and yield each with how it ended."""
        for waiting in self._waiting:
            while waiting and self.num_run < self._limit:
                branch = waiting.popleft()
                schedule = replace(self._base, choices=branch.choices)
                outcome, explorer = self._runner.choose(
                    schedule, partial(Explorer, branch, self._bound)
                )
                self.num_run += 1
                self._was_cut |= explorer.was_cut
                self._add(explorer.found)
                yield schedule, outcome

    def _add(self, found: list[Branch]) -> None:
        """Queue branches, as long as there is a chance that they will be run."""
        for branch in found:
            waiting = self._waiting[branch.preemptions]
            if len(waiting) < self._limit:
                waiting.append(branch)
            else:
                self._was_cut = True
