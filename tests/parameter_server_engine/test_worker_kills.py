"""Workers that are killed, stopped, added and removed: no push is lost and none counts twice.

The facts are those of TensorFlow's fault_tolerance_test, cluster_coordinator_mpr_test and
elastic_test, and of what a push promises here. A gate forces where a closure is when it happens.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import ClosureCancelledError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import FileGate
from tests.parameter_server_engine.conftest import (
    coordinating,
    kill,
    pids_of,
    table_of,
    until_workers,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_WORKERS = 2
KILLS = int(os.environ.get("TEST_KILLS", "3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> Any:
    async with coordinating(num_workers=NUM_WORKERS) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(opened: Any) -> Any:
    """The cluster of the module, with all its workers."""
    strategy, coordinator = opened
    await until_workers(strategy, NUM_WORKERS)
    yield strategy, coordinator
    await coordinator.join()


@pytest.mark.parametrize("fn", [closures.add_row, closures.add_row_async])
async def test_a_closure_between_two_pushes_runs_again(
    cluster: Any, gate: FileGate, fn: Any
) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    before = coordinator.statistics()
    remotes = [await coordinator.schedule(fn, (table, i, gate)) for i in range(4)]
    first, second = await gate.reached(2)
    assert first != second
    await kill(first)
    gate.open()
    await coordinator.join()
    statistics = coordinator.statistics()

    expected = np.zeros((24, 2))
    expected[:4] = 1
    np.testing.assert_array_equal(await table.read(), expected)
    assert len(await coordinator.fetch(remotes)) == 4
    assert len(gate.pids()) == 5
    assert statistics.num_retries > before.num_retries
    assert statistics.pushes_dropped == before.pushes_dropped + 1


async def test_a_worker_killed_between_closures_is_replaced(cluster: Any) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    for i in range(2):
        await coordinator.schedule(closures.add_row, (table, i))
    await coordinator.join()
    victim = (await pids_of(strategy, "W"))[0]
    await kill(victim)
    for i in range(2, 4):
        await coordinator.schedule(closures.add_row, (table, i))
    await coordinator.join()
    assert np.sum(await table.read()) == 8
    assert victim not in await until_workers(strategy, NUM_WORKERS)


async def test_all_workers_are_killed(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    for i in range(10):
        await coordinator.schedule(closures.add_row, (table, i, gate))
    for pid in await gate.reached(2):
        await kill(pid)
    assert not coordinator.done()
    await gate.reached(4)
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[:10], np.ones((10, 2)))


class Census:
    """Counts the workers that an engine tells of."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.has_changed = asyncio.Event()

    def learn_workers(self, workers: Any) -> None:
        self.told.append(len(workers))
        self.has_changed.set()

    async def until(self, *counts: int) -> None:
        """Wait until it was told of these numbers of workers, in this order."""
        async with asyncio.timeout(closures.LIMIT_S):
            for count in counts:
                while count not in self.told:
                    self.has_changed.clear()
                    await self.has_changed.wait()
                del self.told[: self.told.index(count) + 1]


async def test_a_variable_of_a_killed_worker_begins_anew(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    first = FileGate(gate.folder.parent)
    for _ in range(NUM_WORKERS):
        await coordinator.schedule(closures.hold, (first,))
    await first.reached(NUM_WORKERS)  # so all kills of earlier tests have been told
    first.open()
    counter = coordinator.create_per_worker_variable(closures.own_count, name="counter")
    await coordinator.join()
    for _ in range(NUM_WORKERS):
        await coordinator.schedule(closures.count_and_hold, (counter, gate))
    victim = (await gate.reached(NUM_WORKERS))[0]
    gate.open()
    await coordinator.join()
    assert await counter.read_all() == [101] * NUM_WORKERS

    census = Census()
    strategy.engine.watch(census)
    await kill(victim)
    await census.until(NUM_WORKERS - 1, NUM_WORKERS)
    strategy.engine.unwatch(census)
    with pytest.warns(RuntimeWarning, match="1 workers were lost.*counter"):
        assert sorted(await counter.read_all()) == [100] + [101] * (NUM_WORKERS - 1)


async def test_a_worker_is_killed_again_and_again(cluster: Any, tmp_path: Path) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    gate = FileGate(tmp_path)
    remotes = [await coordinator.schedule(closures.add_row, (table, i, gate)) for i in range(4)]
    for turn in range(3):
        pids = await gate.reached(2 + turn)
        await kill(pids[-1])
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[:4], np.ones((4, 2)))
    assert len(await coordinator.fetch(remotes)) == 4


