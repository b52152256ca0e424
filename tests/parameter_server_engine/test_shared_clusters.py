"""A cluster that outlives its strategies, and whose workers are retired and added by others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster

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
from tests.parameter_server_engine.test_clusters import HOST, dask_cluster

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


def resident_bytes(dask_worker: Any) -> int:
    return psutil.Process().memory_info().rss


async def test_twenty_strategies_leave_nothing_in_a_cluster() -> None:
    """Each has a table of 8 MiB, which both workers pull."""
    async with (
        dask_cluster() as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        sizes: list[int] = []
        for turn in range(20):
            async with coordinating(cluster.scheduler_address) as (strategy, coordinator):
                with strategy.scope():
                    table, sgd = (
                        ar.Variable(np.zeros((2**19, 2)), name="table"),
                        ar.optimizers.SGD(1.0),
                    )
                dataset = coordinator.create_per_worker_dataset(closures.part_of)
                iterator = iter(dataset)
                for i in range(4):
                    await coordinator.schedule(closures.learn_row, (table, sgd, i, iterator))
                    await coordinator.schedule(closures.total, (table,))
                await coordinator.join()
                assert np.sum(await table.read()) == -8.0, turn
            assert await things_left(client) == 0
            sizes.append(sum((await client.run(resident_bytes)).values()))
        assert sizes[-1] - sizes[9] < 100 * 2**20  # 10 tables in three processes are 240 MiB


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


@asynccontextmanager
async def adaptive_cluster(minimum: int, maximum: int) -> AsyncIterator[Any]:
    """Start a cluster whose workers come and go as Dask's own adaptive scheduling wants.

    The parameter server is a process by itself, not one of those that are adapted.
    """
    common = {"nthreads": 1, **HOST}
    worker = {"cls": Nanny, "options": {**common, "resources": {"W": 1}}}
    scheduler = {"cls": Scheduler, "options": HOST}
    async with (
        SpecCluster(
            {}, scheduler=scheduler, worker=worker, asynchronous=True, silence_logs=50
        ) as cluster,
        Nanny(cluster.scheduler_address, name="ps", resources={"PS": 1}, **common),
    ):
        cluster.adapt(
            minimum=minimum, maximum=maximum, interval="20ms", wait_count=1, target_duration="1ms"
        )
        async with Client(cluster, asynchronous=True) as client:
            await client.wait_for_workers(1 + minimum)
        yield cluster


async def test_adaptive_scaling_brings_workers_and_takes_them_away(tmp_path: Path) -> None:
    async with (
        adaptive_cluster(1, 3) as cluster,
        coordinating(cluster.scheduler_address) as (strategy, coordinator),
    ):
        table = table_of(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(closures.part_of))
        await table.read()
        remotes: list[Any] = []
        seen = set[int]()
        for _ in range(2):
            await until_workers(strategy, 1)
            gate = FileGate(tmp_path)
            args = (table, iterator, gate)
            remotes += [await coordinator.schedule(closures.learn_next, args) for _ in range(12)]
            pids = await gate.reached(3)  # those who wait have made Dask start two workers more
            assert len(set(pids)) >= 3  # more if the last one was retired just then
            seen.update(pids)
            gate.open()
            await coordinator.join()
        await until_workers(strategy, 1)

        np.testing.assert_array_equal(await table.read(), np.ones((24, 2)))
        assert sorted(await coordinator.fetch(remotes)) == [*range(24)]
        assert len(seen) >= 5
        statistics = coordinator.statistics()
        assert (statistics.num_failed, statistics.num_cancelled) == (0, 0)
        assert strategy.lost_variables == ()


async def test_two_coordinators_at_once_have_nothing_of_each_other(tmp_path: Path) -> None:
    """An error ends what one of them has scheduled, and its close takes nothing from the other."""
    async with (
        dask_cluster(("PS", "PS", "W", "W", "W")) as cluster,
        coordinating(cluster.scheduler_address) as (strategy, coordinator),
    ):
        table, gate, later = table_of(strategy), FileGate(tmp_path), FileGate(tmp_path)

        async def add(rows: range, gate: FileGate) -> list[Any]:
            args = ((table, row, gate) for row in rows)
            return [await coordinator.schedule(closures.add_row, each) for each in args]

        remotes = await add(range(2), gate)
        await gate.reached(2)
        async with coordinating(cluster.scheduler_address) as (_, other):
            bad = [await other.schedule(closures.fail) for _ in range(3)]  # two behind what is held
            fetching = [asyncio.ensure_future(each.fetch()) for each in bad]
            await asyncio.wait(fetching, return_when=asyncio.FIRST_COMPLETED)
            gate.open()
            with pytest.raises(ValueError, match="bad batch"):
                await other.join()
            await asyncio.gather(*fetching, return_exceptions=True)
            remotes += await add(range(2, 8), later)
            await later.reached(3)
        later.open()
        await coordinator.join()
        assert len(await coordinator.fetch(remotes)) == 8
        statistics = coordinator.statistics()
        assert (statistics.num_failed, statistics.num_cancelled) == (0, 0)
        expected = np.zeros((24, 2))
        expected[:8] = 1.0
        np.testing.assert_array_equal(await table.read(), expected)
