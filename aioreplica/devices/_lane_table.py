"""All lanes of the process: made at the first op, counted by the strategies that use them."""

from __future__ import annotations

import asyncio
import atexit
import operator
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, final

from ..context import REGISTRY
from ..errors import DeviceError
from ._cores import BlasBudget, BlasThreads, num_cores
from ._gate import Gate
from ._lane import Lane, LaneProcess, LaneStatistics, forget_other_threads, served_lane
from ._logical import is_process_device
from ._streams import find_streams

HOST = "host"
"""Name of the lane of functions without a device."""
COLLECTIVES = "collectives"
"""Name of the lane of large reductions."""
EXIT_JOIN_S = 0.5
MAX_C_INT = 2**31 - 1


@final
class LaneTable:
    """Finds the lane of a device, and ends lanes that no strategy uses.

    Invariants:
        * A lane in `_lanes` is running or has not had an op; a stopped one is taken out first.
        * `generation` grows by one in the child of every fork: what was opened before is dead.
    """

    is_simulated = False
    """Whether it stands for the real one in a test that decides what happens when."""

    def __init__(self) -> None:
        self.generation = 0
        self.nice = 5
        self.background = False
        self.num_streams = 1
        self.num_collective_streams = _default_collective_streams()
        self.blas_threads: BlasThreads = "auto"
        self._blas = BlasBudget(self.blas_threads)
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._at_exit)

    def _reset(self) -> None:
        self.gang_lock = threading.Lock()
        self._lock = threading.RLock()
        self._lanes: dict[str, Lane] = {}
        self._users: dict[str, int] = {}

    def lane(self, name: str, *, num_streams: int | None = None, nicer: int = 0) -> Lane:
        """Return the lane of a device (or of the host), making it if needed.

        `num_streams` is for a lane whose number of threads is not the user's choice, `nicer` for
        one that has to leave the cores to the others.
        """
        lane = self._lanes.get(name)
        if lane is None:
            with self._lock:
                streams = num_streams or self._streams_of(name)
                process = self._new_process(name) if is_process_device(name) else None
                if process is not None:
                    streams = 1  # the process has one thread for ops
                is_device = num_streams is None and name != HOST  # or the lane of reductions
                new = Lane(
                    name,
                    num_streams=streams,
                    nice=self.nice + nicer,
                    background=self.background and is_device,
                    process=process,
                    streams=find_streams(name) if is_device else None,
                )
                lane = self._lanes.setdefault(name, new)
        return lane

    def served_lane(self) -> Lane | None:
        """Return the lane whose ops the calling thread runs, None elsewhere."""
        return served_lane()

    def new_gate(self, loop: asyncio.AbstractEventLoop | None) -> Gate:
        """Make a closed gate for a thread that works for a run on `loop`."""
        return Gate(loop)

    def acquire(self, names: tuple[str, ...]) -> None:
        """Count one more user of each lane, and limit BLAS threads while CPU ones are used."""
        with self._lock:
            for name in names:
                self._users[name] = self._users.get(name, 0) + 1
            self._budget()

    def release(self, names: tuple[str, ...]) -> None:
        """Count one user less; a lane without users ends after the ops it has."""
        with self._lock:
            for name in names:
                left = self._users.get(name, 0) - 1
                if left > 0:
                    self._users[name] = left
                    continue
                self._users.pop(name, None)
                lane = self._lanes.pop(name, None)
                if lane is not None:
                    lane.stop()
            self._budget()

    def retire(self, name: str) -> None:
        """Take a lane out whose op hangs: the next op of the device gets a thread of its own."""
        with self._lock:
            lane = self._lanes.pop(name, None)
        if lane is not None:
            lane.stop()

    def configure(
        self,
        num_streams: int,
        nice: int,
        background: bool,
        num_collective_streams: int | None,
        blas_threads: BlasThreads,
    ) -> None:
        """Set options of lanes made from now on; BLAS threads at once."""
        with self._lock:
            if self._lanes:
                used = ", ".join(sorted(self._lanes))
                raise DeviceError(
                    f"Lane options cannot change while lanes are in use ({used}). "
                    "Set them at program start."
                )
            self.num_streams = num_streams
            self.nice = nice
            self.background = background
            self.num_collective_streams = num_collective_streams or _default_collective_streams()
            self.blas_threads = blas_threads
            self._blas.set_num_lanes(0)
            self._blas = BlasBudget(blas_threads)
            self._budget()

    def statistics(self) -> dict[str, LaneStatistics]:
        """Return the statistics of every lane, by device name."""
        with self._lock:
            return {name: self._lanes[name].statistics() for name in sorted(self._lanes)}

    def __repr__(self) -> str:
        return f"<LaneTable | {len(self._lanes)} lanes, {len(self._users)} in use>"

    def _new_process(self, name: str) -> LaneProcess:
        from .processes import DeviceProcess  # it needs cloudpickle

        return DeviceProcess(name, lambda: self._blas.threads_per_lane)

    def _streams_of(self, name: str) -> int:
        if name == COLLECTIVES:
            return self.num_collective_streams
        return _host_streams() if name == HOST else self.num_streams

    def _budget(self) -> None:
        self._blas.set_num_lanes(len([name for name in self._users if name.startswith("cpu:")]))

    def _after_fork(self) -> None:
        """Start afresh in the child: the parent's threads do not exist here.

        BLAS keeps the parent's limit, and the budget what it was before, until a strategy of the
        child asks for another one or is closed.
        """
        REGISTRY.reset_after_fork()
        forget_other_threads()
        self.generation += 1
        self._reset()

    def _at_exit(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.stop()
        deadline = monotonic() + EXIT_JOIN_S
        for lane in lanes:
            lane.join(max(0.0, deadline - monotonic()))


def _host_streams() -> int:
    return min(32, num_cores() + 4)


def _default_collective_streams() -> int:
    """Return as many threads as keep memory busy; more would only take cores from the devices."""
    return min(4, num_cores())


def lane_table() -> LaneTable:
    """Return the lane table of the process."""
    return REGISTRY.once("lane_table", LaneTable)


def lend_lane() -> AbstractContextManager[None]:
    """Lend the lane whose op the calling thread runs, see `Lane.lend`; nothing elsewhere."""
    lane = lane_table().served_lane()
    return nullcontext() if lane is None else lane.lend()


def name_of_served_lane() -> str | None:
    """Return the name of the lane whose ops the calling thread runs, None elsewhere."""
    lane = lane_table().served_lane()
    return None if lane is None else lane.name


def new_gate(loop: asyncio.AbstractEventLoop | None) -> Gate:
    """Make a closed gate; device threads of the library wait at gates only.

    A test may have put another lane table in place, which makes gates under its control.
    """
    return lane_table().new_gate(loop)


def set_lane_options(
    *,
    num_streams: int = 1,
    nice: int = 5,
    background: bool = False,
    num_collective_streams: int | None = None,
    blas_threads: BlasThreads = "auto",
) -> None:
    """Set how lanes are made, before the first op.

    Args:
        num_streams: Threads per device; 1 keeps the ops of a device in stream order.
        nice: Added to the OS niceness of lane threads; 0 leaves them at the loop's priority.
        background: Whether lane threads run only where a core has nothing else to do (Linux,
            `SCHED_IDLE`), so that requests and the loop never wait for an op to be preempted. For
            a machine with a core to spare: where other processes keep every core busy, ops make
            hardly any progress, and a loop that needs the GIL from one waits for it. Lanes that
            write files, and that of functions without a device, keep `nice` only.
        num_collective_streams: Threads that reduce large arrays; None takes one per core, at most
            4. Results do not depend on it.
        blas_threads: How many threads BLAS libraries (NumPy's too) have while a strategy with CPU
            devices is open. That is a setting of the whole process, handlers and other threads
            included: there is none for single threads. "auto" divides the cores over the CPU
            devices of open strategies, within a limit that was set before; a number is taken as it
            is; None leaves BLAS alone. Restored when the last strategy is closed. It holds in the
            processes of devices too.

    Raises:
        ValueError: If a number of streams or threads is below 1, or too large for a C int, or
            `nice` is not between 0 and 19.
        TypeError: If a number is not an int, or `blas_threads` is something else.
        DeviceError: If lanes exist already.
    """
    num_streams = _checked_number("num_streams", num_streams, "")
    nice = _checked_number("nice", nice, "", at_least=0, at_most=19)
    if num_collective_streams is not None:
        num_collective_streams = _checked_number(
            "num_collective_streams", num_collective_streams, " or None"
        )
    if blas_threads is not None and not (isinstance(blas_threads, str) and blas_threads == "auto"):
        blas_threads = _checked_number("blas_threads", blas_threads, ', "auto" or None')
    lane_table().configure(num_streams, nice, background, num_collective_streams, blas_threads)


def _checked_number(
    name: str, value: Any, or_what: str, *, at_least: int = 1, at_most: int = MAX_C_INT
) -> int:
    """Check a number here: threads that cannot use it would end, and their ops never."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int{or_what}, got {value!r}.")
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be between {at_least} and {at_most}, got {number}.")
    return number
