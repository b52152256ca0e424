"""Snapshots and writes under many schedules; each test says how many."""

import asyncio

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art

DEVICES = ["cpu:0", "cpu:1"]


async def two_variables() -> tuple[ar.MirroredStrategy, list[ar.Variable]]:
    strategy = ar.MirroredStrategy(DEVICES)
    with strategy.scope():
        made = [
            ar.Variable(np.zeros(3, np.float32), name=name, aggregation="mean")
            for name in ("a", "b")
        ]
    return strategy, made


async def train(strategy: ar.Strategy, variables: list[ar.Variable], num_steps: int) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        assert context is not None
        await context.run_on_device(int)
        for variable in variables:
            await variable.assign_add(np.ones(3, np.float32))

    for _ in range(num_steps):
        await strategy.run(step)


@pytest.mark.explore(schedules=60)
async def test_a_value_is_never_torn() -> None:
    strategy, (a, b) = await two_variables()
    training = asyncio.create_task(train(strategy, [a, b], 2))
    while not training.done():
        taken = strategy.snapshot(a, b)
        for variable in (a, b):
            assert len(set(np.asarray(taken[variable]).tolist())) == 1
        await asyncio.sleep(0)
    await training
    assert np.asarray(a.value).tolist() == [2.0] * 3
    await strategy.aclose()


@pytest.mark.explore(schedules=200)
async def test_a_cancelled_step_leaves_each_variable_old_or_new_on_all_replicas() -> None:
    strategy, (a, b) = await two_variables()
    training = asyncio.create_task(train(strategy, [a, b], 3))
    for _ in range(6):
        await asyncio.sleep(0)
    training.cancel()
    await asyncio.wait([training])
    await strategy.check_in_sync([a, b])
    await strategy.aclose()


def test_training_can_be_cancelled_at_every_await() -> None:
    async def main() -> None:
        strategy, (a, b) = await two_variables()
        try:
            await train(strategy, [a, b], 2)
        finally:
            await strategy.check_in_sync([a, b])
            await strategy.aclose()

    art.cancel_everywhere(main).check()
