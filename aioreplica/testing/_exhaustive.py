"""Exhaustive exploration: every schedule within a bound on preemptions.

A preemption is a task that is held although it could go on, while another task goes. Everything
else is free: who goes on when a task has to wait, when a pool starts and completes a call, when a
callback runs or a timer fires; but a timer that fires while tasks are ready counts as a preemption.
So the bound does not count how far a schedule is from asyncio's own.

At fidelity "asyncio" tasks stand in their real queue and nothing is preempted: what is chosen is
when each event from outside comes, and all of those choices are searched, without a bound.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from time import perf_counter
from typing import Final

from ._branches import Search
from ._execute import Main, Outcome, check_main
from ._explain import explain, warnings_of, with_same_runs
from ._explore import MIN_LENGTH
from ._leaks import Ignored
from ._report import Report, handed_out
from ._repro import Program
from ._runner import Runner, check_no_loop, same_end
from ._sandbox import Sandbox
from ._schedule import Schedule
from ._strategies import FIFO, maker_of, mix

CROSS_CHECK: Final = 600
"""Schedules of the portfolio that have to pass too before a program is called clean."""
SEARCHED: Final = ("asyncio", "reorder")
"""Fidelities that can be searched: without any order there is no end to it."""


def exhaustive(
    main: Main,
    *,
    max_preemptions: int = 2,
    limit: int = 100_000,
    leaks: Ignored = (),
    fidelity: str = "reorder",
) -> Report:
    """Run a program under every schedule with at most `max_preemptions` preemptions.

    Schedules with fewer preemptions come first. A sample of the portfolio, which knows no bound,
    has to pass too before the report calls the program clean; `report.cross_checked` says how many
    schedules that were.

    Args:
        main: An async callable without arguments that builds its own state.
        max_preemptions: How often a task may be held although it could go on.
        limit: How many schedules at most.
        leaks: What does not count as a leak, as for `explore`.
        fidelity: "reorder", or "asyncio" for its real ready queue, in which no task is preempted:
            every moment at which an event from outside may come is tried, and no sample is needed.

    Returns:
        What was found. `complete` is True only if every schedule within the bound was run and all
        passed.

    Raises:
        TypeError: If `main` is not an async callable without arguments.
        ValueError: If a number is out of range, or the fidelity is another.
        ContextError: If an event loop is running here.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
        >>> exhaustive(main).complete
        True
        >>> exhaustive(main, fidelity="asyncio").schedules_run
        1
    """
    check_main(main)
    for name, value, least in (("max_preemptions", max_preemptions, 0), ("limit", limit, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    _check_fidelity(fidelity)
    check_no_loop("art.exhaustive")
    bound = None if fidelity == "asyncio" else max_preemptions
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, None, leaks)
        report = with_same_runs(runner, lambda: _search(runner, fidelity, bound, limit))
    return handed_out(report, Program(main, leaks), "exhaustive", sys._getframe(1))


def _check_fidelity(fidelity: object) -> None:
    if fidelity not in SEARCHED:
        hint = (
            "Call art.explore(main, fidelity='adversarial')." if fidelity == "adversarial" else ""
        )
        raise ValueError(
            f"Cannot search every schedule of fidelity {fidelity!r}. Choose from "
            f"{', '.join(SEARCHED)}. {hint}".rstrip()
        )


def _search(runner: Runner, fidelity: str, bound: int | None, limit: int) -> Report:
    """Run everything within the bound, or up to the first failure or the limit."""
    start = perf_counter()
    base = Schedule(FIFO, mix(0, 0), fidelity=fidelity)
    search = Search(runner, base, bound, limit)
    sampled = 0

    def report(*, is_complete: bool = False, num_spun: int = 0) -> Report:
        rate = search.num_run / (perf_counter() - start)
        return Report(
            False, None, search.num_run, is_complete, rate, 0, "exhaustive", fidelity,
            warnings_of(base_trace, num_spun, search.num_run), sampled,
        )  # fmt: skip

    first, base_trace = runner.trace_first(base)
    if not first.has_failed and not same_end(first, runner.run(base)):
        first = replace(first, kind="differs")
    if first.has_failed:
        return explain(runner, base, first, report(), base, base_trace)
    for schedule, outcome in search.outcomes():
        if outcome.has_failed:
            return explain(runner, schedule, outcome, report(), base, base_trace)
        if search.num_run == CROSS_CHECK and bound is not None:
            sampled, failed = _cross_check(runner, base, len(first.order))
            if failed is not None:
                return explain(runner, *failed, report(), base, base_trace)
    if not sampled and bound is not None:
        sampled, failed = _cross_check(runner, base, len(first.order))
        if failed is not None:
            return explain(runner, *failed, report(), base, base_trace)
    return report(is_complete=search.is_complete, num_spun=search.num_spun)


def _cross_check(
    runner: Runner, base: Schedule, length: int
) -> tuple[int, tuple[Schedule, Outcome] | None]:
    """Run a sample that knows no bound; return how many, and the one that fails."""
    for at in range(1, CROSS_CHECK):
        schedule = replace(
            base, maker=maker_of("portfolio", at), seed=mix(0, at), length=max(MIN_LENGTH, length)
        )
        outcome = runner.run(schedule)
        if outcome.has_failed:
            return at, (schedule, outcome)
    return CROSS_CHECK - 1, None
