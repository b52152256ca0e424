"""Totals: what exporters of metrics count while a strategy runs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import final

from ._observer import Event, ObservedMerge, ObservedRun, Observer


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


@final
class Totals:
    """Counts what happens in the runs of a strategy; read from any thread.

    Attributes:
        observer: What to add to the strategy's observers.
    """

    __slots__ = (
        "_begun", "_collectives", "_faults", "_lock", "_num_runs", "_run_s", "_scalars", "observer",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = Lock()  # merges may end on several device threads at once
        self._begun: dict[int, float] = {}
        self._num_runs = 0
        self._run_s = 0.0
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
            with self._lock:
                self._num_runs += 1
                self._run_s += time.perf_counter() - begin

    def _merge_ended(self, merge: ObservedMerge, error: BaseException | None) -> None:
        _, _, _, name, _, num_bytes, members, visits = merge.entry(0.0)
        arrived = [at_s for _, _, at_s in visits]
        waited_s = len(arrived) * max(arrived) - sum(arrived)
        total_bytes = sum(num_bytes) if len(num_bytes) > 1 else num_bytes[0] * len(members)
        with self._lock:
            old = self._collectives.get(name, CollectiveTotals())
            self._collectives[name] = CollectiveTotals(
                old.num_merges + 1,
                old.num_failed + (error is not None),
                old.num_bytes + total_bytes,
                old.waited_s + waited_s,
            )

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
