"""What the rounds say: medians, ratios to ours with their spread, and what was promised."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

from .._measure import compare
from ._cases import OURS, Case, promised

HEADER = ("measured", "N", "who", "median", "unit", "times ours", "rounds", "goal")


class Contender(NamedTuple):
    """A peer and its way to do the task."""

    peer: str
    mode: str

    def __str__(self) -> str:
        return f"{self.peer} {self.mode}".strip()


@final
@dataclass(slots=True)
class Measured:
    """The samples of one case.

    Attributes:
        case: What was measured.
        samples: Microseconds per unit, by contender, in the order of the rounds.
        losses: What the checks gave.
        reports: What errors said, where errors are the task.
    """

    case: Case
    samples: dict[Contender, list[float]] = field(default_factory=dict)
    losses: dict[Contender, list[float]] = field(default_factory=dict)
    reports: dict[Contender, str] = field(default_factory=dict)

    @property
    def best(self) -> Contender:
        """Our fastest way."""
        ours = [key for key in self.samples if key.peer == OURS]
        return min(ours, key=lambda key: median(self.samples[key]))

    def rows(self) -> list[dict[str, Any]]:  # Any: what the json module takes
        """Return a row per contender; ratios are theirs to our fastest way, above 1 if we lead."""
        best = self.samples[self.best]
        rows = []
        for key, samples in self.samples.items():
            found = compare(samples, best)
            goal = None if key.peer == OURS else promised(self.case, key.peer, key.mode)
            rows.append(
                {
                    "name": self.case.title, "num_replicas": self.case.num_replicas,
                    "task": self.case.task, "settings": dict(self.case.settings),
                    "peer": key.peer, "mode": key.mode, "is_best": key == self.best,
                    "median": found.ours, "unit": self.case.unit, "ratio": found.ratio,
                    "lowest": found.lowest, "highest": found.highest, "goal": goal,
                    "is_met": None if goal is None else found.ratio >= goal,
                    "report": self.reports.get(key),
                }
            )  # fmt: skip
        return rows

    def summary(self) -> str:
        """Return one line with all medians."""
        parts = [f"{key} {median(found):.3g}" for key, found in self.samples.items()]
        return (
            f"{self.case.title}, N = {self.case.num_replicas}, {self.case.unit}: {', '.join(parts)}"
        )


@final
@dataclass(slots=True)
class Result:
    """All that was measured.

    Attributes:
        is_quick: Whether it was a smoke run.
        measured: The cases.
        starts: Seconds until a program was ready, by peer and number of replicas.
        memory: Bytes that it held at the end, likewise.
    """

    is_quick: bool
    measured: list[Measured] = field(default_factory=list)
    starts: dict[str, dict[int, float]] = field(default_factory=dict)
    memory: dict[str, dict[int, int]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all cases."""
        return [row for each in self.measured for row in each.rows()]


def format_results(result: Result) -> str:
    """Lay everything out as text."""
    lines = [HEADER]
    rows = result.rows()
    for row in rows:
        goal = (
            ""
            if row["goal"] is None
            else f">= {row['goal']:g} {'ok' if row['is_met'] else 'MISSED'}"
        )
        who = f"{row['peer']} {row['mode']}".strip() + (" *" if row["is_best"] else "")
        lines.append(
            (
                row["name"], str(row["num_replicas"]), who,
                f"{row['median']:.4g}", row["unit"], f"{row['ratio']:.2f}",
                f"{row['lowest']:.2f}-{row['highest']:.2f}", goal,
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    marks = [row["is_met"] for row in rows if row["is_met"] is not None]
    text.append(f"{sum(marks)} of {len(marks)} goals met. * is our fastest way.")
    for each in result.measured:
        text += [f"{each.case.title}, {key}: {said[:400]}" for key, said in each.reports.items()]
    for title, found, scale, unit in (
        ("start-up", result.starts, 1.0, "s"),
        ("memory", result.memory, 2.0**20, "MiB"),
    ):
        for name, by_size in found.items():
            numbers = ", ".join(f"{value / scale:.3g} at {size}" for size, value in by_size.items())
            text.append(f"{title}, {name}: {numbers} ({unit}, by number of replicas)")
    return "\n".join(text)


def write_results(path: Path, result: Result) -> None:
    """Write the rows and what they were measured on."""
    written = {
        "benchmark": "peers",
        "is_quick": result.is_quick,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        "rows": result.rows(),
        "start_s": result.starts,
        "memory_bytes": result.memory,
    }
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
