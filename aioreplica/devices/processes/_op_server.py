"""The process of a device: what runs in it, from its start to its end.

It is a process of a `concurrent.futures.ProcessPoolExecutor`, which calls `start` once and `serve`
for every op, in the main thread. It ends when the executor does, when the process that made it has
gone, and at the latest `END_S` after its main thread.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextvars import Context
from logging.handlers import QueueHandler
from multiprocessing.connection import wait
from typing import Any, TextIO, final

import cloudpickle
import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ...context import PLACE, REGISTRY, Place
from ...tree import Array
from .._logical import set_logical_devices
from ._context_variables import MAINS, VarName, set_vars
from ._messages import Memory, NewSegment, OpFailure, Reply, Request, Setup, Value, Where
from ._parcel import Parcel, Reduced, Side, dumps, named, obstacle, pack, unpack
from ._segments import Arena, Extent, Mappings, NoSharedMemoryError

LOOK_S = 1.0  # how often a device process looks whether its parent and its main thread live
END_S = 1.0
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
REPLICA = "replica"


def start(setup: Setup, descriptors: socket.socket) -> None:
    """Make this process a device process; the first thing that the executor calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program to judge
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A thread of its own: the main thread belongs to ops.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    set_logical_devices("cpu", setup.num_devices)
    server = _OpServer(setup, descriptors)
    REGISTRY.replace("op_server", server)


def ready() -> int:
    """Return the id of this process, once it has started."""
    return os.getpid()


def serve(message: bytes) -> bytes:
    """Carry out one op."""
    return _op_server().serve(message)


def _op_server() -> _OpServer:
    return REGISTRY.once("op_server", _no_server)


def _no_server() -> _OpServer:
    raise LookupError("This process does not run the ops of a device.")


