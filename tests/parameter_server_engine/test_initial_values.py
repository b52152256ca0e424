"""Initial values that are made in the processes of the servers."""

from __future__ import annotations

import os

import numpy as np
import pytest

import aioreplica as ar
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.conftest import coordinating, pids_of

pytestmark = pytest.mark.asyncio


async def test_rows_are_made_in_the_process_of_their_server() -> None:
    partitioner = ar.FixedShardsPartitioner(2)
    async with coordinating(num_ps=2, num_workers=1, variable_partitioner=partitioner) as (
        strategy,
        coordinator,
    ):
        with strategy.scope():
            table = ar.Variable(closures.pids_of_rows, shape=(4, 2), dtype="int64", name="table")
        value = await table.read()
        assert value[:, 0].tolist() == [0, 1, 2, 3]
        servers = await pids_of(strategy, "PS")
        assert os.getpid() not in servers
        assert {*value[:, 1]} == {*servers}
        remote = await coordinator.schedule(closures.total, (table,))
        assert await remote.fetch() == np.sum(value)
