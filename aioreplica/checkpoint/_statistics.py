"""Counters of a manager, and the bounds of the histogram of its saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

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
