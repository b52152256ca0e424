"""What tests let workers do; they import it in their processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.context import CLOSURE

LIMIT_S = 150.0  # more than twice what waits took where seven programs had two cores
PAUSE_S = 0.01


class FileGate:
    """Holds closures of any process until a test opens it, by files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / uuid.uuid4().hex
        self.folder.mkdir()

    def pass_through(self) -> None:
        """Say which process is here; wait until the gate opens."""
        come = self.folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        come.touch()
        end = time.monotonic() + LIMIT_S
        while not (self.folder / "open").exists():
            if time.monotonic() > end:
                raise RuntimeError("The gate was not opened.")
            threading.Event().wait(PAUSE_S)  # another process opens it

    def pids(self) -> list[int]:
        """Return the process of each closure that has come, in order."""
        found = [each for each in self.folder.iterdir() if "-" in each.name]
        found.sort(key=lambda each: each.stat().st_mtime_ns)
        return [int(each.name.partition("-")[0]) for each in found]

    async def reached(self, num_closures: int = 1) -> list[int]:
        """Wait until so many closures have come in all."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.pids()) < num_closures:
                await asyncio.sleep(PAUSE_S)
        return self.pids()

    def open(self) -> None:
        """Let all through, now and later."""
        (self.folder / "open").touch()


def add_row(table: Any, row: int, gate: FileGate | None = None) -> int:
    """Add 1 to a row, be at the gate, and add 1 to another column of it."""
    slices = ar.IndexedSlices(np.array([[1.0, 0.0]]), [row], table.shape)
    table.assign_add(slices)
    if gate is not None:
        gate.pass_through()
    table.assign_add(ar.IndexedSlices(np.array([[0.0, 1.0]]), [row], table.shape))
    return os.getpid()


async def add_row_async(table: Any, row: int, gate: FileGate | None = None) -> int:
    """Do the same in a coroutine."""
    await table.assign_add(ar.IndexedSlices(np.array([[1.0, 0.0]]), [row], table.shape))
    if gate is not None:
        await asyncio.to_thread(gate.pass_through)
    await table.assign_add(ar.IndexedSlices(np.array([[0.0, 1.0]]), [row], table.shape))
    return os.getpid()


def hold(gate: FileGate) -> int:
    """Wait at the gate; return the process."""
    gate.pass_through()
    return os.getpid()


def identity(x: Any) -> Any:
    """Return what is given."""
    return x


def add_one(count: Any) -> int:
    """Count."""
    count.assign_add(1.0)
    return os.getpid()


def pid_and_server() -> tuple[int, int]:
    """Return the process, and which object the handle of the first server is."""
    return os.getpid(), id(CLOSURE.get().closure.servers[0])


def total(variable: Any) -> float:
    """Pull a variable."""
    return float(np.sum(variable.value))


def take(iterator: Any) -> Any:
    """Take the next element."""
    return next(iterator)


class OddError(Exception):
    """Cannot be built anew from its message."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


def refuse(value: Any) -> Any:
    """A constraint that takes nothing but zeros."""
    if np.any(value):
        raise OddError("not zero", 7)
    return value


def fail(text: str = "bad batch") -> None:
    """Raise what a user's closure may raise."""
    raise ValueError(text)


def raise_base(name: str) -> None:
    """Raise what is no Exception."""
    errors = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt,
              "GeneratorExit": GeneratorExit, "CancelledError": asyncio.CancelledError,
              "BaseException": BaseException}  # fmt: skip
    raise errors[name]("from a closure")


async def raise_base_async(name: str) -> None:
    """Raise it in a coroutine."""
    raise_base(name)


def sleep(seconds: float) -> None:
    """Block the thread."""
    threading.Event().wait(seconds)


async def sleep_async(seconds: float) -> None:
    """Wait in a coroutine."""
    await asyncio.sleep(seconds)


def hold_gil(seconds: float) -> str:
    """Let no other thread of the process run for so long."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


def die(signal_number: int = signal.SIGKILL) -> None:
    """End the process in the middle of a closure."""
    os.kill(os.getpid(), signal_number)
    threading.Event().wait(LIMIT_S)


def die_once(mark: str) -> str:
    """End the process of the first run only."""
    if not Path(mark).exists():
        Path(mark).touch()
        die()
    return "second run"


def bytes_of(num_bytes: int) -> Any:
    """Return an array."""
    return np.ones(num_bytes, np.uint8)


def unpicklable() -> Any:
    """Return what cannot travel."""
    return threading.Lock()


def own_pid() -> int:
    """A resource: which process made it."""
    return os.getpid()


def own_count() -> int:
    """A first value of a per-worker variable."""
    return 100


def count_and_hold(counter: Any, gate: FileGate) -> None:
    """Count on this worker, and wait at the gate."""
    counter.assign_add(1)
    gate.pass_through()


def with_resource(resource: int) -> tuple[int, int]:
    """Return who made the resource, and who uses it."""
    return resource, os.getpid()


def index_and_pid(gate: FileGate) -> tuple[int, int]:
    """Return the worker's index and its process."""
    gate.pass_through()
    return ar.cluster.current_worker_index(), os.getpid()


def part_of(context: Any) -> Any:
    """Return the rows that one worker learns."""
    return range(context.input_pipeline_id, 24, context.num_input_pipelines)


def learn_next(table: Any, iterator: Any, gate: FileGate) -> int:
    """Take the next row, and add to it as `add_row` does."""
    row: int = next(iterator)
    add_row(table, row, gate)
    return row


def scaled_step(w: Any, optimizer: Any, gradient: float) -> float:
    """Apply a gradient as `compute_gradients` gives it: times the loss scale, which is returned."""
    scale = optimizer.loss_scale.scale
    whole = np.full(w.shape, gradient * scale, w.dtype)
    optimizer.apply_gradients([(ar.optimizers.ScaledGradient(whole, scale), w)])
    return float(scale)


def pids_of_rows(begin: int, end: int) -> Any:
    """Give rows that tell which they are, and the process that has made them."""
    return np.stack([np.arange(begin, end), np.full(end - begin, os.getpid())], axis=1)


def learn_row(table: Any, optimizer: Any, row: int, iterator: Any) -> int:
    """Take an element, and descend by 1 in a row."""
    taken: int = next(iterator)
    slices = ar.IndexedSlices(np.ones((1, *table.shape[1:])), [row], table.shape)
    optimizer.apply_gradients([(slices, table)])
    return taken
