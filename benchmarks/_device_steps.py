"""Steps of a small network: a device loop beside `run` with awaited device ops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from itertools import cycle, islice
from typing import Any

import numpy as np

import aioreplica as ar

from . import _mlp_ops as mlp
from ._measure import take_turns, timed
from ._row import Row, Target, compared_row

MAX_RATIO = Target("ratio", 1 / 3)
NUM_BATCHES = 16
HOPS = (1, 10, 100)


async def measure_steps(
    loop: str, strategy: ar.Strategy, *, num_steps: int, num_rounds: int
) -> list[Row]:
    """Compare a device loop with one run per step whose ops are awaited one by one."""
    size = strategy.num_replicas_in_sync
    batches = mlp.new_batches(size, NUM_BATCHES)
    contenders = {
        "ours": timed(in_device_loop(strategy, batches, num_steps), num_units=num_steps),
        "floor": timed(in_runs(strategy, batches, num_steps), num_units=num_steps),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    row = compared_row(
        "MLP step", loop, size, "us/step", against="run, awaited ops", target=MAX_RATIO, **samples
    )
    return [row]


async def count_different_bits(strategy: ar.Strategy) -> tuple[int, int]:
    """Train for 100 steps in hops of 1, 10 and 100; count the weights that differ.

    Returns:
        How many hop sizes were compared with a run per step, and in how many some bit differs.
    """
    batches = mlp.new_batches(strategy.num_replicas_in_sync, NUM_BATCHES)
    expected = await trained(in_runs, strategy, batches)
    different = 0
    for hop in HOPS:
        params = await trained(in_device_loop, strategy, batches, hop)
        different += params != expected
    return len(HOPS), different


async def trained(
    how: Callable[..., Callable[[], Awaitable[object]]], strategy: ar.Strategy, *args: Any
) -> list[bytes]:
    """Return the bytes of all weights after 100 steps."""
    weights = replica_params(strategy)
    batches, *hop = args
    await how(strategy, batches, 100, *hop, weights=weights)()
    return [param.tobytes() for params in weights for param in params]


def replica_params(strategy: ar.Strategy) -> list[mlp.Params]:
    """Return weights for each replica."""
    return [mlp.new_params() for _ in range(strategy.num_replicas_in_sync)]


def in_device_loop(
    strategy: ar.Strategy,
    batches: list[Any],
    num_steps: int,
    hop: int | None = None,
    *,
    weights: list[mlp.Params] | None = None,
) -> Callable[[], Awaitable[object]]:
    """Return what trains for so many steps on the device threads, `hop` steps per call."""
    own = weights or replica_params(strategy)

    def step(ctx: ar.MultiStepContext, images: Any, labels: Any) -> None:
        replica = ar.get_replica_context()
        assert replica is not None
        params = own[replica.replica_id_in_sync_group]
        gradients = mlp.gradients_of(params, images, labels)
        mlp.descend(params, replica.blocking.all_reduce("mean", gradients))

    async def train() -> None:
        iterator = islice(cycle(batches), num_steps)
        for _ in range(num_steps // (hop or num_steps)):
            await strategy.run_steps(step, iterator, hop or num_steps)

    return train


def in_runs(
    strategy: ar.Strategy,
    batches: list[Any],
    num_steps: int,
    *,
    weights: list[mlp.Params] | None = None,
) -> Callable[[], Awaitable[object]]:
    """Return what trains for so many steps with `run`, every op awaited on its device."""
    own = weights or replica_params(strategy)

    async def step(images: Any, labels: Any) -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        params, on_device = own[ctx.replica_id_in_sync_group], ctx.run_on_device
        hidden = await on_device(mlp.hidden_layer, params, images)
        logits = await on_device(mlp.output_layer, params, hidden)
        errors = await on_device(mlp.loss_gradient, logits, labels)
        top = await on_device(mlp.output_gradients, hidden, errors)
        bottom = await on_device(mlp.hidden_gradients, params, images, hidden, errors)
        reduced = await ctx.all_reduce("mean", [*bottom, *top])
        await on_device(mlp.descend, params, reduced)

    async def train() -> None:
        for batch in islice(cycle(batches), num_steps):
            await strategy.run(step, args=batch)

    return train


def in_bare_threads(
    executor: Executor, num_replicas: int, num_steps: int
) -> Callable[[], Awaitable[object]]:
    """Return what does the same work in bare threads that meet at a `threading.Barrier`."""
    loop = asyncio.get_running_loop()
    batches = mlp.new_batches(num_replicas, NUM_BATCHES)
    weights = [mlp.new_params() for _ in range(num_replicas)]
    shared: list[Any] = [None] * num_replicas
    barrier = threading.Barrier(num_replicas)

    def parts(replica_id: int) -> Iterator[tuple[Any, Any]]:
        for images, labels in islice(cycle(batches), num_steps):
            yield images[replica_id], labels[replica_id]

    def train(replica_id: int) -> None:
        params = weights[replica_id]
        for images, labels in parts(replica_id):
            shared[replica_id] = mlp.gradients_of(params, images, labels)
            barrier.wait()
            means = [np.mean(column, axis=0) for column in zip(*shared, strict=True)]
            barrier.wait()
            mlp.descend(params, means)

    return lambda: asyncio.gather(
        *[loop.run_in_executor(executor, train, i) for i in range(num_replicas)]
    )
