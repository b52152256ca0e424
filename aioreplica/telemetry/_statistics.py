"""Statistics of running strategies: skew, waits, totals for exporters, and use of the library."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import final

from ..context import REGISTRY
from ._observer import Event, ObservedMerge, ObservedRun, Observer
from ._recorder import MergeRecord


@final
@dataclass(frozen=True, slots=True)
class ReplicaSkew:
    """Lateness of one replica at the merges that the recorder keeps.

    Attributes:
        replica_id: Whose.
        num_merges: Merges of several replicas that it took part in.
        num_last: In how many of them it arrived last.
        late_s: Seconds between the first arrival and its own, summed.
        waited_s: Seconds between its own arrival and the last, summed.
        site: `file:line` and collective where it was late the longest in all; "-" if nowhere.
    """

    replica_id: int
    num_merges: int
    num_last: int
    late_s: float
    waited_s: float
    site: str


@final
@dataclass(frozen=True, slots=True)
class ReplicaWait:
    """Something that a replica waits for.

    Attributes:
        step: Number of the run in its strategy.
        replica_id: Who waits.
        device: Name of its device, or "-".
        what: A collective with its number and argument, an op, or what else it is.
        waits_for: The replicas that have not arrived; empty for other waits and running merges.
        where: `file:line` of the call, or "-".
    """

    step: int
    replica_id: int
    device: str
    what: str
    waits_for: tuple[int, ...]
    where: str

    def describe(self) -> str:
        """Return the wait as a sentence."""
        for_whom = ""
        if self.waits_for:
            plural = "s" if len(self.waits_for) > 1 else ""
            for_whom = f" for replica{plural} {', '.join(map(str, self.waits_for))}"
        return f"Replica {self.replica_id} waits{for_whom} in {self.what} at {self.where}."


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of this process's use of the library; they are sent nowhere.

    Attributes:
        strategies: How many strategies of each kind were made, by class name.
        replicas: The most replicas that one of the kind had.
        input_calls: How often each method that distributes input was called.

    Source:
        The gauges of tf.distribute: distribution_strategy, replica, input_api.
    """

    strategies: Mapping[str, int]
    replicas: Mapping[str, int]
    input_calls: Mapping[str, int]


@final
class UsageCounters:
    """Counts the usage of the library in this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._strategies: Counter[str] = Counter()
        self._replicas: dict[str, int] = {}
        self._input_calls: Counter[str] = Counter()

    @staticmethod
    def of_process() -> UsageCounters:
        """Return those of the process."""
        return REGISTRY.once("usage", UsageCounters)

    def count_strategy(self, kind: str, num_replicas: int) -> None:
        """Count a strategy that was made."""
        with self._lock:
            self._strategies[kind] += 1
            self._replicas[kind] = max(num_replicas, self._replicas.get(kind, 0))

    def count_input(self, method: str) -> None:
        """Count a call of a method that distributes input."""
        with self._lock:
            self._input_calls[method] += 1

    def usage(self) -> Usage:
        """Return the counts, names in alphabetical order."""
        with self._lock:
            counts = self._strategies, self._replicas, self._input_calls
            return Usage(*(dict(sorted(each.items())) for each in counts))


def usage() -> Usage:
    """Return how this process has used the library so far.

    Example:
        >>> import aioreplica as ar
        >>> before = usage().strategies.get("OneDeviceStrategy", 0)
        >>> strategy = ar.OneDeviceStrategy("cpu:0")
        >>> usage().strategies["OneDeviceStrategy"] - before
        1
    """
    return UsageCounters.of_process().usage()


def skew_of(records: Sequence[MergeRecord], num_replicas: int) -> tuple[ReplicaSkew, ...]:
    """Return how late each replica came to the recorded merges, in replica order.

    Example:
        >>> record = MergeRecord(
        ...     1.0, 0, 1, "barrier", "a.py", 7, 2, "", (0,), (0, 1), (0.25, 0.75), ()
        ... )
        >>> skew_of([record], 2)[1].late_s
        0.5
    """
    late: list[dict[str, float]] = [{} for _ in range(num_replicas)]
    last, waited, taken = ([0] * num_replicas, [0.0] * num_replicas, [0] * num_replicas)
    for record in records:
        if len(record.members) < 2:
            continue
        first_s, last_s = min(record.arrived_s), max(record.arrived_s)
        last[record.members[record.arrived_s.index(last_s)]] += 1
        for position, (member, at_s) in enumerate(
            zip(record.members, record.arrived_s, strict=True)
        ):
            site = record.sites[position] if record.sites else f"{record.file}:{record.line}"
            where = f"{record.collective} at {site}"
            late[member][where] = late[member].get(where, 0.0) + at_s - first_s
            waited[member] += last_s - at_s
            taken[member] += 1
    return tuple(
        ReplicaSkew(
            i, taken[i], last[i], sum(late[i].values()), waited[i],
            max(late[i], key=late[i].__getitem__, default="-"),
        )
        for i in range(num_replicas)
    )  # fmt: skip


def straggler_text(skew: Sequence[ReplicaSkew], device_names: Sequence[str]) -> str:
    """Describe who holds up the others: a sentence, then a table of all replicas."""
    if not any(each.num_merges for each in skew):
        return "No merge of several replicas is recorded."
    worst = max(skew, key=lambda each: (each.late_s, each.num_merges))
    head = "  replica  device  last  late (ms)  waited (ms)"
    rows = [
        f"  {each.replica_id:<7}  {device:<6}  {each.num_last:>4}  {1e3 * each.late_s:>9.3f}  "
        f"{1e3 * each.waited_s:>11.3f}"
        for each, device in zip(skew, device_names, strict=True)
    ]
    waited_ms = 1e3 * worst.late_s / worst.num_merges
    return (
        f"Replica {worst.replica_id} ({device_names[worst.replica_id]}) was late by "
        f"{waited_ms:.3g} ms per merge, and last in {worst.num_last} of {worst.num_merges}; "
        f"most of it in {worst.site}.\n" + "\n".join([head, *rows])
    )


@final
@dataclass(frozen=True, slots=True)
class CollectiveTotals:
    """Cost of one kind of collective.

    Attributes:
        num_merges: How often replicas have met in it.
        num_failed: How many of these failed.
        num_bytes: What all members brought.
        waited_s: Seconds that members waited for the last one, summed over members.
    """

    num_merges: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0


BOUNDS_S = (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of the histograms of runs and of waits, in seconds."""


