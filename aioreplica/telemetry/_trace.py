"""The trace: the newest happenings of a strategy, ready to be drawn on a time line.

While the program runs, a tuple of numbers and names is kept for each happening, in a ring. Only
who reads the trace turns them into slices on tracks (`Timeline`), which `chrome_json` writes for
https://ui.perfetto.dev. So tracing costs the program little, and its memory is bounded.

Source:
    "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from math import isfinite
from operator import attrgetter
from typing import TypeAlias, final

from ._observer import (
    Event,
    MergeEntry,
    MessageEntry,
    ObservedMerge,
    ObservedMessage,
    ObservedOp,
    ObservedRun,
    Observer,
)
from ._recorder import Ring, source_line
from ._sinks import error_text

MAX_OPS_QUEUED = 4096  # whose times are remembered; those of ops that are withdrawn pass away
STEPS = "steps"

Args: TypeAlias = Mapping[str, str | int | float]


@final
@dataclass(slots=True)
class Slice:
    """Something that took time on a track.

    Attributes:
        track: Name of the track.
        name: What it was.
        category: "run", "step", "collective", "message", "await" or "op".
        begin_ns: When it began, in nanoseconds since 1970.
        end_ns: When it ended.
        args: Further numbers and texts.
        flows: Numbers of the flows that lead from slice to slice in the order of their begins.
    """

    track: str
    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: Args = field(default_factory=dict)
    flows: tuple[int, ...] = ()


@final
@dataclass(slots=True)
class Instant:
    """Something that happened at one moment on a track."""

    track: str
    name: str
    category: str
    at_ns: int
    args: Args = field(default_factory=dict)


@final
@dataclass(slots=True)
class Sample:
    """A value of a counter at one moment."""

    name: str
    at_ns: int
    value: float


@final
@dataclass(slots=True)
class Timeline:
    """Tracks and events of a trace.

    Attributes:
        worker: Name of the process.
        pid: Its id.
        tracks: Their names, in the order in which they are shown.
        slices: In the order of their begins; on each track they are nested.
        instants: In order of time.
        samples: In order of time.
    """

    worker: str
    pid: int
    tracks: Sequence[str]
    slices: Sequence[Slice]
    instants: Sequence[Instant]
    samples: Sequence[Sample]


@final
class TraceRecorder:
    """Keeps what happens in the runs of a strategy, for a time line.

    Args:
        device_names: One per replica.
        capacity: How many happenings are kept; older ones are dropped. A merge of 4 replicas takes
            about 700 bytes, an op 250.
        worker_id: Number of this process among those that work together.

    Attributes:
        observer: What to add to the strategy's observers.

    Raises:
        ValueError: If the capacity is below 1.
    """

    __slots__ = ("_begun", "_device_names", "_now", "_queued", "_ring", "_worker_id", "observer")

    def __init__(
        self, device_names: Sequence[str], *, capacity: int = 65_536, worker_id: int = 0
    ) -> None:
        if capacity < 1:
            raise ValueError(f"A trace keeps at least 1 happening, got capacity={capacity}.")
        self._device_names = tuple(device_names)
        self._worker_id = worker_id
        self._now = time.monotonic  # looked up now: a test may have put another clock there
        self._ring: Ring[tuple[Callable[..., None], tuple[object, ...]]] = Ring(capacity)
        self._begun: dict[tuple[int, int | None], float] = {}
        self._queued: dict[int, float] = {}
        self.observer = Observer(
            replica_began=self._replica_began,
            replica_ended=self._replica_ended,
            run_began=self._run_began,
            run_ended=self._run_ended,
            merge_ended=self._merge_ended,
            value_received=self._value_received,
            op_queued=self._op_queued,
            op_ended=self._op_ended,
            write_published=self._write_published,
            fault=self._fault,
            event_added=self._event_added,
        )

    # ---- while the program runs ----------------------------------------------------------

    def _replica_began(self, run: ObservedRun, replica_id: int, _context: Context) -> None:
        self._begun[run.step, replica_id] = self._now()

    def _replica_ended(
        self, run: ObservedRun, replica_id: int, error: BaseException | None
    ) -> None:
        begin = self._begun.pop((run.step, replica_id), None)
        if begin is not None:
            text = None if error is None else error_text(error)
            part = (run.step, replica_id, run.fn_name, begin, self._now(), text)
            self._ring.add((_Drawing.replica, part))

    def _run_began(self, run: ObservedRun) -> None:
        self._begun[run.step, None] = self._now()

    def _run_ended(self, run: ObservedRun) -> None:
        begin = self._begun.pop((run.step, None), None)
        if begin is not None:
            self._ring.add((_Drawing.run, (run.step, run.fn_name, begin, self._now())))

    def _merge_ended(self, merge: ObservedMerge, error: BaseException | None) -> None:
        self._ring.add((_Drawing.merge, (merge.entry(self._now()), error is not None)))

    def _value_received(self, message: ObservedMessage) -> None:
        self._ring.add((_Drawing.message, (message.entry(self._now()),)))

    def _op_queued(self, op: ObservedOp, _lane: str) -> None:
        queued = self._queued
        if len(queued) >= MAX_OPS_QUEUED:
            with suppress(StopIteration, RuntimeError):  # an op has ended meanwhile: there is room
                queued.pop(next(iter(queued)), None)
        queued[id(op)] = self._now()

    def _op_ended(self, op: ObservedOp, lane: str) -> None:
        end = self._now()
        begin = end - op.seconds
        queued = min(self._queued.pop(id(op), begin), begin)
        self._ring.add((_Drawing.op, (lane, op.fn_name, op.replica_id, queued, begin, end)))

    def _write_published(self, number: int) -> None:
        self._ring.add((_Drawing.write, (self._now(), number)))

    def _fault(self, step: int, error: BaseException) -> None:
        self._ring.add((_Drawing.fault, (self._now(), step, error_text(error))))

    def _event_added(self, event: Event) -> None:
        self._ring.add((_Drawing.event, (event,)))

    # ---- afterwards ----------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Return what was kept as slices on tracks; from any thread.

        The tracks are the steps of the worker, each replica, each device that had an op; and a
        further one where slices of a track overlap, as those of collectives that were started
        ahead.
        """
        drawing = _Drawing(self._device_names)
        for draw, part in self._ring.copied():
            draw(drawing, *part)
        tracks, slices = _nest(drawing.first_tracks(), drawing.slices)
        return Timeline(
            f"worker {self._worker_id}",
            os.getpid(),
            tracks,
            slices,
            sorted(drawing.instants, key=attrgetter("at_ns")),
            sorted(drawing.samples, key=attrgetter("at_ns")),
        )

    def clear(self) -> None:
        """Forget what was kept."""
        self._ring.clear()

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"<TraceRecorder | {len(self._ring)} of {self._ring.capacity} happenings>"


