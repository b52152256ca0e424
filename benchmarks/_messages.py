"""One worker of `scale`: times messages between two workers, `python -m benchmarks._messages PATH`.

Worker 0 writes JSON: pairs of bytes and seconds of one message of MPI, seconds per byte of a sum,
and what an awaited all_reduce of 1 KiB takes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from aioreplica.cluster import connect

SIZES = tuple(4**power for power in range(3, 13))  # 64 B to 16 MiB
NUM_TIMES = 30


async def measure() -> dict[str, Any]:
    """Measure everything; return what this worker saw."""
    async with await connect(engine="mpi", timeout=60.0) as c:
        from mpi4py import MPI

        comm, other = MPI.COMM_WORLD.Dup(), 1 - c.rank
        points = []
        for size in SIZES:
            out, into = np.ones(size, np.uint8), np.empty(size, np.uint8)
            times = []
            for _ in range(NUM_TIMES):
                comm.Barrier()
                start = perf_counter()
                comm.Sendrecv(out, other, recvbuf=into, source=other)
                times.append(perf_counter() - start)
            points.append((size, min(times)))
        x, y = np.ones(2**20, np.float32), np.ones(2**20, np.float32)
        sums, awaited = [], []
        for _ in range(NUM_TIMES):
            start = perf_counter()
            np.add(x, y, x)
            sums.append(perf_counter() - start)
            await c.barrier()
            start = perf_counter()
            await c.all_reduce(y[:256])
            awaited.append(perf_counter() - start)
    return {
        "rank": c.rank, "points": points, "gamma": min(sums) / x.nbytes,
        "awaited": median(awaited),
    }  # fmt: skip


if __name__ == "__main__":
    told = asyncio.run(measure())
    if told["rank"] == 0:
        Path(sys.argv[1]).write_text(json.dumps(told))
