"""The recorder of merges, always on, and the ring of newest records that threads add to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from types import CodeType
from typing import Generic, NamedTuple, TypeVar, final

from .._gil import has_gil
from ..typing import ReduceOp
from ._observer import MergeEntry, ObservedMerge, Visit

T = TypeVar("T")


@final
class Ring(Generic[T]):
    """Keeps the newest of what threads add.

    A deque is copied in one go while the GIL is held. Without a GIL, what another thread appends
    meanwhile ends the copy with an error, so that both take a lock there.

    Args:
        capacity: How many are kept.

    Attributes:
        capacity: The same.
        add: Adds one, from any thread; bound once, as every merge is added.

    Example:
        >>> ring = Ring(2)
        >>> for number in range(3):
        ...     ring.add(number)
        >>> ring.copied(), len(ring)
        ([1, 2], 2)
    """

    __slots__ = ("_kept", "_lock", "add", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: deque[T] = deque(maxlen=capacity)
        self._lock = Lock()
        self.add: Callable[[T], None] = self._kept.append if has_gil() else self._add_in_turn

    def copied(self) -> list[T]:
        """Return what is kept, oldest first."""
        with self._lock:
            return list(self._kept)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def _add_in_turn(self, thing: T) -> None:
        with self._lock:
            self._kept.append(thing)


SHOWN = 5  # merges that an error lists


@final
class MergeRecord(NamedTuple):
    """One merge of one run.

    Attributes:
        time_s: The loop's clock at the merge, in seconds.
        step: Number of the run in its strategy.
        sequence: Number of the collective in its group, from 1.
        collective: Name of the collective, such as "all_reduce".
        file: Source file of the first member's call.
        line: Line of the first member's call.
        num_replicas: How many replicas met.
        op: The operator of a reduction, such as "SUM"; else empty.
        num_bytes: Size of what each member brought; one number if all brought as much.
        members: The replica ids, ascending.
        arrived_s: When each member arrived.
        sites: `file:line` of each member's call; empty if all called from the same line.
    """

    time_s: float
    step: int
    sequence: int
    collective: str
    file: str
    line: int
    num_replicas: int
    op: str
    num_bytes: tuple[int, ...]
    members: tuple[int, ...]
    arrived_s: tuple[float, ...]
    sites: tuple[str, ...]

    def describe(self) -> str:
        """Say in one line what was merged, where, and who was waited for."""
        op = f" ({self.op})" if self.op else ""
        sizes = f", {_range(self.num_bytes)} bytes per replica" if any(self.num_bytes) else ""
        where = f"{self.file}:{self.line}"
        if self.sites:
            pairs = zip(self.members, self.sites, strict=True)
            where = ", ".join(f"{site} (replica {member})" for member, site in pairs)
        waited = ""
        last = max(self.arrived_s)
        if len(self.members) > 1:
            late = self.members[self.arrived_s.index(last)]
            waited = f", {1e3 * (last - min(self.arrived_s)):.3g} ms for replica {late}"
        return (
            f"step {self.step}: {self.collective} #{self.sequence}{op} of replica"
            f"{'s' if len(self.members) > 1 else ''} {_range(self.members)}{sizes}, at {where}"
            f"{waited}"
        )


@final
class CollectiveRecord(NamedTuple):
    """One replica's part in one merge.

    Attributes:
        replica_id: Whose.
        step: Number of the run in its strategy.
        sequence: Number of the collective in its group, from 1.
        collective: Name of the collective.
        op: The operator of a reduction; else empty.
        num_bytes: Size of what the replica brought.
        site: `file:line` of its call.
        arrived_s: When it arrived, on the loop's clock.
        merged_s: When all were released.
    """

    replica_id: int
    step: int
    sequence: int
    collective: str
    op: str
    num_bytes: int
    site: str
    arrived_s: float
    merged_s: float


@final
class Recorder:
    """Keeps the newest merges of a strategy.

    Args:
        capacity: How many records are kept; older ones are dropped.

    Attributes:
        now: The clock, in seconds.

    Example:
        >>> recorder = Recorder(capacity=2)
        >>> code = (lambda: None).__code__
        >>> for sequence in range(3):
        ...     visits = [(code, 0, 0.125), (code, 0, 0.5)]
        ...     recorder.record(0.5, 0, sequence, "barrier", "", (0,), (0, 1), visits)
        >>> [record.sequence for record in recorder.records()]
        [1, 2]
        >>> recorder.collectives(replica_id=1)[-1].arrived_s
        0.5
    """

    __slots__ = ("_keep", "_ring", "now")

    def __init__(self, capacity: int = 256) -> None:
        if capacity < 1:
            raise ValueError(f"A recorder keeps at least 1 record, got capacity={capacity}.")
        self.now = time.monotonic  # looked up now: a test may have put another clock there
        self._ring: Ring[MergeEntry] = Ring(capacity)
        self._keep = self._ring.add  # bound once, as every merge is kept

    def record(
        self,
        time_s: float,
        step: int,
        sequence: int,
        collective: str,
        op: str,
        num_bytes: tuple[int, ...],
        members: tuple[int, ...],
        visits: Sequence[Visit],
    ) -> None:
        """Add one merge that is described by names.

        Args:
            time_s: When it ended.
            step: Number of the run.
            sequence: Number of the collective.
            collective: Its name.
            op: The operator of a reduction, or "".
            num_bytes: Size of what each member brought, or of what all of them did.
            members: Who met.
            visits: Where each member called from, and when it arrived.
        """
        parsed = ReduceOp.parse(op) if op else None
        self._keep((time_s, step, sequence, collective, parsed, num_bytes, members, visits))

    def merge_ended(self, merge: ObservedMerge, error: BaseException | None) -> None:
        """Add a merge that has just ended; one that failed is not kept."""
        if error is None:
            self._keep(merge.entry(self.now()))

    def records(self) -> tuple[MergeRecord, ...]:
        """Return the kept merges, oldest first."""
        return tuple(map(_readable, self._ring.copied()))

    def collectives(self, replica_id: int) -> tuple[CollectiveRecord, ...]:
        """Return one replica's part in the kept merges, oldest first."""
        return tuple(
            _part(record, replica_id)
            for record in self.records()
            if replica_id in record.members
        )  # fmt: skip

    def history(self) -> str:
        """Return the newest merges as lines for an error; empty if there were none."""
        newest = self._ring.copied()[-SHOWN:]
        lines = [f"\n  {_readable(entry).describe()}" for entry in newest]
        return "\nThe last merges, newest last:" + "".join(lines) if lines else ""

    def __repr__(self) -> str:
        return f"<Recorder | {len(self._ring)} of {self._ring.capacity} records>"


