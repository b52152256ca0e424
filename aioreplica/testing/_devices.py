"""Simulated devices: lanes whose ops the schedule runs, and the gates that device threads wait at.

`SimLaneTable` takes the place of the process's table of lanes, in the registry, so the library
itself asks it for lanes and gates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, final

from ..devices import COLLECTIVES, HOST, LaneStatistics, Op, OpTracker
from ..errors import DeviceError
from ..telemetry import Observers, ThreadWait
from ._pools import DEFAULT_WORKERS, PoolOp, PoolTable, SimPool

COLLECTIVE_WORKERS: Final = 4
WORKERS: Final = {HOST: DEFAULT_WORKERS, COLLECTIVES: COLLECTIVE_WORKERS}
"""As on a machine with many cores; all others have one."""


@final
class DeviceOp(PoolOp):
    """An op of the library, in a simulated lane."""

    __slots__ = ()

    @property
    def lender(self) -> Any:
        """The run that the op belongs to."""
        return self.future.tracker

    def claim(self) -> bool:
        """Take the op, unless it was withdrawn."""
        return bool(self.future.claim())

    def perform(self, context: Context) -> None:
        """Run the op's function, and tell observers as a real lane does."""
        op, name, observers = self.future, self.pool.name, observers_of(self.future.tracker)
        if (tell := observers.op_started) is not None:
            tell(op, name)
        op.run_claimed()
        if (tell := observers.op_ended) is not None:
            tell(op, name)

    def fail(self, error: BaseException) -> None:
        """End the op with an error, without running it."""
        self.future.fail_claimed(error)

    def deliver(self) -> None:
        """Complete the op's future, after what threads asked for while it ran."""
        self.future.completions.deliver()
        self.future.resolve()

    def describe(self) -> str:
        """Name the op for stories."""
        return str(self.future.fn_name)


@final
class SimGate:
    """Stands for a gate; the schedule decides when the op that waited goes on.

    Args:
        pools: The pools of the run.
    """

    __slots__ = ("_pools", "lock")

    def __init__(self, pools: PoolTable) -> None:
        self._pools = pools
        self.lock: Any = threading.Lock()  # Any: a simulated one, inside a run
        self.lock.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is open; False if that took longer than `timeout_s`."""
        return bool(self.lock.acquire(True, -1 if timeout_s is None else timeout_s))

    def open(self) -> None:
        """Open the gate; an op that lets another one go on may be overtaken by it."""
        is_awaited = bool(self.lock.waiters)
        self.lock.release()
        op = self._pools.current_op
        if is_awaited and op is not None:
            op.on_thread().give_way()


@final
class SimLane:
    """Stands for a device's lane.

    Args:
        pool: Where its ops wait.
    """

    __slots__ = ("_is_stopped", "_num_done", "name", "pool")
    streams = None  # functions end with their work

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
        if (tell := observers_of(op.tracker).op_queued) is not None:
            tell(op, self.name)
        self.pool.put(DeviceOp(self.pool, _never_called, (), op))

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let other ops run while the op that runs waits for something; see `Lane.lend`."""
        pool = self.pool
        op = pool.table.current_op
        assert op is not None  # it is served by this lane
        op.on_thread()
        pool.lend(op.lender)
        try:
            yield
        finally:
            gate = SimGate(pool.table)
            if not pool.take_back(op.lender, gate.open):
                self._wait_for_worker(gate, observers_of(op.lender))
            pool.lends_no_longer(op.lender)

    def _wait_for_worker(self, gate: SimGate, observers: Observers) -> None:
        wait = ThreadWait("its lane, which it has lent to other ops")
        if (tell := observers.wait_began) is not None:
            tell(wait)
        try:
            gate.wait()
        finally:
            if (tell := observers.wait_ended) is not None:
                tell(wait)

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


def observers_of(tracker: OpTracker | None) -> Observers:
    """Return whom to tell about the ops of a run; None stands for ops outside every run."""
    return (OpTracker() if tracker is None else tracker).observers


def _never_called() -> None:
    """Stand for the op's function, which the op itself calls."""


@final
class SimLaneTable:
    """Stands for the process's table of lanes while one schedule runs."""

    is_simulated = True

    def __init__(self, pools: PoolTable) -> None:
        self.generation = 0
        self.num_collective_streams = COLLECTIVE_WORKERS
        self.gang_lock = threading.Lock()
        self._pools = pools
        self._lanes: dict[str, SimLane] = {}
        self._lane_of: dict[SimPool, SimLane] = {}  # given back ones too: they still run ops
        self._users: dict[str, int] = {}

    def lane(self, name: str, *, num_streams: int | None = None, nicer: int = 0) -> SimLane:
        """Return the lane of a device, making it if needed; none of its threads is nicer."""
        lane = self._lanes.get(name)
        if lane is None:
            workers = num_streams or WORKERS.get(name, 1)
            lane = self._lanes[name] = SimLane(self._pools.make(name, workers))
            self._lane_of[lane.pool] = lane
        return lane

    def served_lane(self) -> SimLane | None:
        """Return the lane whose op runs now."""
        op = self._pools.current_op
        return self._lane_of.get(op.pool) if op is not None else None

    def new_gate(self, loop: object) -> SimGate:
        """Make a closed gate, whose waits the schedule sees."""
        return SimGate(self._pools)

    def acquire(self, names: tuple[str, ...]) -> None:
        """Count one more user of each lane."""
        for name in names:
            self._users[name] = self._users.get(name, 0) + 1

    def retire(self, name: str) -> None:
        """Do nothing: no op hangs here."""

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

    def configure(self, *options: object) -> None:
        """Refuse: options of real lanes have no meaning here."""
        raise DeviceError("Lane options cannot be set inside a simulated run.")

    def statistics(self) -> dict[str, LaneStatistics]:
        """Return the statistics of every lane, by device name."""
        return {name: self._lanes[name].statistics() for name in sorted(self._lanes)}
