"""Closures, lost workers and pushes under many schedules, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine


async def count_and_wait(counter: Any) -> int:
    counter.assign_add(1)
    await asyncio.sleep(0)
    counter.assign_add(1)
    return 7


async def lose_one(engine: LocalClosureEngine) -> None:
    await asyncio.sleep(0)
    engine.lose_worker("worker-0")


async def main() -> None:
    engine = LocalClosureEngine(num_workers=2)
    async with ar.ParameterServerStrategy(engine) as strategy:
        with strategy.scope():
            counter = ar.Variable(0, name="counter")
        async with ar.ClusterCoordinator(strategy) as coordinator:
            remotes = [await coordinator.schedule(count_and_wait, (counter,)) for _ in range(3)]
            losing = asyncio.create_task(lose_one(engine))
            await coordinator.join()
            await losing
            assert await coordinator.fetch(remotes) == [7, 7, 7]
        assert int(await counter.read()) == 6


def test_each_push_counts_once_under_every_schedule() -> None:
    art.explore(main, schedules=60).check()
