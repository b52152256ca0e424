"""Two promises that hold or do not: nothing grows, and a run that is stopped resumes exactly."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import psutil

import aioreplica as ar

MAX_BYTES_GROWN = 50_000
NUM_EXAMPLES = 1_000


@final
@dataclass(frozen=True, slots=True)
class Growth:
    """What is there after the epochs and was not before.

    Attributes:
        num_epochs: How many there were, each broken off.
        num_tasks: Tasks of the event loop.
        num_threads: Threads of the process.
        num_files: File descriptors of the process.
        num_bytes: Bytes of Python objects.
    """

    num_epochs: int
    num_tasks: int
    num_threads: int
    num_files: int
    num_bytes: int

    @property
    def is_flat(self) -> bool:
        """Whether nothing but noise was left behind."""
        counts = (self.num_tasks, self.num_threads, self.num_files)
        return max(counts) <= 0 and self.num_bytes < MAX_BYTES_GROWN


async def measure_growth(strategy: ar.Strategy, *, num_epochs: int) -> Growth:
    """Break off epochs of a source with a file and a thread, and see what is left."""

    def source() -> Iterator[Any]:
        with open(__file__) as file:  # noqa: PTH123 - any file will do
            for number, _ in enumerate(file):
                yield np.full(8, number)

    async def epochs(count: int) -> None:
        for epoch in range(count):
            async with strategy.distribute_dataset(source) as batches:
                async for _ in batches:
                    if batches.statistics().num_delivered > epoch % 5:
                        break

    await epochs(20)
    tracemalloc.start()
    try:
        await epochs(20)
        before = _footprint()
        await epochs(num_epochs)
        after = _footprint()
    finally:
        tracemalloc.stop()
    return Growth(num_epochs, *(new - old for new, old in zip(after, before, strict=True)))


async def count_wrong_resumes(strategy: ar.Strategy, *, batch_size: int) -> tuple[int, int]:
    """Stop behind every batch of an epoch, go on in new objects, compare what is seen bit by bit.

    Returns:
        How many stops there were, and after how many of them the rest was another one.
    """
    data = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4))

    def batches() -> ar.DistributedDataset:
        return strategy.distribute_dataset(ar.ArrayDataset(data, batch_size, shuffle=True))

    states, seen = [], []
    async with batches() as whole:
        states.append(json.dumps(whole.state_dict()))
        async for batch in whole:
            seen.append(_bits(batch))
            states.append(json.dumps(whole.state_dict()))
    num_wrong = 0
    for number, state in enumerate(states):
        async with batches() as rest:
            rest.load_state_dict(json.loads(state))
            num_wrong += [_bits(batch) async for batch in rest] != seen[number:]
    return len(states), num_wrong


def _bits(batch: Any) -> bytes:
    return b"".join(part.tobytes() for part in batch.values)


def _footprint() -> tuple[int, int, int, int]:
    gc.collect()
    return (
        len(asyncio.all_tasks()),
        threading.active_count(),
        psutil.Process().num_fds(),
        tracemalloc.get_traced_memory()[0],
    )
