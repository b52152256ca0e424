"""`aioreplica trace`: where the time of a traced program went, in words and as a picture."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from ..telemetry._trace import STEPS, Instant, Sample, Slice, Timeline
from ._rows import failed, print_rows

COLOURS = {
    "run": "#b8b8c8",
    "step": "#c9d6ea",
    "collective": "#d9822b",
    "await": "#e8cf9a",
    "op": "#2f7d6d",
}
OTHER_COLOUR = "#8c6bb1"
MAX_NAMES = 12
MAX_INCHES = 200.0
"""Largest height of a picture: one may have 2**16 pixels, of which there are 120 to an inch."""
UNREADABLE = (
    ArithmeticError,  # a time that is not a number
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a file raises that has not the form of a trace."""


def trace(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="What strategy.trace has written.")
    ],
    png: Annotated[
        Path | None, typer.Option(help="Draw the time line into this file, too.")
    ] = None,
) -> None:
    """Sum a trace up: steps, what took the time, how busy each replica and device was."""
    try:
        timeline = read_trace(file)
    except (OSError, ValueError) as error:
        raise failed(f"{file} cannot be read as a trace: {error}.") from None
    if not timeline.slices:
        raise failed(f"{file} has no slices: nothing ran while it was recorded.")
    if png is not None:
        _draw(timeline, png, file.name)
    print_rows(("what", "value"), list(_overview(timeline)), title="trace")
    head = ("kind", "name", "count", "total", "mean", "longest")
    print_rows(head, list(_by_name(timeline)), title="time")
    print_rows(("track", "count", "busy"), list(_by_track(timeline)), title="tracks")
    marks = Counter(map(_mark, timeline.instants))
    rows = [(*names, str(count)) for names, count in marks.most_common(MAX_NAMES)]
    print_rows(("mark", "name", "count"), rows, title="marks")
    print_rows(("counter", "count", "last"), list(_counters(timeline)), title="counters")


def read_trace(path: Path) -> Timeline:
    """Read a trace file in Chrome's JSON: complete slices (`X`), moments and counters.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a trace, or damaged.
    """
    content = path.read_bytes()
    if not content.strip():
        raise ValueError("the file is empty")
    try:
        parsed: Any = json.loads(content)
        events = parsed["traceEvents"] if isinstance(parsed, dict) else parsed
        return _from_chrome([each for each in events if isinstance(each, dict)])
    except UNREADABLE as error:
        raise ValueError(f"it is not a trace in Chrome's format ({error!r:.200})") from None


def _from_chrome(events: list[dict[str, Any]]) -> Timeline:
    names: dict[tuple[object, object], str] = {}
    worker, pid = "", 0
    for event in events:
        if event.get("ph") == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = str(event["args"]["name"])
        elif event.get("ph") == "M" and event["name"] == "process_name" and not worker:
            worker, pid = str(event["args"]["name"]), int(event["pid"])
    slices, instants, samples = [], [], []
    for event in events:
        kind = event.get("ph")
        if kind not in ("X", "i", "C"):
            continue
        name, begin = str(event["name"]), round(float(event["ts"]) * 1e3)
        place = event.get("pid"), event.get("tid")
        if kind == "C":
            samples.append(Sample(name, begin, float(next(iter(event["args"].values()), 0.0))))
            continue
        track = names.setdefault(place, f"thread {place[1]}")
        category = str(event.get("cat", ""))
        if kind == "i":
            instants.append(Instant(track, name, category, begin, dict(event.get("args", {}))))
            continue
        end = begin + round(float(event.get("dur", 0)) * 1e3)
        slices.append(Slice(track, name, category, begin, end))
    slices.sort(key=lambda each: (each.begin_ns, -each.end_ns))
    instants.sort(key=attrgetter("at_ns"))
    samples.sort(key=attrgetter("at_ns"))
    return Timeline(worker, pid, list(dict.fromkeys(names.values())), slices, instants, samples)


def _overview(timeline: Timeline) -> Iterator[tuple[str, str]]:
    begin, end = _extent(timeline)
    yield "process", f"{timeline.worker} ({timeline.pid})"
    yield "length", _time(end - begin)
    steps = [each.end_ns - each.begin_ns for each in timeline.slices if each.category == "run"]
    yield "steps", str(len(steps))
    if steps:
        yield "median step", _time(median(steps))
        yield "longest step", _time(max(steps))


