"""One of two workers with a GPU each: `python -m benchmarks._gpu_worker KIND ROUNDS BYTES PATH`.

An `all_reduce` of an array that is on the GPU: the library's, which sends it through the memory
of the host over Gloo, and NCCL's. In a dry run on the host Gloo takes the place of NCCL. They take
turns; worker 0 writes the samples as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import aioreplica as ar

NUM_TIMES = 4


async def measure(kind: str, num_rounds: int, num_bytes: int) -> dict[str, list[float]]:
    """Return milliseconds of each, in the order of the rounds.

    Raises:
        AssertionError: If a sum is wrong.
    """
    array = torch.arange(num_bytes // 4, dtype=torch.float32, device=kind)
    communicator = await ar.cluster.connect(engine="torch", timeout=60)
    rank = communicator.rank
    nccl: Any = dist.new_group(backend="nccl" if kind == "cuda" else "gloo")
    async with ar.MultiWorkerMirroredStrategy(communicator) as strategy:

        async def step() -> None:
            ctx = ar.get_replica_context()
            assert ctx is not None
            for _ in range(NUM_TIMES):
                total = await ctx.all_reduce("sum", array)
            _require_twice(total, array)

        samples: dict[str, list[float]] = {"ours": [], "by hand": []}
        for number in range(num_rounds + 1):
            begin = perf_counter()
            await strategy.run(step)
            between = perf_counter()
            for _ in range(NUM_TIMES):
                total = array.clone()
                dist.all_reduce(total, group=nccl)
            _require_twice(total, array)
            end = perf_counter()
            if number:  # the first round connects
                samples["ours"].append((between - begin) / NUM_TIMES * 1e3)
                samples["by hand"].append((end - between) / NUM_TIMES * 1e3)
    return samples if rank == 0 else {}


def take_own_gpu() -> None:
    """See one of the GPUs only, before CUDA is asked for any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(os.environ["RANK"])]


def _require_twice(total: Any, array: Any) -> None:
    assert torch.equal(total, 2 * array), "The sum of two workers is wrong."


if __name__ == "__main__":
    take_own_gpu()
    ar.set_logical_devices("cpu", 1)
    told = asyncio.run(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    if told:
        Path(sys.argv[4]).write_text(json.dumps(told), encoding="utf-8")
