"""The doors to the outside, replaced for as long as schedules run.

Every replacement does the real thing when called from another thread, or between two schedules.
Afterwards everything is as it was, the state of `random` included.
"""

from __future__ import annotations

import _thread
import asyncio
import datetime as dt
import gc
import os
import queue
import random
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from itertools import count
from random import Random
from threading import TIMEOUT_MAX, get_ident
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from ..context import REGISTRY
from . import _faults
from ._faults import Targets
from ._forbidden import is_foreign, is_importing, refuse, wait_in_c
from ._locks import lock_classes
from ._participants import SimTask
from ._patches import executor_patches, imported_names, new_modules, socket_patches
from ._sets import numbered
from ._simulation import Simulation
from ._started import thread_patches
from ._strategies import mix
from ._watchdog import Watchdog

if TYPE_CHECKING:
    from ._devices import SimLaneTable
    from ._loop import SimLoop
    from ._pools import PoolTable
    from ._schedule import Schedule

COLLECT_EVERY: Final = 100
LANE_TABLE: Final = "lane_table"
SOURCE_LANES: Final = "source_lanes"
FUSED_RULES: Final = "fused_rules"
ABSENT: Final = object()
IMPORTED_LATER: Final = {
    "numpy": "numpy.random",
    "aioreplica.devices": "aioreplica.testing._devices",
}
"""What a program that has imported the one would import in its first run: part of no other run."""
real_wait = asyncio.wait
real_as_completed = asyncio.as_completed
real_all_tasks = asyncio.all_tasks
if sys.version_info >= (3, 12):
    eager_task_factory = asyncio.create_eager_task_factory(
        SimTask
    )  # its first step is not a choice
ONLY_ASYNCIO: Final = (
    "Only asyncio is simulated: run the program there, with anyio's backend 'asyncio' if it is "
    "written for both."
)
ONLY_PYTHON: Final = (
    "It waits for its sockets in C, and ends the interpreter on a simulated loop. Put a stub "
    "of your own in its place: the methods of a servicer can be awaited directly."
)
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
REAL_CLOCK: Final = (
    "The program reads datetime.now(), which is real beside virtual time: what waits for it hardly "
    "goes on. Install time-machine (`pip install time-machine`), and it shows virtual time."
)
KEPT_CLOCKS: Final = ("time", "time_ns", "monotonic", "monotonic_ns", "sleep")
KEPT_CLOCK: Final = (
    "The program calls the real time.{}: it was kept before the run, in a class or as a default "
    "argument, where nothing can replace it. Look it up when it is called (`time.{}`)."
)
OTHER_LOOP: Final = (
    "The program runs an event loop of uvloop: it and what it opens are real, and no schedule "
    "decides about them. Use asyncio.run() in the program."
)
EPOCH_S: Final = 1_700_000_000.0 - 1000.0
"""What `time.time()` shows when virtual time is 0."""
LATEST_S: Final = 253_402_000_000.0
"""The end of the year 9999, which `datetime` cannot pass; a timer may be set beyond it."""


