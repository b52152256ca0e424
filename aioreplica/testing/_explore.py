"""Run a program: once, under the schedule of a token, under many, or cancelled at every await."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

from ._cancel import is_named
from ._execute import Main, Outcome, check_main
from ._explain import (
    ENDLESS_STEPS,
    checked_token,
    confirm,
    explain,
    warnings_of,
    with_same_runs,
)
from ._faults import Faults
from ._leaks import Ignored
from ._report import Failure, Report, handed_out, text_timeline
from ._repro import Program
from ._runner import Runner, check_integer, check_no_loop, same_end
from ._sandbox import Sandbox
from ._schedule import CANCELLED, FIDELITIES, Schedule
from ._strategies import BY_DECISIONS, CYCLES, FIFO, RANDOM, Rotation, mix
from ._token import decode
from ._trace import Trace

MIN_LENGTH: Final = 8


def explore(
    main: Main,
    *,
    schedules: int = 1000,
    seed: int = 0,
    strategy: str = "portfolio",
    fidelity: str = "reorder",
    faults: Faults | None = None,
    max_steps: int | None = None,
    leaks: Ignored = (),
) -> Report:
    """Run a program under many schedules; stop at the first that fails, and explain it.

    The first schedule is asyncio's own, which also measures how long the program is.

    Args:
        main: An async callable without arguments that builds its own state.
        schedules: How many schedules at most.
        seed: Other seeds give other schedules.
        strategy: "portfolio", which takes several in turns. One of them alone ("fifo", "random",
            "pct", "pos") is for comparisons with it, and promises nothing.
        fidelity: "reorder" lets tasks interleave freely; "asyncio" keeps its real ready queue, so
            that only pools and timers vary; "adversarial" keeps no order at all.
        faults: What may go wrong in pools and devices.
        max_steps: When to call a schedule endless; 100 000 steps if not given. Its token knows it.
        leaks: Functions, or names of functions or tasks, that may be left; "ignore" for all.

    Returns:
        What was found; `check()` raises it.

    Raises:
        TypeError: If `main` is not an async callable without arguments.
        ValueError: If another argument is not one of those above.
        ContextError: If an event loop is running here.

    Determinism:
        The same arguments give the same report, in every process.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     count = 0
        ...
        ...     async def add():
        ...         nonlocal count
        ...         seen = count
        ...         await asyncio.sleep(0)
        ...         count = seen + 1
        ...
        ...     await add()
        ...     await add()
        ...     assert count == 2
        >>> explore(main, schedules=50)
        <Report portfolio | 50 schedules, no failure>
    """
    report = explored(
        main, schedules=schedules, seed=seed, strategy=strategy, fidelity=fidelity, faults=faults,
        max_steps=max_steps, leaks=leaks,
    )  # fmt: skip
    return handed_out(report, Program(main, leaks, faults is not None), "explore", sys._getframe(1))


def explored(
    main: Main,
    *,
    schedules: int,
    seed: int,
    strategy: str = "portfolio",
    fidelity: str,
    faults: Faults | None = None,
    max_steps: int | None,
    leaks: Ignored,
    told: Callable[[int], None] | None = None,
) -> Report:
    """Explore for one who looks at the report, and is told how many schedules were run so far."""
    _check(main, schedules, seed, strategy, fidelity, faults, max_steps)
    base = Schedule(FIFO, mix(seed, 0), 0, fidelity, faults=faults)
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, max_steps, leaks)
        return with_same_runs(
            runner, lambda: _sample(runner, base, schedules, seed, strategy, told)
        )


def _sample(
    runner: Runner,
    base: Schedule,
    schedules: int,
    seed: int,
    strategy: str,
    told: Callable[[int], None] | None,
) -> Report:
    """Run schedule after schedule until one fails."""
    start = perf_counter()
    first, base_trace = runner.trace_first(base)
    num_steps, num_decisions = len(first.order), base_trace.num_decisions
    schedule, outcome, num_run, num_spun = base, first, 1, int(first.is_cut)
    if not first.has_failed and not same_end(first, runner.run(base)):
        outcome = replace(first, kind="differs")
    rotation = Rotation(strategy)
    while not outcome.has_failed and num_run < schedules:
        maker, own_seed = rotation.next(), mix(seed, num_run)
        length = num_decisions if maker in BY_DECISIONS else num_steps
        schedule = replace(base, maker=maker, seed=own_seed, length=max(MIN_LENGTH, length))
        outcome = runner.run(schedule)
        rotation.ran(maker, outcome.order.tobytes())
        num_run += 1
        num_spun += outcome.is_cut
        if told is not None:
            told(num_run)
    if not outcome.has_failed and not same_end(first, runner.run(base)):
        schedule, outcome = base, replace(first, kind="differs")
    rate = num_run / (perf_counter() - start)
    warnings = warnings_of(base_trace, 0 if outcome.has_failed else num_spun, num_run)
    if not outcome.has_failed:
        warnings += runner.targets.warnings(base.faults, num_run)
    report = Report(False, None, num_run, False, rate, seed, strategy, base.fidelity, warnings)
    if outcome.has_failed:
        return explain(runner, schedule, outcome, report, base, base_trace)
    return report


def _check(
    main: object,
    schedules: Any,
    seed: object,
    strategy: Any,
    fidelity: object,
    faults: object,
    max_steps: Any,
) -> None:
    check_main(main)
    check_integer("seed", seed)
    for name, value in (("schedules", schedules), ("max_steps", max_steps)):
        if value is not None:
            check_integer(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
    if strategy not in CYCLES:
        hint = {
            "exhaustive": "Call art.exhaustive(main).",
            "replay": "Call art.replay(main, token).",
        }.get(strategy, f"Choose from {', '.join(CYCLES)}.")
        raise ValueError(f"Unknown strategy {strategy!r}. {hint}")
    if fidelity not in FIDELITIES:
        raise ValueError(f"Unknown fidelity {fidelity!r}. Choose from {', '.join(FIDELITIES)}.")
    if faults is not None and not isinstance(faults, Faults):
        raise TypeError(f"faults must be art.Faults(), got {faults!r}.")
    check_no_loop("art.explore")


def run(
    main: Main,
    *,
    seed: int | None = None,
    schedule: Schedule | None = None,
    leaks: Ignored = (),
) -> Any:
    """Run a program once, deterministically, in virtual time.

    Args:
        main: An async callable without arguments.
        seed: Picks a random schedule; without one asyncio's own order is kept.
        schedule: One drawn from `schedules()`, instead of a seed.
        leaks: What does not count as a leak, as for `explore`.

    Returns:
        What `main` returns.

    Raises:
        BaseException: What `main` raises.
        DeadlockError: If nothing can happen any more and it has not ended.
        StarvationError: If it takes more steps than its budget.
        LeakError: If it leaves tasks, generators or unretrieved exceptions behind.

    Example:
        >>> import asyncio
        >>> run(lambda: asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """
    __tracebackhide__ = True
    check_main(main)
    check_no_loop("art.run")
    if seed is not None and schedule is not None:
        raise ValueError(f"Pass a seed ({seed!r}) or a schedule, not both.")
    if seed is not None:
        check_integer("seed", seed)
        schedule = Schedule(RANDOM, mix(seed, 0))
    elif schedule is None:
        schedule = Schedule(FIFO, mix(0, 0))
    with Sandbox() as sandbox:
        outcome, error = _run_one(Runner(main, sandbox, None, leaks), schedule)
    if error is not None:
        raise error
    return outcome.value


def replay(main: Main, token: str, *, faults: Faults | None = None, leaks: Ignored = ()) -> Any:
    """Run the schedule of a token again.

    Args:
        main: The program that the token is of, as it was or mended.
        token: From a report.
        faults: The faults of the exploration, needed only where the token has no room for them. A
            token that says nothing of faults is run with them.
        leaks: What does not count as a leak, as for `explore`.

    Returns:
        What `main` returns.

    Raises:
        ValueError: If the token is damaged, of another program, or has other faults; then nothing
            was run.
        BaseException: What `main` raises, with the trace as a note; or as `run`.
    """
    __tracebackhide__ = True
    check_main(main)
    schedule = decode(token, main, faults)
    check_no_loop("art.replay")
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, None, leaks)
        runner.freshen_uuids(is_on=schedule.own_uuids)
        outcome, error = _run_one(runner, schedule)
        while outcome.kind != "stuck" and runner.find_sets(schedule) and runner.order_sets():
            outcome, error = _run_one(runner, schedule)  # with the orders that the token is of
    if error is not None:
        raise error
    return outcome.value


def _run_one(runner: Runner, schedule: Schedule) -> tuple[Outcome, BaseException | None]:
    """Run a schedule, again with its trace if it fails; return what to raise too."""
    outcome = runner.run(schedule)
    if not outcome.has_failed or outcome.kind == "stuck":
        return outcome, outcome.error
    limit = min(ENDLESS_STEPS, len(outcome.order)) if outcome.kind == "endless" else None
    again, trace = runner.trace(schedule, limit)
    error = again.error
    if not same_end(outcome, again) and runner.freshen_uuids(is_on=True):
        again, trace = runner.trace(schedule, limit)  # the first run may have left something behind
        runner.freshen_uuids(is_on=schedule.own_uuids)
        error = again.error
    if not same_end(outcome, again):
        _, third = runner.trace(schedule, limit)
        error = runner.nondeterminism(schedule, trace, third, (outcome, again))
        error.__cause__ = outcome.error
    else:
        assert error is not None
        error.add_note(text_timeline(trace.steps))
    return outcome, error


def cancel_everywhere(
    main: Main,
    *,
    task: str | Callable[..., object] | None = None,
    orders: int = 1,
    leaks: Ignored = (),
) -> Report:
    """Run a program once for each of its steps, and cancel it there.

    The main task, or another, is cancelled after the first step of the program, in the next run
    after the second, and so on, so that it is cancelled at each of its awaits and at each moment
    of whatever it awaits. Every time the program has to end: with the cancellation, or by itself.
    Anything else fails: another error, a deadlock, a leak.

    Args:
        main: An async callable without arguments that builds its own state.
        task: Which task is cancelled, one in each run: a name of tasks or of their function, with
            wildcards as in file names (`"*"` is every task), or a function; the main task if not
            given.
        orders: In how many orders of the steps: asyncio's own, and random ones.
        leaks: What does not count as a leak, as for `explore`.

    Returns:
        What was found; `complete` if no run failed.

    Raises:
        TypeError: If `main` is not an async callable without arguments.
        ValueError: If no task has that name, or `orders` is below 1.
        ContextError: If an event loop is running here.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2), return_exceptions=True)
        >>> cancel_everywhere(main).complete
        True
        >>> cancel_everywhere(main, task="sleep", orders=3).complete
        True
    """
    check_main(main)
    check_integer("orders", orders)
    if orders < 1:
        raise ValueError(f"orders must be at least 1, got {orders}.")
    check_no_loop("art.cancel_everywhere")
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, None, leaks)
        report = with_same_runs(runner, lambda: _cancel_in_orders(runner, task, orders))
    return handed_out(report, Program(main, leaks, True), "cancel_everywhere", sys._getframe(1))


def _cancel_in_orders(
    runner: Runner, task: str | Callable[..., object] | None, orders: int
) -> Report:
    """Cancel the tasks of a name at every step of several orders."""
    start = perf_counter()
    num_run = num_named = 0
    known: dict[str, None] = {}
    warnings: dict[str, None] = {}
    report = Report(False, None, 0, False, 0.0, 0, "cancel_everywhere", "reorder")
    for number in range(orders):
        order = RANDOM if number else FIFO
        base = Schedule(order, mix(0, number))
        first, trace = runner.trace_first(base)
        num_run += 1
        if not first.has_failed and not same_end(first, runner.run(base)):
            first = replace(first, kind="differs")
        if first.has_failed:
            report = replace(report, schedules_run=num_run)
            return explain(runner, base, first, report, base, trace)
        warnings |= dict.fromkeys(trace.order.warnings())
        report = replace(report, warnings=tuple(warnings))
        known |= dict.fromkeys(
            name.rpartition(".")[2] for made in trace.tasks for name in made.names
        )
        for step, cancelled in _cancellations(trace, task):
            num_named += 1
            schedule = replace(
                base, maker=CANCELLED, order=order, cancel_step=step, cancel_task=cancelled
            )
            outcome = runner.run(schedule)
            num_run += 1
            if outcome.has_failed and not was_just_cancelled(outcome):
                report = replace(report, schedules_run=num_run)
                return _failed(runner, schedule, outcome, report, trace)
    if not num_named:
        raise ValueError(
            f"No task of the program is called {task!r}, and no function of one is. Its tasks are "
            f"{', '.join(known)}."
        )
    rate = num_run / (perf_counter() - start)
    return replace(report, schedules_run=num_run, schedules_per_second=rate, complete=True)


def _cancellations(trace: Trace, task: Any) -> Iterator[tuple[int, int]]:
    """Yield after which steps which task is to be cancelled."""
    pattern = task if task is None or isinstance(task, str) else task.__qualname__
    for number, made in enumerate(trace.tasks):
        if number == 0 if pattern is None else is_named(pattern, made.names):
            last = trace.num_steps if made.ended_after is None else made.ended_after
            for step in range(made.made_after, last):
                yield step, number


def was_just_cancelled(outcome: Outcome) -> bool:
    """Tell whether a program ended with its cancellation, as it should."""
    return outcome.kind == "raised" and isinstance(outcome.error, asyncio.CancelledError)


def _failed(
    runner: Runner, schedule: Schedule, outcome: Outcome, report: Report, uncancelled: Trace
) -> Report:
    """Tell the trace of a cancellation that went wrong."""
    again, trace = runner.trace(schedule)
    error = again.error
    if not same_end(outcome, again):
        third = runner.trace(schedule)[1]
        error = runner.nondeterminism(schedule, trace, third, (outcome, again))
    assert error is not None
    number, steps = schedule.cancel_step, uncancelled.steps
    who = uncancelled.tasks[schedule.cancel_task].who
    at = ""
    if number <= len(steps):  # else no trace says where it stood
        before = reversed(steps[:number])
        at = f" at {next((step.reached for step in before if step.who == who), 'its start')},"
    constraint = f"{who} is cancelled{at} after step {number} of the program"
    failure = Failure(
        error,
        checked_token(runner, schedule, again),
        (constraint,),
        tuple(outcome.order),
        tuple(trace.steps),
        report.schedules_run - 1,
        causes=trace.lost,
    )
    return confirm(runner, replace(report, failed=True, failure=failure), schedule, again)
