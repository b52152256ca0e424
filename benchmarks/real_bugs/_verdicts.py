"""What the tools say of one bug: on the release that has it, and on the one that has not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final, final

from .._environments import Environments
from ._table import Bug

TOOLS: Final = ("simloom", "simloop")
PROBE: Final = Path(__file__).with_name("_probe.py")
HEADER: Final = ("bug", "release", "kit", "schedules", "names the line", "fixed", "simloom",
                 "simloop", "plain")  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to run.

    Attributes:
        num_seeds: Seeds of exploration.
        num_schedules: Schedules for each of them, at most.
        num_repeats: Repeats on plain asyncio.
        seconds: Longest time for a tool other than the kit.
    """

    num_seeds: int
    num_schedules: int
    num_repeats: int
    seconds: float

    def within(self, seconds: float) -> Plan:
        """Return the plan with other seconds."""
        return replace(self, seconds=seconds)


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one bug.

    Attributes:
        name: Of the bug.
        release: Package and the release that has it.
        is_run: Whether there was an environment for it.
        found: For every seed of the kit, the schedule that failed, from 1, or None.
        named: Where the report names a line of the culprit: "sentence", "error", "timeline", "no".
        story: What the kit reported.
        alarms: What the kit reported of the fixed release: error texts.
        others: What the probes of the other tools printed, by tool.
    """

    name: str
    release: str
    is_run: bool
    found: list[int | None] = field(default_factory=list)
    named: str = ""
    story: dict[str, str] | None = None
    alarms: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def is_found(self) -> bool:
        """Whether every seed found it."""
        return bool(self.found) and None not in self.found


def judge(bug: Bug, environments: Environments, plan: Plan, tools: Sequence[str]) -> Verdict:
    """Run the program of a bug with every tool.

    Args:
        bug: Which.
        environments: Where releases are installed.
        plan: How much to run.
        tools: Names of tools; "kit" also runs the fixed release.
    """
    release = f"{bug.package} {bug.buggy}"
    buggy = environments.make(bug.package, bug.buggy, bug.needs)
    if buggy is None:
        return Verdict(bug.name, release, is_run=False)
    fixed = environments.make(bug.package, bug.fixed, bug.needs) if bug.fixed else None
    found: dict[str, Any] = {}
    alarms = []
    if "kit" in tools:
        found = _probe(buggy, "kit", bug, plan.num_seeds, plan.num_schedules, 600)
        if fixed is not None:
            clean = _probe(fixed, "kit", bug, plan.num_seeds, plan.num_schedules, 600)
            alarms = [clean["broken"]] if "broken" in clean else []
            alarms += [clean["story"]["error"]] if clean["story"] else []
    tools = [tool for tool in tools if tool not in TOOLS or environments.add(buggy, tool)]
    others = {
        tool: _probe(buggy, tool, bug, 1 if tool == "plain" else plan.num_seeds,
                     plan.num_repeats if tool == "plain" else plan.num_schedules, plan.seconds)
        for tool in tools if tool != "kit"
    }  # fmt: skip
    for tool in TOOLS:
        if tool in others and fixed is not None and any(others[tool]["found"]):
            environments.add(fixed, tool)
            others[tool]["fixed"] = _probe(fixed, tool, bug, 1, 20, plan.seconds)
    return Verdict(
        bug.name, release, True, found.get("found", []), found.get("named", "no"),
        found.get("story"), alarms, others,
    )  # fmt: skip


def _probe(
    python: Path, tool: str, bug: Bug, num_seeds: int, num_schedules: int, seconds: float
) -> dict[str, Any]:
    """Run the probe in an environment; a probe that does not end is broken."""
    command = [str(python), str(PROBE), tool, bug.name, str(num_seeds), str(num_schedules),
               str(seconds), bug.culprit]  # fmt: skip
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + 120
        )
    except subprocess.TimeoutExpired:
        return {"found": [], "story": None, "broken": "did not end"}
    try:
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"found": [], "story": None, "broken": result.stderr.strip()[-500:]}
    return answer


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Lay the verdicts out, a line each."""
    rows = [HEADER, *map(_cells, verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cells(verdict: Verdict) -> tuple[str, ...]:
    if not verdict.is_run:
        return (verdict.name, verdict.release, "no such Python", *[""] * 6)
    hits = [at for at in verdict.found if at is not None]
    return (
        verdict.name,
        verdict.release,
        f"{len(hits)}/{len(verdict.found)}",
        f"{mean(hits):.0f}" if hits else "",
        verdict.named,
        "alarm" if verdict.alarms else "clean",
        *(_other(verdict.others.get(tool)) for tool in (*TOOLS, "plain")),
    )


def _other(result: dict[str, Any] | None) -> str:
    """Say what another tool found: the schedule, or how many passed, or that it cannot run it."""
    if result is None:
        return ""
    if "broken" in result:
        return "cannot run"
    hits = [at for at in result["found"] if at is not None]
    if hits and any(result.get("fixed", {}).get("found", ())):
        return "fails on fixed too"
    if not hits:
        return f"none in {result['ran']}"
    return f"{len(hits)}/{len(result['found'])} at {mean(hits):.0f}"