@final
class Sandbox:
    """Replaces clocks, randomness, pools and real I/O inside its `with` block.

    Not to be nested: its user checks that no loop is running.

    Attributes:
        simulation: The schedule that runs, for what takes the place of the real doors.
        watchdog: Interrupts steps that do not end.
        targets: What came by in its schedules that faults could strike.
        has_fresh_uuids: Whether every run has uuids of its own, as every process has: a registry of
            the process that is keyed by them is then as empty in a second run as in the first.
            Otherwise the seed of the schedule decides them.
        draws_uuids: Whether a run has drawn one.
    """

    def __init__(self) -> None:
        self.simulation = Simulation()
        self.watchdog = Watchdog(self.simulation)
        self.targets = Targets()
        self._gate = REGISTRY.once("testing_gate", threading.RLock)
        self._undo: list[tuple[Any, str, object]] = []
        self.has_fresh_uuids = self.draws_uuids = False
        self._bytes: Random | None = None
        self._uuids: Random | None = None
        self._seed = 0
        self._num_runs = 0
        self._collects = False
        self._random_state: Any = None
        self._lane_table: object = None
        self._source_lanes: Any = None
        self._wall: WallClock | None = None
        self._kept_clocks: dict[int, str] = {}

    # ---- around all schedules ----------------------------------------------------------------

    def __enter__(self) -> Sandbox:
        for name, later in IMPORTED_LATER.items():
            if name in sys.modules:
                import_module(later)
        self._gate.acquire()  # what is replaced belongs to the whole process
        self._collects = gc.isenabled()
        gc.disable()  # what a finaliser does must not depend on when the collector runs
        self._random_state = random.getstate()
        self._lane_table = REGISTRY.replace(LANE_TABLE, None)
        self._source_lanes = REGISTRY.replace(SOURCE_LANES, None)
        self._fused_rules = REGISTRY.replace(FUSED_RULES, None, _rules_in_numpy)
        self.watchdog.start()
        try:
            self._wall = WallClock.start()  # before its functions are replaced
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
        self._restore_imported()
        for owner, name, value in reversed(self._undo):
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()
        if self._wall is not None:
            self._wall.stop()
        REGISTRY.replace(LANE_TABLE, self._lane_table)
        REGISTRY.replace(SOURCE_LANES, self._source_lanes)
        REGISTRY.replace(FUSED_RULES, self._fused_rules)
        random.setstate(self._random_state)
        self.simulation.threads.close()
        self.watchdog.stop()
        if self._collects:
            gc.enable()
        self._gate.release()

    # ---- around each schedule ----------------------------------------------------------------

    def begin(self, loop: SimLoop, pools: PoolTable, schedule: Schedule) -> None:
        """Start a schedule: same seed, same random numbers."""
        self._num_runs += 1
        if self._num_runs % COLLECT_EVERY == 0:
            gc.collect(1)
        self._seed = seed = schedule.seed
        self._bytes = self._uuids = None
        random.seed(seed)
        if schedule.faults is not None:
            pools.faults = schedule.faults.for_run(seed, self.targets)
        threads = self.simulation.threads
        pools.threads = threads if threads.is_needed else None
        REGISTRY.replace(LANE_TABLE, None, self._simulated_lanes)
        REGISTRY.replace(SOURCE_LANES, None)
        self.simulation.begin(loop, pools)
        if self._wall is not None:
            loop.moved = self._wall.show
            self._wall.show(loop.now)

    def _simulated_lanes(self) -> SimLaneTable:
        from ._devices import SimLaneTable  # the library, for programs that use it

        with self.simulation.outside():
            return SimLaneTable(self.simulation.pools)

    def end(self) -> None:
        """End a schedule."""
        self.simulation.end()
        if self._wall is not None:
            self._wall.go_on()

    def find_real_clocks(self) -> AbstractContextManager[None]:
        """Note, inside a `with` block, whether the program reads a clock that is real."""
        if sys.getprofile() is not None:
            return nullcontext()
        return _noting_clocks(self.simulation, self._kept_clocks, self._wall is None)

    def order_sets_of(self, cls: type, hashed: dict[str, None] | None = None) -> bool:
        """Let the objects of a class hash by number from now on; False if it cannot be changed.

        Args:
            cls: The class.
            hashed: Takes its name if one of its objects is hashed in a run.
        """
        try:
            for owner, name, value in numbered(cls, self.simulation, hashed):
                self._patch(owner, name, value)
        except TypeError:  # it is written in C
            self._undo.pop()
            return False
        return True

    # ---- the replacements --------------------------------------------------------------------

    def _patch(self, owner: object, name: str, value: object) -> None:
        self._undo.append((owner, name, vars(owner).get(name, ABSENT)))
        setattr(owner, name, value)

    def _patch_all(self) -> None:
        here = self.simulation
        real = {name: getattr(time, name) for name in CLOCK_NAMES}
        self._kept_clocks = {id(real[name]): name for name in CLOCK_NAMES if name in KEPT_CLOCKS}
        real |= {} if self._wall is None else self._wall.real
        for name, value in clock_functions(here, real).items():
            self._patch(time, name, value)
        for module in (threading, queue):  # they have a name of their own for the clock
            self._patch(module, CLOCK_ALIASES[module.__name__], time.monotonic)
        urandom = self._random_bytes(os.urandom)
        self._patch(os, "urandom", urandom)
        self._patch(random, "_urandom", urandom)  # of SystemRandom, and so of `secrets`
        self._patch(random.Random, "seed", self._seeding(random.Random.seed))
        for name, value in lock_classes(here).items():
            self._patch(threading, name, value)
        self._patch(uuid, "uuid1", self._uuid(uuid.uuid1, 1))
        self._patch(uuid, "uuid4", self._uuid(uuid.uuid4, 4))
        self._patch(_faults, "visit", self._visit)
        for module in (asyncio, asyncio.tasks):
            self._patch(module, "Task", SimTask)
            self._patch(module, "wait", wait)
            self._patch(module, "as_completed", as_completed)
            self._patch(module, "all_tasks", all_tasks)
            if sys.version_info >= (3, 12):
                self._patch(module, "eager_task_factory", eager_task_factory)
        self._patch_refusals()
        from ._patches import anyio_patches  # imports a backend of anyio, which takes a while

        for patches in (executor_patches, anyio_patches, socket_patches, thread_patches):
            for owner, name, value in patches(here):
                self._patch(owner, name, value)
        self._patch_imported()

    def _patch_imported(self) -> None:
        """Replace what modules have imported by name before."""
        stand_ins = {
            id(real): vars(owner)[name]
            for owner, name, real in reversed(self._undo)
            if type(owner) is ModuleType and real is not ABSENT
        }
        for module, name, real in imported_names(stand_ins):
            self._patch(module, name, stand_ins[id(real)])

    def _restore_imported(self) -> None:
        """Take the stand-ins from modules that were imported while schedules ran."""
        reals = {
            id(vars(owner)[name]): real
            for owner, name, real in self._undo
            if type(owner) is ModuleType and real is not ABSENT
        }
        for module in new_modules():
            for name, value in tuple(vars(module).items()):
                if id(value) in reals:
                    setattr(module, name, reals[id(value)])

    def _patch_refusals(self) -> None:
        self._refuse(_thread, "start_new_thread", "A thread started", "Use threading.Thread.")
        self._refuse(subprocess.Popen, "__init__", "A process started", "")
        for owner, name in process_starters():
            self._refuse(owner, name, "A process started", "")
        for owner in filter(None, (sys.modules.get("trio"), sys.modules.get("trio.lowlevel"))):
            for name in {"run", "start_guest_run"} & vars(owner).keys():
                self._refuse(owner, name, "An event loop of trio", ONLY_ASYNCIO)
        for name in {"epoll", "kqueue", "devpoll"} & vars(select).keys():  # also of a later trio
            self._refuse(select, name, f"select.{name}, made by another event loop", ONLY_ASYNCIO)
        uvloop: Any = sys.modules.get("uvloop")
        if uvloop is not None:
            self._patch(uvloop, "new_event_loop", self._noting(uvloop.new_event_loop, OTHER_LOOP))
        for owner in filter(None, (sys.modules.get("grpc.aio"),)):
            for name in {"insecure_channel", "secure_channel", "server"} & vars(owner).keys():
                self._refuse(owner, name, "A connection of grpc.aio", ONLY_PYTHON)
        if "concurrent.futures.process" in sys.modules:  # else the import alone takes a while
            self._refuse(
                futures.ProcessPoolExecutor,
                "submit",
                "A process started",
                "Await loop.run_in_executor(pool, ...): that is simulated.",
            )

    def _refuse(self, owner: object, name: str, what: str, instead: str) -> None:
        real = getattr(owner, name)

        def stand_in(*args: object, **kwargs: object) -> object:
            if not self.simulation.is_here():
                return real(*args, **kwargs)
            if not is_importing():
                refuse(what, instead)
            with self.simulation.outside():
                return real(*args, **kwargs)

        self._patch(owner, name, stand_in)

    def _noting(self, real: Callable[..., object], text: str) -> Callable[..., object]:
        """Return a function that does the same, and notes if a program calls it."""

        def stand_in(*args: object, **kwargs: object) -> object:
            if self.simulation.is_here():
                self.simulation.notes[text] = None
            return real(*args, **kwargs)

        return stand_in

    def _visit(self, name: str) -> None:
        """Let a fault strike at a point of the program."""
        if self.simulation.is_here():
            faults = self.simulation.pools.faults
            if faults is not None:
                faults.visit(name)

    def _random_bytes(self, real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int, /) -> bytes:
            if not self.simulation.is_here():
                return real(size)
            if self._bytes is None:
                self._bytes = Random(self._seed ^ 0x5EED)
            return self._bytes.randbytes(size)

        return urandom

    def _seeding(self, real: Callable[..., None]) -> Callable[..., None]:
        def seed(generator: Random, a: object = None, version: int = 2) -> None:
            if a is None and self.simulation.is_here():
                a = int.from_bytes(os.urandom(16))
            real(generator, a, version)

        return seed

    def _uuid(self, real: Callable[..., uuid.UUID], version: int) -> Callable[..., uuid.UUID]:
        def make(*args: object, **kwargs: object) -> uuid.UUID:
            if not self.simulation.is_here():
                return real(*args, **kwargs)
            if self._uuids is None:
                self.draws_uuids = True
                runs = REGISTRY.once("testing_uuids", count)
                salt = 1 + next(runs) if self.has_fresh_uuids else 0
                self._uuids = Random(mix(self._seed, salt))
            return uuid.UUID(bytes=self._uuids.randbytes(16), version=version)

        return make


