"""Search of every schedule, branch by branch.

Every run follows a list of choices and then the default, which preempts no task; each other option
that it passes becomes a list of its own, unless it exceeds the bound. No two runs are the same, and
when no list is left every schedule within the bound has been run.

Sleep sets leave out schedules that differ from others in the order of two neighbours alone that no
program can tell apart: starts of calls in different pools, and bookkeeping of asyncio. Such a step
sleeps behind the options that come after it, until something goes that it may depend on. These
steps are no preemptions, and do not decide whether another one is, so both orders are within the
same bound. With steps of tasks that is not so, and schedules would be lost.

Source:
    Godefroid, Partial-order methods for the verification of concurrent systems, 1996; why bounds
    and reductions go badly together: Coons, Musuvathi and McKinley, Bounded partial-order
    reduction, OOPSLA 2013.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from ._execute import Outcome
from ._participants import CLOCK, KitStep, Participant
from ._runner import Runner
from ._schedule import CHOICES, Ranks, Schedule, is_outside, is_preemptible, kit_step


@final
@dataclass(frozen=True, slots=True)
class Branch:
    """A list of choices still to be run.

    Attributes:
        choices: Pairs of a decision's number and a rank among its options.
        preemptions: How many of them preempt.
        asleep: Numbers of participants that go next in other branches, and need not here.
    """

    choices: tuple[tuple[int, int], ...]
    preemptions: int
    asleep: frozenset[int] = frozenset()


@final
class Explorer:
    """Follows one branch and notes the branches that leave it.

    Args:
        branch: What to follow.
        max_preemptions: Branches beyond that are dropped; None where there is no bound.

    Attributes:
        choices: What it has followed so far; after the branch, mostly the default.
        found: The branches that leave it, after its last choice.
        was_cut: Whether a task that spins had to be stopped, so that not all was covered.

    Invariants:
        * What sleeps was an option of the last decision, and of every one since it fell asleep.
    """

    __slots__ = (
        "_asleep", "_bound", "_branch", "_decision", "_first_new", "_given", "_is_covered",
        "_num_steps", "_ranks", "choices", "found", "was_cut",
    )  # fmt: skip

    def __init__(self, branch: Branch, max_preemptions: int | None) -> None:
        self._branch = branch
        self._bound = max_preemptions
        self._given = dict(branch.choices)
        self._first_new = branch.choices[-1][0] + 1 if branch.choices else 0
        self._decision = 0
        self._ranks = Ranks()
        self._asleep: list[KitStep] = []
        self._num_steps = 0  # of the run, up to the last decision and with what it chose
        self._is_covered = False  # True once other branches have all that may follow
        self.choices = branch.choices
        self.found: list[Branch] = []
        self.was_cut = False

    def __call__(self, options: list[Participant]) -> int:
        ranked = self._ranks.rank(options)
        decision = self._decision
        self._decision = decision + 1
        if decision >= self._first_new:
            at = ranked[self._branch_off(decision, [options[i] for i in ranked])]
        else:
            at = ranked[self._given.get(decision, 0)]
            if decision == self._first_new - 1 and self._branch.asleep:
                self._put_to_sleep(_steps_of(self._branch.asleep, options))
        self._ranks.took(options[at])
        return at

    def _branch_off(self, decision: int, ranked: list[Participant]) -> int:
        """Note the other options of a decision; return the rank of the one that goes here."""
        branch, spins, last = self._branch, self._ranks.is_spinning, self._ranks.last
        self.was_cut |= spins
        if self._is_covered:
            return 0
        before = self._still_asleep(ranked)  # what other branches begin with
        asleep = {each.index for each in before}
        goes, goes_asleep = -1, before
        for rank, option in enumerate(ranked):
            if option.index in asleep or (rank and spins and option.index == last):
                continue  # to spin on is not tried: there is no end to it
            step = kit_step(option)
            others = [each for each in before if step is not None and each.scope is not step.scope]
            count = branch.preemptions
            if self._bound is not None and _preempts(rank, ranked, last, spins=spins):
                count += 1
            if goes < 0 and count == branch.preemptions:
                goes, goes_asleep = rank, others
            elif self._bound is None or count <= self._bound:
                path = (*self.choices, (decision, rank))
                numbers = frozenset(each.index for each in others)
                self.found.append(Branch(path, count, numbers))
            if step is not None:
                before.append(step)
        if goes < 0:
            self._is_covered = True
            return 0
        if goes:
            self.choices = (*self.choices, (decision, goes))
        self._put_to_sleep(goes_asleep)
        return goes

    def _put_to_sleep(self, steps: list[KitStep]) -> None:
        self._asleep = steps
        if steps:
            self._num_steps = len(steps[0].loop.order) + 1

    def _still_asleep(self, options: Sequence[Participant]) -> list[KitStep]:
        """Return what still sleeps: nothing if a step was taken that no decision was about."""
        if self._asleep and len(self._asleep[0].loop.order) == self._num_steps:
            return _steps_of({each.index for each in self._asleep}, options)
        return []


def _steps_of(numbers: AbstractSet[int], options: Sequence[Participant]) -> list[KitStep]:
    steps = [kit_step(each) for each in options if each.index in numbers]
    return [each for each in steps if each is not None]


def _preempts(rank: int, ranked: Sequence[Participant], last: int, *, spins: bool) -> bool:
    """Tell whether an option holds a task that could go on, or all of them while time passes."""
    option = ranked[rank]
    if option.index == CLOCK:
        return not all(map(is_outside, ranked))
    return rank > 0 and not spins and ranked[0].index == last and is_preemptible(option)


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
        num_spun: How many of them spun, so that asyncio's own order decided in the end.
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
        self.num_run = self.num_spun = 0

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
                self.num_spun += outcome.is_cut
                self._was_cut |= explorer.was_cut or outcome.is_cut
                self._add(explorer.found)
                yield replace(schedule, choices=explorer.choices), outcome

    def _add(self, found: list[Branch]) -> None:
        """Queue branches, as long as there is a chance that they will be run."""
        for branch in found:
            waiting = self._waiting[branch.preemptions]
            if len(waiting) < self._limit:
                waiting.append(branch)
            else:
                self._was_cut = True
