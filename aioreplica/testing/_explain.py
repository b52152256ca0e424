"""Explain a failure: trace it, check that it repeats, shrink it, give it a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ._branches import Search
from ._errors import NondeterminismError, RealIOError
from ._execute import Outcome
from ._loop import MAX_STEPS, SPIN_STEPS
from ._report import Failure, Report
from ._runner import Runner, same_end, same_failure
from ._schedule import CANCELLED, HELD, Hold, Schedule
from ._shrink import describe, shrink
from ._strategies import FIFO, maker_of, mix
from ._token import TokenTooLongError, decode, encode
from ._trace import RECENT, Trace

ENDLESS_STEPS: Final = 2_500
"""How much of an endless schedule is base_trace, at least."""
FOLLOWS_UUIDS: Final = (
    "Behaviour follows uuids, or state that outlives a schedule: runs of one schedule differed, "
    "and no longer with the same uuids. So the seed of a schedule decides them here."
)
CONFIRM: Final = 100
"""How many schedules of fidelity "asyncio" are searched for a failure, and how many sampled."""
CONFIRM_STEPS: Final = 200_000
"""After so many steps the search for it ends."""
UNSEEN_SETS: Final = (
    "Runs no longer differ if objects of these classes are walked in one order: {}. They hash by "
    "their addresses, and a set of them, which no task holds while it waits, is walked in another "
    "order in every run. Keep them in a dict or a list, or give them a `__hash__`."
)
SPUN: Final = (
    "{} of {} schedules took {} steps at one instant. From there on asyncio's own order decided, "
    "so what the program does after that was run in no other order."
)
SEARCH: Final = 600
"""How many schedules to search for one that fits into a token."""


def with_same_runs(runner: Runner, attempt: Callable[[], Report]) -> Report:
    """Explore; again where runs of one schedule differ for what can be made to repeat.

    That are uuids, which every run has of its own unless behaviour follows them, and the order of
    sets of plain objects.
    """
    runner.freshen_uuids(is_on=True)
    report = attempt()
    if _differs(report) and runner.freshen_uuids(is_on=False):
        seeded = attempt()
        if not _differs(seeded):
            return replace(seeded, warnings=(*seeded.warnings, FOLLOWS_UUIDS, *runner.notes))
        runner.freshen_uuids(is_on=True)
    while _differs(report) and runner.order_sets():
        report = attempt()
    if _differs(report):
        _name_unseen_sets(runner, report, attempt)
    return replace(report, warnings=(*report.warnings, *runner.warnings, *runner.notes))


def _name_unseen_sets(runner: Runner, report: Report, attempt: Callable[[], Report]) -> None:
    """Find out whether sets decided that no task could see when it waited, and say so.

    They are not given an order for good: a replay could not know that it has to.
    """
    hashed = runner.order_unseen_sets()
    if report.failure is not None and not _differs(attempt()) and hashed:
        report.failure.error.add_note(UNSEEN_SETS.format(", ".join(sorted(hashed))))


def _differs(report: Report) -> bool:
    """Tell whether runs of one schedule differed."""
    return report.failure is not None and isinstance(report.failure.error, NondeterminismError)


def warnings_of(trace: Trace, num_spun: int, num_run: int) -> tuple[str, ...]:
    """Return what is to be said although no schedule has failed.

    Args:
        trace: Of asyncio's own order.
        num_spun: How many schedules spun, so that not all of them varied.
        num_run: Of how many.
    """
    spun = (SPUN.format(num_spun, num_run, f"{SPIN_STEPS:,}"),) if num_spun else ()
    return (*trace.order.warnings(), *spun)


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

    holds, num_runs = shrink(trace, fails)
    if limit is not None and holds and not same_failure(again, runner.run_holds(schedule, holds)):
        holds = None  # these only let it end later
    token, shown, ended = _told(runner, schedule, holds, limit, again, trace)
    known = [*shown.pending, *trace.pending, *trace.steps]
    assert ended.error is not None
    failure = Failure(
        ended.error,
        token,
        describe(holds or (), shown.steps, known),
        tuple(ended.order),
        tuple(shown.steps),
        report.schedules_run - 1,
        num_runs,
        shown.lost,
    )
    return confirm(runner, replace(report, failed=True, failure=failure), schedule, again)


def _told(
    runner: Runner,
    schedule: Schedule,
    holds: tuple[Hold, ...] | None,
    limit: int | None,
    outcome: Outcome,
    trace: Trace,
) -> tuple[str, Trace, Outcome]:
    """Return a token, and the trace and the end that it replays: after shrinking, if that works.

    The shrunk schedule may fail with another text. Then its own token is needed, so that a replay
    shows what is told.
    """
    if holds is not None:
        ended, shrunk = runner.trace_holds(schedule, holds, limit)
        if same_failure(outcome, ended):
            if str(ended.error) == str(outcome.error):
                return token_of(runner, schedule, holds, outcome, limit), shrunk, ended
            token = checked_token(runner, held(schedule, holds), ended, limit)
            if token:
                return token, shrunk, ended
    return token_of(runner, schedule, holds or (), outcome, limit), trace, outcome


def _failed(report: Report, runner: Runner, schedule: Schedule, error: BaseException) -> Report:
    """Report what no token can be checked for: a step that is stuck, or runs that differ."""
    token = ""
    with suppress(TokenTooLongError):
        token = encode(_with_uuids(runner, schedule), runner.main)
    failure = Failure(error, token, (), ())
    return replace(report, failed=True, failure=failure)


def held(schedule: Schedule, holds: Sequence[Hold]) -> Schedule:
    """Return asyncio's order under constraints, with the seed and the faults of a schedule."""
    return replace(schedule, maker=HELD, length=0, choices=(), holds=tuple(holds))


