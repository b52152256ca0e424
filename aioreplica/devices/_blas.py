"""The BLAS thread budget: CPU devices share the cores instead of oversubscribing them."""

from __future__ import annotations

from typing import Any, final

from threadpoolctl import ThreadpoolController

from ._cores import num_cores


@final
class BlasBudget:
    """Divides the cores' BLAS threads over the CPU lanes in use, and restores them after.

    The limit is process-wide: BLAS libraries have no per-thread setting that holds everywhere.
    """

    def __init__(self) -> None:
        self._num_lanes = 0
        self._limits: Any = None  # threadpoolctl is untyped

    @property
    def threads_per_lane(self) -> int | None:
        """BLAS threads an op may use, or None while no CPU lane is in use."""
        if self._num_lanes == 0:
            return None
        return max(1, num_cores() // self._num_lanes)

    def set_num_lanes(self, num_lanes: int) -> None:
        """Apply the budget for so many CPU lanes; 0 restores what was found at first."""
        if num_lanes == self._num_lanes:
            return
        before = self.threads_per_lane
        self._num_lanes = num_lanes
        budget = self.threads_per_lane
        if budget == before:
            return
        if self._limits is not None:
            self._limits.restore_original_limits()
            self._limits = None
        if budget is not None:
            blas = ThreadpoolController().select(user_api="blas")
            found = [library["num_threads"] for library in blas.info()]
            self._limits = blas.limit(limits=min([budget, *found]))  # never above the user's own
