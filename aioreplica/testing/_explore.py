"""Exploring: run a program under many schedules until one of them fails."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any, Final

from ._execute import Main
from ._explain import explain
from ._faults import Faults
from ._mix import mix
from ._report import Report
from ._runner import Runner, check_integer, check_main, check_no_loop, same_end
from ._sandbox import Sandbox
from ._schedule import FIDELITIES, Schedule
from ._strategies import CYCLES, FIFO, maker_of

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
) -> Report:
    """Run a program under many schedules; stop at the first that fails, and explain it.

    The first schedule is asyncio's own, which also measures how long the program is.

    Args:
        main: An async callable without arguments that builds its own state.
        schedules: How many schedules at most.
        seed: Other seeds give other schedules.
        strategy: "portfolio" (all of the following in turns), "fifo", "random", "pct" or "pos".
        fidelity: "reorder" lets tasks interleave freely; "asyncio" keeps its real ready queue, so
            that only pools and timers vary; "adversarial" keeps no order at all.
        faults: What may go wrong in pools and devices.
        max_steps: When to call a schedule endless; 100 000 steps if not given.

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
    _check(main, schedules, seed, strategy, fidelity, faults, max_steps)
    check_no_loop("art.explore")
    base = Schedule(FIFO, mix(seed, 0), 0, fidelity, faults=faults)
    with Sandbox() as sandbox:
        runner = Runner(main, sandbox, max_steps)
        return _sample(runner, base, schedules, seed, strategy)


def _sample(runner: Runner, base: Schedule, schedules: int, seed: int, strategy: str) -> Report:
    """Run schedule after schedule until one fails."""
    start = perf_counter()
    first, told = runner.tell_first(base)
    length = max(MIN_LENGTH, len(first.order))
    schedule, outcome, num_run = base, first, 1
    if not first.has_failed and not same_end(first, runner.run(base)):
        outcome = replace(first, kind="differs")
    while not outcome.has_failed and num_run < schedules:
        maker, own_seed = maker_of(strategy, num_run), mix(seed, num_run)
        schedule = replace(base, maker=maker, seed=own_seed, length=length)
        outcome = runner.run(schedule)
        num_run += 1
    if not outcome.has_failed and not same_end(first, runner.run(base)):
        schedule, outcome = base, replace(first, kind="differs")
    rate = num_run / (perf_counter() - start)
    warnings = told.order.warnings()
    report = Report(False, None, num_run, False, rate, seed, strategy, base.fidelity, warnings)
    if outcome.has_failed:
        return explain(runner, schedule, outcome, report, base, told)
    return report


def _check(
    main: Any,
    schedules: Any,
    seed: Any,
    strategy: Any,
    fidelity: Any,
    faults: Any,
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
