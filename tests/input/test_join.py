"""Bringing batches to devices: through the backend of the device, on the device's own lane."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from aioreplica.context import REGISTRY
from aioreplica.devices import lane_table
from aioreplica.devices.backends import Backend, NumpyBackend
from aioreplica.input import InputContext as Context
from aioreplica.input import InputOptions, InputTarget, OpenLoops, distribute_dataset
from aioreplica.values import StepGate


class Moved:
    """An array on a device of the test."""

    def __init__(self, array: Any, device: str) -> None:
        self.array = array
        self.device = device


class FakeBackend(Backend):
    """Devices called fake:0, fake:1 and so on."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    @property
    def name(self) -> str:
        return "fake"

    @property
    def has_streams(self) -> bool:
        return False

    def num_devices(self, kind: str) -> int:
        return 4 if kind == "fake" else 0

    def owns(self, value: object) -> bool:
        return isinstance(value, Moved)

    def put(self, value: Any, device: str) -> Any:
        self.threads.append(threading.current_thread().name)
        return Moved(value, device)

    def get(self, array: Any) -> Any:
        return array.array

    def scope(self, device: str) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronise(self, device: str) -> None: ...

    def keep(self, array: Any) -> None: ...

    def reduce(self, op: Any, arrays: Sequence[Any]) -> Any: ...


@pytest.fixture
def fake() -> Iterator[FakeBackend]:
    before = REGISTRY._entries.get("backends")
    backend = FakeBackend()
    REGISTRY._entries["backends"] = (NumpyBackend(), backend)
    lane_table().acquire(("fake:0", "fake:1"))
    yield backend
    lane_table().release(("fake:0", "fake:1"))
    if before is None:
        del REGISTRY._entries["backends"]
    else:
        REGISTRY._entries["backends"] = before


def target() -> InputTarget:
    return InputTarget(
        ("fake:0", "fake:1"),
        False,
        lambda: Context(1, 0, 2),
        OpenLoops(),
        lambda: None,
        StepGate(),
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1])
async def test_parts_arrive_on_their_devices(fake: FakeBackend, buffer: int) -> None:
    options = InputOptions(per_replica_buffer_size=buffer)
    data = [{"x": np.arange(3), "y": np.ones((3, 2))}]

    async with distribute_dataset(target(), data, options) as batches:
        async for batch in batches:
            assert [part.device for part in batch["x"].values] == ["fake:0", "fake:1"]
            assert [part.array.tolist() for part in batch["x"].values] == [[0, 1], [2]]
            assert [part.array.shape for part in batch["y"].values] == [(2, 2), (1, 2)]
    assert set(fake.threads) == {"aioreplica collectives"}  # a device loop keeps its own


@pytest.mark.asyncio
async def test_without_fetching_they_stay_on_the_host(fake: FakeBackend) -> None:
    options = InputOptions(fetch_to_device=False)
    async with distribute_dataset(target(), [np.arange(3)], options) as batches:
        async for batch in batches:
            assert [type(part) for part in batch.values] == [np.ndarray] * 2
    assert fake.threads == []


@pytest.mark.asyncio
async def test_arrays_of_a_backend_are_read_through_it(fake: FakeBackend) -> None:
    options = InputOptions(fetch_to_device=False)
    data = [Moved(np.arange(4), "fake:3")]
    async with distribute_dataset(target(), data, options) as batches:
        async for batch in batches:
            assert [part.tolist() for part in batch.values] == [[0, 1], [2, 3]]
