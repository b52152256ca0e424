"""Coordinators in one process, and gates that closures wait at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import numpy as np

import aioreplica as ar

LIMIT_S = 30.0
_gates: dict[int, Gate] = {}
_numbers = count()


class Gate:
    """Holds closures until a test opens it; a copy that was pickled is the same gate."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._came = threading.Semaphore(0)
        self._is_open = threading.Event()
        _gates[self._number] = self

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return gate_of, (self._number,)

    def pass_through(self) -> None:
        """Say that a closure is here; block its thread until the gate opens."""
        self._came.release()
        if not self._is_open.wait(LIMIT_S):
            raise RuntimeError("The gate was not opened.")

    async def apass_through(self) -> None:
        """Wait in an async closure."""
        await asyncio.to_thread(self.pass_through)

    async def reached(self, num_closures: int = 1) -> None:
        """Wait until so many more closures are at the gate."""
        for _ in range(num_closures):
            if not await asyncio.to_thread(self._came.acquire, timeout=LIMIT_S):
                raise RuntimeError("No closure has come to the gate.")

    def open(self) -> None:
        """Let all through, now and later."""
        self._is_open.set()


def gate_of(number: int) -> Gate:
    return _gates[number]


@asynccontextmanager
async def coordinating(
    *, num_workers: int = 2, num_ps: int = 2, queue_size: int = 256,
    timeout_s: float | None = None, **options: Any,
) -> AsyncIterator[tuple[ar.ParameterServerStrategy, ar.ClusterCoordinator]]:  # fmt: skip
    """Open a strategy and its coordinator, all in this process."""
    engine = ar.cluster.LocalClosureEngine(num_workers=num_workers)
    strategy = ar.ParameterServerStrategy(engine, num_ps=num_ps, **options)
    coordinator = ar.ClusterCoordinator(strategy, queue_size=queue_size, timeout_s=timeout_s)
    async with asyncio.timeout(4 * LIMIT_S), strategy, coordinator:
        yield strategy, coordinator


class Cluster:
    """A strategy, its coordinator, and a variable that counts closures."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        self.strategy, self.coordinator = strategy, coordinator
        with strategy.scope():
            self.count = ar.Variable(np.zeros(()), name="count")

    async def counted(self) -> float:
        return float(await self.count.read())


def add_one(count: Any) -> float:
    count.assign_add(1.0)
    return 1.0


def fail(text: str = "bad batch") -> None:
    raise ValueError(text)


def hold(gate: Gate) -> str:
    gate.pass_through()
    return "held"


def identity(x: Any) -> Any:
    return x
