"""The formats of traces: Chrome's JSON, and Perfetto's own protocol buffers.

Both are opened by https://ui.perfetto.dev. JSON is read by more programs; the other is a third of
its size.

Source:
    Chrome: "Trace Event Format" (Google, 2016). Perfetto: `perfetto_trace.proto`, the messages
    TracePacket, TrackDescriptor and TrackEvent.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ._trace import Args, Slice, Timeline

SEQUENCE = 1  # one writer
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type


def chrome_json(timeline: Timeline) -> Iterator[bytes]:
    """Write a time line in Chrome's format, piece by piece."""
    ids = {track: number for number, track in enumerate(timeline.tracks, 1)}
    head = {"displayTimeUnit": "ms", "otherData": {"producer": "aioreplica"}, "traceEvents": []}
    yield json.dumps(head)[:-2].encode()
    for number, event in enumerate(_chrome_events(timeline, ids)):
        yield ((",\n" if number else "\n") + json.dumps(event)).encode()
    yield b"\n]}\n"


def _chrome_events(timeline: Timeline, ids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    pid = timeline.pid  # Any above: what JSON can be made of
    yield _named("process_name", pid, 0, name=timeline.worker)
    for track, tid in ids.items():
        yield _named("thread_name", pid, tid, name=track)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    left = Counter(flow for each in timeline.slices for flow in each.flows)
    total = dict(left)
    for each in timeline.slices:
        tid = ids[each.track]
        yield {
            "ph": "X", "name": each.name, "cat": each.category, "pid": pid, "tid": tid,
            "ts": each.begin_ns / 1e3, "dur": (each.end_ns - each.begin_ns) / 1e3,
            "args": dict(each.args),
        }  # fmt: skip
        for flow in each.flows:
            phase = "s" if left[flow] == total[flow] else "f" if left[flow] == 1 else "t"
            left[flow] -= 1
            yield {
                "ph": phase, "id": flow, "name": each.category, "cat": "flow", "pid": pid,
                "tid": tid, "ts": each.begin_ns / 1e3, "bp": "e",
            }  # fmt: skip
    for instant in timeline.instants:
        yield {
            "ph": "i", "s": "t", "name": instant.name, "cat": instant.category, "pid": pid,
            "tid": ids[instant.track], "ts": instant.at_ns / 1e3, "args": dict(instant.args),
        }  # fmt: skip
    for sample in timeline.samples:
        yield {
            "ph": "C", "name": sample.name, "pid": pid, "ts": sample.at_ns / 1e3,
            "args": {"value": sample.value},
        }  # fmt: skip


def _named(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def perfetto_protobuf(timeline: Timeline) -> Iterator[bytes]:
    """Write a time line in Perfetto's format, packet by packet."""
    ids = {track: number for number, track in enumerate(timeline.tracks, 2)}
    process = _int(1, timeline.pid) + _text(6, timeline.worker)
    yield _packet(60, _int(1, 1) + _int(11, 3) + _bytes(3, process))
    for track, uuid in ids.items():
        yield _packet(60, _int(1, uuid) + _int(5, 1) + _text(2, track) + _int(12, uuid))
    counters: dict[str, int] = {}
    for sample in timeline.samples:
        if sample.name not in counters:
            counters[sample.name] = len(ids) + 2 + len(counters)
            head = _int(1, counters[sample.name]) + _int(5, 1)
            yield _packet(60, head + _text(2, sample.name) + _bytes(8, b""))
    for at_ns, event in sorted(_perfetto_events(timeline, ids, counters), key=lambda each: each[0]):
        yield _packet(11, event, at_ns)


def _perfetto_events(
    timeline: Timeline, ids: Mapping[str, int], counters: Mapping[str, int]
) -> Iterator[tuple[int, bytes]]:
    """Yield time and TrackEvent; those of a track in order, also where times are equal."""
    ends: dict[str, list[Slice]] = {}
    for each in timeline.slices:
        stack = ends.setdefault(each.track, [])
        yield from _ended(stack, ids, each.begin_ns)
        stack.append(each)
        flows = b"".join(_key(47, 1) + struct.pack("<Q", flow) for flow in each.flows)
        head = _event(SLICE_BEGIN, ids[each.track], each.name, each.category, each.args)
        yield each.begin_ns, head + flows
    for stack in ends.values():
        yield from _ended(stack, ids, None)
    for instant in timeline.instants:
        yield (
            instant.at_ns,
            _event(INSTANT, ids[instant.track], instant.name, instant.category, instant.args),
        )
    for sample in timeline.samples:
        value = _key(44, 1) + struct.pack("<d", sample.value)
        yield sample.at_ns, _int(9, COUNTER) + _int(11, counters[sample.name]) + value


def _ended(
    stack: list[Slice], ids: Mapping[str, int], at_ns: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the ends of the innermost slices that have ended; None: of all."""
    while stack and (at_ns is None or stack[-1].end_ns <= at_ns):
        top = stack.pop()
        yield top.end_ns, _int(9, SLICE_END) + _int(11, ids[top.track])


def _event(kind: int, uuid: int, name: str, category: str, args: Args) -> bytes:
    notes = b"".join(_bytes(4, _text(10, key) + _value(value)) for key, value in args.items())
    return _int(9, kind) + _int(11, uuid) + _text(23, name) + _text(22, category) + notes


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return _text(6, value)
    if isinstance(value, int):
        return _int(4, value)
    return _key(5, 1) + struct.pack("<d", value)


def _packet(field: int, message: bytes, at_ns: int | None = None) -> bytes:
    time = b"" if at_ns is None else _int(8, at_ns)
    return _bytes(1, time + _int(10, SEQUENCE) + _bytes(field, message))


# --- the wire format of protocol buffers: a key, then a varint, 8 bytes, or a length and bytes ----


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative numbers take their two's complement
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _int(field: int, number: int) -> bytes:
    return _key(field, 0) + _varint(number)


def _bytes(field: int, payload: bytes) -> bytes:
    return _key(field, 2) + _varint(len(payload)) + payload


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", "backslashreplace"))


FORMATS: Mapping[str, Callable[[Timeline], Iterable[bytes]]] = {
    ".json": chrome_json,
    ".pftrace": perfetto_protobuf,
}
"""What writes a file, by the end of its name."""
