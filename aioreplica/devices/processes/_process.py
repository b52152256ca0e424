"""The process of a device, as the device's lane uses it: ops go out, results come back.

The thread of the lane sends an op and waits for it, so ops stay first in, first out, and all that
is said of ops on threads holds. The process belongs to a `concurrent.futures.ProcessPoolExecutor`
of one, which starts it, carries messages, and knows when it has ended. One that has died is
replaced for the next op.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import perf_counter
from typing import Any, final

from ...context import REGISTRY
from ...errors import ContextError, DeviceError
from .._lane import ProcessStatistics
from .._op import AnyOp
from ._context_variables import ContextSender, numpy_errors
from ._link import ProcessLink
from ._messages import OpFailure, Reply, Request, Value
from ._op_server import ModuleNames, receive_segments, send_segments, serve
from ._parcel import Parcel, obstacle, pack, unpack
from ._segments import Extent, NoSharedMemoryError

END_S = 3.0  # how long the exit code of a device process is waited for
LOOK_S = 0.1  # how often the lane's thread looks whether anyone still waits for an op


@final
class RemoteTracebackError(Exception):
    """The traceback of an error in a device process, as text; the cause of that error here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@final
class DeviceProcess:
    """Runs the ops of one device in a process of its own.

    Args:
        device_name: Name of the device.
        blas_threads: Tells how many threads BLAS may use there now.

    Every method but `stop` and `statistics` is for the thread of the device's lane.
    """

    def __init__(self, device_name: str, blas_threads: Callable[[], int | None]) -> None:
        self._device_name = device_name
        self._blas_threads = blas_threads
        self._context = ContextSender(device_name)
        self._modules = ModuleNames()
        self._link: ProcessLink | None = None
        self._is_stopped = False
        self._num_deaths = 0
        self._bytes_sent = self._bytes_received = 0
        self._send_s = 0.0

    def call(
        self, op: AnyOp, fn: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call of an op in the device process; return what it returns.

        Raises:
            DeviceError: If the device process ended, or there is no memory for what is sent.
            TypeError: If something that is to be sent cannot be pickled.
            BaseException: What the call raises.
        """
        link = self._link or self._open(op)
        if link.has_ended():  # while it had nothing to do
            link = self._reopen(link, op)
        begin_s = perf_counter()
        try:
            message = self._message(link, op, fn, args, kwargs)
            future = link.executor.submit(serve, message)
        except (BrokenProcessPool, BrokenPipeError):  # it has ended just now
            link = self._reopen(link, op)
            message = self._message(link, op, fn, args, kwargs)
            future = link.executor.submit(serve, message)
        self._bytes_sent += len(message)
        self._send_s += perf_counter() - begin_s
        data = self._wait(link, op, future)
        self._bytes_received += len(data)
        return self._finish(link, op, pickle.loads(data))

    def stop(self) -> None:
        """End the device process if nobody waits for the op it runs; from any thread."""
        self._is_stopped = True

    def close(self) -> None:
        """End the device process: by itself if it can, else it is killed."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def statistics(self) -> ProcessStatistics:
        """Return the counts; from any thread."""
        link = self._link
        pid = None if link is None else link.process.pid
        return ProcessStatistics(
            pid, self._num_deaths, self._bytes_sent, self._bytes_received, self._send_s,
            _resident_bytes(pid),
        )  # fmt: skip

    # ---- one op --------------------------------------------------------------------------

    def _message(
        self,
        link: ProcessLink,
        op: AnyOp,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> bytes:
        link.names.clear()
        link.place = place = op.place
        context = self._context.pack(op.context)
        errors = numpy_errors(op.context)
        try:
            parcel = pack((fn, args, kwargs), link.arena, link)
        except NoSharedMemoryError as error:
            raise self._no_memory(op, error) from error
        except Exception as error:
            raise self._unsendable(link, op, fn, args, kwargs, error) from error
        values: list[Value] = []
        stand_ins: list[tuple[int, bytes]] = []
        try:
            strategy = link.number_of_strategy(place)
            stand_ins = link.stand_ins(place)
            link.find_values(values)
            stand_in = None if place.replica is None else pickle.dumps(place.replica.stand_in())
        except BaseException as error:
            link.undo(parcel, stand_ins, values)
            if isinstance(error, NoSharedMemoryError):
                raise self._no_memory(op, error) from error
            raise
        self._bytes_sent += parcel.num_bytes - len(parcel.payload)
        self._bytes_sent += sum(v.data.num_bytes for v in values if isinstance(v.data, Extent))
        try:
            own = send_segments(link.socket, link.arena, link.announced)
            request = Request(
                op.fn_name, own, link.public_memory(), link.results.take_released(),
                link.reader.take_forgotten(), stand_ins, values, parcel, stand_in, strategy,
                context, errors, self._blas_threads(),
            )  # fmt: skip
            return pickle.dumps(request, protocol=5)
        except BaseException as error:
            self.close()  # descriptors are on their way that the next op would take for its own
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                raise self._device_error(
                    f"Op {op.fn_name!r} was not sent to {self._device_name}: {error}. The device "
                    "starts a new process for its next op."
                ) from error
            raise

    def _unsendable(
        self,
        link: ProcessLink,
        op: AnyOp,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        error: Exception,
    ) -> TypeError:
        """Return the error of an op that cannot be pickled, naming what is in the way."""
        named = {f"argument {i}": arg for i, arg in enumerate(args)}
        named |= {f"argument {name!r}": arg for name, arg in kwargs.items()}
        words, _ = obstacle({"its function": fn, **named}, link, error)
        return TypeError(
            f"Op {op.fn_name!r} cannot be sent to {self._device_name}, whose lane is a device "
            f"process: {words}. Make it in the op, pass what can be pickled, or use a device whose "
            "lane is a thread."
        )

    def _wait(self, link: ProcessLink, op: AnyOp, future: Future[bytes]) -> bytes:
        while True:
            try:
                error = future.exception(LOOK_S)
            except TimeoutError:
                is_left = self._is_stopped and op.is_abandoned
                if is_left or link.exit.has_begun:
                    link.process.kill()  # nobody waits for it, and the program ends or goes on
                continue
            break
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            raise self._died(link, op) from error
        self._died(link, op)
        raise self._device_error(
            f"The device process of {self._device_name} failed at op {op.fn_name!r}: {error!r}. "
            "The device starts a new process for its next op."
        ) from error

    def _finish(self, link: ProcessLink, op: AnyOp, reply: Reply) -> object:
        """Take over what an op has told; return its result, or raise its error."""
        receive_segments(link.socket, link.results, reply.memory)
        for extent in reply.released:
            link.arena.free(extent)
        link.reader.released(reply.public_released)
        failure, parcel = reply.failure, reply.parcel
        result: Any = None
        if parcel is not None:
            self._bytes_received += parcel.num_bytes - len(parcel.payload)
            result = self._unpacked(link, op, parcel, failure)
        link.names.clear()
        for data in reply.records:
            record = pickle.loads(data)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        replica = op.place.replica
        try:
            for name, value in reply.recorded:
                op.context.run(replica.context.record, name, value)  # type: ignore[union-attr]  # it recorded
        except ContextError:  # the run is over
            if failure is None:
                raise
        if failure is not None:
            raise self._error(op, failure, result)
        for refused in reply.refused:
            self._context.refuse(*refused)
        for data, (filename, line, module) in reply.warnings:
            registry = _warnings_shown().setdefault(filename, {})
            warning = pickle.loads(data)
            where = module or self._modules.of_file(filename)
            warnings.warn_explicit(warning, type(warning), filename, line, where, registry)
        return result

    def _unpacked(
        self, link: ProcessLink, op: AnyOp, parcel: Parcel, failure: OpFailure | None
    ) -> object:
        try:
            return unpack(parcel, link)
        except Exception as error:
            if failure is not None:
                return None  # an error that cannot be built again: its words have to do
            raise TypeError(
                f"What op {op.fn_name!r} on {self._device_name} returned cannot be built from its "
                f"pickle here: {error}"
            ) from error

    def _error(self, op: AnyOp, failure: OpFailure, error: BaseException | None) -> BaseException:
        what, words = failure.what, failure.words
        cause = RemoteTracebackError(failure.text) if failure.text else None
        if what == "raised":
            if error is None:
                text = f"Op {op.fn_name!r} on {self._device_name} raised {words}"
                error = self._device_error(f"{text} (an error that cannot be pickled).")
        elif what == "returned":
            error = TypeError(
                f"Op {op.fn_name!r} cannot send its result back from {self._device_name}, whose "
                f"lane is a device process: {words}. Return arrays, numbers and plain containers."
            )
        elif what == "rebuilt":
            error = self._device_error(
                f"Op {op.fn_name!r} cannot be built in the device process of {self._device_name}: "
                f"{words}. Its modules must be importable there, with the program's sys.path."
            )
        else:
            error = self._device_error(
                f"Op {op.fn_name!r} on {self._device_name} has run, but there is no shared memory "
                f"for its result: {words}."
            )
        assert error is not None  # each case has made one
        error.__cause__ = cause
        return error

    def _no_memory(self, op: AnyOp, error: OSError) -> DeviceError:
        return self._device_error(
            f"Op {op.fn_name!r} was not sent to {self._device_name}, as there is no shared memory "
            f"for its arrays: {error}. Free memory, raise the limit, or send less at a time."
        )

    def _device_error(self, text: str) -> DeviceError:
        return DeviceError(text, device=self._device_name)

    # ---- the process ---------------------------------------------------------------------

    def _open(self, op: AnyOp) -> ProcessLink:
        """Start a device process, and wait until it can take ops."""
        try:
            link = ProcessLink(self._device_name)
        except OSError as error:
            raise self._device_error(
                f"Op {op.fn_name!r} was not run, as the device process of {self._device_name} "
                f"cannot be started: {error}. Is /dev/shm full, or a limit on processes or files "
                "reached?"
            ) from error
        try:
            self._wait(link, op, link.is_ready)
        except DeviceError:
            link.close()
            raise self._device_error(
                f"Op {op.fn_name!r} was not run, as the device process of {self._device_name} "
                f"ended before it was ready ({_end_of(link.process)}); its own error output says "
                "why. A program that is a script must start its work under "
                "`if __name__ == '__main__':`, because a device process imports it."
            ) from None
        self._link = link
        return link

    def _reopen(self, dead: ProcessLink, op: AnyOp) -> ProcessLink:
        self.close()
        self._num_deaths += 1
        logging.getLogger("aioreplica.devices").warning(
            "The device process of %s (pid %s) has ended between two ops (%s). A new one is "
            "started.", self._device_name, dead.process.pid, _end_of(dead.process),
        )  # fmt: skip
        return self._open(op)

    def _died(self, link: ProcessLink, op: AnyOp) -> DeviceError:
        if link is self._link:
            self._num_deaths += 1
            self.close()
        return self._device_error(
            f"The device process of {self._device_name} (pid {link.process.pid}) ended while it "
            f"ran op {op.fn_name!r}: {_end_of(link.process)}. The op may have run in part; the "
            "device starts a new process for its next op."
        )


def _end_of(process: SpawnProcess) -> str:
    process.join(END_S)
    code = process.exitcode
    if code is None:
        return "how is not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    advice = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{advice}"


def _resident_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process; None where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _warnings_shown() -> dict[str, dict[Any, Any]]:
    """Return the registries of warnings from device processes, by file."""
    return REGISTRY.once("warnings_of_device_processes", dict[str, dict[Any, Any]])
