"""Simulated lanes: the library's own devices, run by the schedule."""

from __future__ import annotations

import threading
from asyncio import events
from typing import TYPE_CHECKING, Any, final

from ..devices import HOST, LaneStatistics, Op
from ..errors import DeviceError
from ._pools import DEFAULT_WORKERS, PoolOp, SimPool

if TYPE_CHECKING:
    from ._loop import SimLoop


@final
class DeviceOp(PoolOp):
    """An op of the library, in a simulated lane."""

    __slots__ = ()

    def claim(self) -> bool:
        """Take the op, unless it was withdrawn."""
        return bool(self.future.claim())

    def perform(self) -> None:
        """Run the op's function."""
        events._set_running_loop(None)
        try:
            self.future.run_claimed()
        finally:
            events._set_running_loop(self.pool.loop)

    def fail(self, error: BaseException) -> None:
        """End the op with an error, without running it."""
        self.future.fail_claimed(error)

    def deliver(self) -> None:
        """Wake whoever waits for the op."""
        self.future.resolve()

    def describe(self) -> str:
        """Name the op for stories."""
        return str(self.future.fn_name)


@final
class SimLane:
    """Stands for a device's lane.

    Args:
        pool: Where its ops wait.
    """

    __slots__ = ("_is_stopped", "_num_done", "name", "pool")

    def __init__(self, pool: SimPool) -> None:
        self.pool = pool
        self.name = pool.name
        self._is_stopped = False

    def put(self, op: Op[Any]) -> None:
        """Enqueue an op.

        Raises:
            DeviceError: If the lane was given back.
        """
        if self._is_stopped:
            raise DeviceError(
                f"Device {self.name} was given back, so it runs no more ops. Use a strategy that "
                "is open.",
                device=self.name,
            )
        self.pool.put(DeviceOp(self.pool, _never_called, (), op))

    def stop(self) -> None:
        """Refuse further ops."""
        self._is_stopped = True

    def join(self, timeout_s: float) -> None:
        """There is no thread to wait for."""

    def statistics(self) -> LaneStatistics:
        """Count what is queued and in flight."""
        pool = self.pool
        queued = len(pool.queue) + (pool.offered is not None)
        return LaneStatistics(queued, pool.num_running, 0, 0.0)


def _never_called() -> None:
    """Stand for the op's function, which the op itself calls."""


@final
class SimLaneTable:
    """Stands for the process's table of lanes while one schedule runs."""

    def __init__(self, loop: SimLoop) -> None:
        self.generation = 0
        self.gang_lock = threading.Lock()
        self._loop = loop
        self._lanes: dict[str, SimLane] = {}
        self._users: dict[str, int] = {}

    def lane(self, name: str) -> SimLane:
        """Return the lane of a device, making it if needed."""
        lane = self._lanes.get(name)
        if lane is None:
            workers = DEFAULT_WORKERS if name == HOST else 1
            lane = self._lanes[name] = SimLane(self._loop.pools.make(name, workers))
        return lane

    def acquire(self, names: tuple[str, ...]) -> None:
        """Count one more user of each lane."""
        for name in names:
            self._users[name] = self._users.get(name, 0) + 1

    def release(self, names: tuple[str, ...]) -> None:
        """Count one user less; a lane without users takes no more ops."""
        for name in names:
            left = self._users.get(name, 0) - 1
            if left > 0:
                self._users[name] = left
                continue
            self._users.pop(name, None)
            lane = self._lanes.pop(name, None)
            if lane is not None:
                lane.stop()

    def configure(self, num_streams: int, nice: int) -> None:
        """Refuse: options of real lanes have no meaning here."""
        raise DeviceError("Lane options cannot be set inside a simulated run.")

    def statistics(self) -> dict[str, LaneStatistics]:
        """Return the statistics of every lane, by device name."""
        return {name: self._lanes[name].statistics() for name in sorted(self._lanes)}
