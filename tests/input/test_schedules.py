"""Reading ahead under many schedules; each test says how many it explores."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art

DEVICES = ["cpu:0", "cpu:1"]


class Source:
    """Five batches that take a while each; knows how far it was read and whether it is open."""

    def __init__(self) -> None:
        self.num_read = 0
        self.is_open = False

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        self.is_open = True
        try:
            for number in range(5):
                await asyncio.sleep(0.01)
                self.num_read += 1
                yield np.full(4, number)
        finally:
            self.is_open = False


async def step(batch: np.ndarray) -> int:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return int(await ctx.all_reduce("sum", await ctx.run_on_device(np.sum, batch)))


@pytest.mark.explore(schedules=200)
async def test_batches_arrive_in_order_and_never_too_far_ahead() -> None:
    source, seen = Source(), []
    options = ar.InputOptions(per_replica_buffer_size=2)
    async with ar.MirroredStrategy(DEVICES) as strategy:
        async with strategy.distribute_dataset(source, options) as batches:
            async for batch in batches:
                seen.append(int(batch[0][0]))
                assert source.num_read <= len(seen) + 3  # the buffer, and one on its way
                assert (await strategy.run(step, args=(batch,)))[0] == 4 * seen[-1]
        assert not source.is_open
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.explore(schedules=200)
async def test_a_loop_that_is_left_closes_its_source() -> None:
    source = Source()
    async with ar.MirroredStrategy(DEVICES) as strategy:
        async with strategy.distribute_dataset(source) as batches:
            async for batch in batches:
                if batch[0][0] == 1:
                    break
        assert not source.is_open


async def train() -> None:
    """Read and compute; whatever happens, the source ends closed."""
    source = Source()
    try:
        async with (
            ar.MirroredStrategy(DEVICES) as strategy,
            strategy.distribute_dataset(source) as batches,
        ):
            async for batch in batches:
                await strategy.run(step, args=(batch,))
    finally:
        assert not source.is_open


def test_reading_ahead_can_be_cancelled_at_every_await() -> None:
    report = art.cancel_everywhere(train)

    report.check()
    assert report.schedules_run > 20


@pytest.mark.explore(schedules=200)
async def test_a_state_does_not_skip_batches_that_were_read_ahead() -> None:
    async with ar.MirroredStrategy(DEVICES) as strategy:
        batches = strategy.distribute_dataset(ar.ArrayDataset(np.arange(12), 4))
        seen = []
        with suppress(StopAsyncIteration):
            async with batches:
                async for batch in batches:
                    seen += [int(x) for part in batch.values for x in part]
                    if len(seen) == 4:
                        break
                state = batches.state_dict()
        again = strategy.distribute_dataset(ar.ArrayDataset(np.arange(12), 4))
        again.load_state_dict(state)
        async with again:
            async for batch in again:
                seen += [int(x) for part in batch.values for x in part]
    assert seen == list(range(12))
