"""Strategies of parameter servers with workers in this process, and closures for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine
from aioreplica.strategies.parameter_server._queue import FIRST_WAITING

UNDER_WAY = 1 + FIRST_WAITING
"""Closures that one worker has."""


@asynccontextmanager
async def opened(num_workers: int = 1, **options: Any) -> AsyncIterator[Any]:
    engine = LocalClosureEngine(num_workers)
    async with (
        ar.ParameterServerStrategy(engine, **options) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        yield strategy, coordinator


async def descend_by_rows(w: Any, optimizer: Any, rows: Any) -> None:
    slices = ar.IndexedSlices(w.rows(rows) - 1.0, rows, w.shape)
    await optimizer.apply_gradients([(slices, w)])


def count_twice(counter: Any) -> int:
    counter.assign_add(1)
    counter.assign_add(1)
    return int(counter.value)


def fail(kind: type[BaseException]) -> None:
    raise kind("no")


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)
