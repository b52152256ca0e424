"""Charts of a result: PNG files for people who would rather look than read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ._cases import OURS, WIDE

COLOURS = {
    OURS: "C3", WIDE: "darkred", f"{OURS} without fast": "C6",
    f"{OURS} on jax": "C4", f"{OURS} on torch": "C5",
    "floor": "0.6", "tensorflow": "C1", "jax": "C0", "torch": "C2",
}  # fmt: skip
STYLES = ("-", "--", ":")
WIDTH, HEIGHT = 9.0, 4.2


def draw_charts(rows: list[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Draw a chart for each kind of task that has rows; return their paths.

    Raises:
        ImportError: If matplotlib is not installed (the extra `examples` has it).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        ("merge", "replicas", lambda row: row["num_replicas"]),
        ("all_reduce", "bytes per replica", lambda row: row["settings"]["size"]),
    )
    for task, label, place in tasks:
        chosen = [row for row in rows if row["task"] == task]
        if chosen:
            yield _lines(folder / f"peers_{task}.png", chosen, label, place)
    for task in ("train", "small"):
        chosen = [row for row in rows if row["task"] == task]
        if chosen:
            yield _bars(folder / f"peers_{task}.png", chosen)


def _lines(path: Path, rows: list[Any], label: str, place: Callable[[Any], Any]) -> Path:
    from matplotlib.figure import Figure

    sizes = sorted({row["num_replicas"] for row in rows})
    panels = sizes if rows[0]["task"] == "all_reduce" else [None]
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = [row for row in rows if panel is None or row["num_replicas"] == panel]
        for peer, mode in dict.fromkeys((row["peer"], row["mode"]) for row in shown):
            points = [row for row in shown if (row["peer"], row["mode"]) == (peer, mode)]
            points.sort(key=place)
            modes = list(dict.fromkeys(row["mode"] for row in shown if row["peer"] == peer))
            axes.plot(
                [place(row) for row in points], [row["median"] for row in points],
                marker="o", markersize=3, color=COLOURS.get(peer), label=f"{peer} {mode}".strip(),
                linestyle=STYLES[modes.index(mode) % len(STYLES)],
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel=rows[0]["unit"])
        axes.set_xscale("log", base=2)
        axes.set_title(rows[0]["task"] if panel is None else f"{rows[0]['task']}, N = {panel}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _bars(path: Path, rows: list[Any]) -> Path:
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row["name"], row["num_replicas"]) for row in rows))
    ways = list(dict.fromkeys((row["peer"], row["mode"]) for row in rows))
    figure = Figure((WIDTH, 0.5 + 0.16 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(ways)
    for index, (peer, mode) in enumerate(ways):
        modes = [other for name, other in ways if name == peer]
        found = {
            (row["name"], row["num_replicas"]): 1e6 / row["median"]
            for row in rows
            if (row["peer"], row["mode"]) == (peer, mode)
        }
        places = [cases.index(case) + index * height for case in found]
        axes.barh(
            places, list(found.values()), height, color=COLOURS.get(peer),
            alpha=1 - 0.3 * modes.index(mode), label=f"{peer} {mode}".strip(),
        )  # fmt: skip
    axes.set_yticks(
        [place + 0.4 - height / 2 for place in range(len(cases))],
        [f"{name}, N = {size}" for name, size in cases],
        fontsize="small",
    )
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="steps per second")
    figure.legend(fontsize="small", loc="outside right upper")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
