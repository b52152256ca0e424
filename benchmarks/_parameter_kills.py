"""Workers of closures that are killed in the middle: every push counts exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from random import Random
from typing import Any, final

import numpy as np

import aioreplica as ar

NUM_CLOSURES = 24
CLOSURE_S = 0.08
LIMIT_S = 120.0


@final
@dataclass(slots=True)
class Kills:
    """What became of the pushes.

    Attributes:
        num_kills: Runs of 24 closures, each with one kill.
        num_pushes: Pushes that had to count, two of each closure.
        num_lost: Those that did not.
        num_twice: Those that did more than once.
        num_retries: Closures that ran again.
        num_dropped: Pushes that servers had seen before.
    """

    num_kills: int = 0
    num_pushes: int = 0
    num_lost: int = 0
    num_twice: int = 0
    num_retries: int = 0
    num_dropped: int = 0

    def __str__(self) -> str:
        return (
            f"killed {self.num_kills} workers in the middle of {NUM_CLOSURES} closures: of "
            f"{self.num_pushes} pushes {self.num_lost} lost, {self.num_twice} counted twice; "
            f"{self.num_retries} closures ran again, {self.num_dropped} pushes came again"
        )

    @property
    def is_good(self) -> bool:
        """Whether each push counted once, and kills hit running closures at all."""
        return bool(self.num_retries) and not self.num_lost and not self.num_twice


def push_twice(counts: Any, row: int, seconds: float) -> None:
    """Push, work, push, work."""
    for column in (0, 1):
        delta = np.zeros((1, 2))
        delta[0, column] = 1.0
        counts.assign_add(ar.IndexedSlices(delta, [row], counts.shape))
        time.sleep(seconds / 2)


async def kill_workers(num_kills: int, *, seed: int = 0) -> Kills:
    """Run closures, kill a worker at a random time, count; all on one cluster.

    If no kill has hit a closure between its pushes, up to ten more follow.
    """
    rng, kills = Random(seed), Kills()
    strategy = ar.ParameterServerStrategy(num_ps=1, num_workers=2)
    async with strategy, ar.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            counts = ar.Variable(np.zeros((NUM_CLOSURES, 2)), name="counts")
        while kills.num_kills < num_kills or (
            not kills.num_retries and kills.num_kills < num_kills + 10
        ):
            victims = await _workers(strategy)
            await counts.assign(np.zeros(counts.shape))
            for row in range(NUM_CLOSURES):
                await coordinator.schedule(push_twice, (counts, row, CLOSURE_S))
            await asyncio.sleep(rng.uniform(0.1, NUM_CLOSURES / 2 * CLOSURE_S * 0.8))
            os.kill(rng.choice(victims), signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                await coordinator.join()
            found = await counts.read()
            kills.num_kills += 1
            kills.num_pushes += found.size
            kills.num_lost += int(np.sum(found < 1))
            kills.num_twice += int(np.sum(found > 1))
            statistics = coordinator.statistics()
            kills.num_retries, kills.num_dropped = statistics.num_retries, statistics.pushes_dropped
    return kills


async def _workers(strategy: Any) -> list[int]:
    """Wait until both workers are there; return their processes."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            pids = [each.pid for each in await strategy.engine.workers() if each.role == "W"]
            if len(pids) == 2:
                return pids
            await asyncio.sleep(0.02)
