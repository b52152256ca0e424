"""Explain a failure: trace it, check that it repeats, shrink it, give it a token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ._execute import Outcome
from ._report import Failure, Report
from ._runner import Runner, nondeterminism, same_end, same_failure
from ._schedule import HELD, Hold, Schedule
from ._shrink import describe, shrink
from ._strategies import maker_of, mix
from ._token import TokenTooLongError, encode
from ._trace import RECENT, Step, Trace

ENDLESS_STEPS: Final = 2_500
"""How much of an endless schedule is base_trace, at least."""
SEARCH: Final = 600
"""How many schedules to search for one that fits into a token."""


def explain(
    runner: Runner,
    schedule: Schedule,
    outcome: Outcome,
    report: Report,
    base: Schedule,
    base_trace: Trace,
) -> Report:
    """Rerun a failing schedule with a trace, check that it repeats, and shrink it.

    Args:
        runner: Runs it.
        schedule: The one that failed.
        outcome: How.
        report: What is known so far.
        base: asyncio's own schedule.
        base_trace: Its trace, from before.
    """
    if outcome.kind == "stuck":  # that takes long: it is not run again
        assert outcome.error is not None
        return _failed(report, runner, schedule, outcome.error)
    limit = None
    if outcome.kind == "endless":  # more than asyncio's own order takes, or that would count too
        own = 0 if base_trace.ending == "endless" else base_trace.num_steps
        limit = min(len(outcome.order), max(ENDLESS_STEPS, 2 * (own + RECENT)))
    again, trace = runner.trace(schedule, limit)
    if not same_end(outcome, again):
        third = runner.trace(schedule)[1]
        error = nondeterminism(trace.steps, third.steps, (outcome, again))
        return _failed(report, runner, schedule, error)
    _, base_again = runner.trace(base)
    if not base_again.is_same(base_trace):
        error = nondeterminism(base_trace.steps, base_again.steps, (again,))
        return _failed(report, runner, base, error)

    def fails(holds: Sequence[Hold]) -> bool:
        return same_failure(again, runner.run_holds(schedule, holds, limit))

    found = shrink(trace, fails)
    steps: Sequence[Step] = trace.steps
    known, lost = [*trace.pending, *trace.steps], trace.lost
    if found.is_certain:
        ended, shrunk = runner.trace_holds(schedule, found.holds, limit)
        if same_failure(again, ended):
            steps, known = shrunk.steps, [*shrunk.pending, *known]
            lost = shrunk.lost
    assert again.error is not None
    failure = Failure(
        again.error,
        token_of(runner, schedule, found.holds, again),
        describe(found.holds, steps, known),
        tuple(outcome.order),
        tuple(steps),
        report.schedules_run - 1,
        found.num_runs,
        lost,
    )
    return replace(report, failed=True, failure=failure)


def _failed(report: Report, runner: Runner, schedule: Schedule, error: BaseException) -> Report:
    token = ""
    with suppress(TokenTooLongError):
        token = encode(schedule, runner.main)
    failure = Failure(error, token, (), ())
    return replace(report, failed=True, failure=failure)


def token_of(runner: Runner, schedule: Schedule, holds: Sequence[Hold], outcome: Outcome) -> str:
    """Return a token of a failing schedule.

    Where its decisions do not fit, the constraints may; else the portfolio is searched for a
    schedule that shows the same failure. If that finds none there is no token, and "" says so.
    """
    with suppress(TokenTooLongError):
        return encode(schedule, runner.main)
    if holds:
        with suppress(TokenTooLongError):
            held = replace(schedule, maker=HELD, choices=(), holds=tuple(holds))
            return encode(held, runner.main)
    for at in range(1, SEARCH):
        other = replace(schedule, maker=maker_of("portfolio", at), seed=mix(0, at), choices=(),
                        length=len(outcome.order))  # fmt: skip
        if same_failure(outcome, runner.run(other)):
            return encode(other, runner.main)
    return ""
