"""Overlap: a source and a step of 10 ms each, with reading ahead and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

import aioreplica as ar

from ._measure import take_turns, timed
from ._row import Row, Target, compared_row

SECONDS = 0.010
MAX_RATIO = Target("ratio", 1 / 1.9)


async def measure_overlap(
    loop: str, strategy: ar.Strategy, *, num_batches: int, num_rounds: int
) -> list[Row]:
    """Compare the time per batch with that of the same loop without reading ahead.

    Args:
        loop: Name of the running event loop.
        strategy: Runs the steps.
        num_batches: Batches in one sample.
        num_rounds: Rounds of the comparison.
    """
    contenders = {
        "ours": timed(_training(strategy, num_batches, 1), num_units=num_batches),
        "floor": timed(_training(strategy, num_batches, 0), num_units=num_batches),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    size = strategy.num_replicas_in_sync
    return [
        compared_row(
            "10 ms source, 10 ms step", loop, size, "us/batch", against="buffer size 0",
            target=MAX_RATIO, **samples,
        )
    ]  # fmt: skip


def _training(
    strategy: ar.Strategy, num_batches: int, buffer_size: int
) -> Callable[[], Awaitable[None]]:
    options = ar.InputOptions(per_replica_buffer_size=buffer_size)

    def source() -> Iterator[Any]:
        for number in range(num_batches):
            time.sleep(SECONDS)
            yield np.full(8, number)

    async def step(_part: Any) -> None:
        await asyncio.sleep(SECONDS)

    async def train() -> None:
        async with strategy.distribute_dataset(source, options) as batches:
            async for batch in batches:
                await strategy.run(step, args=(batch,))

    return train