@final
class _Drawing:
    """Turns what was kept into slices; one method for each kind."""

    def __init__(self, device_names: Sequence[str]) -> None:
        self._tracks = [f"replica {i} ({name})" for i, name in enumerate(device_names)]
        self._lanes: dict[str, None] = {}
        self._offset_ns = time.time_ns() - int(time.monotonic() * 1e9)
        self._num_flows = 0
        self.slices: list[Slice] = []
        self.instants: list[Instant] = []
        self.samples: list[Sample] = []

    def first_tracks(self) -> list[str]:
        return [STEPS, *self._tracks, *sorted(self._lanes)]

    def run(self, step: int, fn_name: str, begin: float, end: float) -> None:
        args = {"step": step}
        self.slices.append(Slice(STEPS, fn_name, "run", self._ns(begin), self._ns(end), args))

    def replica(
        self, step: int, replica_id: int, fn_name: str, begin: float, end: float, error: str | None
    ) -> None:
        args: dict[str, str | int | float] = {"function": fn_name, "step": step}
        if error is not None:
            args["error"] = error
        begin_ns, end_ns = self._ns(begin), self._ns(end)
        track = self._tracks[replica_id]
        self.slices.append(Slice(track, f"step {step}", "step", begin_ns, end_ns, args))

    def merge(self, entry: MergeEntry, has_failed: bool) -> None:
        end, step, sequence, collective, op, num_bytes, members, visits = entry
        end_ns = self._ns(end)
        flows = (self._next_flow(),) if len(members) > 1 else ()
        title = collective if op is None else f"{collective} ({op.name})"
        for position, (member, (code, at, arrived)) in enumerate(zip(members, visits, strict=True)):
            size = num_bytes[position if len(num_bytes) > 1 else 0]
            args: dict[str, str | int | float] = {
                "step": step,
                "number": sequence,
                "bytes": size,
                "where": f"{code.co_filename}:{source_line(code, at)}",
            }
            if has_failed:
                args["failed"] = "yes"
            track, begin_ns = self._tracks[member], self._ns(arrived)
            self.slices.append(Slice(track, title, "collective", begin_ns, end_ns, args, flows))

    def message(self, entry: MessageEntry) -> None:
        end, step, number, tag, members, visits = entry
        end_ns, flows = self._ns(end), (self._next_flow(),)
        for title, member, (code, at, arrived) in zip(
            ("send", "receive"), members, visits, strict=True
        ):
            args: dict[str, str | int | float] = {
                "step": step,
                "number": number,
                "where": f"{code.co_filename}:{source_line(code, at)}",
            }
            if tag is not None:
                args["tag"] = tag
            track, begin_ns = self._tracks[member], self._ns(arrived)
            self.slices.append(Slice(track, title, "message", begin_ns, end_ns, args, flows))

    def op(
        self,
        lane: str,
        fn_name: str,
        replica_id: int | None,
        queued: float,
        begin: float,
        end: float,
    ) -> None:
        self._lanes[lane] = None
        begin_ns, end_ns = self._ns(begin), self._ns(end)
        flows: tuple[int, ...] = ()
        if replica_id is not None:
            flows = (self._next_flow(),)
            track, queued_ns, args = self._tracks[replica_id], self._ns(queued), {"device": lane}
            self.slices.append(Slice(track, fn_name, "await", queued_ns, end_ns, args, flows))
        whose = {} if replica_id is None else {"replica": replica_id}
        self.slices.append(Slice(lane, fn_name, "op", begin_ns, end_ns, whose, flows))

    def write(self, at: float, number: int) -> None:
        self.instants.append(Instant(STEPS, f"write {number}", "write", self._ns(at)))

    def fault(self, at: float, step: int, error: str) -> None:
        args: dict[str, str | int | float] = {"step": step, "error": error}
        self.instants.append(Instant(STEPS, "fault", "fault", self._ns(at), args))

    def event(self, event: Event) -> None:
        at_ns = self._ns(event.time_s)
        value = event.value
        if isinstance(value, float) and not isfinite(value):
            value = str(value)  # JSON has no word for it, and a counter no place
        if event.kind == "scalar" and not isinstance(value, str):
            self.samples.append(Sample(event.name, at_ns, float(value or 0.0)))
            return
        args: dict[str, str | int | float] = {"step": event.step}
        if value is not None:
            args["value"] = value
        name = f"{event.kind} {event.name}"
        self.instants.append(Instant(STEPS, name, event.kind, at_ns, args))

    def _next_flow(self) -> int:
        self._num_flows += 1
        return self._num_flows

    def _ns(self, time_s: float) -> int:
        return self._offset_ns + int(time_s * 1e9)


