"""Two hundred epochs that are broken off leave no task, thread, file or memory behind."""

import asyncio
import gc
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import aioreplica as ar
from aioreplica.devices import lane_table
from aioreplica.devices._cores import num_cores
from tests.conftest import mirrored

EPOCHS = 200


def footprint(older: Collection[threading.Thread]) -> tuple[int, int, int]:
    """Tasks, threads beside those of lanes in use, and file descriptors.

    Threads of a lane that was given back may take a moment to end.
    """
    lanes = {f"aioreplica {name}" for name in lane_table().statistics()}
    left = {thread for thread in threading.enumerate() if thread.name not in lanes} - set(older)
    for thread in left:
        thread.join(60)
    alive = sum(thread.is_alive() for thread in left)
    return len(asyncio.all_tasks()), alive, psutil.Process().num_fds()


async def fill_host_pool() -> None:
    """Have all threads of the lane `host` started: it starts one when all others are busy."""
    count = min(32, num_cores() + 4)
    together = threading.Barrier(count)
    await asyncio.gather(*(ar.run_on_host(together.wait, 60) for _ in range(count)))


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


@pytest.mark.xslow
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

    older = threading.enumerate()
    async with mirrored(2) as strategy:
        await epochs(strategy, 20)
        await fill_host_pool()
        gc.collect()
        tracemalloc.start()
        try:
            await epochs(strategy, 20)
            gc.collect()
            before, memory = footprint(older), tracemalloc.get_traced_memory()[0]
            await epochs(strategy, EPOCHS)
            gc.collect()
            after, grown = footprint(older), tracemalloc.get_traced_memory()[0] - memory
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
