"""Explain a failure: trace it, check that it repeats, shrink it, give it a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ._errors import NondeterminismError
from ._execute import Outcome
from ._report import Failure, Report
from ._runner import Runner, same_end, same_failure
from ._schedule import HELD, Hold, Schedule
from ._shrink import Shrunk, describe, shrink
from ._strategies import maker_of, mix
from ._token import TokenTooLongError, encode
from ._trace import RECENT, Trace

ENDLESS_STEPS: Final = 2_500
"""How much of an endless schedule is base_trace, at least."""
SEARCH: Final = 600
"""How many schedules to search for one that fits into a token."""


def with_ordered_sets(runner: Runner, attempt: Callable[[], Report]) -> Report:
    """Explore; again where sets of plain objects made runs differ, with an order for those."""
    report = attempt()
    while (
        report.failure is not None
        and isinstance(report.failure.error, NondeterminismError)
        and runner.order_sets()
    ):
        report = attempt()
    return replace(report, warnings=(*report.warnings, *runner.warnings))


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
        error = runner.nondeterminism(schedule, trace, third, (outcome, again))
        return _failed(report, runner, schedule, error)
    _, base_again = runner.trace(base)
    if not base_again.is_same(base_trace):
        error = runner.nondeterminism(base, base_trace, base_again, (again,))
        return _failed(report, runner, base, error)

    def fails(holds: Sequence[Hold]) -> bool:
        return same_failure(again, runner.run_holds(schedule, holds, limit))

    found = shrink(trace, fails)
    token, shown, ended = _told(runner, schedule, found, limit, again, trace)
    known = [*shown.pending, *trace.pending, *trace.steps]
    assert ended.error is not None
    failure = Failure(
        ended.error,
        token,
        describe(found.holds, shown.steps, known),
        tuple(ended.order),
        tuple(shown.steps),
        report.schedules_run - 1,
        found.num_runs,
        shown.lost,
    )
    return replace(report, failed=True, failure=failure)


def _told(
    runner: Runner,
    schedule: Schedule,
    found: Shrunk,
    limit: int | None,
    outcome: Outcome,
    trace: Trace,
) -> tuple[str, Trace, Outcome]:
    """Return a token, and the trace and the end that it replays: after shrinking, if that works.

    The shrunk schedule may fail with another text. Then its own token is needed, so that a replay
    shows what is told.
    """
    token = token_of(runner, schedule, found.holds, outcome)
    if found.is_certain:
        ended, shrunk = runner.trace_holds(schedule, found.holds, limit)
        if same_failure(outcome, ended):
            if str(ended.error) == str(outcome.error):
                return token, shrunk, ended
            own = held_token(runner, schedule, found.holds)
            if own:
                return own, shrunk, ended
    return token, trace, outcome


def _failed(report: Report, runner: Runner, schedule: Schedule, error: BaseException) -> Report:
    token = ""
    with suppress(TokenTooLongError):
        token = encode(schedule, runner.main)
    failure = Failure(error, token, (), ())
    return replace(report, failed=True, failure=failure)


def held_token(runner: Runner, schedule: Schedule, holds: Sequence[Hold]) -> str:
    """Return a token of asyncio's order under constraints; "" if they do not fit, or are none."""
    if holds:
        with suppress(TokenTooLongError):
            held = replace(schedule, maker=HELD, choices=(), holds=tuple(holds))
            return encode(held, runner.main)
    return ""


def token_of(runner: Runner, schedule: Schedule, holds: Sequence[Hold], outcome: Outcome) -> str:
    """Return a token of a failing schedule.

    Where its decisions do not fit, the constraints may; else the portfolio is searched for a
    schedule that shows the same failure. If that finds none there is no token, and "" says so.
    """
    with suppress(TokenTooLongError):
        return encode(schedule, runner.main)
    held = held_token(runner, schedule, holds)
    if held:
        return held
    for at in range(1, SEARCH):
        other = replace(schedule, maker=maker_of("portfolio", at), seed=mix(0, at), choices=(),
                        length=len(outcome.order))  # fmt: skip
        if same_failure(outcome, runner.run(other)):
            return encode(other, runner.main)
    return ""