def _rules_in_numpy() -> object:
    """Return what compiles nothing: compilers would meet simulated locks; the bits are the same."""
    from ..optimizers import FusedRules

    return FusedRules(is_on=False)


def process_starters() -> list[tuple[object, str]]:
    """Return what starts processes, besides `subprocess`: where it is, and its name."""
    owners = [os, sys.modules.get("_posixsubprocess")]  # the latter serves multiprocessing
    names = ("fork", "forkpty", "system", "posix_spawn", "posix_spawnp", "fork_exec")
    return [(owner, name) for owner in owners for name in names if hasattr(owner, name)]


# ---- clocks of C ------------------------------------------------------------------------------


@final
class WallClock:
    """Clocks that C code reads, such as `datetime.now`, moved by the package time-machine.

    It changes what the functions read and leaves every class as it is, for all threads: they see
    virtual time in `datetime` as long as a schedule runs.

    Attributes:
        real: What goes on showing real time, by the name in `time`.
    """

    __slots__ = ("_travel", "_traveller", "real")

    def __init__(self, travel: Any, real: dict[str, Callable[..., Any]]) -> None:
        self._travel = travel
        self._traveller = travel.start()
        self.real = real

    @staticmethod
    def start() -> WallClock | None:
        """Begin to move the clocks; None without time-machine, or where a test has set them."""
        try:
            machine = import_module("time_machine")
        except ImportError:
            return None
        if machine.escape_hatch.is_travelling() or dt.datetime.__name__ == "FakeDatetime":
            return None
        real = {name: getattr(machine.escape_hatch.time, name) for name in ("time", "time_ns")}
        return WallClock(machine.travel(time.time()), real)

    def show(self, now: float) -> None:
        """Show a moment of virtual time, until told otherwise."""
        self._traveller.move_to(min(EPOCH_S + now, LATEST_S), tick=False)

    def go_on(self) -> None:
        """Show real time."""
        self._traveller.move_to(self.real["time"](), tick=True)

    def stop(self) -> None:
        """Give the clocks back."""
        self._travel.stop()


