"""Real bugs of published packages: which tools find them, how soon, and do they name the line.

Every release is installed into an environment of its own; see README.md there. With `--correct`,
correct programs over popular libraries are explored instead; none of them may fail.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .._environments import Environments
from ._correct import check_correct
from ._table import BUGS, QUICK, Bug
from ._verdicts import Plan, Verdict, format_verdicts, judge

FULL = Plan(num_seeds=5, num_schedules=1_000, num_repeats=1_000, seconds=60)
SMALL = Plan(num_seeds=1, num_schedules=1_000, num_repeats=20, seconds=5)
OTHERS = {True: "plain", False: "simloom,simloop,plain"}


def main(arguments: Sequence[str]) -> None:
    """Look for the bugs, print the table, write the JSON; fail if a fixed release alarms.

    With `--quick` a bug that the kit misses fails the command too.
    """
    options = _parse(arguments)
    environments = Environments("real_bugs", options.python)
    if options.correct is not None:
        raise SystemExit(check_correct(environments, options.correct, options.seconds or 600))
    plan = SMALL if options.quick else FULL
    if options.seconds:
        plan = plan.within(options.seconds)
    tools = (options.tools or f"kit,{OTHERS[options.quick]}").split(",")
    verdicts = []
    for bug in _choose(options):
        verdict = judge(bug, environments, plan, tools)
        verdicts.append(verdict)
        print(format_verdicts([verdict]).splitlines()[-1], flush=True)
        _write(options.output, verdicts, is_quick=options.quick)
    print(format_verdicts(verdicts))
    run = [verdict for verdict in verdicts if verdict.is_run]
    num_found = sum(verdict.is_found for verdict in run)
    alarms = [verdict.name for verdict in run if verdict.alarms]
    print(f"The kit found {num_found} of {len(run)} bugs with every seed; {len(alarms)} alarms.")
    print(f"Written to {options.output}.")
    if alarms:
        raise SystemExit(f"Alarms on fixed releases: {', '.join(alarms)}.")
    if options.quick and num_found < len(run):
        raise SystemExit("A bug was missed.")


def _choose(options: argparse.Namespace) -> list[Bug]:
    if options.only:
        return [bug for bug in BUGS if bug.name in options.only]
    return [bug for bug in BUGS if not options.quick or bug.name in QUICK]


def _write(path: Path, verdicts: Sequence[Verdict], *, is_quick: bool) -> None:
    result = {
        "benchmark": "real_bugs",
        "is_quick": is_quick,
        "system": f"{platform.system()} {platform.machine()}",
        "bugs": [asdict(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real_bugs", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"only {', '.join(QUICK)}, one seed each")
    add("--only", action="append", metavar="NAME", choices=[bug.name for bug in BUGS],
        help="only this bug; may be given several times")  # fmt: skip
    add("--tools", metavar="NAMES", help="default: kit,simloom,simloop,plain; quick: kit,plain")
    add("--seconds", type=float, help="longest time for a tool other than the kit, a bug")
    add("--python", help="the interpreter of the environments (default: this one)")
    add("--correct", type=int, metavar="SCHEDULES", help="explore the correct programs instead")
    add("--output", type=Path, default=Path("benchmark-results-real_bugs.json"), metavar="PATH")
    return parser.parse_args(arguments)
