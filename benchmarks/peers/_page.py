"""The tables of the documentation, from the rows of a result: written into the page in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ._cases import FASTEST, OURS, show_bytes

BEGIN, END = "% tables of python -m benchmarks peers", "% end of tables"

Row: TypeAlias = dict[str, Any]  # Any: what the json module gives


def write_tables(rows: Sequence[Row], page: Path) -> None:
    """Replace what stands between the two marks of a page.

    Raises:
        ValueError: If the page does not have both marks.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} to write tables between.")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    tables = "\n\n".join(tables_of(rows))
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def tables_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a paragraph and a table for each kind of task that has rows."""
    for title, tasks, label in (
        ("Smallest collective", ("merge",), None),
        ("Empty run", ("run",), None),
        ("all_reduce", ("all_reduce",), lambda row: show_bytes(row["settings"]["size"])),
        ("Training", ("train",), lambda row: row["name"].removeprefix("MLP, ")),
        ("Small models", ("small",), lambda row: row["name"].removeprefix("linear, ")),
        ("Compiled steps", ("compiled",), lambda row: row["name"].partition(", ")[2]),
        ("Start-up and memory", ("start",), lambda row: row["name"]),
        ("Reports of errors", ("failure",), lambda row: row["name"].removeprefix("report of ")),
    ):
        chosen = [row for row in rows if row["task"] in tasks]
        if chosen:
            yield f"## {title}"
            yield _table(chosen, label)
    marks = [row["is_met"] for row in rows if row["is_met"] is not None]
    yield f"{sum(marks)} of {len(marks)} goals are met; those that are not:"
    missed = [row for row in rows if row["is_met"] is False]
    yield "\n".join(map(_missed, missed)) or "None."


def _table(rows: Sequence[Row], label: Callable[[Row], str] | None) -> str:
    others = list(dict.fromkeys(map(_column, rows)))
    fastest = {row["peer"] for row in rows} & set(FASTEST)
    if len(fastest) == 1:  # it has a column
        others.remove(*fastest)
    unit = ", ".join(dict.fromkeys(row["unit"] for row in rows))
    head = ["N", *([""] if label else []), f"fastest ({unit.replace('us', 'µs')})", *others]
    lines = [head, ["---"] * len(head)]
    for key in sorted({(row["num_replicas"], _place(rows, row)) for row in rows}):
        case = [row for row in rows if (row["num_replicas"], _place(rows, row)) == key]
        best = next(row for row in case if row["is_best"])
        way = best["against"].removeprefix(OURS).strip(" ,")
        ours = _number(best["median"]) + (f" {way}" if way else "")
        slowest_first = sorted(case, key=lambda row: -row["median"])
        found = {_column(row): _cell(row) for row in slowest_first}
        lines.append(
            [
                str(key[0]), *([label(best)] if label else []), ours,
                *(found.get(other, "") for other in others),
            ]
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _place(rows: Sequence[Row], row: Row) -> int:
    """Number the cases in the order in which they were measured."""
    return list(dict.fromkeys(each["name"] for each in rows)).index(row["name"])


def _column(row: Row) -> str:
    """Return the head of a row's column: of ours, all ways of a program share one."""
    peer: str = row["peer"]
    return peer if peer.startswith(OURS) else str(row["against"])


def _cell(row: Row) -> str:
    times = f"{_number(1 / row['ratio'])}x"
    return f"**{times}**" if row["is_met"] is False else times


def _missed(row: Row) -> str:
    return (
        f"- {row['name']}, N = {row['num_replicas']}, beside {row['against']}: "
        f"{_number(1 / row['ratio'])} times ours ({_number(1 / row['highest'])} to "
        f"{_number(1 / row['lowest'])} by round), promised were {row['goal']:g}."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