@contextmanager
def _noting_clocks(
    simulation: Simulation, kept: dict[int, str], is_datetime_real: bool
) -> Iterator[None]:
    def note(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        name = kept.get(id(called))
        if name is not None:
            if simulation.is_here() and not is_foreign(frame.f_code.co_filename):
                simulation.notes[KEPT_CLOCK.format(name, name)] = None
        elif (waits := wait_in_c(called)) and simulation.is_here():
            simulation.notes[waits] = None
        elif is_datetime_real and getattr(called, "__name__", "") in ("now", "utcnow"):
            cls = called.__self__
            if (
                isinstance(cls, type)
                and issubclass(cls, dt.datetime)
                and simulation.is_here()
                and not is_foreign(frame.f_code.co_filename)
            ):
                simulation.notes[REAL_CLOCK] = None

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


# ---- virtual time -----------------------------------------------------------------------------


def clock_functions(simulation: Simulation, real: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return stand-ins for the functions of `time`; other threads go on seeing the real ones.

    Inside a simulated op time goes on by what the op has slept so far.
    """
    here = simulation.is_here

    def clock(name: str, start_s: float = 0.0) -> Callable[[], float]:
        real_clock = real[name]

        def read() -> float:  # called for every op: one call, without `here` on the loop's thread
            if simulation.is_running and (get_ident() == simulation.thread or here()):
                return start_s + (simulation.loop.now + simulation.pools.slept_s)
            return real_clock()  # type: ignore[no-any-return]

        return read

    def clock_ns(name: str) -> Callable[[], int]:
        read, real_clock = virtual[name], real[f"{name}_ns"]
        return lambda: round(read() * 1e9) if here() else real_clock()

    virtual = {
        "time": clock("time", EPOCH_S),
        "monotonic": clock("monotonic"),
        "perf_counter": clock("perf_counter"),
    }

    def sleep(seconds: float) -> None:
        if not here():
            real["sleep"](seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        if seconds > TIMEOUT_MAX:
            raise OverflowError("timestamp too large to convert to C PyTime_t")
        op = simulation.pools.current_op
        if op is not None:
            simulation.pools.sleep(op, seconds)
        else:  # the program keeps the loop from everything else for that long
            simulation.loop.jump(simulation.loop.now + seconds)

    return {**virtual, **{f"{name}_ns": clock_ns(name) for name in virtual}, "sleep": sleep}


# ---- functions of asyncio that return or walk sets --------------------------------------------


@final
class OrderedSet(set[Any]):
    """A set that is walked, and popped, in the order it was made in."""

    def __init__(self, members: Iterable[object]) -> None:
        self._order = tuple(dict.fromkeys(members))
        super().__init__(self._order)

    def __iter__(self) -> Iterator[object]:
        inside = super().__contains__
        known = set(self._order)
        yield from [each for each in self._order if inside(each)]
        yield from [each for each in super().__iter__() if each not in known]

    def pop(self) -> object:
        """Take out the first member."""
        for each in self:
            self.remove(each)
            return each
        return super().pop()


async def wait(
    fs: Iterable[Any], *, timeout: float | None = None, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[Any], set[Any]]:
    """Wait as `asyncio.wait` does; both sets keep the order of `fs`."""
    if asyncio.isfuture(fs) or asyncio.iscoroutine(fs):
        return await real_wait(fs, timeout=timeout, return_when=return_when)
    members = list(fs)
    done, pending = await real_wait(members, timeout=timeout, return_when=return_when)
    return (
        OrderedSet(each for each in members if each in done),
        OrderedSet(each for each in members if each in pending),
    )


def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
    """Yield as `asyncio.as_completed` does; tasks are made in the order of `fs`."""
    if asyncio.isfuture(fs) or asyncio.iscoroutine(fs):
        return real_as_completed(fs, timeout=timeout)
    return real_as_completed([asyncio.ensure_future(each) for each in fs], timeout=timeout)


def all_tasks(loop: Any = None) -> set[object]:
    """Return all tasks, in the order of their making."""
    return OrderedSet(sorted(real_all_tasks(loop), key=_number))


def _number(task: object) -> int:
    return task.number if isinstance(task, SimTask) else -1
