"""A parameter server that is killed: an error that names its variables, and then a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica.cluster import DaskClosureEngine
from aioreplica.errors import ContextError, WorkerLostError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import FileGate
from tests.parameter_server_engine.conftest import coordinating, kill, pids_of

pytestmark = pytest.mark.asyncio


async def lose(strategy: Any, variable: Any) -> None:
    """Kill the server of a variable."""
    server = variable.shards[0].server
    await kill((await pids_of(strategy, "PS"))[server])


@pytest.mark.parametrize("way", ["join", "schedule", "read"])
async def test_it_is_told_with_the_names_of_its_variables(gate: FileGate, way: str) -> None:
    async with coordinating(num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            kept, lost = (ar.Variable(np.zeros((4, 2)), name=name) for name in ("kept", "lost"))
        np.testing.assert_array_equal(await kept.read(), np.zeros((4, 2)))
        for _ in range(3):
            await coordinator.schedule(closures.add_row, (lost, 0, gate))
        await gate.reached(2)
        await lose(strategy, lost)
        gate.open()
        with pytest.raises(WorkerLostError, match="lost") as caught:  # noqa: PT012
            if way == "join":
                await coordinator.join()
            elif way == "schedule":
                while True:
                    await coordinator.schedule(closures.total, (lost,))
                    await asyncio.sleep(0.01)
            else:
                await lost.read()
        assert caught.value.variables == ("lost",)
        assert strategy.lost_variables == ("lost",)


async def test_a_checkpoint_makes_them_anew(tmp_path: Path) -> None:
    async with (
        ar.CheckpointManager(tmp_path) as manager,
        coordinating(num_ps=2) as (strategy, coordinator),
    ):
        with strategy.scope():
            kept, lost = (ar.Variable(np.zeros((4, 2)), name=name) for name in ("kept", "lost"))
            optimizer = ar.optimizers.Adam(0.1)
        state = {"kept": kept, "lost": lost, "optimizer": optimizer}
        for i in range(4):
            await coordinator.schedule(closures.add_row, (lost, i))
        await coordinator.join()
        await manager.save(1, state)
        await lose(strategy, lost)
        await coordinator.schedule(closures.add_row, (lost, 0))
        with pytest.raises(WorkerLostError, match="lost"):
            await coordinator.join()

        assert await manager.restore(state) == 1
        assert strategy.lost_variables == ()
        np.testing.assert_array_equal(await lost.read(), np.ones((4, 2)))
        await coordinator.schedule(closures.add_row, (lost, 0))
        await coordinator.join()
        np.testing.assert_array_equal((await lost.read())[0], [2, 2])


async def test_a_server_and_a_worker_are_killed_at_once(gate: FileGate) -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            variable = ar.Variable(np.zeros((4, 2)), name="lost")
        for i in range(4):
            await coordinator.schedule(closures.add_row, (variable, i, gate))
        pids = await gate.reached(2)
        await asyncio.gather(kill(pids[0]), lose(strategy, variable))
        gate.open()
        with pytest.raises(WorkerLostError, match="lost"):
            await coordinator.join()


async def test_one_shard_is_lost() -> None:
    partitioner = ar.FixedShardsPartitioner(2)
    async with coordinating(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            variable = ar.Variable(np.arange(8.0), name="table")
        await variable.read()
        await lose(strategy, variable)
        with pytest.raises(WorkerLostError, match="table"):
            await variable.read()
        await variable.assign(np.ones(8))
        np.testing.assert_array_equal(await variable.read(), np.ones(8))
        remote = await coordinator.schedule(closures.total, (variable,))
        assert await remote.fetch() == 8.0


@pytest.mark.parametrize("is_told", [False, True], ids=["told-later", "told"])
async def test_a_server_is_made_elsewhere_if_its_process_dies_meanwhile(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinating(num_ps=2) as (strategy, _):
        with strategy.scope():
            variable = ar.Variable(np.zeros(2), name="table")
        await variable.read()
        pids, engine = await pids_of(strategy, "PS"), strategy.engine
        listed, has_gone, told = engine._infos, engine._known.has_gone, asyncio.Event()

        def learn(worker: str) -> None:
            has_gone(worker)
            told.set()

        async def die_when_listed() -> Any:
            found = await listed()
            if pids:
                await kill(pids.pop(0))
                if is_told:
                    await told.wait()
            return found

        monkeypatch.setattr(engine._known, "has_gone", learn)
        monkeypatch.setattr(engine, "_infos", die_when_listed)
        pids[1:] = []
        state = await engine.create_state("owner", list, (), 0)

        assert pids == []
        assert await state.call("__len__") == 0


async def test_a_strategy_that_is_closed_while_it_is_reopened_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children(recursive=True))
    async with (
        ar.CheckpointManager(tmp_path) as manager,
        coordinating() as (strategy, _coordinator),
    ):
        with strategy.scope():
            lost = ar.Variable(np.ones((4, 2)), name="lost")
        await manager.save(1, {"lost": lost})
        await lose(strategy, lost)
        with pytest.raises(WorkerLostError):
            await lost.read()
        began, engine = asyncio.Event(), DaskClosureEngine(num_workers=1)
        connect = engine._connect

        async def connect_and_wait(num_servers: int) -> None:
            await connect(num_servers)
            began.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(engine, "_connect", connect_and_wait)
        reopening = asyncio.create_task(
            strategy.reopen(engine, manager=manager, state={"lost": lost})
        )
        await began.wait()
        await strategy.aclose()
        with pytest.raises(ContextError, match="is closed"):
            await reopening
    left = set(psutil.Process().children(recursive=True)) - before
    assert [each for each in left if "resource_tracker" not in " ".join(each.cmdline())] == []


async def test_what_runs_while_it_is_reopened_keeps_its_worker(
    tmp_path: Path, gate: FileGate
) -> None:
    async with (
        ar.CheckpointManager(tmp_path) as manager,
        coordinating(num_ps=2, num_workers=1) as (strategy, coordinator),
    ):
        with strategy.scope():
            kept, lost = (ar.Variable(np.zeros((4, 2)), name=name) for name in ("kept", "lost"))
        own = coordinator.create_per_worker_variable(np.zeros((4, 2)))
        state = {"kept": kept, "lost": lost}
        await manager.save(1, state)
        pids = await pids_of(strategy, "W")
        await coordinator.schedule(closures.add_row, (own, 0, gate))
        await gate.reached(1)
        await lose(strategy, lost)
        with pytest.raises(WorkerLostError):
            await lost.read()
        await strategy.reopen(manager=manager, state=state)
        queue = coordinator._runner.queue
        remote = await coordinator.schedule(closures.add_row, (lost, 1, gate))
        while (closure := queue.with_workers()[-1]).submission is None or closure.is_over:
            await asyncio.sleep(0)
        assert [each.began_s is None for each in queue.with_workers()] == [False, True]
        gate.open()
        await remote.fetch()
        assert float((await lost.read()).sum()) == 2.0
        np.testing.assert_array_equal(await own.read_all(), np.zeros((1, 4, 2)))
        assert await pids_of(strategy, "W") == pids
