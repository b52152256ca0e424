"""Reading traces back, in both formats that `strategy.trace` writes.

Of Chrome's JSON it reads complete slices (`X`), moments and counters, of Perfetto's protocol
buffers the messages that the library writes; what other programs add is passed over.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ..telemetry._trace import Instant, Sample, Slice, Timeline

Value: TypeAlias = int | float | bytes
Message: TypeAlias = dict[int, Value]
"""The last value of each field; enough for the messages of a trace."""

TRACK_DESCRIPTOR, TRACK_EVENT = 60, 11
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4

UNREADABLE = (
    ArithmeticError,  # a time that is not a number
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading a file raises that has not the form of a trace."""


def read_trace(path: Path) -> tuple[str, Timeline]:
    """Read a trace file.

    Returns:
        The name of its format, and what it shows.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a trace, or damaged.
    """
    content = path.read_bytes()
    if not content.strip():
        raise ValueError("the file is empty")
    if content.lstrip()[:1] in (b"{", b"["):
        return "Chrome JSON", _read_chrome(content)
    return "Perfetto", _read_perfetto(content)


def _read_chrome(content: bytes) -> Timeline:
    try:
        parsed: Any = json.loads(content)
        events = parsed["traceEvents"] if isinstance(parsed, dict) else parsed
        return _from_chrome([each for each in events if isinstance(each, dict)])
    except UNREADABLE as error:
        raise ValueError(f"it is no trace in Chrome's format ({error!r})") from None


def _from_chrome(events: list[dict[str, Any]]) -> Timeline:
    names: dict[tuple[Any, Any], str] = {}
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
    return _timeline(worker, pid, list(names.values()), slices, instants, samples)


def _read_perfetto(content: bytes) -> Timeline:
    try:
        return _from_perfetto(content)
    except UNREADABLE as error:
        raise ValueError(f"it is neither JSON nor a trace of Perfetto ({error!r})") from None


def _from_perfetto(content: bytes) -> Timeline:
    names: dict[int, str] = {}
    counters: set[int] = set()
    worker, pid = "", 0
    slices, instants, samples = [], [], []
    open_slices: dict[int, list[Slice]] = {}
    for field, packet in _fields(content):
        if field != 1 or not isinstance(packet, bytes):
            raise ValueError(f"there is no packet in field {field}")
        message = dict(_fields(packet))
        at_ns = _number(message, 8)
        if TRACK_DESCRIPTOR in message:
            track = _inside(message, TRACK_DESCRIPTOR)
            uuid = _number(track, 1)
            if 3 in track:  # the process
                process = _inside(track, 3)
                worker, pid = _text(process, 6), _number(process, 1)
                continue
            names[uuid] = _text(track, 2)
            if 8 in track:
                counters.add(uuid)
        elif TRACK_EVENT in message:
            event = _inside(message, TRACK_EVENT)
            uuid, kind = _number(event, 11), _number(event, 9)
            name, category = _text(event, 23), _text(event, 22)
            if kind == SLICE_BEGIN:
                begun = Slice(names[uuid], name, category, at_ns, at_ns)
                slices.append(begun)
                open_slices.setdefault(uuid, []).append(begun)
            elif kind == SLICE_END:
                open_slices[uuid].pop().end_ns = at_ns
            elif kind == INSTANT:
                args = _texts(message[TRACK_EVENT])
                instants.append(Instant(names[uuid], name, category, at_ns, args))
            elif kind == COUNTER:
                value = event.get(44, 0.0)
                samples.append(Sample(names[uuid], at_ns, _double(value)))
    if not names:
        raise ValueError("there is no track in it")
    tracks = [name for uuid, name in names.items() if uuid not in counters]
    return _timeline(worker, pid, tracks, slices, instants, samples)


def _timeline(
    worker: str,
    pid: int,
    tracks: list[str],
    slices: list[Slice],
    instants: list[Instant],
    samples: list[Sample],
) -> Timeline:
    slices.sort(key=lambda each: (each.begin_ns, -each.end_ns))
    instants.sort(key=lambda each: each.at_ns)
    samples.sort(key=lambda each: each.at_ns)
    return Timeline(worker, pid, list(dict.fromkeys(tracks)), slices, instants, samples)


# --- the wire format of protocol buffers: a key, then a varint, 8 or 4 bytes, or a length and bytes


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field.

    Raises:
        ValueError: If the message ends in the middle of a field.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, place = _varint(message, place)
        if size is None or place + size > len(message):
            raise ValueError(f"byte {place} is in the middle of a field")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    raise ValueError(f"the number before byte {place} is too long")


def _number(message: Message, field: int) -> int:
    value = message.get(field, 0)
    if not isinstance(value, int):
        raise TypeError(f"field {field} is no number")
    return value


def _text(message: Message, field: int) -> str:
    return _bytes(message.get(field, b"")).decode("utf-8", "replace")


def _inside(message: Message, field: int) -> Message:
    return _message(message[field])


def _message(value: Value) -> Message:
    return dict(_fields(_bytes(value)))


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value} is neither a text nor a message")
    return value


def _texts(event: Value) -> dict[str, str]:
    """Return the notes of an event that are texts."""
    notes = [_message(value) for field, value in _fields(_bytes(event)) if field == 4]
    return {_text(note, 10): _text(note, 6) for note in notes if 6 in note}


def _double(value: Value) -> float:
    return float(struct.unpack("<d", value)[0]) if isinstance(value, bytes) else float(value)
