"""Reading traces back: Chrome's JSON with the json module, Perfetto's with its own protos."""

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


def read_perfetto(path: Path) -> Read:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    read = Read()
    names: dict[int, str] = {}
    open_slices: dict[int, list[tuple[str, str, int, tuple[int, ...]]]] = defaultdict(list)
    last_ns = 0
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in names
            names[track.uuid] = track.name
            if track.HasField("process"):
                read.process = track.process.process_name, track.process.pid
            else:
                assert track.parent_uuid == 1
                if not track.HasField("counter"):
                    read.tracks.append(track.name)
            continue
        event = packet.track_event
        assert packet.timestamp >= last_ns
        last_ns = packet.timestamp
        name, uuid = names[event.track_uuid], event.track_uuid
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            begun = (event.name, event.categories[0], packet.timestamp, tuple(event.flow_ids))
            open_slices[uuid].append(begun)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            title, category, begin, flows = open_slices[uuid].pop()
            read.slices.append((name, title, category, begin, packet.timestamp, flows))
        elif event.type == TrackEvent.TYPE_COUNTER:
            read.samples.append((name, event.double_counter_value))
        else:
            assert event.type == TrackEvent.TYPE_INSTANT
            read.instants.append((name, event.name))
    assert not any(open_slices.values())
    return read
