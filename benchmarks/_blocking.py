"""What it costs device threads to meet: a blocking reduction beside a bare barrier."""

from __future__ import annotations

import threading

import numpy as np

import aioreplica as ar

from ._measure import take_turns, timed
from ._row import Row, Target, compared_row

MAX_RATIO = Target("ratio", 1.0)
NUM_BYTES = 1024


async def measure_blocking(
    loop: str, strategy: ar.Strategy, *, num_times: int, num_rounds: int
) -> list[Row]:
    """Compare a blocking all_reduce of 1 KiB with a round of `threading.Barrier`.

    Both run on the device threads, so that they have the same priority.
    """
    size = strategy.num_replicas_in_sync
    barrier = threading.Barrier(size)
    arrays = ar.PerReplica([np.full(NUM_BYTES // 4, i, np.float32) for i in range(size)])

    def reduce(array: object) -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        all_reduce = ctx.blocking.all_reduce
        for _ in range(num_times):
            all_reduce("sum", array)

    def meet(_array: object) -> None:
        for _ in range(num_times):
            barrier.wait()

    contenders = {
        "ours": timed(lambda: strategy.run(reduce, args=(arrays,)), num_units=num_times),
        "floor": timed(lambda: strategy.run(meet, args=(arrays,)), num_units=num_times),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    row = compared_row(
        "blocking 1 KiB", loop, size, "us/round", against="threading.Barrier", target=MAX_RATIO,
        **samples,
    )  # fmt: skip
    return [row]
