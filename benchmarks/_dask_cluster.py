"""A Dask cluster on this machine with TLS, which ours and the bare calls of Dask share."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client, Nanny, Scheduler, Security, SpecCluster, wait

NUM_WORKERS = 2
HOST = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
QUIET = {"silence_logs": logging.ERROR}


class BareTable:
    """An actor with an array and two calls, and no more."""

    def __init__(self, num_elements: int) -> None:
        self.array = np.zeros(num_elements, np.float32)

    def get(self) -> Any:
        """Return the array."""
        return self.array

    def add(self, delta: Any) -> None:
        """Add to the array."""
        self.array += delta


@asynccontextmanager
async def dask_client(num_workers: int = NUM_WORKERS, num_servers: int = 1) -> AsyncIterator[Any]:
    """Start a scheduler, workers for parameters and others for closures; give a client."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    security = Security.temporary()
    tls = {"security": security, "protocol": "tls://", **HOST}
    roles = {f"ps{i}": "PS" for i in range(num_servers)}
    roles |= {f"worker{i}": "W" for i in range(num_workers)}
    workers = {
        name: {"cls": Nanny, "options": {"nthreads": 1, "resources": {role: 1}, **tls, **QUIET}}
        for name, role in roles.items()
    }
    scheduler = {"cls": Scheduler, "options": dict(tls)}
    async with (
        SpecCluster(workers, scheduler=scheduler, security=security, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True, security=security) as client,
    ):
        await client.wait_for_workers(len(workers))
        yield client


def spin(seconds: float) -> None:
    """Keep the interpreter busy for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


async def submit_bare(client: Any, num_closures: int, fn: Callable[..., Any], *args: Any) -> None:
    """Submit closures, all at once, and wait until they are done."""
    futures = [
        client.submit(fn, *args, pure=False, resources={"W": 1}) for _ in range(num_closures)
    ]
    await wait(futures)


def pull_and_push(tables: list[Any], delta: Any) -> tuple[float, float]:
    """Call actors from a task; return the µs of a call that gets, and of one that adds."""
    begin_s = perf_counter()
    for table in tables:
        table.get().result()
    between_s = perf_counter()
    for table in tables:
        table.add(delta).result()
    scale = 1e6 / len(tables)
    return (between_s - begin_s) * scale, (perf_counter() - between_s) * scale