@final
class Totals:
    """Counts what happens in the runs of a strategy; read from any thread.

    Attributes:
        observer: What to add to the strategy's observers.
    """

    __slots__ = (
        "_begun", "_collectives", "_faults", "_lock", "_num_runs", "_run_counts", "_run_s",
        "_scalars", "_wait_counts", "observer",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = Lock()  # merges may end on several device threads at once
        self._begun: dict[int, float] = {}
        self._num_runs = 0
        self._run_s = 0.0
        self._run_counts = [0] * (len(BOUNDS_S) + 1)  # of runs, between the bounds
        self._wait_counts: dict[str, list[int]] = {}
        self._collectives: dict[str, CollectiveTotals] = {}
        self._faults: Counter[str] = Counter()
        self._scalars: dict[str, float] = {}
        self.observer = Observer(
            run_began=self._run_began,
            run_ended=self._run_ended,
            merge_ended=self._merge_ended,
            fault=self._fault,
            event_added=self._event_added,
        )

    def _run_began(self, run: ObservedRun) -> None:
        self._begun[run.step] = time.perf_counter()

    def _run_ended(self, run: ObservedRun) -> None:
        begin = self._begun.pop(run.step, None)
        if begin is not None:
            seconds = time.perf_counter() - begin
            with self._lock:
                self._num_runs += 1
                self._run_s += seconds
                self._run_counts[bisect_left(BOUNDS_S, seconds)] += 1

    def _merge_ended(self, merge: ObservedMerge, error: BaseException | None) -> None:
        _, _, _, name, _, num_bytes, members, visits = merge.entry(0.0)
        arrived = [at_s for _, _, at_s in visits]
        last_s = max(arrived)
        waited_s = len(arrived) * last_s - sum(arrived)
        total_bytes = sum(num_bytes) if len(num_bytes) > 1 else num_bytes[0] * len(members)
        with self._lock:
            old = self._collectives.get(name, CollectiveTotals())
            self._collectives[name] = CollectiveTotals(
                old.num_merges + 1,
                old.num_failed + (error is not None),
                old.num_bytes + total_bytes,
                old.waited_s + waited_s,
            )
            counts = self._wait_counts.setdefault(name, [0] * (len(BOUNDS_S) + 1))
            for at_s in arrived:
                counts[bisect_left(BOUNDS_S, last_s - at_s)] += 1

    def _fault(self, _step: int, error: BaseException) -> None:
        with self._lock:
            self._faults[type(error).__name__] += 1

    def _event_added(self, event: Event) -> None:
        if event.kind == "scalar" and not isinstance(event.value, str) and event.value is not None:
            with self._lock:
                self._scalars[event.name] = event.value

    def runs(self) -> tuple[int, float]:
        """Return how many runs have ended, and the seconds they took."""
        with self._lock:
            return self._num_runs, self._run_s

    def run_counts(self) -> tuple[int, ...]:
        """Return how many runs took at most so long as each bound says, and how many in all."""
        with self._lock:
            return tuple(accumulate(self._run_counts))

    def wait_counts(self, collective: str) -> tuple[int, ...]:
        """Return the same of the waits of replicas in a kind of collective."""
        with self._lock:
            return tuple(accumulate(self._wait_counts.get(collective, [0] * (len(BOUNDS_S) + 1))))

    def collectives(self) -> dict[str, CollectiveTotals]:
        """Return the totals of each kind of collective, names in alphabetical order."""
        with self._lock:
            return dict(sorted(self._collectives.items()))

    def faults(self) -> dict[str, int]:
        """Return how many runs ended with an error, by its type."""
        with self._lock:
            return dict(sorted(self._faults.items()))

    def scalars(self) -> dict[str, float]:
        """Return the newest value of each number that steps recorded."""
        with self._lock:
            return dict(sorted(self._scalars.items()))

    def __repr__(self) -> str:
        return f"<Totals | {self._num_runs} runs, {len(self._collectives)} kinds of collectives>"
