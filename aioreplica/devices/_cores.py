"""The cores of this process: how many there are, and BLAS threads that do not outnumber them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, TypeAlias, final

from threadpoolctl import ThreadpoolController

BlasThreads: TypeAlias = int | Literal["auto"] | None
"""How many threads BLAS has while a strategy is open, see `set_lane_options`."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class BlasBudget:
    """Limits BLAS threads while CPU lanes are in use, and restores their number after.

    The limit is process-wide: BLAS libraries have no per-thread setting that holds everywhere.

    Args:
        threads: See `set_lane_options`.
    """

    def __init__(self, threads: BlasThreads = "auto") -> None:
        self._threads = threads
        self._num_lanes = 0
        self._restore: Callable[[], None] | None = None

    @property
    def threads_per_lane(self) -> int | None:
        """BLAS threads an op may use; None without a limit, or while no CPU lane is in use."""
        if self._num_lanes == 0 or self._threads is None:
            return None
        if self._threads != "auto":
            return self._threads
        return max(1, num_cores() // self._num_lanes)

    def set_num_lanes(self, num_lanes: int) -> None:
        """Apply the budget for so many CPU lanes; 0 restores the numbers found at first."""
        if num_lanes == self._num_lanes:
            return
        before = self.threads_per_lane
        self._num_lanes = num_lanes
        budget = self.threads_per_lane
        if budget == before:
            return
        if self._restore is not None:
            self._restore()
            self._restore = None
        if budget is not None:
            blas = ThreadpoolController().select(user_api="blas")
            if self._threads == "auto":  # never above the user's own limit
                budget = min([budget, *(library["num_threads"] for library in blas.info())])
            self._restore = blas.limit(limits=budget).restore_original_limits
