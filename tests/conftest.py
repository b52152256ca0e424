"""What every test shares: eight logical CPU devices, strategies that are closed, no task left."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.devices import list_devices

ar.set_logical_devices("cpu", 8)

STRATEGIES = {
    "default": ar.DefaultStrategy,
    "one device": lambda: ar.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: mirrored(2),
    "mirrored 4": lambda: mirrored(4),
    "central 2": lambda: ar.CentralStorageStrategy(list_devices("cpu")[:2]),
    "tpu 2x1": lambda: ar.TPUStrategy(ar.TPUClusterResolver(2, 1)),
}


def mirrored(num_replicas: int) -> ar.MirroredStrategy:
    return ar.MirroredStrategy(list_devices("cpu")[:num_replicas])


@pytest_asyncio.fixture(params=STRATEGIES)
async def strategy(request: pytest.FixtureRequest) -> AsyncIterator[ar.Strategy]:
    """Every kind of strategy: what a test says of this one holds for all."""
    chosen = STRATEGIES[request.param]()
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture(params=[2, 4], ids=["mirrored 2", "mirrored 4"])
async def gang(request: pytest.FixtureRequest) -> AsyncIterator[ar.MirroredStrategy]:
    """Two and four replicas: for what takes more than one."""
    chosen = mirrored(request.param)
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[ar.MirroredStrategy]:
    """Two replicas."""
    chosen = mirrored(2)
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture
async def triple() -> AsyncIterator[ar.MirroredStrategy]:
    """Three replicas."""
    chosen = mirrored(3)
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture
async def solo() -> AsyncIterator[ar.OneDeviceStrategy]:
    """One replica."""
    chosen = ar.OneDeviceStrategy("cpu:0")
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves an asyncio task behind."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert left == set()
