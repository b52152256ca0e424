"""One worker of `scale`: times messages and reductions, `python -m benchmarks._messages PATH`.

Worker 0 writes JSON: medians of an awaited all_reduce in a step, by bytes; and of two workers pairs
of bytes and seconds of one message of MPI, and the seconds of one of many messages, per byte of a
sum, and per frame that is looked at.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.cluster import Communicator, connect
from aioreplica.cluster._frame import Frame, FrameKind, slots_if_one_collective

SIZES = tuple(4**power for power in range(3, 13))  # 64 B to 16 MiB
REDUCED = (4 * 1024, 1024**2)
NUM_TIMES = 30
NUM_IN_FLIGHT = 32
NUM_FRAMES = 1024


def seconds_of(fn: Callable[[], object]) -> float:
    """Return the shortest of many calls."""
    times = []
    for _ in range(NUM_TIMES):
        start = perf_counter()
        fn()
        times.append(perf_counter() - start)
    return min(times)


def measure_messages(c: Communicator) -> dict[str, Any]:
    """Time what a reduction between two workers is made of."""
    from mpi4py import MPI

    comm, other = MPI.COMM_WORLD.Dup(), 1 - c.rank

    def swap(out: Any, into: Any) -> None:
        comm.Sendrecv(out, other, recvbuf=into, source=other)

    points = []
    for size in SIZES:
        out, into = np.ones(size, np.uint8), np.empty(size, np.uint8)
        comm.Barrier()
        points.append((size, seconds_of(partial(swap, out, into))))
    small, rows = np.ones(64, np.uint8), np.empty((NUM_IN_FLIGHT, 64), np.uint8)

    def send_many() -> None:
        requests = [comm.Irecv(row, other) for row in rows]
        requests += [comm.Isend(small, other) for _ in rows]
        MPI.Request.Waitall(requests)

    comm.Barrier()
    many = seconds_of(send_many)
    x, y = np.ones(2**20, np.float32), np.ones(2**20, np.float32)
    frames = np.stack([Frame(FrameKind.COLLECTIVE, 0, "step", 1).encode()] * NUM_FRAMES)
    return {
        "points": points,
        "overhead": many / NUM_IN_FLIGHT,
        "gamma": seconds_of(lambda: np.add(x, y, x)) / x.nbytes,
        "look": seconds_of(lambda: slots_if_one_collective(frames)) / NUM_FRAMES,
    }


async def measure_reductions() -> dict[int, float]:
    """Time an awaited all_reduce in a step, from when all workers are ready."""
    ctx = ar.get_replica_context()
    assert ctx is not None
    found = {}
    for num_bytes in REDUCED:
        x, times = np.ones(num_bytes // 4, np.float32), []
        for _ in range(NUM_TIMES):
            await ctx.all_reduce("sum", 0.0)
            start = perf_counter()
            await ctx.all_reduce("sum", x)
            times.append(perf_counter() - start)
        found[num_bytes] = median(times)
    return found


async def measure() -> dict[str, Any]:
    """Measure everything; return what this worker saw."""
    async with await connect(engine="mpi", timeout=60.0) as c:
        rank, messages = c.rank, measure_messages(c) if c.size == 2 else {}
    ar.set_logical_devices("cpu", 1)
    again = await connect(engine="mpi", timeout=60.0)
    async with ar.MultiWorkerMirroredStrategy(again) as strategy:
        reduced = strategy.local_results(await strategy.run(measure_reductions))[0]
    return {"rank": rank, "reduced": list(reduced.items()), **messages}


if __name__ == "__main__":
    told = asyncio.run(measure())
    if told["rank"] == 0:
        Path(sys.argv[1]).write_text(json.dumps(told))
