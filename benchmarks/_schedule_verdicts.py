"""What the kit says of programs whose verdict is known: planted bugs, and correct ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter
from typing import Any, final

import aioreplica.testing as art
from tests.testing import programs
from tests.testing.depths import DEPTHS, TASKS, planted_bug
from tests.testing.programs import step

Program = Callable[[], Coroutine[Any, Any, Any]]

MAX_SCHEDULES = 600
FIDELITIES = ("asyncio", "reorder")
REPLAY_SCRIPT = """
import sys, aioreplica.testing as art
from tests.testing import programs
from tests.testing.depths import DEPTHS, TASKS, planted_bug
program = getattr(programs, sys.argv[1])
first, count = "", 0
for _ in range(int(sys.argv[3])):
    try:
        art.replay(program, sys.argv[2])
    except Exception as error:
        text = f"{type(error).__name__}: {error}" + "".join(error.__notes__)
        first = first or text
        count += text == first
print(count)
print(first)
"""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """How one planted bug was found.

    Attributes:
        name: The program.
        num_seeds: Seeds of exploration that were tried.
        num_found: Seeds that found it within `MAX_SCHEDULES`.
        mean_schedules: Mean number of schedules up to the failure.
        most_schedules: The largest.
        most_constraints: The largest number of constraints after shrinking.
        most_shrink_runs: The most schedules that shrinking took.
        longest_token: Characters of the longest token.
        exhaustive: What `exhaustive` says: "found", "complete" or "not covered".
    """

    name: str
    num_seeds: int
    num_found: int
    mean_schedules: float
    most_schedules: int
    most_constraints: int
    most_shrink_runs: int
    longest_token: int
    exhaustive: str


@final
@dataclass(frozen=True, slots=True)
class Depth:
    """How bugs of one depth among a number of tasks were found, by the portfolio and at random.

    Attributes:
        depth: How many constraints the failing order meets.
        num_tasks: How many tasks there are.
        num_bugs: How many bugs were planted.
        num_found: How many were found within `MAX_PLANTED` schedules, by strategy.
        mean_schedules: Mean number of schedules, by strategy.
    """

    depth: int
    num_tasks: int
    num_bugs: int
    num_found: dict[str, int]
    mean_schedules: dict[str, float]


MAX_PLANTED = 1000
STRATEGIES = ("portfolio", "random")


def compare_depths(num_bugs: int) -> list[Depth]:
    """Look for planted bugs of every depth with the portfolio and with a random walk."""
    return [_depth(depth, num_tasks, num_bugs) for depth in DEPTHS for num_tasks in TASKS]


def _depth(depth: int, num_tasks: int, num_bugs: int) -> Depth:
    reports = {
        strategy: [
            art.explore(
                planted_bug(depth, num_tasks, seed),
                schedules=MAX_PLANTED,
                seed=seed,
                strategy=strategy,
            )
            for seed in range(num_bugs)
        ]
        for strategy in STRATEGIES
    }
    return Depth(
        depth,
        num_tasks,
        num_bugs,
        {name: sum(each.failed for each in found) for name, found in reports.items()},
        {name: mean(each.schedules_run for each in found) for name, found in reports.items()},
    )


def find_bugs(num_seeds: int, limit: int) -> list[Found]:
    """Explore every planted bug with a number of seeds, and exhaustively up to a limit."""
    return [_find(program, num_seeds, limit) for program in programs.BUGGY]


def _find(program: Program, num_seeds: int, limit: int) -> Found:
    reports = [
        art.explore(program, schedules=MAX_SCHEDULES, seed=seed) for seed in range(num_seeds)
    ]
    failures = [report.failure for report in reports if report.failure is not None]
    counts = [report.schedules_run for report in reports if report.failed]
    report = art.exhaustive(program, limit=limit)
    verdict = "complete" if report.complete else "not covered"
    return Found(
        program.__name__,
        num_seeds,
        len(failures),
        mean(counts) if counts else float("nan"),
        max(counts, default=0),
        max((len(failure.constraints) for failure in failures), default=0),
        max((failure.shrink_runs for failure in failures), default=0),
        max((len(failure.token) for failure in failures), default=0),
        "found" if report.failed else verdict,
    )


def count_alarms(num_seeds: int) -> tuple[int, int]:
    """Explore every correct program, a schedule per seed; return alarms and schedules."""
    alarms = total = 0
    for program in programs.CORRECT:
        for fidelity in FIDELITIES:
            report = art.explore(program, schedules=num_seeds, seed=17, fidelity=fidelity)
            alarms += report.failed
            total += report.schedules_run
    return alarms, total


def count_replays(num_replays: int, hash_seeds: Sequence[str]) -> tuple[int, int]:
    """Replay failures in other processes; return how many were identical, and how many in all.

    Every process has another `PYTHONHASHSEED`, and its stories are compared with each other, word
    for word.
    """
    chosen = [programs.crossed_locks, programs.completion_order, programs.lost_wakeup]
    each = -(-num_replays // (len(chosen) * len(hash_seeds)))
    same = total = 0
    for program in chosen:
        report = art.explore(program, schedules=MAX_SCHEDULES)
        assert report.failure is not None
        stories = []
        for hash_seed in hash_seeds:
            result = subprocess.run(
                [sys.executable, "-c", REPLAY_SCRIPT, program.__name__, report.failure.token,
                 str(each)],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            count, _, story = result.stdout.partition("\n")
            stories.append(story)
            same += int(count) if story == stories[0] else 0
            total += each
    return same, total


async def twenty_awaits() -> None:
    """Wait twenty times."""
    await step(20)


def time_cancellation() -> tuple[float, int]:
    """Cancel a program of twenty awaits everywhere; return seconds and runs."""
    start = perf_counter()
    report = art.cancel_everywhere(twenty_awaits).check()
    return perf_counter() - start, report.schedules_run
