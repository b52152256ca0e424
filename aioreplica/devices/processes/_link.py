"""The link to one device process: the executor that it belongs to, and the memory they share."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import signal
import socket
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, final

import cloudpickle

from ...context import REGISTRY, Living, Place
from .._logical import list_devices
from ._messages import Memory, Setup, Value
from ._op_server import REPLICA, ready, send_segments, start
from ._parcel import Parcel, Reduced, named
from ._publications import Published, publications
from ._segments import Arena, Bytes, Extent, Mappings


@final
class ProcessLink:
    """One device process: its executor, and the memory shared with it.

    Args:
        device_name: Name of its device.

    Attributes:
        executor: Carries messages to it.
        process: The process.
        is_ready: Done when it takes ops.
        socket: Where descriptors come and go.
        arena: Memory for what it reads.
        announced: The segments of it that the device process knows.
        results: Its memory.
        reader: What it knows of publications.
        exit: Tells whether the program ends.
        names: What an op refers to by name, while it is under way.
        place: Where the op was made.
    """

    def __init__(self, device_name: str) -> None:
        self.names: dict[int | str, Any] = {}
        self.place = Place()
        self.exit = REGISTRY.once("program_exit", _ProgramExit)
        self.arena = Arena()
        self.announced: set[int] = set()
        self.results = Mappings(is_readonly=False)
        self._forks = REGISTRY.once("forks_of_links", _Forks)
        self._forks.results.add(self.results)
        self._public_announced: set[int] = set()
        self._publications = publications()
        context = _Context(f"aioreplica {device_name}")
        setup = Setup(device_name, len(list_devices("cpu")), _log_levels())
        self.socket, theirs = socket.socketpair()
        masked = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # the device process inherits it
        try:
            with self._forks.lock:
                resource_tracker.ensure_running()  # unmasks Ctrl-C, if the executor starts it
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                self.executor = ProcessPoolExecutor(
                    1, mp_context=context, initializer=start, initargs=(setup, theirs)
                )
                self.is_ready: Future[Any] = self.executor.submit(ready)
        except BaseException:
            self.socket.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            theirs.close()
        self.reader = self._publications.new_reader()
        self.process = context.made[0]
        self._end = select.poll()
        self._end.register(self.process.sentinel)

    def has_ended(self) -> bool:
        """Tell whether the process has, which its executor may not know yet."""
        return bool(self._end.poll(0))

    def close(self) -> None:
        """End the process, and let go of its memory."""
        with self._forks.lock:
            self.executor.shutdown(
                cancel_futures=True
            )  # an idle device process ends within seconds
        self.reader.close()
        self.arena.close()
        self.socket.close()

    # ---- names ---------------------------------------------------------------------------

    def refer(self, thing: Published) -> Reduced:
        """Name a variable, or what else is published."""
        number = self._publications.number_of(thing)
        self.names[number] = thing
        return named, (number,)

    def reduced(self, thing: object) -> Reduced | None:
        """Name the replica context and the strategy."""
        place = self.place
        if place.replica is not None and thing is place.replica.context:
            self.names[REPLICA] = thing
            return named, (REPLICA,)
        if place.strategy is not None and thing is place.strategy.facade:
            return named, (self.number_of_strategy(place),)
        return None

    def number_of_strategy(self, place: Place) -> int | None:
        """Return the name of the strategy at a place."""
        strategy = place.strategy
        return None if strategy is None else self._publications.number_of(strategy.facade)

    def stand_ins(self, place: Place) -> list[tuple[int, bytes]]:
        """Return what names stand for that the device process does not know yet."""
        new = []
        for number, thing in self.names.items():
            if isinstance(number, int) and not self.reader.knows(number):
                new.append((number, pickle.dumps(thing._stand_in())))
        strategy = self.number_of_strategy(place)
        if place.strategy is not None and strategy is not None:
            facade = place.strategy.facade
            if not self.reader.knows(strategy):
                new.append((strategy, _packed_strategy(facade)))
            self.names[strategy] = facade
        for number, _ in new:
            self.reader.was_told(number)
        return new

    def find_values(self, values: list[Value]) -> None:
        """Add the values that the device process has not got."""
        strategy = self.number_of_strategy(self.place)
        for number, thing in self.names.items():
            if not isinstance(number, int) or number == strategy:
                continue
            value = self.reader.value(number, thing._publication(self.place))
            if value is not None:
                values.append(value)

    def undo(self, parcel: Parcel, stand_ins: list[tuple[int, bytes]], values: list[Value]) -> None:
        """Take back what was made for an op that is not sent."""
        for number, _ in stand_ins:
            self.reader.was_not_told(number)
        extents = [*parcel.buffers]
        if isinstance(parcel.payload, Extent):
            extents.append(parcel.payload)
        for extent in extents:
            self.arena.free(extent)
        for value in values:
            self.reader.take_back(value)

    def public_memory(self) -> Memory:
        """Return what is new of the memory that all device processes read."""
        with self._publications.lock:
            return send_segments(self.socket, self._publications.arena, self._public_announced)

    def view(self, extent: Extent) -> Bytes:
        """Return an extent of a result."""
        return self.results.view(extent)

    def find(self, name: int | str) -> object:
        """Return what a name stands for here.

        Raises:
            LookupError: If the op was not given it.
        """
        if name not in self.names:
            what = "the replica context" if name == REPLICA else "a variable or strategy"
            raise LookupError(
                f"it has {what}, which the op was not given. Return values from the op, or pass "
                "the object to it as an argument"
            )
        return self.names[name]


@final
class _ProgramExit:
    """Knows when the interpreter begins to exit.

    Executors wait for what runs in their processes before `atexit` functions are called, so an op
    that nobody waits for has to be ended earlier. No public function tells of that moment; this one
    exists in CPython 3.9 to 3.14, and where it does not the exit waits for such an op.

    Attributes:
        has_begun: Whether it has.
    """

    def __init__(self) -> None:
        self.has_begun = False
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._begin)  # called before those that were registered earlier

    def _begin(self) -> None:
        self.has_begun = True


@final
class _Process(SpawnProcess):
    """A process that a fork of the program can forget: there its exit would fail to join it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made_by = os.getpid()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process, in the program that has started it; at once elsewhere."""
        if self._made_by == os.getpid():
            super().join(timeout)


@final
class _Context(SpawnContext):
    """Spawns processes under a name, and remembers them.

    Args:
        name: Theirs.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.made: list[SpawnProcess] = []
        self._process_name = name

    def Process(self, *args: object, **kwargs: object) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        """Make a process, as the context's attribute of that name does."""
        process = _Process(*args, name=self._process_name, **kwargs)
        self.made.append(process)
        return process