def _extent(timeline: Timeline) -> tuple[int, int]:
    begins = [each.begin_ns for each in timeline.slices]
    return min(begins), max(each.end_ns for each in timeline.slices)


def _by_name(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    """Yield what took most time, most first; waits for ops are told by the ops."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for each in timeline.slices:
        if each.category not in ("run", "await"):
            name = re.sub(r"(?<=^step) \d+$| #\d+", "", each.name)  # without its number
            lengths.setdefault((each.category, name), []).append(each.end_ns - each.begin_ns)
    ranked = sorted(lengths.items(), key=lambda item: -sum(item[1]))
    for (category, name), each_ns in ranked[:MAX_NAMES]:
        numbers = (_time(sum(each_ns)), _time(mean(each_ns)), _time(max(each_ns)))
        yield category, name, str(len(each_ns)), *numbers


def _by_track(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    begin, end = _extent(timeline)
    of_track = _slices_of_tracks(timeline)
    for track in timeline.tracks:
        slices = of_track[track]
        share = _covered(slices) / max(1, end - begin)
        yield track, str(len(slices)), f"{share:.0%}"


def _slices_of_tracks(timeline: Timeline) -> Mapping[str, Sequence[Slice]]:
    """Return the slices of each track, in order."""
    found: dict[str, list[Slice]] = {track: [] for track in timeline.tracks}
    for each in timeline.slices:
        found[each.track].append(each)
    return found


def _covered(slices: Sequence[Slice]) -> int:
    """Return how many nanoseconds lie in at least one of the slices, which are in order."""
    total, reached = 0, 0
    for each in slices:
        total += max(0, each.end_ns - max(each.begin_ns, reached))
        reached = max(reached, each.end_ns)
    return total


def _mark(instant: Instant) -> tuple[str, str]:
    name = re.sub(r" \d+$", "", instant.name)  # of a write without its number
    return instant.category, str(instant.args.get("error", name))


def _counters(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    counts = Counter(each.name for each in timeline.samples)
    last = {each.name: each.value for each in timeline.samples}
    for name, count in counts.items():
        yield name, str(count), f"{last[name]:.6g}"


def _time(ns: float) -> str:
    """Return a length of time in words; into a pipe, in seconds."""
    if not Console().is_terminal:
        return f"{ns / 1e9:.9f}"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns / 1e3:.1f} us"


def _draw(timeline: Timeline, path: Path, name: str) -> None:
    """Write a picture: time from left to right, a row for each track."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        text = "A time line is drawn with matplotlib. Install it with: "
        raise failed(text + "pip install 'aioreplica[examples]'") from None
    begin, end = _extent(timeline)
    tracks = sorted(timeline.tracks, key=lambda track: track != STEPS)
    height = min(1.4 + 0.42 * len(tracks), MAX_INCHES)
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots()
    seen: dict[str, str] = {}
    of_track = _slices_of_tracks(timeline)
    for row, track in enumerate(tracks):
        for depth, category, bars in _bars(of_track[track], begin):
            seen[category] = colour = COLOURS.get(category, OTHER_COLOUR)
            height = 0.8 * 0.75**depth
            axes.broken_barh(bars, (row - height / 2, height), facecolors=colour, linewidth=0)
    marks = [each for each in timeline.instants if each.category == "fault"]
    for each in marks:
        axes.axvline((each.at_ns - begin) / 1e6, color="#c0392b", linewidth=0.8)
    axes.set_yticks(range(len(tracks)), [track.replace("$", r"\$") for track in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(0, max(1, end - begin) / 1e6)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{name}: {timeline.worker}".replace("$", r"\$"), loc="left", fontsize=10)
    patches = [Patch(color=colour, label=category) for category, colour in seen.items()]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), frameon=False)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise failed(f"The picture cannot be written to {path}: {error}.") from None


def _bars(
    slices: Sequence[Slice], begin: int
) -> Iterator[tuple[int, str, list[tuple[float, float]]]]:
    """Yield what is drawn together: depth of nesting, category, and begins and lengths in ms."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    open_ends: list[int] = []
    for each in slices:
        while open_ends and open_ends[-1] <= each.begin_ns:
            open_ends.pop()
        place = (each.begin_ns - begin) / 1e6, (each.end_ns - each.begin_ns) / 1e6
        bars.setdefault((len(open_ends), each.category), []).append(place)
        open_ends.append(each.end_ns)
    for depth, category in sorted(bars):
        yield depth, category, bars[depth, category]
