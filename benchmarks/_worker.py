"""One worker of the `workers` benchmark: `python -m benchmarks._worker ENGINE ROUNDS LOOP PATH`.

The engine's own blocking call and ours take turns; worker 0 writes the samples as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.cluster import Communicator, connect

from ._loop_lag import lag_during
from ._loops import find_loop_factory

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, MIB, 16 * MIB, 64 * MIB)
CALLS = {4 * KIB: 30, MIB: 10, 16 * MIB: 2, 64 * MIB: 1}
NUM_LAG = 6
NUM_HANDLES = 32
FREED_BYTES = 24 * MIB
LATE_S = 2.0

Blocking = Callable[[Any], Any]
Ours = Callable[[Any], Awaitable[Any]]


def bare_mpi() -> tuple[Blocking, Callable[[], None]]:
    """Return an Allreduce into a fresh array, and a barrier, both blocking."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def all_reduce(x: Any) -> Any:
        result = np.empty_like(x)
        comm.Allreduce(x, result)
        return result

    return all_reduce, comm.Barrier


def bare_gloo() -> tuple[Blocking, Callable[[], None]]:
    """Return an all_reduce of a copy, and a barrier, both blocking."""
    import torch
    import torch.distributed as dist

    def all_reduce(x: Any) -> Any:
        result = torch.from_numpy(x).clone()
        dist.all_reduce(result)
        return result.numpy()

    return all_reduce, dist.barrier


async def compare_sizes(
    ours: Ours, size: int, bare: Blocking, barrier: Callable[[], None], num_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Time both at every size, in µs, worker 0 as it sees them.

    Args:
        ours: All_reduce of this library.
        size: How many workers there are.
        bare: That of the engine.
        barrier: Of the engine.
        num_rounds: Samples of each.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    for num_bytes in SIZES:
        x = np.ones(num_bytes // 4, np.float32)
        both: dict[str, list[float]] = {"ours": [], "floor": []}
        for turn in range(num_rounds + 1):
            for name, kept in both.items():
                gc.collect()
                times = []
                for _ in range(CALLS[num_bytes]):
                    barrier()
                    start = perf_counter()
                    result = bare(x) if name == "floor" else await ours(x)
                    times.append(perf_counter() - start)
                    assert result[-1] == size
                    del result
                if turn:
                    kept.append(median(times) * 1e6)
        samples[str(num_bytes)] = both
    return samples


async def compare_handles(
    bare: Blocking, barrier: Callable[[], None], num_rounds: int
) -> dict[str, list[float]]:
    """Time reductions of 4 KiB that are started together beside as many calls of the engine, in µs.

    Args:
        bare: Call of the engine.
        barrier: Of the engine.
        num_rounds: Samples of each.
    """
    ctx = ar.get_replica_context()
    assert ctx is not None
    arrays = [np.ones(KIB, np.float32) for _ in range(NUM_HANDLES)]
    both: dict[str, list[float]] = {"ours": [], "floor": []}
    for turn in range(num_rounds + 1):
        for name, kept in both.items():
            times = []
            for _ in range(10):
                barrier()
                start = perf_counter()
                if name == "floor":
                    results = [bare(x) for x in arrays]
                else:
                    handles = [ctx.start_all_reduce("sum", x) for x in arrays]
                    results = [await handle for handle in handles]
                times.append(perf_counter() - start)
                assert results[-1][-1] == ctx.num_replicas_in_sync
            if turn:
                kept.append(median(times) * 1e6)
    return both


async def measure_wait(c: Communicator) -> float:
    """Return the CPU seconds that worker 0 uses while worker 1 is two seconds late."""
    await c.barrier()
    if c.rank == 1:
        await asyncio.sleep(LATE_S)
    start = process_time()
    await c.barrier()
    return process_time() - start


async def measure(engine: str, num_rounds: int) -> dict[str, Any]:
    """Measure everything; return what this worker saw."""
    # Until something large was freed, glibc gives a freed MiB back to the system: then each fresh
    # result costs 350 page faults, five times as long as the reduction, for ours or the floor.
    np.ones(FREED_BYTES, np.uint8)
    async with await connect(engine=engine, timeout=120.0) as c:
        bare, barrier = bare_mpi() if engine == "mpi" else bare_gloo()
        alone = await compare_sizes(c.all_reduce, c.size, bare, barrier, num_rounds)
        waits = [await measure_wait(c) for _ in range(min(3, num_rounds))]
        x = np.ones(64 * MIB // 4, np.float32)

        async def reduce_often() -> None:
            for _ in range(NUM_LAG):
                await c.all_reduce(x)

        lags = [await lag_during(reduce_often)() for _ in range(min(3, num_rounds))]
        await c.barrier()

    async def step() -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None

        def all_reduce(x: Any) -> Awaitable[Any]:
            return ctx.all_reduce("sum", x)

        sizes = await compare_sizes(all_reduce, c.size, bare, barrier, num_rounds)
        return sizes, await compare_handles(bare, barrier, num_rounds)

    ar.set_logical_devices("cpu", 1)
    again = await connect(engine=engine, timeout=120.0)
    async with ar.MultiWorkerMirroredStrategy(again) as strategy:
        in_step, handles = strategy.local_results(await strategy.run(step))[0]
    return {
        "rank": c.rank, "sizes": in_step, "handles": handles, "alone": alone, "cpu": waits,
        "lag": lags,
    }  # fmt: skip


if __name__ == "__main__":
    factory = find_loop_factory(sys.argv[3])
    with asyncio.Runner(loop_factory=factory) as runner:
        told = runner.run(measure(sys.argv[1], int(sys.argv[2])))
    if told["rank"] == 0:
        Path(sys.argv[4]).write_text(json.dumps(told))