def _watch(parent_id: int) -> None:
    """End the process when its parent has gone, or its main thread cannot end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # an executor made this process
    main = threading.main_thread()
    while main.is_alive():
        # A fork of the parent may hold the sentinel open; then the parent's id tells.
        if wait([parent.sentinel], LOOK_S) or os.getppid() != parent_id:
            os._exit(1)
    time.sleep(END_S)  # for `atexit`; threads of ops that never end are not waited for
    os._exit(0)


@final
class _OpServer:
    """Carries out ops, and keeps what they refer to by name.

    Args:
        setup: What the device has told.
        descriptors: Where the descriptors of new segments come and go.

    """

    def __init__(self, setup: Setup, descriptors: socket.socket) -> None:
        self._known: dict[int | str, Any] = {}
        self._names: dict[int, int | str] = {}  # by the id of what they stand for
        self._device_name = setup.device_name
        self._socket = descriptors
        self._arena = Arena()
        self._announced: set[int] = set()
        self._own = Mappings(is_readonly=False)
        self._public = Mappings(is_readonly=True)
        self._blas_threads: int | None = None
        self._told = _Told(setup.log_levels)
        self._refused: list[tuple[VarName, str]] = []  # context variables of the op

    def serve(self, message: bytes) -> bytes:
        request: Request = pickle.loads(message)
        self._attach(self._own, request.own)
        self._attach(self._public, request.public)
        for extent in request.released:
            self._arena.free(extent)
        for number in request.forgotten:
            self._forget(number)
        self._budget(request.blas_threads)
        self._refused = []
        parcel, failure = Context().run(self._call, request)
        recorded = self._recorded()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        told = self._told
        reply = Reply(
            self._new_memory(), self._own.take_released(), self._public.take_released(),
            parcel, failure, told.take_warnings(), told.take_records(), recorded, self._refused,
        )  # fmt: skip
        return pickle.dumps(reply, protocol=5)

    def _call(self, request: Request) -> tuple[Parcel | None, OpFailure | None]:
        try:
            for number, data in request.stand_ins:
                make, args = pickle.loads(data)
                self._know(number, make(*args))
            for value in request.values:
                self._known[value.number].take_value(value.num_writes, self._array(value))
            self._enter(request)
            fn, args, kwargs = unpack(request.parcel, self)
        except BaseException as error:  # noqa: BLE001 - the op's awaiter is told
            return None, OpFailure(_traceback(error), "rebuilt", _words(error))
        errors = {} if request.numpy_errors is None else cloudpickle.loads(request.numpy_errors)
        try:
            with np.errstate(**errors):
                result = fn(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the op's awaiter gets it
            text = _traceback(error)
            traceback.clear_frames(error.__traceback__)
            return self._pack_error(error), OpFailure(text, "raised", _words(error))
        del args, kwargs, fn  # what is not in the result is released with this reply
        return self._pack_result(result)

    def _enter(self, request: Request) -> None:
        """Set the context variables, in a context of the op's own."""
        self._refused = set_vars(request.context)
        strategy = replica = None
        if request.strategy is not None:
            strategy = self._known[request.strategy]
        if request.replica is not None:
            make, args = pickle.loads(request.replica)
            replica = make(*args, strategy)
            self._know(REPLICA, replica)
        PLACE.set(Place(None if strategy is None else strategy._runtime, replica))

    def _pack_result(self, result: object) -> tuple[Parcel | None, OpFailure | None]:
        try:
            return pack(result, self._arena, self), None
        except (NoSharedMemoryError, MemoryError) as error:
            return None, OpFailure(_traceback(error), "memory", _words(error))
        except Exception as error:  # noqa: BLE001 - whatever a `__reduce__` raises
            words, _ = obstacle({"its result": result}, self, error)
            return None, OpFailure("", "returned", words)

    def _pack_error(self, error: BaseException) -> Parcel | None:
        for sent in (error, _Remade(self, error)):
            try:
                unpack(Parcel(dumps(sent, self, lambda _buffer: True), ()), self)
                return pack(sent, self._arena, self)
            except Exception:  # noqa: BLE001 - then the next; else its text has to do
                continue
        return None

    def _recorded(self) -> Sequence[tuple[str, float | str]]:
        replica = self._forget(REPLICA)
        return () if replica is None else replica.take_recorded()

    def _know(self, name: int | str, thing: object) -> None:
        self._known[name] = thing
        self._names[id(thing)] = name

    def _forget(self, name: int | str) -> Any:
        thing = self._known.pop(name, None)
        self._names.pop(id(thing), None)
        return thing

    # ---- names and memory ----------------------------------------------------------------

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        return self._own.view(extent)

    def find(self, name: int | str) -> object:
        return self._known[name]

    def refer(self, thing: object) -> Reduced:
        name = self._names.get(id(thing))
        if name is not None:
            return named, (name,)
        raise TypeError(f"{thing!r} was made in the device process and is of no use outside it.")

    def reduced(self, thing: object) -> Reduced | None:
        place = PLACE.get()
        strategy = None if place.strategy is None else place.strategy.facade
        is_here = thing is place.replica or (strategy is not None and thing is strategy)
        return self.refer(thing) if is_here else None

    def _array(self, value: Value) -> Array:
        data = value.data
        source: Any = data if isinstance(data, bytes) else self._public.view(data)
        return np.ndarray(value.shape, value.dtype, source, strides=value.strides)

    def _attach(self, mappings: Mappings, memory: Memory) -> None:
        receive_segments(self._socket, mappings, memory)

    def _new_memory(self) -> Memory:
        return send_segments(self._socket, self._arena, self._announced)

    def _budget(self, threads: int | None) -> None:
        """Give BLAS as many threads as the device's lane would leave it."""
        if threads is None or threads == self._blas_threads:
            return
        self._blas_threads = threads
        for name in THREAD_VARIABLES:  # for libraries that are loaded later
            os.environ[name] = str(threads)
        ThreadpoolController().limit(limits=threads, user_api="blas")


