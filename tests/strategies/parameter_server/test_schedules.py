"""Closures, lost workers and pushes under many schedules, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import ClosureCancelledError


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


async def mark_twice(marks: Any, index: int, is_bad: bool = False) -> int:
    row = ar.IndexedSlices(np.ones((1, 1)), [index], marks.shape)
    marks.assign_add(row)
    await asyncio.sleep(0)
    if is_bad:
        raise ValueError("bad")
    marks.assign_add(row)
    return index


async def lose_and_add(engine: LocalClosureEngine) -> None:
    for name in ("worker-0", "worker-1"):
        await asyncio.sleep(0)
        engine.lose_worker(name)
        engine.add_worker()


async def errors_losses_and_joins() -> None:
    """Two tasks schedule, a closure fails, workers go and come, a third task joins."""
    engine, errors = LocalClosureEngine(num_workers=2), []
    remotes: dict[int, Any] = {}

    async def tried(doing: Any) -> Any:
        try:
            return await doing
        except ValueError as error:
            errors.append(error)

    async with ar.ParameterServerStrategy(engine, num_ps=2) as strategy:
        with strategy.scope():
            marks = ar.Variable(np.zeros((6, 1)), name="marks")
        async with ar.ClusterCoordinator(strategy, queue_size=2) as coordinator:

            async def schedule(indices: Any) -> None:
                for i in indices:
                    args = (marks, i, i == 1)
                    remotes[i] = await tried(coordinator.schedule(mark_twice, args))

            await asyncio.gather(
                schedule((0, 1)), schedule((2, 3, 4)), lose_and_add(engine),
                tried(coordinator.join()),
            )  # fmt: skip
            await tried(coordinator.join())
            remotes[5] = await coordinator.schedule(mark_twice, (marks, 5))
            await coordinator.join()
            found = (await marks.read()).reshape(-1).tolist()
            statistics = coordinator.statistics()
            outcomes = {i: await outcome_of(remote) for i, remote in remotes.items()}
    assert len(errors) == 1
    told = [outcome for outcome in outcomes.values() if outcome is not None]
    assert sum(outcome == "done" for outcome in told) == statistics.num_finished
    assert told.count("bad") == statistics.num_failed == 1
    assert told.count("cancelled") == statistics.num_cancelled
    for i, outcome in outcomes.items():
        allowed = {None: [0], "done": [2], "bad": [1], "cancelled": [0, 1, 2]}[outcome]
        assert found[i] in allowed, (i, outcome, found)


async def outcome_of(remote: Any) -> str | None:
    if remote is None:  # `schedule` raised
        return None
    try:
        await remote.fetch()
    except ClosureCancelledError:
        return "cancelled"
    except ValueError:
        return "bad"
    return "done"


@pytest.mark.xslow
def test_errors_and_lost_workers_in_every_order_count_exactly() -> None:
    art.explore(errors_losses_and_joins, schedules=150).check()