async def test_closures_that_never_began_outlive_any_number_of_kills(
    cluster: Any, tmp_path: Path
) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    gate = FileGate(tmp_path)
    for i in range(24):
        await coordinator.schedule(closures.add_row, (table, i, gate))
    for turn in range(6):  # both in turn: no closure loses more than three workers
        pids = await gate.reached(2 + turn)
        await kill(pids[turn])
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal(await table.read(), np.ones((24, 2)))


async def test_a_kill_and_an_error_of_a_closure(cluster: Any, gate: FileGate) -> None:
    _, coordinator = cluster
    held = await coordinator.schedule(closures.hold, (gate,))
    (victim,) = await gate.reached(1)
    bad = await coordinator.schedule(closures.fail)
    with pytest.raises(ValueError, match="bad batch"):
        await bad.fetch()
    await kill(victim)
    gate.open()
    with pytest.raises(ValueError, match="bad batch"):
        await coordinator.join()
    with pytest.raises(ClosureCancelledError):
        await held.fetch()
    for _ in range(3):
        await coordinator.schedule(closures.identity, (1,))
    await coordinator.join()


async def test_a_fetched_result_outlives_its_worker(cluster: Any, gate: FileGate) -> None:
    _, coordinator = cluster
    gate.open()
    remote = await coordinator.schedule(closures.hold, (gate,))
    pid = await remote.fetch()
    await kill(pid)
    assert await remote.fetch() == pid


async def test_a_result_that_was_not_fetched_is_made_again(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    gate.open()
    remote = await coordinator.schedule(closures.add_row, (table, 5, gate))
    await coordinator.join()
    (first,) = gate.pids()
    await kill(first)
    found = await remote.fetch()

    assert found in gate.pids()
    np.testing.assert_array_equal((await table.read())[5], [1, 1])


async def test_resources_are_made_anew_on_a_new_worker(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    resource = coordinator.create_per_worker_resource(closures.own_pid)
    iterator = iter(coordinator.create_per_worker_dataset(range(1000)))
    for _ in range(2):
        for _ in range(6):
            remote = await coordinator.schedule(closures.with_resource, (resource,))
            maker, user = await remote.fetch()
            assert maker == user
            await (await coordinator.schedule(closures.take, (iterator,))).fetch()
        for pid in await pids_of(strategy, "W"):
            await kill(pid)


async def test_each_row_of_an_epoch_is_learned_once_whoever_is_killed(
    cluster: Any, gate: FileGate
) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(closures.part_of))
    remotes = [
        await coordinator.schedule(closures.learn_next, (table, iterator, gate)) for _ in range(24)
    ]
    first, second = await gate.reached(2)  # both have taken a row, and pushed half of it
    await kill(first)
    await gate.reached(3)
    await kill(second)
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal(await table.read(), np.ones((24, 2)))
    assert sorted(await coordinator.fetch(remotes)) == list(range(24))


async def test_variables_are_read_while_a_worker_is_away(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    await coordinator.schedule(closures.add_row, (table, 0, gate))
    (victim,) = await gate.reached(1)
    reads = [asyncio.ensure_future(table.read()) for _ in range(5)]
    await kill(victim)
    reads += [asyncio.ensure_future(table.read()) for _ in range(5)]
    for value in await asyncio.gather(*reads):
        np.testing.assert_array_equal(value[0], [1, 0])
    await table.assign_add(np.ones((24, 2)))
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[0], [2, 2])


async def test_a_worker_is_added_while_closures_run(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    for i in range(6):
        await coordinator.schedule(closures.add_row, (table, i, gate))
    await gate.reached(2)
    await strategy.engine.add_worker()
    pids = await gate.reached(3)
    gate.open()
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[:6], np.ones((6, 2)))
    assert len(set(pids)) == 3

    added = [each for each in await strategy.engine.workers() if each.pid == pids[2]]
    await strategy.engine.remove_worker(added[0].name)
    assert len(await until_workers(strategy, NUM_WORKERS)) == NUM_WORKERS


async def test_a_worker_is_removed_while_closures_run(cluster: Any, gate: FileGate) -> None:
    strategy, coordinator = cluster
    table = table_of(strategy)
    await strategy.engine.add_worker()
    await until_workers(strategy, 3)
    for i in range(6):
        await coordinator.schedule(closures.add_row, (table, i, gate))
    pids = await gate.reached(3)
    workers = [each for each in await strategy.engine.workers() if each.pid == pids[0]]
    removing = asyncio.ensure_future(strategy.engine.remove_worker(workers[0].name))
    gate.open()
    await removing
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[:6], np.ones((6, 2)))


