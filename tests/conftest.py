"""What every test shares: eight logical CPU devices, strategies that are closed, no task left."""

import asyncio
import gc
from collections.abc import AsyncIterator, Generator

import hypothesis
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.devices import list_devices

ar.set_logical_devices("cpu", 8)

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is `xslow` is `slow` too, so that `-m "not slow"` leaves it out."""
    for item in items:
        if item.get_closest_marker("xslow") is not None:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave pytest's own objects out of every later collection: many tests collect garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skip of an `xslow` test a failure: who asks for these has to have what they need."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and "xslow" in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"An xslow test was skipped: {report.longrepr}"
    return report


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


@pytest_asyncio.fixture(params=["default", "mirrored 2"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[ar.Strategy]:
    """With and without replicas of its own: for refusals, which do not depend on their number."""
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
