"""Reading traces back with the json module."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

Row = tuple[str, str, str, int, int, tuple[int, ...]]
"""Track, name, category, begin, end and flows of a slice."""


@dataclass
class Read:
    """What a file shows."""

    process: tuple[str, int] = ("", 0)
    tracks: list[str] = field(default_factory=list)
    slices: list[Row] = field(default_factory=list)
    instants: list[tuple[str, str]] = field(default_factory=list)
    samples: list[tuple[str, float]] = field(default_factory=list)


def read_chrome(path: Path) -> Read:
    read = Read()
    tracks: dict[int, str] = {}
    flows: dict[tuple[int, float], list[int]] = defaultdict(list)
    events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        if event["name"] == "process_name":
            read.process = event["args"]["name"], event["pid"]
        elif event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        elif event["ph"] in "stf":
            flows[event["tid"], event["ts"]].append(event["id"])
    read.tracks = list(tracks.values())
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"] * 1e3, (event["ts"] + event["dur"]) * 1e3
            own = tuple(flows[event["tid"], event["ts"]])
            is_flow = event["cat"] in {"collective", "await", "op"}
            read.slices.append(
                (tracks[event["tid"]], event["name"], event["cat"], int(begin), int(end),
                 own if is_flow else ())
            )  # fmt: skip
        elif event["ph"] == "i":
            read.instants.append((tracks[event["tid"]], event["name"]))
        elif event["ph"] == "C":
            read.samples.append((event["name"], event["args"]["value"]))
    return read