async def test_workers_have_different_indices_after_a_kill(
    cluster: Any, gate: FileGate, tmp_path: Path
) -> None:
    strategy, coordinator = cluster
    await kill((await pids_of(strategy, "W"))[0])
    await until_workers(strategy, NUM_WORKERS)
    remotes = [await coordinator.schedule(closures.index_and_pid, (gate,)) for _ in range(2)]
    await gate.reached(2)
    gate.open()
    found = dict(await coordinator.fetch(remotes))
    assert len(found) == len(set(found.values())) == 2


async def test_a_stopped_worker_goes_on(cluster: Any, gate: FileGate) -> None:
    """It is late, not lost."""
    strategy, coordinator = cluster
    table = table_of(strategy)
    await coordinator.schedule(closures.add_row, (table, 0, gate))
    (pid,) = await gate.reached(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        for i in range(1, 4):
            await coordinator.schedule(closures.add_row, (table, i))
        gate.open()
    finally:
        os.kill(pid, signal.SIGCONT)
    await coordinator.join()
    np.testing.assert_array_equal((await table.read())[:4], np.ones((4, 2)))


@pytest.mark.parametrize("turn", range(KILLS))
async def test_kills_at_any_time(cluster: Any, turn: int) -> None:
    strategy, coordinator = cluster
    table, rng = table_of(strategy), random.Random(turn)
    for i in range(24):
        fn = closures.add_row_async if i % 3 == 0 else closures.add_row
        await coordinator.schedule(fn, (table, i))
    await asyncio.sleep(rng.uniform(0, 0.1))
    await kill(rng.choice(await pids_of(strategy, "W")))
    await coordinator.join()
    np.testing.assert_array_equal(await table.read(), np.ones((24, 2)))


def descend(optimizer: Any, variable: Any, gate: FileGate) -> None:
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(4), variable)])
    gate.pass_through()


@pytest.mark.parametrize("name", ["SGD", "Adam"])
async def test_updates_of_a_closure_that_ran_twice_count_once(
    cluster: Any, gate: FileGate, name: str
) -> None:
    strategy, coordinator = cluster
    with strategy.scope():
        variable, optimizer = ar.Variable(np.zeros(4)), getattr(ar.optimizers, name)(0.5)
        other, other_optimizer = ar.Variable(np.zeros(4)), getattr(ar.optimizers, name)(0.5)
    await coordinator.schedule(descend, (optimizer, variable, gate))
    (victim,) = await gate.reached(1)
    await kill(victim)
    gate.open()
    await coordinator.join()
    await coordinator.schedule(descend, (other_optimizer, other, gate))
    await coordinator.join()
    np.testing.assert_array_equal(await variable.read(), await other.read())
