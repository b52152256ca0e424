"""Two hundred epochs that are broken off leave no task, thread, file or memory behind."""

import asyncio
import gc
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica.devices import lane_table
from tests.conftest import mirrored

EPOCHS = 200


def footprint() -> tuple[int, int, int]:
    """Tasks, threads and file descriptors; threads of lanes that were given back may still end."""
    lanes = lane_table().statistics()
    for thread in threading.enumerate():
        own = thread.name.removeprefix("aioreplica ")
        if own != thread.name and own not in lanes:
            thread.join(60)
    return len(asyncio.all_tasks()), threading.active_count(), psutil.Process().num_fds()


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], Iterator[Any]]:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join("1 2 3" for _ in range(50)))

    def read() -> Iterator[Any]:
        with path.open() as file:
            for line in file:
                yield np.array([float(word) for word in line.split()])

    return read


USUAL = ("pipeline", True)
WAYS = [
    pytest.param(*way, marks=[pytest.mark.xslow] * (way != USUAL))
    for way in itertools.product(["file", "arrays", "pipeline"], [False, True])
]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "fresh"), WAYS)
async def test_epochs_that_are_broken_off(
    lines: Callable[[], Iterator[Any]], kind: str, fresh: bool
) -> None:
    data: Any = {
        "file": lines,
        "arrays": ar.ArrayDataset(np.ones((64, 3)), 4, shuffle=True),
        "pipeline": ar.Dataset(lines).map(np.negative).batch(2),
    }[kind]

    async def epochs(strategy: ar.Strategy, count: int) -> None:
        batches = strategy.distribute_dataset(data)
        for epoch in range(count):
            if fresh:
                async with strategy.distribute_dataset(data) as own:
                    async for _ in own:
                        if own.statistics().num_delivered > epoch % 7:
                            break
            else:
                async for _ in batches:
                    if epoch % 3 == 0:
                        break
        await batches.aclose()

    async with mirrored(2) as strategy:
        await epochs(strategy, 20)
        gc.collect()
        tracemalloc.start()
        try:
            await epochs(strategy, 20)
            gc.collect()
            before, memory = footprint(), tracemalloc.get_traced_memory()[0]
            await epochs(strategy, EPOCHS)
            gc.collect()
            after, grown = footprint(), tracemalloc.get_traced_memory()[0] - memory
        finally:
            tracemalloc.stop()
    assert after == before
    assert grown < 50_000


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_mapped_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.npy"
    mapped = np.lib.format.open_memmap(path, "w+", np.float32, (200_000, 100))  # 80 MB
    mapped[:] = 1.0
    del mapped
    dataset = ar.ArrayDataset(np.load(path, mmap_mode="r"), 256, shuffle=True)

    tracemalloc.start()
    try:
        async with mirrored(2) as strategy, strategy.distribute_dataset(dataset) as batches:
            async for batch in batches:
                assert all((part == 1.0).all() for part in batch.values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000
