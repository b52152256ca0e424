"""Two devices for the tests of this folder: cpu:0 with one device process, cpu:1 with threads."""

from collections.abc import Iterator

import pytest

import aioreplica as ar
from aioreplica.context import REGISTRY
from aioreplica.devices import lane_table

PROCESS, THREAD = "cpu:0", "cpu:1"


@pytest.fixture(scope="module")
def devices() -> Iterator[tuple[str, str]]:
    """The names of both; the process is started once for a module."""
    pytest.importorskip("cloudpickle")
    before = REGISTRY.replace("logical_devices", None)
    ar.set_logical_devices("cpu", 2, processes=[True, False])
    lane_table().acquire((PROCESS, THREAD))
    lane = lane_table().lane(PROCESS)
    yield PROCESS, THREAD
    lane_table().release((PROCESS, THREAD))
    lane.join(10)
    REGISTRY.replace("logical_devices", before)


@pytest.fixture(params=["process", "thread"])
def strategy(request: pytest.FixtureRequest, devices: tuple[str, str]) -> ar.OneDeviceStrategy:
    """A strategy on either of them: both keep the same contract."""
    return ar.OneDeviceStrategy(devices[request.param == "thread"])


@pytest.fixture
def on_process(devices: tuple[str, str]) -> ar.OneDeviceStrategy:
    """A strategy on the device with a process of its own."""
    return ar.OneDeviceStrategy(devices[0])
