"""The cores of this process: how many there are, and BLAS threads that do not outnumber them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import final

from threadpoolctl import ThreadpoolController


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class BlasBudget:
    """Divides the cores' BLAS threads over the CPU lanes in use, and restores them after.

    The limit is process-wide: BLAS libraries have no per-thread setting that holds everywhere.
    """

    def __init__(self) -> None:
        self._num_lanes = 0
        self._restore: Callable[[], None] | None = None

    @property
    def threads_per_lane(self) -> int | None:
        """BLAS threads an op may use, or None while no CPU lane is in use."""
        if self._num_lanes == 0:
            return None
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
            found = [library["num_threads"] for library in blas.info()]
            limits = blas.limit(limits=min([budget, *found]))  # never above the user's own limit
            self._restore = limits.restore_original_limits
