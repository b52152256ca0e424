"""What the rounds say: medians, ratios to ours with their spread, and what was promised."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

from .._measure import compare
from ._cases import FASTEST, Case, promised

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
        ours = [key for key in self.samples if key.peer in FASTEST]
        return min(ours, key=lambda key: median(self.samples[key]))

    def rows(self) -> list[dict[str, Any]]:  # Any: what the json module takes
        """Return a row per contender; a ratio is our fastest way's time to its own."""
        best = self.samples[self.best]
        rows = []
        for key, samples in self.samples.items():
            found = compare(best, samples)
            goal = promised(self.case, key.peer, key.mode)
            rows.append(
                {
                    "name": self.case.title, "loop": "asyncio", "against": str(key),
                    "num_replicas": self.case.num_replicas,
                    "task": self.case.task, "settings": dict(self.case.settings),
                    "peer": key.peer, "mode": key.mode, "is_best": key == self.best,
                    "median": found.floor, "unit": self.case.unit, "ratio": found.ratio,
                    "lowest": found.lowest, "highest": found.highest, "goal": goal,
                    "is_met": None if goal is None else found.ratio * goal <= 1,
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
        rows: A row per case and contender.
    """

    is_quick: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, measured: Measured) -> None:
        """Add the rows of a case, in place of those that are there already."""
        rows = measured.rows()
        self.rows = [row for row in self.rows if _case_of(row) != _case_of(rows[0])] + rows

    def read(self, path: Path) -> None:
        """Add the rows of a file."""
        self.rows += json.loads(path.read_text(encoding="utf-8"))["rows"]


def format_results(result: Result) -> str:
    """Lay everything out as text."""
    lines = [HEADER]
    for row in result.rows:
        goal = (
            ""
            if row["goal"] is None
            else f">= {row['goal']:g} {'ok' if row['is_met'] else 'MISSED'}"
        )
        lines.append(
            (
                row["name"], str(row["num_replicas"]),
                row["against"] + (" *" if row["is_best"] else ""),
                f"{row['median']:.4g}", row["unit"], f"{1 / row['ratio']:.2f}",
                f"{1 / row['highest']:.2f}-{1 / row['lowest']:.2f}", goal,
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    marks = [row["is_met"] for row in result.rows if row["is_met"] is not None]
    text.append(f"{sum(marks)} of {len(marks)} goals met. * is our fastest way.")
    text += [
        f"{row['name']}, {row['against']}: {row['report'][:400]}"
        for row in result.rows
        if row["report"]
    ]
    return "\n".join([*text, *_memory_of_a_replica(result.rows)])


def _memory_of_a_replica(rows: list[dict[str, Any]]) -> list[str]:
    """Say what a further replica adds, where memory was measured with few and with many."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["name"] == "memory":
            found.setdefault(row["peer"], {})[row["num_replicas"]] = row["median"]
    text = []
    for peer, by_size in found.items():
        few, many = min(by_size), max(by_size)
        if few < many:
            each = (by_size[many] - by_size[few]) / (many - few)
            text.append(f"memory of a further replica, {peer}: {each:.2f} MiB")
    return text


def _case_of(row: dict[str, Any]) -> tuple[str, int]:
    return row["name"], row["num_replicas"]


def write_results(path: Path, result: Result) -> None:
    """Write the rows and what they were measured on."""
    written = {
        "benchmark": "peers",
        "is_quick": result.is_quick,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        "has_fast": find_spec("numba") is not None,
    }
    rows = ",\n".join(json.dumps(_shortened(row)) for row in result.rows)  # a line each
    text = f'{json.dumps(written)[:-1]}, "rows": [\n{rows}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Leave no more digits than were measured."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in row.items()
    }