@final
class _Remade:
    """Stands for an error whose own pickle fails: what of it can be pickled is put together.

    The usual reason is an `__init__` that takes other arguments than it gives to the one above.

    Args:
        side: Where it is pickled.
        error: The error.
    """

    def __init__(self, side: Side, error: BaseException) -> None:
        self._side = side
        self._error = error

    def __reduce__(self) -> Reduced:
        error = self._error
        args: list[object]
        if isinstance(error, BaseExceptionGroup):
            args = [error.message, [_Remade(self._side, each) for each in error.exceptions]]
        else:
            args = [each if self._can_send(each) else repr(each) for each in error.args]
        state = {name: value for name, value in vars(error).items() if self._can_send(value)}
        return _remake, (type(error), args, state)

    def _can_send(self, thing: object) -> bool:
        try:
            unpack(Parcel(dumps(thing, self._side, lambda _buffer: True), ()), self._side)
        except Exception:  # noqa: BLE001 - whatever a `__reduce__` raises
            return False
        return True


def _remake(
    kind: type[BaseException], args: Sequence[object], state: dict[str, object]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = tuple(args)
    vars(error).update(state)
    return error


@final
class ModuleNames:
    """The names of modules by their files, each searched for once."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def of_file(self, filename: str) -> str | None:
        """Return the name of the module that was imported from a file; None if none was."""
        if filename not in self._names:
            found = (
                name
                for name, module in list(sys.modules.items())
                if getattr(module, "__dict__", {}).get("__file__") == filename
            )
            name = next(found, None)
            self._names[filename] = "__main__" if name in MAINS else name
        return self._names[filename]


@final
class _Told:
    """Warnings and log records of ops, kept until the next reply.

    Args:
        log_levels: The levels that loggers have in the program.
    """

    def __init__(self, log_levels: dict[str, int]) -> None:
        self._warnings: list[tuple[bytes, Where]] = []
        self._modules = ModuleNames()
        self._handler = _Records()
        for name, level in log_levels.items():
            logging.getLogger(name or None).setLevel(level)
        logging.getLogger().addHandler(self._handler)
        warnings.simplefilter("always")  # the program's own filters decide
        warnings.showwarning = self._show

    def take_warnings(self) -> list[tuple[bytes, Where]]:
        taken, self._warnings = self._warnings, []
        return taken

    def take_records(self) -> list[bytes]:
        taken, self._handler.records = self._handler.records, []
        return taken

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        data: bytes
        try:
            data = cloudpickle.dumps(message)
        except Exception:  # noqa: BLE001 - its words can be sent in any case
            data = cloudpickle.dumps(RuntimeWarning(f"{category.__qualname__}: {message}"))
        self._warnings.append((data, (filename, lineno, self._modules.of_file(filename))))


@final
class _Records(QueueHandler):
    """Keeps log records in a form that can be sent."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # there is no queue: see `enqueue`
        self.records: list[bytes] = []

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep a record; one that cannot be sent goes to `handleError`, as from any handler."""
        self.records.append(cloudpickle.dumps(record))


def send_segments(descriptors: socket.socket, arena: Arena, announced: set[int]) -> Memory:
    """Tell of segments that are new to the other side, or gone; and send the new ones.

    Args:
        descriptors: Where they are sent.
        arena: Whose segments.
        announced: Those that the other side knows; it is brought up to date.
    """
    if announced == arena.segments.keys():
        return _UNCHANGED
    new = [each for each in arena.segments.values() if each.segment_id not in announced]
    dropped = tuple(sorted(announced - arena.segments.keys()))
    for segment in new:
        socket.send_fds(descriptors, [b"s"], [segment.descriptor])
    announced.difference_update(dropped)
    announced.update(each.segment_id for each in new)
    return Memory(tuple(NewSegment(each.segment_id, each.size) for each in new), dropped)


def receive_segments(descriptors: socket.socket, mappings: Mappings, memory: Memory) -> None:
    """Map the segments that the other side has told of."""
    for segment in memory.new:
        _, received, _, _ = socket.recv_fds(descriptors, 1, 1)
        mappings.add(segment.segment_id, received[0], segment.size)
    for segment_id in memory.dropped:
        mappings.drop(segment_id)


_UNCHANGED = Memory()


def _traceback(error: BaseException) -> str:
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None  # without this module's own frame
    lines = traceback.format_exception(type(error), error, own)
    return "".join(lines)


def _words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # it may be closed, or None
        stream.flush()
