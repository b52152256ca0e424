"""Batches: what a distributed one costs above slicing the array by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

import aioreplica as ar

from ._measure import take_turns, timed
from ._row import Row, Target, compared_row

BATCH_SIZE = 256
WIDTH = 784
MAX_US = Target("ours", 60.0)


async def measure_batches(
    loop: str, strategy: ar.Strategy, *, num_batches: int, num_rounds: int
) -> list[Row]:
    """Compare an epoch of global batches with the same slices made by hand.

    Two rows, in order and shuffled. `ours` is what a batch costs above the slices: the difference
    within a round, since that is what was promised. A shuffled batch of this size is gathered on
    a host thread, so that it overlaps with the step; here there is no step.

    Args:
        loop: Name of the running event loop.
        strategy: Says over how many replicas a batch is split.
        num_batches: Batches in one sample.
        num_rounds: Rounds of the comparison.
    """
    rows = []
    for name, is_shuffled in (("batch above slices", False), ("shuffled, above slices", True)):
        contenders = {
            "ours": timed(_epoch(strategy, num_batches, is_shuffled), num_units=num_batches),
            "floor": timed(_slices(strategy, num_batches, is_shuffled), num_units=num_batches),
        }
        samples = await take_turns(contenders, num_rounds=num_rounds)
        above = [
            max(ours - floor, 0.01)
            for ours, floor in zip(samples["ours"], samples["floor"], strict=True)
        ]
        size = strategy.num_replicas_in_sync
        rows.append(
            compared_row(
                name, loop, size, "us/batch", against="slices", ours=above,
                floor=samples["floor"], target=None if is_shuffled else MAX_US,
            )
        )  # fmt: skip
    return rows


def _arrays(num_batches: int) -> np.ndarray:
    return np.ones((num_batches * BATCH_SIZE, WIDTH), np.float32)


def _epoch(
    strategy: ar.Strategy, num_batches: int, is_shuffled: bool
) -> Callable[[], Awaitable[None]]:
    dataset = ar.ArrayDataset(_arrays(num_batches), BATCH_SIZE, shuffle=is_shuffled)

    async def iterate() -> None:
        async with strategy.distribute_dataset(dataset) as batches:
            async for _ in batches:
                pass

    return iterate


def _slices(
    strategy: ar.Strategy, num_batches: int, is_shuffled: bool
) -> Callable[[], Awaitable[None]]:
    array = _arrays(num_batches)
    size = strategy.num_replicas_in_sync
    share = BATCH_SIZE // size
    rng = np.random.default_rng(0)

    async def cut() -> None:
        order = rng.permutation(len(array)) if is_shuffled else None
        for start in range(0, len(array), BATCH_SIZE):
            chosen = slice(start, start + BATCH_SIZE)
            batch = array[chosen] if order is None else array[order[chosen]]
            [batch[i * share : (i + 1) * share] for i in range(size)]
        await asyncio.sleep(0)

    return cut
