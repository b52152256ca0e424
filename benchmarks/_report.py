"""Reporting rows: a table of plain text for people, a JSON file for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ._row import Row, Target

HEADER = ("measured", "loop", "N", "ours", "unit", "against", "floor", "ratio", "rounds", "target")
RIGHT_ALIGNED = {"N", "ours", "floor", "ratio"}
MARKS = {True: "ok", False: "MISSED", None: ""}


def format_table(rows: Sequence[Row]) -> str:
    """Lay rows out as text, columns aligned, with the marks of their targets."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if title in RIGHT_ALIGNED else cell.ljust(width)
            for cell, width, title in zip(line, widths, HEADER, strict=True)
        ).rstrip()
        for line in (HEADER, rule, *lines[1:])
    )


def summarise(rows: Sequence[Row]) -> str:
    """Say in one line how many targets were met."""
    marks = [row.is_met for row in rows if row.is_met is not None]
    return f"{sum(marks)} of {len(marks)} targets met."


def write_json(
    path: Path,
    name: str,
    rows: Sequence[Row],
    *,
    is_quick: bool,
    counts: Mapping[str, object] | None = None,
) -> None:
    """Write rows, and what they were measured on, to a file; `counts` go beside the rows."""
    result = {
        "benchmark": name,
        "is_quick": is_quick,
        "aioreplica": metadata.version("aioreplica"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        **(counts or {}),
        "rows": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cells(row: Row) -> tuple[str, ...]:
    target = "" if row.target is None else f"{_show(row.target)} {MARKS[row.is_met]}"
    return (
        row.name,
        row.loop,
        str(row.num_replicas),
        _number(row.ours),
        row.unit,
        row.against,
        _number(row.floor),
        f"{row.ratio:.2f}",
        f"{row.lowest:.2f}-{row.highest:.2f}",
        target,
    )


def _show(target: Target) -> str:
    what = "ours - floor" if target.of == "difference" else target.of
    return f"{what} <= {target.limit:.7g}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"
