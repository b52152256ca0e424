"""The doors to the outside, replaced for as long as schedules run.

Every replacement does the real thing when called from another thread, or between two schedules.
Afterwards everything is as it was, the state of `random` included.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from ..context import REGISTRY
from ._anyio import anyio_patches
from ._clock import clock_functions
from ._device_lanes import SimLaneTable
from ._forbidden import refuse
from ._locks import lock_class, rlock_class
from ._op_threads import OpThreads
from ._ordered import all_tasks, as_completed, wait
from ._task import SimTask
from ._thread_pools import executor_patches

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._schedule import Schedule

COLLECT_EVERY: Final = 100
LANE_TABLE: Final = "lane_table"
SOURCE_LANES: Final = "source_lanes"
ABSENT: Final = object()


@final
class Sandbox:
    """Replaces clocks, randomness, pools and real I/O inside its `with` block.

    Not to be nested: its user checks that no loop is running.

    Attributes:
        loop: The loop of the schedule that runs.
        numbers: Hashes of objects that a run made and that are walked in sets, by address.
        threads: Where ops run that wait.
    """

    def __init__(self) -> None:
        self.loop: SimLoop = None  # type: ignore[assignment]  # set by begin, for each schedule
        self._is_running = False
        self._thread = threading.get_ident()
        self._gate = REGISTRY.once("testing_gate", threading.RLock)
        self._undo: list[tuple[Any, str, Any]] = []
        self._bytes: Random | None = None
        self._seed = 0
        self._num_runs = 0
        self.numbers: dict[int, int] = {}
        self.threads = OpThreads(self)
        self._collects = False
        self._random_state: Any = None
        self._lane_table: Any = None
        self._source_lanes: Any = None

    def is_here(self) -> bool:
        """Whether the caller is the program under test."""
        if not self._is_running:
            return False
        ident = threading.get_ident()
        return ident == self._thread or ident in self.threads.idents

    def who(self) -> Any:
        """Return what stands for the thread that goes on: an op, or the loop for all tasks."""
        if not self.is_here():
            return threading.get_ident()
        op = self.loop.pools.current_op
        return self if op is None else op

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the program under test for a moment, to do something real."""
        is_running, self._is_running = self._is_running, False
        try:
            yield
        finally:
            self._is_running = is_running

    # ---- around all schedules ----------------------------------------------------------------

    def __enter__(self) -> Sandbox:
        self._gate.acquire()  # what is replaced belongs to the whole process
        self._collects = gc.isenabled()
        gc.disable()  # what a finaliser does must not depend on when the collector runs
        self._random_state = random.getstate()
        self._lane_table = REGISTRY.replace(LANE_TABLE, None)
        self._source_lanes = REGISTRY.replace(SOURCE_LANES, None)
        try:
            self._patch_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for owner, name, value in reversed(self._undo):
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()
        REGISTRY.replace(LANE_TABLE, self._lane_table)
        REGISTRY.replace(SOURCE_LANES, self._source_lanes)
        random.setstate(self._random_state)
        self.threads.close()
        if self._collects:
            gc.enable()
        self._gate.release()

    # ---- around each schedule ----------------------------------------------------------------

    def begin(self, loop: SimLoop, schedule: Schedule) -> None:
        """Start a schedule: same seed, same random numbers."""
        self._num_runs += 1
        self.numbers.clear()
        if self._num_runs % COLLECT_EVERY == 0:
            gc.collect(1)
        self.loop = loop
        self._seed = seed = schedule.seed
        self._bytes = None
        random.seed(seed)
        if schedule.faults is not None:
            loop.pools.faults = schedule.faults.for_run(seed)
        loop.pools.threads = self.threads if self.threads.is_needed else None
        REGISTRY.replace(LANE_TABLE, SimLaneTable(loop))
        REGISTRY.replace(SOURCE_LANES, None)
        self._is_running = True

    def end(self) -> None:
        """End a schedule."""
        self._is_running = False

    # ---- the replacements --------------------------------------------------------------------

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, ABSENT)))
        setattr(owner, name, value)

    def _patch_all(self) -> None:
        for name, value in clock_functions(
            self, {name: getattr(time, name) for name in CLOCK_NAMES}
        ).items():
            self._patch(time, name, value)
        for module in (threading, queue):  # they have a name of their own for the clock
            self._patch(module, CLOCK_ALIASES[module.__name__], time.monotonic)
        urandom = self._random_bytes(os.urandom)
        self._patch(os, "urandom", urandom)
        self._patch(random, "_urandom", urandom)  # of SystemRandom, and so of `secrets`
        self._patch(random.Random, "seed", self._seeding(random.Random.seed))
        lock = lock_class(self)
        self._patch(threading, "Lock", lock)
        self._patch(threading, "_allocate_lock", lock)  # of conditions
        self._patch(threading, "RLock", rlock_class(self))
        self._patch(uuid, "uuid1", self._uuid1(uuid.uuid1))
        for module in (asyncio, asyncio.tasks):
            self._patch(module, "Task", SimTask)
            self._patch(module, "wait", wait)
            self._patch(module, "as_completed", as_completed)
            self._patch(module, "all_tasks", all_tasks)
        self._patch_refusals()
        for owner, name, value in [*executor_patches(self), *anyio_patches(self)]:
            self._patch(owner, name, value)

    def _patch_refusals(self) -> None:
        self._refuse(
            threading.Thread,
            "start",
            "A thread started",
            "Use asyncio.to_thread, run_in_executor or a device op: those are simulated.",
        )
        self._refuse(socket.socket, "__init__", "A socket made", "")
        for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
            self._refuse(socket, name, "A name looked up", "")
        self._refuse(subprocess.Popen, "__init__", "A process started", "")
        for owner, name in process_starters():
            self._refuse(owner, name, "A process started", "")
        if "concurrent.futures.process" in sys.modules:  # else the import alone takes a while
            self._refuse(
                futures.ProcessPoolExecutor,
                "submit",
                "A process started",
                "Await loop.run_in_executor(pool, ...): that is simulated.",
            )

    def _refuse(self, owner: Any, name: str, what: str, instead: str) -> None:
        real = getattr(owner, name)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self.is_here():
                refuse(what, instead)
            return real(*args, **kwargs)

        self._patch(owner, name, stand_in)

    def _random_bytes(self, real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int, /) -> bytes:
            if not self.is_here():
                return real(size)
            if self._bytes is None:
                self._bytes = Random(self._seed ^ 0x5EED)
            return self._bytes.randbytes(size)

        return urandom

    def _seeding(self, real: Callable[..., None]) -> Callable[..., None]:
        def seed(generator: Random, a: Any = None, version: int = 2) -> None:
            if a is None and self.is_here():
                a = int.from_bytes(os.urandom(16))
            real(generator, a, version)

        return seed

    def _uuid1(self, real: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        def uuid1(node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
            if not self.is_here():
                return real(node, clock_seq)
            return uuid.UUID(bytes=os.urandom(16), version=1)

        return uuid1


def process_starters() -> list[tuple[Any, str]]:
    """Return what starts processes, besides `subprocess`: where it is, and its name."""
    owners = [os, sys.modules.get("_posixsubprocess")]  # the latter serves multiprocessing
    names = ("fork", "forkpty", "system", "posix_spawn", "posix_spawnp", "fork_exec")
    return [(owner, name) for owner in owners for name in names if hasattr(owner, name)]


CLOCK_ALIASES: Final = {"threading": "_time", "queue": "time"}
CLOCK_NAMES: Final = (
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "sleep",
)
