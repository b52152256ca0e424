"""What every test shares: eight logical CPU devices, strategies that are closed, no task left."""

import asyncio
import gc
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.cluster import ClusterResolver
from aioreplica.devices import Device, list_devices
from aioreplica.devices.backends._discover import may_have_gpu

ON_STREAMS = os.environ.get("AIOREPLICA_TEST_STREAMS")  # how they give memory back: a step of CI
if ON_STREAMS:  # in the place of the machine's own
    from tests.devices import streams

    streams.take_place(ON_STREAMS)
ar.set_logical_devices("cpu", 8)

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is `xslow` is `slow` too, so that `-m "not slow"` leaves it out.

    What is `gpu` is skipped where there is none.
    """
    for item in items:
        if item.get_closest_marker("xslow") is not None:
            item.add_marker("slow")
    need_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if need_gpu and not has_gpu():
        for item in need_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch can use"))


def has_gpu() -> bool:
    """Tell whether torch can use a GPU; it is imported only where there may be one."""
    if not may_have_gpu() or find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    """Leave pytest's own objects out of every later collection: many tests collect garbage."""
    set_aside()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Leave out what tests have left for good as well, from time to time."""
    del nodeid
    if next(NUM_FINISHED) % 50 == 0:
        set_aside()


NUM_FINISHED = itertools.count(1)


def set_aside() -> None:
    """Free what is garbage, and leave all else out of later collections."""
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


MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where the system has one: for what saves often, and not about the disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as made:
        yield Path(made)


STRATEGIES = {
    "default": ar.DefaultStrategy,
    "one device": lambda: ar.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: mirrored(2),
    "mirrored 4": lambda: mirrored(4),
    "central 2": lambda: ar.CentralStorageStrategy(list_devices("cpu")[:2]),
    "tpu 2x1": lambda: ar.TPUStrategy(ar.TPUClusterResolver(2, 1)),
}
if os.environ.get("AIOREPLICA_TEST_WORKERS"):  # a step of CI: all contracts, the way across workers
    STRATEGIES["workers-1"] = lambda: one_worker(2)
if ON_STREAMS:
    STRATEGIES["streams-2"] = lambda: on_streams(2)
NOT_FOR_WORKERS = {
    "test_it_may_run_the_strategy_again": "a run in a merge function would wait for itself",
    "test_device_programs_are_refused_there": "so would this",
    "test_cancelling_after_any_number_of_cycles": "what other workers need goes on a little longer",
    "test_a_failed_reduction_fails_the_run_though_its_result_was_given_up": "begins a cycle later",
    "test_it_trains_like_the_eager_step": "compiled steps are refused there",
    "test_every_collective_gives_what_it_gives_eagerly": "so are these",
}


def mirrored(num_replicas: int) -> ar.MirroredStrategy:
    return ar.MirroredStrategy(list_devices("cpu")[:num_replicas])


def on_streams(num_replicas: int) -> ar.MirroredStrategy:
    return ar.MirroredStrategy([f"cuda:{index}" for index in range(num_replicas)])


def one_worker(num_replicas: int) -> ar.MultiWorkerMirroredStrategy:
    """Return a strategy of many workers with one: all goes the way across, and comes back."""
    devices = list_devices("cpu")[:num_replicas]

    def chosen(_name: str, _devices: object) -> list[Device]:  # mocks have classes of their own,
        return devices  # which CPython 3.13 keeps for ever if it runs without the GIL

    with mock.patch("aioreplica.strategies._multi_worker.chosen_devices", chosen):
        return ar.MultiWorkerMirroredStrategy(ClusterResolver())


@pytest_asyncio.fixture(params=STRATEGIES)
async def strategy(request: pytest.FixtureRequest) -> AsyncIterator[ar.Strategy]:
    """Every kind of strategy: what a test says of this one holds for all."""
    if request.param == "workers-1" and request.node.originalname in NOT_FOR_WORKERS:
        pytest.skip(NOT_FOR_WORKERS[request.node.originalname])
    if request.param == "streams-2" and request.node.path.name.startswith("test_compiled"):
        pytest.skip("compiled steps run where jax has devices")
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


@pytest_asyncio.fixture(params=["streams-pair"] if ON_STREAMS else None)
async def pair() -> AsyncIterator[ar.MirroredStrategy]:
    """Two replicas."""
    chosen = on_streams(2) if ON_STREAMS else mirrored(2)
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture
async def triple() -> AsyncIterator[ar.MirroredStrategy]:
    """Three replicas."""
    chosen = mirrored(3)
    yield chosen
    await chosen.aclose()


@pytest_asyncio.fixture(params=["streams-solo"] if ON_STREAMS else None)
async def solo() -> AsyncIterator[ar.OneDeviceStrategy]:
    """One replica."""
    chosen = ar.OneDeviceStrategy("cuda:0" if ON_STREAMS else "cpu:0")
    yield chosen
    await chosen.aclose()


@pytest.fixture
def made_on_device() -> Iterator[None]:
    """Have a test make its tensors on the devices with streams, if its strategies run there."""
    with streams.makers() if ON_STREAMS else nullcontext():
        yield


@pytest_asyncio.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves an asyncio task behind."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert left == set()
