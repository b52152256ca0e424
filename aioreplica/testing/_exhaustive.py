"""Exhaustive exploration: every schedule within a bound on preemptions.

A preemption is a task that is held although it could go on, while another task goes. Everything
else is free: who goes on when a task has to wait, when a pool starts and completes a call, when a
callback runs or a timer fires; but a timer that fires while tasks are ready counts as a preemption.
So the bound does not count how far a schedule is from asyncio's own.

Every run follows a list of choices and then the default, which preempts no task; each other option
that it passes becomes a list of its own, unless it exceeds the bound. No two runs are the same, and
when no list is left every schedule within the bound has been run.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Final, final

from ._execute import Main, Outcome, check_main
from ._explain import explain, with_same_runs
from ._explore import MIN_LENGTH
from ._leaks import Ignored
from ._participants import CLOCK, Participant
from ._report import Report, handed_out
from ._runner import Runner, check_no_loop, same_end
from ._sandbox import Sandbox
from ._schedule import CHOICES, Ranks, Schedule, is_outside, is_preemptible
from ._strategies import FIFO, maker_of, mix
from ._trace import Trace

CROSS_CHECK: Final = 600
"""Schedules of the portfolio that have to pass too before a program is called clean."""


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
        max_preemptions: Branches beyond that are dropped.

    Attributes:
        found: The branches that leave it, after its last choice.
        was_cut: Whether a task that spins had to be stopped, so that not all was covered.
    """

    __slots__ = (
        "_bound", "_branch", "_choices", "_decision", "_first_new", "_ranks", "found", "was_cut"
    )  # fmt: skip

    def __init__(self, branch: Branch, max_preemptions: int) -> None:
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
            count = branch.preemptions + preempts
            if count <= self._bound:
                self.found.append(Branch((*branch.choices, (decision, option)), count))


def exhaustive(
    main: Main, *, max_preemptions: int = 2, limit: int = 100_000, leaks: Ignored = ()
) -> Report:
    """Run a program under every schedule with at most `max_preemptions` preemptions.

    Schedules with fewer preemptions come first. A sample of the portfolio, which knows no bound,
    has to pass too before the report calls the program clean.

    Args:
        main: An async callable without arguments that builds its own state.
        max_preemptions: How often a task may be held although it could go on.
        limit: How many schedules at most.
        leaks: What does not count as a leak, as for `explore`.

    Returns:
        What was found. `complete` is True only if every schedule within the bound was run and all
        passed.

    Raises:
        TypeError: If `main` is not an async callable without arguments.
        ValueError: If a number is out of range.
        ContextError: If an event loop is running here.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
        >>> exhaustive(main).complete
        True
    """
    check_main(main)
    for name, value, least in (("max_preemptions", max_preemptions, 0), ("limit", limit, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    check_no_loop("art.exhaustive")
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, None, leaks)
        report = with_same_runs(runner, lambda: _Search(runner, max_preemptions, limit).run())
    return handed_out(report, "exhaustive", sys._getframe(1))


@final
class _Search:
    """Runs branch after branch, those with fewer preemptions first."""

    def __init__(self, runner: Runner, max_preemptions: int, limit: int) -> None:
        self._runner = runner
        self._bound = max_preemptions
        self._limit = limit
        self._seed = mix(0, 0)
        self._waiting: list[deque[Branch]] = [deque() for _ in range(max_preemptions + 1)]
        self._start = perf_counter()
        self._num_run = 0
        self._was_cut = False

    def run(self) -> Report:
        """Run everything within the bound, or up to the first failure or the limit."""
        base = Schedule(FIFO, self._seed)
        first, base_trace = self._runner.trace_first(base)
        if not first.has_failed and not same_end(first, self._runner.run(base)):
            first = replace(first, kind="differs")
        if first.has_failed:
            report = self._report(is_complete=False)
            return explain(self._runner, base, first, report, base, base_trace)
        self._waiting[0].append(Branch((), 0))
        for waiting in self._waiting:
            while waiting and self._num_run < self._limit:
                branch = waiting.popleft()
                schedule = Schedule(CHOICES, self._seed, choices=branch.choices)
                outcome, explorer = self._runner.choose(
                    schedule, partial(Explorer, branch, self._bound)
                )
                self._num_run += 1
                self._was_cut |= explorer.was_cut
                if outcome.has_failed:
                    report = self._report(is_complete=False)
                    return explain(self._runner, schedule, outcome, report, base, base_trace)
                self._add(explorer.found)
                if self._num_run == CROSS_CHECK:
                    failed = self._cross_check(base, first, base_trace)
                    if failed is not None:
                        return failed
        if self._num_run < CROSS_CHECK:
            failed = self._cross_check(base, first, base_trace)
            if failed is not None:
                return failed
        return self._report(is_complete=not (any(self._waiting) or self._was_cut))

    def _add(self, found: list[Branch]) -> None:
        """Queue branches, as long as there is a chance that they will be run."""
        for branch in found:
            waiting = self._waiting[branch.preemptions]
            if len(waiting) < self._limit:
                waiting.append(branch)
            else:
                self._was_cut = True

    def _cross_check(self, base: Schedule, first: Outcome, base_trace: Trace) -> Report | None:
        """Run a sample that knows no bound; return the report if it fails."""
        length = max(MIN_LENGTH, len(first.order))
        for at in range(1, CROSS_CHECK):
            schedule = Schedule(maker_of("portfolio", at), mix(0, at), length)
            outcome = self._runner.run(schedule)
            if outcome.has_failed:
                report = self._report(is_complete=False)
                return explain(self._runner, schedule, outcome, report, base, base_trace)
        return None

    def _report(self, *, is_complete: bool) -> Report:
        rate = self._num_run / (perf_counter() - self._start)
        return Report(False, None, self._num_run, is_complete, rate, 0, "exhaustive", "reorder")
