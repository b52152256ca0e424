"""Counters of a manager, the bounds of the histogram of its saves, and who is told of each."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic, time
from typing import final

from ..telemetry import ObservedCheckpoint, Observers

SAVE_BOUNDS_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histogram of saves, in seconds."""


@final
@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Counters of a manager.

    Attributes:
        num_saved: Steps it has saved.
        is_saving: Whether a save is going on.
        num_retried: Calls of the storage that failed and were made again.
        num_failed: Saves that failed, or were cancelled.
        num_bytes: Length of the data files of all saves.
        save_s: Seconds from begin to end of the files of all saves, without waiting for steps.
        save_counts: How many saves took at most so long as each of SAVE_BOUNDS_S says.
        last_step: The step saved last; None before the first one.
        last_save_s: How long that took.
        last_saved_at: When it ended, by the clock on the wall.
        age_s: How long ago that is.
    """

    num_saved: int
    is_saving: bool
    num_retried: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    save_s: float = 0.0
    save_counts: tuple[int, ...] = (0,) * len(SAVE_BOUNDS_S)
    last_step: int | None = None
    last_save_s: float | None = None
    last_saved_at: float | None = None
    age_s: float | None = None


@final
class Counters:
    """Counts what a manager does, and tells observers of it.

    Attributes:
        observers: Who is told.
        num_saved: Steps that were saved.
        num_retried: Calls that were made again.
    """

    def __init__(self) -> None:
        self.observers = Observers()
        self.num_saved = self.num_retried = 0
        self._num_failed = self._num_bytes = 0
        self._counts = [0] * (len(SAVE_BOUNDS_S) + 1)  # of saves, between the bounds
        self._save_s = 0.0
        self._last: tuple[int, float, float, float] | None = None  # step, seconds, end by clocks

    def save_ended(
        self, step: int, began_s: float, num_bytes: int, error: BaseException | None
    ) -> None:
        """Count a save."""
        now = monotonic()
        seconds = now - began_s
        self._num_bytes += num_bytes
        if error is None:
            self.num_saved += 1
            self._save_s += seconds
            self._counts[bisect_left(SAVE_BOUNDS_S, seconds)] += 1
            self._last = (step, seconds, time(), now)
        else:
            self._num_failed += 1
        self._tell(ObservedCheckpoint("save", step, began_s, seconds, num_bytes, error))

    def restore_ended(self, step: int | None, began_s: float, error: BaseException | None) -> None:
        """Tell of a restore."""
        self._tell(ObservedCheckpoint("restore", step, began_s, monotonic() - began_s, 0, error))

    def _tell(self, done: ObservedCheckpoint) -> None:
        if (tell := self.observers.checkpoint_ended) is not None:
            tell(done)

    def statistics(self, *, is_saving: bool) -> CheckpointStatistics:
        """Return what was counted so far."""
        step, last_s, at, clock = (None,) * 4 if self._last is None else self._last
        return CheckpointStatistics(
            self.num_saved,
            is_saving,
            self.num_retried,
            self._num_failed,
            self._num_bytes,
            self._save_s,
            tuple(accumulate(self._counts[:-1])),
            step,
            last_s,
            at,
            None if clock is None else monotonic() - clock,
        )
