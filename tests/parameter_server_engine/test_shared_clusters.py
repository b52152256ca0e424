"""A cluster that outlives its strategies, and whose workers are retired and added by others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from distributed import Client

import aioreplica as ar
from aioreplica.errors import WorkerLostError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import LIMIT_S, PAUSE_S, FileGate
from tests.parameter_server_engine.conftest import (
    coordinating,
    pids_of,
    table_of,
    until_workers,
)
from tests.parameter_server_engine.test_clusters import dask_cluster

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:The Dask scheduler at .*127.0.0.1:RuntimeWarning"),
]


def things_of_worker(dask_worker: Any) -> int:
    """Count what strategies have left with a worker."""
    from aioreplica.cluster._dask_states import closure_worker

    kept = sum(map(len, closure_worker(dask_worker)._kept.values()))
    return kept + len(dask_worker.state.actors) + len(dask_worker.data)


def num_tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


async def things_left(client: Any) -> int:
    """Count what is left in a cluster; waits for what is on its way."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            tasks = await client.run_on_scheduler(num_tasks)
            left = tasks + sum((await client.run(things_of_worker)).values())
            if not left:
                return 0
            await asyncio.sleep(PAUSE_S)


async def test_strategies_leave_nothing_in_a_cluster() -> None:
    async with (
        dask_cluster() as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        for turn in range(3):
            async with coordinating(cluster.scheduler_address) as (strategy, coordinator):
                with strategy.scope():
                    table, sgd = (
                        ar.Variable(np.zeros((64, 2)), name="table"),
                        ar.optimizers.SGD(1.0),
                    )
                dataset = coordinator.create_per_worker_dataset(closures.part_of)
                iterator = iter(dataset)
                for i in range(4):
                    await coordinator.schedule(closures.learn_row, (table, sgd, i, iterator))
                await coordinator.join()
                assert np.sum(await table.read()) == -8.0, turn
            assert await things_left(client) == 0


@pytest.mark.parametrize("target", ["client", "address"])
async def test_what_runs_keeps_its_place_behind_another_client(gate: FileGate, target: str) -> None:
    """The connection knows it; one in its place could not ask when it has ended."""
    async with (
        dask_cluster(("PS", "PS", "W")) as cluster,
        Client(cluster, asynchronous=True) as client,
        Client(cluster, asynchronous=True) as another,
        coordinating(client) as (strategy, coordinator),
    ):
        table, engine = table_of(strategy), strategy.engine
        await coordinator.schedule(closures.add_row, (table, 0, gate))
        await gate.reached(1)
        pids = await pids_of(strategy, "W")
        strategy.servers.handles[0].lose()  # as the scheduler tells, without half a minute of Dask
        with pytest.raises(WorkerLostError):
            await table.read()
        await strategy.reopen(another if target == "client" else cluster.scheduler_address)
        assert strategy.engine is engine
        await table.assign(np.zeros(table.shape))
        queue = coordinator._runner.queue
        remote = await coordinator.schedule(closures.add_row, (table, 1, gate))
        while (closure := queue.with_workers()[-1]).submission is None or closure.is_over:
            await asyncio.sleep(0)
        assert [each.began_s is None for each in queue.with_workers()] == [False, True]
        gate.open()
        await remote.fetch()
        assert float((await table.read()).sum()) == 2.0
        assert await pids_of(strategy, "W") == pids


async def test_workers_that_are_retired_lose_nothing(gate: FileGate) -> None:
    """As `cluster.adapt` does: workers are told to go while closures run, and others come."""
    async with (
        dask_cluster() as cluster,
        Client(cluster, asynchronous=True) as client,
        coordinating(cluster.scheduler_address) as (strategy, coordinator),
    ):
        table = table_of(strategy)
        early = [await coordinator.schedule(closures.add_row, (table, i)) for i in range(4)]
        await coordinator.join()
        late = [await coordinator.schedule(closures.add_row, (table, i, gate)) for i in range(4, 8)]
        await gate.reached(2)
        retired = next(iter(strategy.engine.workers_now))
        gate.open()
        await client.retire_workers([retired], close_workers=True)
        await until_workers(strategy, 1)
        assert len(await coordinator.fetch([*early, *late])) == 8
        await coordinator.join()
        expected = np.zeros((24, 2))
        expected[:8] = 1.0
        np.testing.assert_array_equal(await table.read(), expected)
