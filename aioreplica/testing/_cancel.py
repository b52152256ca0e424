"""Cancellation at every await: a run for each step, with one cancellation after it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import perf_counter

from ._execute import Main, Outcome
from ._explain import explain
from ._mix import mix
from ._report import Failure, Report
from ._runner import Runner, check_main, check_no_loop, nondeterminism, same_end
from ._sandbox import Sandbox
from ._schedule import CANCELLED, Schedule
from ._story import Story
from ._strategies import FIFO
from ._token import encode


def cancel_everywhere(main: Main) -> Report:
    """Run a program once for each of its steps, and cancel it there.

    In asyncio's own order the main task is cancelled after the first step of the program, in the
    next run after the second, and so on, so that it is cancelled at each of its awaits and at each
    moment of whatever it awaits. Every time it has to end: with the cancellation, or by itself.
    Anything else fails: another error, a deadlock, a leak.

    Args:
        main: An async callable without arguments that builds its own state.

    Returns:
        What was found; `complete` if no run failed.

    Raises:
        TypeError: If `main` is not an async callable without arguments.
        ContextError: If an event loop is running here.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2))
        >>> cancel_everywhere(main).complete
        True
    """
    check_main(main)
    check_no_loop("art.cancel_everywhere")
    start = perf_counter()
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox)
        base = Schedule(FIFO, mix(0, 0))
        first, told = runner.tell_first(base)
        num_run = 1
        report = Report(False, None, num_run, False, 0.0, 0, "cancel_everywhere", "reorder")
        if first.has_failed or not same_end(first, runner.run(base)):
            return explain(runner, base, first, report, base, told)
        for step in range(len(first.order)):
            schedule = Schedule(CANCELLED, base.seed, cancel_step=step)
            outcome = runner.run(schedule)
            num_run += 1
            if outcome.has_failed and not was_just_cancelled(outcome):
                report = replace(report, schedules_run=num_run)
                return _failed(runner, schedule, outcome, report, told)
        rate = num_run / (perf_counter() - start)
        return replace(report, schedules_run=num_run, schedules_per_second=rate, complete=True)


def was_just_cancelled(outcome: Outcome) -> bool:
    """Tell whether a program ended with its cancellation, as it should."""
    return outcome.kind == "raised" and isinstance(outcome.error, asyncio.CancelledError)


def _failed(
    runner: Runner, schedule: Schedule, outcome: Outcome, report: Report, uncancelled: Story
) -> Report:
    """Tell the story of a cancellation that went wrong."""
    again, story = runner.tell(schedule)
    error = again.error
    if not same_end(outcome, again):
        error = nondeterminism(story.steps, runner.tell(schedule)[1].steps)
    assert error is not None
    before = uncancelled.steps[: schedule.cancel_step]
    at = next((step.reached for step in reversed(before) if step.who == "main"), "its start")
    constraint = f"main is cancelled at {at}, after step {schedule.cancel_step} of the program"
    failure = Failure(
        error,
        encode(schedule, runner.main),
        (constraint,),
        tuple(outcome.order),
        tuple(story.steps),
        report.schedules_run - 1,
    )
    return replace(report, failed=True, failure=failure)
