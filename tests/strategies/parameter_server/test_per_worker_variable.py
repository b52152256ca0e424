"""Datasets, resources and variables that each worker has for itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine, current_worker_index
from aioreplica.errors import ContextError, WorkerLostError
from aioreplica.strategies.parameter_server._per_worker_variable import VariableOf
from tests.parameter_server.coordinating import Gate
from tests.strategies.parameter_server.opening import opened

MAY_END = threading.Event()


def index_and_next(iterator: Any, resource: Any) -> tuple[int, int, int]:
    return current_worker_index(), next(iterator), id(resource)


def elements(context: Any) -> Any:
    return range(context.input_pipeline_id * 10, 100)


@pytest.mark.asyncio
async def test_workers_have_their_own_datasets_and_resources() -> None:
    async with opened(1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        resource = coordinator.create_per_worker_resource(threading.Lock)
        remotes = [await coordinator.schedule(index_and_next, (iterator, resource)) for _ in "abc"]
        found = await coordinator.fetch(remotes)
        assert [each[:2] for each in found] == [(0, 0), (0, 1), (0, 2)]
        assert len({each[2] for each in found}) == 1
        with pytest.raises(ContextError, match="on the workers"):
            next(iterator)
    with pytest.raises(ContextError, match="outside a closure"):
        current_worker_index()


def count_here(counter: Any) -> int:
    counter.assign_add(1)
    return current_worker_index()


async def count_here_async(counter: Any) -> int:
    await counter.assign_add(1)
    return current_worker_index()


@pytest.mark.asyncio
@pytest.mark.parametrize("fn", [count_here, count_here_async])
async def test_each_worker_has_a_variable_for_itself(fn: Any) -> None:
    async with opened(3) as (_, coordinator):
        counter = coordinator.create_per_worker_variable(lambda: np.int64(10), name="counter")
        unused = coordinator.create_per_worker_variable([1.0, 2.0])
        remotes = [await coordinator.schedule(fn, (counter,)) for _ in range(20)]
        indices = await coordinator.fetch(remotes)

        assert await counter.read_all() == [10 + indices.count(i) for i in range(3)]
        assert (await counter.read_all())[0].dtype == np.int64
        np.testing.assert_array_equal(await unused.read_all(), [[1.0, 2.0]] * 3)
    with pytest.raises(ContextError, match=r"read_all\(\) of .*counter.*closed"):
        await counter.read_all()


@pytest.mark.asyncio
async def test_a_lost_server_without_variables_is_told() -> None:
    async with opened(1, num_ps=2) as (strategy, coordinator):
        counter = coordinator.create_per_worker_variable(0, name="counter")
        assert await counter.read_all() == [0]
        strategy.engine.lose_server(1)
        with pytest.raises(WorkerLostError, match="server 1 was lost"):
            await coordinator.join()
        with pytest.raises(WorkerLostError, match="server 1 was lost"):
            await counter.read_all()


@pytest.mark.asyncio
async def test_a_variable_of_a_lost_worker_begins_anew_and_that_is_told() -> None:
    async with opened(2) as (strategy, coordinator):
        engine = strategy.engine
        counter = coordinator.create_per_worker_variable(0, name="counter")
        remotes = [await coordinator.schedule(count_here, (counter,)) for _ in range(8)]
        indices = await coordinator.fetch(remotes)
        engine.lose_worker("worker-0")
        with pytest.warns(RuntimeWarning, match=r"1 workers were lost.*counter.*worker-0"):
            assert await counter.read_all() == [indices.count(1)]
        engine.add_worker()
        assert await counter.read_all() == [0, indices.count(1)]
        late = coordinator.create_per_worker_variable(5)
        assert await late.read_all() == [5, 5]

        await coordinator.aclose()
        engine.lose_worker("worker-1")  # it is told although the coordinator did not look
        async with coordinator:
            with pytest.warns(RuntimeWarning, match="worker-1"):
                assert await counter.read_all() == [0]


def wait_at_the_gate(counter: Any) -> None:
    counter.assign_add(1)
    assert MAY_END.wait(10.0)


@pytest.mark.asyncio
async def test_a_worker_that_is_lost_while_its_variable_is_read_is_left_out() -> None:
    async with opened(2) as (strategy, coordinator):
        counter = coordinator.create_per_worker_variable(0, name="counter")
        MAY_END.clear()
        remotes = [await coordinator.schedule(wait_at_the_gate, (counter,)) for _ in "ab"]
        while None in [each.running for each in strategy.engine._workers.values()]:
            await asyncio.sleep(0)
        reading = asyncio.ensure_future(counter.read_all())
        submitted = strategy.engine._workers["worker-0"].waiting
        while not submitted:  # behind the closure
            await asyncio.sleep(0)
        strategy.engine.lose_worker("worker-0")
        MAY_END.set()
        with pytest.warns(RuntimeWarning, match="worker-0"):
            assert await reading == [1]
        assert await coordinator.fetch(remotes) == [None, None]


def broken_value() -> Any:
    raise ValueError("no value today")


@pytest.mark.asyncio
async def test_an_initial_value_that_cannot_be_made_is_told() -> None:
    async with opened(1) as (_, coordinator):
        counter = coordinator.create_per_worker_variable(broken_value)
        with pytest.raises(ValueError, match="no value today"):
            await counter.read_all()
        await coordinator.join()
        with pytest.raises(TypeError, match="cannot be sent"):
            coordinator.create_per_worker_variable(threading.Lock())


@pytest.mark.asyncio
async def test_threads_of_a_worker_write_a_variable_one_at_a_time() -> None:
    variable = VariableOf(0, "counter")()

    def write() -> None:
        for _ in range(200):
            variable.assign_add(1)

    await asyncio.gather(*(asyncio.to_thread(write) for _ in range(4)))
    assert variable.value == 800
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros(2))
    with pytest.raises(ValueError, match="cannot assign 9223372036854775808"):
        variable.assign_add(2**63)
    assert variable.value == 800


def add_here(counter: Any, first: Any, later: Any, gate: Gate) -> tuple[int, int]:
    """Write before and behind a gate; make another variable there, which was not used before."""
    counter.assign_add(1)
    first.assign_add(1)
    gate.pass_through()
    counter.assign_add(1)
    later.assign_add(1)
    return int(counter.value), int(later.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_reopened", [False, True])
async def test_after_the_loss_of_a_server_they_begin_anew_if_it_is_reopened(
    tmp_path: Path, *, is_reopened: bool
) -> None:
    async with opened(1) as (strategy, coordinator), ar.CheckpointManager(tmp_path) as manager:
        with strategy.scope():
            w = ar.Variable(1.0, name="w")
        await manager.save(1, {"w": w})
        counter, later = (coordinator.create_per_worker_variable(i) for i in (10, 20))
        resource = coordinator.create_per_worker_resource(threading.Lock)
        before = await (await coordinator.schedule(identity_of, (resource,))).fetch()
        gate = Gate()
        await coordinator.schedule(add_here, (counter, counter, later, gate))
        await gate.reached()
        strategy.engine.lose_server(0)
        with pytest.raises(WorkerLostError):
            await w.read()
        if is_reopened:
            await strategy.reopen(manager=manager, state={"w": w})
        else:
            gate.open()  # restoring waits for what runs
            await manager.restore({"w": w})
        gate.open()  # what ran writes what it had, and makes a variable for itself alone
        remote = await coordinator.schedule(identity_of, (resource,))
        assert (await remote.fetch() == before) is not is_reopened
        values = [await counter.read_all(), await later.read_all()]
        assert values == ([[10], [20]] if is_reopened else [[13], [21]])
        assert float(await w.read()) == 1.0


def identity_of(thing: Any) -> int:
    return id(thing)


MADE: list[object] = []


def make_one() -> object:
    MADE.append(object())
    return MADE[-1]


def count_with(counter: Any, _resource: Any) -> None:
    counter.assign_add(1)


@pytest.mark.asyncio
async def test_workers_keep_things_for_a_strategy_that_was_opened_again() -> None:
    strategy = ar.ParameterServerStrategy(LocalClosureEngine(1))
    with strategy.scope():
        w = ar.Variable(np.ones(3), name="w")
    for _ in range(3):
        MADE.clear()
        async with strategy:
            await w.assign(np.zeros(3))  # it was lost with the servers of the time before
            async with ar.ClusterCoordinator(strategy) as coordinator:
                counter = coordinator.create_per_worker_variable(0)
                resource = coordinator.create_per_worker_resource(make_one)
                for _ in range(3):
                    await coordinator.schedule(count_with, (counter, resource))
                await coordinator.join()
                assert await counter.read_all() == [3]
        assert len(MADE) == 1