def _nest(first: Sequence[str], slices: Iterable[Slice]) -> tuple[list[str], list[Slice]]:
    """Put slices that overlap others of their track without being nested on further tracks.

    Returns the tracks in order, and the slices in the order in which they begin.
    """
    ordered = sorted(slices, key=lambda each: (each.begin_ns, -each.end_ns))
    open_ends: dict[str, list[list[int]]] = {name: [[]] for name in first}
    for each in ordered:
        rows = open_ends.setdefault(each.track, [[]])
        for number in range(len(rows) + 1):
            if number == len(rows):
                rows.append([])
            ends = rows[number]
            while ends and ends[-1] <= each.begin_ns:
                ends.pop()
            if not ends or each.end_ns <= ends[-1]:
                ends.append(each.end_ns)
                each.track = _row_name(each.track, number)
                break
    tracks = [_row_name(name, i) for name, rows in open_ends.items() for i in range(len(rows))]
    return tracks, ordered


def _row_name(track: str, number: int) -> str:
    return track if number == 0 else f"{track} +{number}"


def chrome_json(timeline: Timeline) -> Iterator[bytes]:
    """Write a time line in Chrome's format, piece by piece."""
    ids = {track: number for number, track in enumerate(timeline.tracks, 1)}
    head = {"displayTimeUnit": "ms", "otherData": {"producer": "aioreplica"}, "traceEvents": []}
    yield json.dumps(head)[:-2].encode()
    for number, event in enumerate(_chrome_events(timeline, ids)):
        yield ((",\n" if number else "\n") + json.dumps(event, allow_nan=False)).encode()
    yield b"\n]}\n"


def _chrome_events(timeline: Timeline, ids: Mapping[str, int]) -> Iterator[dict[str, object]]:
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


def _named(kind: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
