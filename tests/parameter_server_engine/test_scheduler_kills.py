"""A scheduler that is killed: told at once by every call, and then a cluster of its own again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, WorkerLostError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import LIMIT_S, PAUSE_S, FileGate
from tests.parameter_server_engine.conftest import coordinating

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:The Dask scheduler at .*127.0.0.1:RuntimeWarning"),
]

NUM_ROWS = 24
"""What `closures.part_of` has."""


class Machines:
    """Processes of `dask scheduler` and `dask worker`, as on machines of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []
        self._num_started = 0
        self.scheduler: Any = None
        self.address = ""

    async def start(self, num_servers: int = 2, num_workers: int = 2, port: str = "0") -> str:
        """Start a scheduler, parameter servers and workers; return the address."""
        told = self._folder / f"scheduler-{self._num_started}.json"
        self._num_started += 1
        where = ("--host", "127.0.0.1", "--port", port, "--scheduler-file", str(told))
        self.scheduler = await self._dask("dask_scheduler", *where)
        async with asyncio.timeout(LIMIT_S):
            while not (told.exists() and told.read_text().endswith("}")):
                await asyncio.sleep(PAUSE_S)
        self.address = str(json.loads(told.read_text())["address"])
        for role in ["PS"] * num_servers + ["W"] * num_workers:
            options = ("--nthreads", "1", "--no-nanny", "--resources", f"{role}=1")
            await self._dask("dask_worker", self.address, *options, "--host", "127.0.0.1")
        async with asyncio.timeout(2 * LIMIT_S):
            await self._until_there(num_servers + num_workers)
        return self.address

    async def _until_there(self, num_workers: int) -> None:
        from distributed import Client

        async with Client(self.address, asynchronous=True) as client:
            await client.wait_for_workers(num_workers)

    async def _dask(self, name: str, *options: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"distributed.cli.{name}", *options, "--no-dashboard",
            env=environment, cwd=self._folder,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._processes.append(process)
        return process

    async def kill_scheduler(self) -> None:
        self.scheduler.send_signal(signal.SIGKILL)
        await self.scheduler.wait()

    async def aclose(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def machines_in(folder: Path) -> AsyncIterator[Machines]:
    found = Machines(folder)
    try:
        yield found
    finally:
        await found.aclose()


async def lost(call: Callable[[], Awaitable[object]]) -> WorkerLostError:
    """Make a call that must say that the cluster is lost, soon and in no other way."""
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(WorkerLostError) as caught:
            await call()
    return caught.value


def learn_row(table: Any, optimizer: Any, iterator: Any, gate: FileGate | None) -> int:
    """Take a row and descend by 1 there."""
    row: int = next(iterator)
    if gate is not None:
        gate.pass_through()
    slices = ar.IndexedSlices(np.ones((1, *table.shape[1:])), [row], table.shape)
    optimizer.apply_gradients([(slices, table)])
    return row


@pytest.mark.xslow
async def test_it_is_killed_three_times_and_each_example_is_learned_once(tmp_path: Path) -> None:
    """The same program goes on: on another cluster, on one at the same address, and so on."""
    (tmp_path / "saved").mkdir()
    async with machines_in(tmp_path) as machines, ar.CheckpointManager(tmp_path / "saved") as saved:
        address = await machines.start()
        strategy = ar.ParameterServerStrategy(
            address, num_ps=2, variable_partitioner=ar.FixedShardsPartitioner(2)
        )
        coordinator = ar.ClusterCoordinator(strategy)
        async with asyncio.timeout(20 * LIMIT_S), strategy, coordinator:
            with strategy.scope():
                table = ar.Variable(np.zeros((NUM_ROWS, 2)), name="table")
                optimizer = ar.optimizers.SGD(1.0, momentum=0.5)
            state = {"table": table, "optimizer": optimizer}
            iterator = iter(coordinator.create_per_worker_dataset(closures.part_of))

            async def learn(count: int, gate: FileGate | None = None) -> list[Any]:
                args = (table, optimizer, iterator, gate)
                return [await coordinator.schedule(learn_row, args) for _ in range(count)]

            kept: list[int] = []
            for turn in range(3):
                remotes = await learn(4)
                await coordinator.join()
                kept += await coordinator.fetch(remotes)
                await saved.save(turn, state)
                value = await table.read()
                (finished, *_) = await learn(3)
                await coordinator.join()
                gate = FileGate(tmp_path)
                unfinished = await learn(5, gate)
                await gate.reached(2)
                await machines.kill_scheduler()

                for remote in (*unfinished, finished):
                    await lost(remote.fetch)
                for call in (coordinator.join, table.read, lambda: learn(1)):
                    error = await lost(call)
                    assert "strategy.reopen(" in str(error)
                    assert "table" in error.variables
                gate.open()
                port = machines.address.rpartition(":")[2] if turn == 1 else "0"
                address = await machines.start(port=port)
                target = () if turn == 1 else (address,)
                found = await strategy.reopen(*target, manager=saved, state=state)

                assert found.step == turn
                assert [len(found.undone), len(found.unfinished)] == [3, 5]
                assert found.num_undone == 3
                assert found.iterators
                numbers = [int(each.partition("#")[2]) for each in found.undone + found.unfinished]
                assert numbers == [*range(numbers[0], numbers[0] + 8)]
                np.testing.assert_array_equal(await table.read(), value)
                assert len(strategy.engine.workers_now) == 2
            remotes = await learn(NUM_ROWS - len(kept))
            await coordinator.join()
            kept += await coordinator.fetch(remotes)

            assert sorted(kept) == [*range(NUM_ROWS)]
            assert int(await optimizer.iterations.read()) == NUM_ROWS
            rows = np.unique(await table.read(), axis=0)
            np.testing.assert_array_equal(rows, -np.ones((1, 2)))


@pytest.mark.xslow
async def test_a_cluster_that_cannot_be_reached_leaves_it_lost(tmp_path: Path) -> None:
    async with machines_in(tmp_path) as machines:
        address = await machines.start(num_servers=1, num_workers=1)
        async with coordinating(address) as (strategy, coordinator):
            with strategy.scope():
                count = ar.Variable(np.zeros(()), name="count")
            await coordinator.schedule(closures.add_one, (count,))
            await coordinator.join()
            with pytest.raises(ContextError, match="has not lost its cluster"):
                await strategy.reopen()
            await machines.kill_scheduler()
            await lost(count.read)

            strategy.engine._timeout_s = 0.2
            with pytest.raises(ConnectionError, match="does not answer"):
                await strategy.reopen()
            await lost(count.read)
            address = await machines.start(num_servers=1, num_workers=1)
            found = await strategy.reopen(address)
            assert (found.step, found.undone) == (None, ("add_one #0",))
            assert strategy.lost_variables == ("count",)
            await count.assign(np.float64(5.0))
            await coordinator.schedule(closures.add_one, (count,))
            await coordinator.join()
            assert float(await count.read()) == 6.0
