"""What got slower from one result to another, outside the noise of their runs.

A result is the JSON file of a benchmark, or the commit of one that was kept in the history file.
Ratios to the floor are compared, not times: both sides of a ratio were measured in the same minute,
so results of different days and machines can stand side by side. A row is slower if even its best
round is above the worst one of before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

HISTORY = Path(__file__).parent / "history.jsonl"
HEADER = ("measured", "loop", "N", "against", "before", "after", "change", "")

Key: TypeAlias = tuple[str, str, int, str]
Result: TypeAlias = Mapping[str, Any]  # Any: what the json module gives


@final
@dataclass(frozen=True, slots=True)
class Change:
    """How a row's ratio to its floor differs between two results.

    Attributes:
        key: Name, loop, number of replicas, and what it is compared with.
        before: Median, lowest and highest ratio of the first result.
        after: The same of the second.
    """

    key: Key
    before: tuple[float, float, float]
    after: tuple[float, float, float]

    @property
    def factor(self) -> float:
        """The second median as a multiple of the first."""
        return self.after[0] / self.before[0] if self.before[0] else 1.0

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" if the rounds of the two do not overlap, else empty."""
        if self.after[1] > self.before[2]:
            return "slower"
        return "faster" if self.after[2] < self.before[1] else ""


def main(arguments: Sequence[str]) -> None:
    """Compare two results, or keep one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("results", nargs="*", metavar="RESULT", help="a JSON file or a commit")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="add a JSON file to the history, by commit"
    )
    parser.add_argument(
        "--history", type=Path, default=HISTORY, metavar="PATH", help="default: %(default)s"
    )
    chosen = parser.parse_args(arguments)
    if chosen.keep is not None and not chosen.results:
        commit = _commit()
        keep(chosen.keep, chosen.history, commit)
        print(f"Kept {chosen.keep} as {commit} in {chosen.history}.")
        return
    if len(chosen.results) != 2 or chosen.keep is not None:
        parser.error("give two results to compare, or --keep FILE alone")
    try:
        before, after = (find(name, chosen.history) for name in chosen.results)
    except (LookupError, OSError, ValueError) as error:
        parser.error(str(error))
    changes = compare_results(before, after)
    if not changes:
        parser.error(f"{chosen.results[0]} and {chosen.results[1]} have no row in common")
    print(format_changes(changes))
    slower = sum(change.verdict == "slower" for change in changes)
    faster = sum(change.verdict == "faster" for change in changes)
    print(f"{slower} of {len(changes)} rows slower, {faster} faster, outside the noise.")


def keep(file: Path, history: Path, commit: str) -> None:
    """Add the result in a file to the history.

    Raises:
        OSError: If a file cannot be read or written.
        ValueError: If it is no result of a benchmark.
    """
    line = json.dumps({"commit": commit, **_read(file)})
    with history.open("a", encoding="utf-8") as kept:
        kept.write(line + "\n")


def find(name: str, history: Path) -> Result:
    """Return the result in a file, or the newest one in the history of a commit that begins so.

    Raises:
        LookupError: If there is neither.
        OSError: If a file cannot be read.
        ValueError: If a file is no result of a benchmark.
    """
    if Path(name).is_file():
        return _read(Path(name))
    lines = history.read_text(encoding="utf-8").splitlines() if history.is_file() else []
    kept = [json.loads(line) for line in lines if line.strip()]
    found = [result for result in kept if result["commit"].startswith(name)]
    if not found:
        known = ", ".join(dict.fromkeys(result["commit"] for result in kept)) or "none"
        raise LookupError(f"{name} is no file and no commit in {history}; it has: {known}")
    newest: Result = found[-1]
    return newest


def compare_results(before: Result, after: Result) -> list[Change]:
    """Return the rows that both results have, those that changed most for the worse first."""
    old, new = _rows(before), _rows(after)
    changes = [Change(key, old[key], new[key]) for key in old if key in new]
    return sorted(changes, key=lambda change: change.factor, reverse=True)


def format_changes(changes: Sequence[Change]) -> str:
    """Lay changes out as text."""
    lines = [HEADER]
    for change in changes:
        name, loop, size, against = change.key
        pair = [f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in (change.before, change.after)]
        lines.append(
            (name, loop, str(size), against, *pair, f"{change.factor:.2f}", change.verdict)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _rows(result: Result) -> dict[Key, tuple[float, float, float]]:
    return {
        (row["name"], row["loop"], row["num_replicas"], row["against"]): (
            row["ratio"],
            row["lowest"],
            row["highest"],
        )
        for row in result["rows"]
    }


def _read(file: Path) -> Result:
    result = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ValueError(f"{file} is no result of a benchmark: it has no rows.")
    return result


def _commit() -> str:
    """Return the checked-out commit, with a plus sign if files differ from it."""
    name = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
        cwd=Path(__file__).parent, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return name.strip()
