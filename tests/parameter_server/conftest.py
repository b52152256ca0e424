"""Coordinators in one process, for all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.parameter_server.coordinating import Cluster, coordinating


@pytest_asyncio.fixture(params=[256, 2], ids=["queue", "short queue"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with coordinating(num_workers=3, queue_size=request.param) as (strategy, coordinator):
        yield Cluster(strategy, coordinator)


@pytest_asyncio.fixture
async def one_worker() -> AsyncIterator[Cluster]:
    """Closures run one after the other here, in the order they were scheduled."""
    async with coordinating(num_workers=1, num_ps=1) as (strategy, coordinator):
        yield Cluster(strategy, coordinator)
