"""Event-loop lag: how late a timer is while large reductions run back to back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.devices import num_collective_streams

from ._blocked_sum import replica_arrays, sum_blocks
from ._measure import Contender, take_turns
from ._reducing import reducing
from ._row import Row, Target, compared_row

PERIOD_S = 0.001
NUM_BYTES = 64 * 1024 * 1024
MAX_LAG_MS = Target("ours", 10.0)


async def measure_lag(
    loop: str, strategy: ar.Strategy, *, num_times: int, num_rounds: int
) -> list[Row]:
    """Compare the lag during reductions with that during the same sums in bare threads.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas reduce.
        num_times: Reductions in one sample.
        num_rounds: Rounds of the comparison.
    """
    size = strategy.num_replicas_in_sync
    arrays = replica_arrays(size, NUM_BYTES)
    with ThreadPoolExecutor(num_collective_streams()) as executor:
        contenders = {
            "ours": lag_during(reducing(strategy, arrays, num_times)),
            "floor": lag_during(_in_threads(executor, arrays, num_times)),
        }
        samples = await take_turns(contenders, num_rounds=num_rounds)
    return [
        compared_row(
            "loop lag, 64 MiB", loop, size, "ms, p99", against="bare threads", target=MAX_LAG_MS,
            **samples,
        )
    ]  # fmt: skip


def _in_threads(
    executor: Executor, arrays: Sequence[Any], num_times: int
) -> Callable[[], Awaitable[object]]:
    """Return what sums the arrays that often, each thread its range, without meeting."""
    loop = asyncio.get_running_loop()
    total = np.zeros_like(arrays[0])
    count = num_collective_streams()
    edges = [total.size * i // count for i in range(count + 1)]

    def sum_range(start: int, stop: int) -> None:
        for _ in range(num_times):
            sum_blocks(arrays, total, start, stop)

    return lambda: asyncio.gather(
        *[loop.run_in_executor(executor, sum_range, *edge) for edge in pairwise(edges)]
    )


def lag_during(action: Callable[[], Awaitable[object]]) -> Contender:
    """Return a contender for how many ms late a sleep ends during `action`, 99th percentile."""

    async def sample() -> float:
        lags: list[float] = []

        async def tick() -> None:
            while True:
                start = perf_counter()
                await asyncio.sleep(PERIOD_S)
                lags.append(perf_counter() - start - PERIOD_S)

        ticking = asyncio.create_task(tick())
        try:
            await action()
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
        return float(np.percentile(lags, 99)) * 1e3

    return sample