def _with_uuids(runner: Runner, schedule: Schedule) -> Schedule:
    """Return a schedule that says where its uuids come from, if any are drawn."""
    return replace(schedule, own_uuids=runner.has_own_uuids)


def _as_told(runner: Runner, schedule: Schedule, outcome: Outcome) -> Schedule:
    """Return a schedule that also says when it is endless, if a replay would not see it so."""
    counts = outcome.kind == "endless" or len(outcome.order) >= MAX_STEPS
    return replace(_with_uuids(runner, schedule), max_steps=runner.max_steps if counts else None)


def checked_token(
    runner: Runner, schedule: Schedule, outcome: Outcome, limit: int | None = None
) -> str:
    """Return the token of a schedule that fails in the same way when it is read again; else "".

    Args:
        runner: Runs what the text of the token says.
        schedule: What failed.
        outcome: How.
        limit: Steps after which an endless one is cut.
    """
    with suppress(TokenTooLongError):
        token = encode(_as_told(runner, schedule, outcome), runner.main)
        if same_failure(outcome, runner.run(decode(token, runner.main), limit)):
            return token
    return ""


def token_of(
    runner: Runner,
    schedule: Schedule,
    holds: Sequence[Hold],
    outcome: Outcome,
    limit: int | None = None,
) -> str:
    """Return a token of a failing schedule.

    Where its decisions do not fit, the constraints may; else the portfolio is searched for a
    schedule that shows the same failure. If that finds none there is no token, and "" says so.
    """
    own = checked_token(runner, schedule, outcome, limit)
    if own:
        return own
    constrained = checked_token(runner, held(schedule, holds), outcome, limit) if holds else ""
    if constrained:
        return constrained
    for at in range(1, SEARCH):
        other = replace(schedule, maker=maker_of("portfolio", at), seed=mix(0, at), choices=(),
                        holds=(), length=len(outcome.order))  # fmt: skip
        if same_failure(outcome, runner.run(other, limit)):
            found = checked_token(runner, other, outcome)
            if found:
                return found
    return ""


# --- is it real? ----------------------------------------------------------------------------


def confirm(runner: Runner, report: Report, schedule: Schedule, outcome: Outcome) -> Report:
    """Look for a failure at fidelity "asyncio", where only events from outside vary.

    Args:
        runner: Runs the program.
        report: With the failure.
        schedule: What failed.
        outcome: How.
    """
    if isinstance(outcome.error, RealIOError):  # a limit of the kit's, at every fidelity
        return report
    if schedule.fidelity == "asyncio":
        assert report.failure is not None
        return replace(report, confirmed=True, confirmed_token=report.failure.token)
    real = replace(schedule, fidelity="asyncio", choices=(), holds=())
    num_run = num_steps = 0
    search = Search(runner, real, None, CONFIRM)
    for tried, ended in _of_asyncio(runner, real, search, len(outcome.order)):
        num_run += 1
        num_steps += len(ended.order)
        if same_failure(outcome, ended):
            token = token_of(runner, tried, (), ended)
            return replace(report, confirmed=True, confirmed_token=token, confirmation_runs=num_run)
        if num_steps > CONFIRM_STEPS:
            break
    is_excluded = search.num_run > 0 and search.is_complete
    confirmed = False if is_excluded else None
    return replace(report, confirmed=confirmed, confirmation_runs=num_run)


def _of_asyncio(
    runner: Runner, real: Schedule, search: Search, length: int
) -> Iterator[tuple[Schedule, Outcome]]:
    """Run schedules of fidelity "asyncio": all of them if they are few, else a sample besides.

    Where a cancellation or a fault has to strike, all orders would not be all schedules.
    """
    if real.maker == CANCELLED:
        real = replace(real, order=FIFO)
        yield real, runner.run(real)
        return
    if real.faults is None:
        yield from search.outcomes()
        if search.is_complete:
            return
    for at in range(CONFIRM):
        seed = mix(0, at) if at else real.seed
        tried = replace(real, maker=maker_of("portfolio", at), seed=seed, length=length)
        yield tried, runner.run(tried)