def _packed_strategy(strategy: object) -> bytes:
    """Return a pickle of an unopened equal of a strategy, or of None if it cannot be pickled."""
    data: bytes
    try:
        data = cloudpickle.dumps((_same, (strategy,)))
    except Exception:  # noqa: BLE001 - one of a user may not be made to be pickled
        data = cloudpickle.dumps((_same, (None,)))
    return data


def _same(thing: object) -> object:
    return thing


def _log_levels() -> dict[str, int]:
    levels = {"": logging.getLogger().level}
    for name, logger in list(logging.getLogger().manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            levels[name] = logger.level
    return levels


@final
class _Forks:
    """Keeps forks and the end of the program apart from starts and ends of device processes.

    A child that finds a thread of an executor half started or half ended would wait for it when it
    exits; and it goes on reading results, which are therefore not written again. The interpreter's
    exit would stop the thread of a lane between the removal of a semaphore and the word of it to
    the process that tracks semaphores, which then complains.

    Attributes:
        lock: Held while an executor starts or ends, while the program forks, and once it ends.
        results: The results of all device processes.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a program may fork at its end
        atexit.register(self.lock.acquire)  # never released: `multiprocessing` ends the rest
        self.results: Living[Mappings] = Living()
        os.register_at_fork(
            before=self._begin, after_in_parent=self.lock.release, after_in_child=self.lock.release
        )

    def _begin(self) -> None:
        self.lock.acquire()
        for each in self.results:
            each.pin()
