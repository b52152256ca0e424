"""Simulated gates: where a device thread of the library waits for somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from ._workers import PoolTable


@final
class SimGate:
    """Stands for a gate; the schedule decides when whoever waited goes on.

    Args:
        pools: The pools of the run.
        lock: A simulated lock.
    """

    __slots__ = ("_pools", "lock")

    def __init__(self, pools: PoolTable, lock: Any) -> None:
        self._pools = pools
        self.lock = lock
        lock.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Stand still until the gate is open; False if that took too long."""
        return bool(self.lock.acquire(True, -1 if timeout_s is None else timeout_s))

    def open(self) -> None:
        """Open the gate; an op that lets another one go on may be overtaken by it."""
        is_awaited = bool(self.lock.waiters)
        self.lock.release()
        op = self._pools.current_op
        if is_awaited and op is not None:
            op.on_thread().give_way()
