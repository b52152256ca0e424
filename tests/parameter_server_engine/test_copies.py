"""Killed processes of parameter servers with copies: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import LIMIT_S, PAUSE_S, FileGate
from tests.parameter_server_engine.conftest import coordinating, kill, pids_of

pytestmark = [pytest.mark.asyncio, pytest.mark.xslow]


async def until_copied(strategy: Any, num_servers: int) -> None:
    """Wait until each server is there, and has a copy."""
    async with asyncio.timeout(2 * LIMIT_S):
        for server in range(num_servers):
            assert await strategy.servers.copies.repair(server)
        while strategy.unreplicated_servers:
            await asyncio.sleep(PAUSE_S)


async def test_servers_are_killed_in_the_middle_of_closures(tmp_path: Path) -> None:
    partitioner = ar.FixedShardsPartitioner(2)
    async with coordinating(num_ps=2, replicate=True, variable_partitioner=partitioner) as both:
        strategy, coordinator = both
        with strategy.scope():
            table = ar.Variable(np.zeros((24, 2)), name="table")
        iterator = iter(coordinator.create_per_worker_dataset(closures.part_of))
        await table.read()
        rows = []
        for turn in range(2):
            gate = FileGate(tmp_path)
            remotes = [
                await coordinator.schedule(closures.learn_next, (table, iterator, gate))
                for _ in range(12)
            ]
            workers = (await gate.reached(2))[:turn]  # and one of them in the second turn
            server = (await pids_of(strategy, "PS"))[turn]
            await asyncio.gather(*(kill(pid) for pid in (server, *workers)))
            gate.open()
            await coordinator.join()
            rows += await coordinator.fetch(remotes)
            await until_copied(strategy, 2)

        assert sorted(rows) == [*range(24)]
        np.testing.assert_array_equal(await table.read(), np.ones((24, 2)))
        assert coordinator.statistics().num_failed == 0
