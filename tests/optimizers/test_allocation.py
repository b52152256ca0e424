"""Steady state: a step builds everything in memory that is there already."""

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop
from aioreplica.values import CAN_COUNT_REFERENCES
from tests.conftest import mirrored

reuses = pytest.mark.skipif(not CAN_COUNT_REFERENCES, reason="references cannot be counted")

DENSE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.1),
    "sgd momentum": lambda: SGD(0.1, momentum=0.9),
    "sgd nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "rmsprop centered momentum": lambda: RMSprop(momentum=0.9, centered=True),
    "adam": Adam,
    "adamw": AdamW,
    "adam, clipped by norm": lambda: Adam(global_clipnorm=1.0),
    "adam, clipped by value": lambda: Adam(clipvalue=0.1, loss_scale=8.0),
    "adam, scaled dynamically": lambda: Adam(
        loss_scale=ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
    ),
}


async def peak_of(action: Callable[[], Awaitable[Any]], *, num_times: int = 3) -> int:
    """Bytes that were allocated at the same time, at most, above what there was by the 5th time."""
    for _ in range(4):
        await action()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_times):
            await action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@reuses
@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_replicas"), [("adam", 1), *((name, 4) for name in DENSE)])
async def test_a_step_allocates_no_large_array(name: str, num_replicas: int) -> None:
    size = 1_000_000
    async with mirrored(num_replicas) as strategy:
        with strategy.scope():
            w = ar.Variable(np.ones(size, np.float32))
            small = ar.Variable(np.ones(10, np.float32))
            optimizer = DENSE[name]()
        gradients = ar.PerReplica([np.full(size, 0.01, np.float32) for _ in range(num_replicas)])

        async def step(gradient: Any) -> None:
            weighted = ar.Weighted(gradient, 2)
            await optimizer.apply_gradients([(weighted, w), (weighted.total[:10], small)])

        before = w.value[0]
        peak = await peak_of(lambda: strategy.run(step, args=(gradients,)))

    assert w.value[0] < before
    assert peak < w.value.nbytes // 4, peak  # a few blocks of 128 KiB


@reuses
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "make",
    [SGD, lambda: SGD(momentum=0.9), Adagrad, Adam],
    ids=["sgd", "momentum", "adagrad", "adam"],
)
async def test_a_sparse_step_allocates_by_its_rows(make: Any) -> None:
    shape = (50_000, 16)
    async with mirrored(4) as strategy:
        with strategy.scope():
            table = ar.Variable(np.ones(shape, np.float32))
            optimizer = make()
        rng = np.random.default_rng(0)

        async def step() -> None:
            rows = rng.integers(0, shape[0], 20)
            slices = ar.IndexedSlices(np.ones((20, 16), np.float32), rows, shape)
            await optimizer.apply_gradients([(slices, table)])

        peak = await peak_of(lambda: strategy.run(step))

    assert peak < 256 * 1024 < table.value.nbytes // 10, peak


@reuses
@pytest.mark.asyncio
@pytest.mark.parametrize("make", [SGD, Adam], ids=["sgd", "adam"])
async def test_many_rows_are_gathered_in_memory_that_is_there(make: Any) -> None:
    shape = (20_000, 64)
    async with mirrored(1) as strategy:
        with strategy.scope():
            table = ar.Variable(np.ones(shape, np.float32))
            optimizer = make()
        rows = np.arange(0, shape[0], 5)
        slices = ar.IndexedSlices(np.ones((len(rows), 64), np.float32), rows, shape)

        async def step() -> None:
            await optimizer.apply_gradients([(slices, table)])

        peak = await peak_of(lambda: strategy.run(step))

    assert peak < slices.nbytes // 4, peak