def _readable(entry: MergeEntry) -> MergeRecord:
    time_s, step, sequence, collective, op, num_bytes, members, visits = entry
    sites = [f"{code.co_filename}:{source_line(code, at)}" for code, at, _ in visits]
    first, at, _ = visits[0]
    return MergeRecord(
        time_s,
        step,
        sequence,
        collective,
        first.co_filename,
        source_line(first, at),
        len(members),
        "" if op is None else op.name,
        num_bytes,
        members,
        tuple(arrived_s for _, _, arrived_s in visits),
        tuple(sites) if len(set(sites)) > 1 else (),
    )


def _part(record: MergeRecord, replica_id: int) -> CollectiveRecord:
    position = record.members.index(replica_id)
    return CollectiveRecord(
        replica_id,
        record.step,
        record.sequence,
        record.collective,
        record.op,
        record.num_bytes[position if len(record.num_bytes) > 1 else 0],
        record.sites[position] if record.sites else f"{record.file}:{record.line}",
        record.arrived_s[position],
        record.time_s,
    )


def _range(numbers: Sequence[int]) -> str:
    """Write numbers shortly: "4", "0 to 3", "0, 2"."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return str(low)
    if len(set(numbers)) == high - low + 1:
        return f"{low} to {high}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def source_line(code: CodeType, instruction: int) -> int:
    """Return the source line of an instruction (a byte offset) of a code object."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
