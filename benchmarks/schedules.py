"""The testing kit: schedules a second, and what it says of programs whose verdict is known.

Times are compared with the stock loop and, where they are installed, with simloom and simloop.
A bug that is missed, a correct program that alarms, a replay that differs or a bug that
`exhaustive` calls clean ends the command with an error; times never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

import aioreplica as ar

from ._command import parse_options
from ._report import format_table, summarise, write_json
from ._schedule_costs import cost_of_a_point, memory_of_steps
from ._schedule_rates import NUM_REPLICAS, TOOLS, find_tool, measure_rates
from ._schedule_verdicts import (
    STRATEGIES,
    Depth,
    Found,
    compare_depths,
    count_alarms,
    count_replays,
    find_bugs,
    time_cancellation,
)


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison of times.
        num_schedules: Schedules that make one sample.
        num_seeds: Seeds with which every bug is looked for.
        num_alarm_seeds: Schedules of every correct program, at each fidelity.
        num_replays: Replays in other processes.
        limit: Schedules of an exhaustive exploration.
        num_steps: Of a long schedule, whose memory is measured.
        num_planted: Bugs of each depth and number of tasks.
    """

    num_rounds: int
    num_schedules: int
    num_seeds: int
    num_alarm_seeds: int
    num_replays: int
    limit: int
    num_steps: int
    num_planted: int


FULL = Plan(5, 3_000, 20, 1_000, 10_000, 2_000, 1_000_000, 20)
QUICK = Plan(1, 100, 2, 20, 20, 150, 10_000, 1)
HASH_SEEDS = ("0", "1", "77", "4242")
MARKS = {True: "ok", False: "MISSED"}


def main(arguments: Sequence[str]) -> None:
    """Measure, print, write the JSON; fail if a verdict is wrong."""
    options = parse_options("schedules", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", NUM_REPLICAS)
    for name in TOOLS:
        if find_tool(name) is None:
            print(f"{name}: skipped, not installed.")
    rows = measure_rates(num_schedules=plan.num_schedules, num_rounds=plan.num_rounds)
    print(format_table(rows))
    for row in rows[:2]:
        print(f"{row.name}: {1e6 / row.ours:.0f} schedules a second")
    print(summarise(rows))

    found = find_bugs(plan.num_seeds, plan.limit)
    print(format_found(found))
    depths = compare_depths(plan.num_planted)
    print(format_depths(depths))
    alarms, num_correct = count_alarms(plan.num_alarm_seeds)
    same, num_replays = count_replays(plan.num_replays, HASH_SEEDS)
    seconds, num_cancelled = time_cancellation()
    print(f"correct programs: {alarms} alarms in {num_correct} schedules")
    print(f"replays: {same} of {num_replays} identical, {len(HASH_SEEDS)} hash seeds")
    print(f"cancel_everywhere, 20 awaits: {num_cancelled} runs in {seconds * 1000:.0f} ms "
          f"(<= 1000 {MARKS[seconds <= 1]})")  # fmt: skip
    point_ns, call_ns = cost_of_a_point()
    print(f"fault_point outside the kit: {point_ns:.0f} ns, a call of nothing {call_ns:.0f} ns "
          f"(<= 100 {MARKS[point_ns <= 100]})")  # fmt: skip
    grown = memory_of_steps(plan.num_steps)
    told = ", ".join(f"{mib:.1f} MiB for {name}" for name, mib in grown.items())
    print(f"memory after one schedule of {plan.num_steps} steps: {told} more")
    counts = {
        "num_missed": sum(each.num_seeds - each.num_found for each in found),
        "num_called_clean": sum(each.exhaustive == "complete" for each in found),
        "num_alarms": alarms,
        "num_correct": num_correct,
        "num_replays": num_replays,
        "num_replays_differ": num_replays - same,
        "cancel_us": round(seconds * 1e6),
        "point_ns": round(point_ns),
        "grown_mib": grown,
    }
    write_json(options.output, "schedules", rows, is_quick=options.is_quick,
               counts={**counts, "found": [asdict(each) for each in found],
                       "depths": [asdict(each) for each in depths]})  # fmt: skip
    print(f"Written to {options.output}.")
    wrong = [
        name
        for name in ("num_missed", "num_called_clean", "num_alarms", "num_replays_differ")
        if counts[name]
    ]
    if wrong:
        raise SystemExit(f"Wrong verdicts: {', '.join(f'{n} = {counts[n]}' for n in wrong)}.")


def format_found(found: Sequence[Found]) -> str:
    """Lay out how each bug was found, a line each."""
    header = ("planted bug", "found", "mean", "most", "constraints", "shrinking", "token",
              "exhaustive")  # fmt: skip
    lines = [header]
    lines += [
        (
            each.name,
            f"{each.num_found}/{each.num_seeds}",
            f"{each.mean_schedules:.1f}",
            str(each.most_schedules),
            str(each.most_constraints),
            str(each.most_shrink_runs),
            str(each.longest_token),
            each.exhaustive,
        )
        for each in found
    ]
    return _columns(lines)


def format_depths(depths: Sequence[Depth]) -> str:
    """Lay out what was found of the bugs of each depth, a line each, and in all."""
    lines = [("depth", "tasks", *(f"{name}: found, mean" for name in STRATEGIES))]
    lines += [
        (
            str(each.depth),
            str(each.num_tasks),
            *(
                f"{each.num_found[name]}/{each.num_bugs}  {each.mean_schedules[name]:.0f}"
                for name in STRATEGIES
            ),
        )
        for each in depths
    ]
    total = sum(each.num_bugs for each in depths)
    sums = [
        f"{sum(each.num_found[name] for each in depths)}/{total}  "
        f"{sum(each.mean_schedules[name] for each in depths) / len(depths):.0f}"
        for name in STRATEGIES
    ]
    return _columns([*lines, ("all", "", *sums)])


def _columns(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
