"""Training steps on replicas beside the same steps in a plain NumPy loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, final

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

import aioreplica as ar

from ._bare_threads import BareThreads, BareUpdate
from ._measure import Contender, take_turns
from ._mlp import SEQUENTIAL, Backprop, initial_parameters, made_up_batch
from ._row import Row, Target, compared_row

SPEEDUP = 1.4  # promised for two replicas and a batch of 256
OVERHEAD = 1.15
PAUSE_S = 0.25


@final
@dataclass(frozen=True, slots=True)
class Speed:
    """One line in steps per second.

    Attributes:
        name: Optimizer and batch.
        num_replicas: How many replicas.
        ours: Steps per second of the library.
        one_thread: Of the sequential program with one BLAS thread.
        default: Of the sequential program with as many as BLAS takes by itself.
        num_threads: How many those are.
    """

    name: str
    num_replicas: int
    ours: float
    one_thread: float
    default: float
    num_threads: int

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.num_replicas} replicas: {self.ours:.0f} steps/s; sequential "
            f"{self.one_thread:.0f} with 1 BLAS thread ({self.ours / self.one_thread:.2f}x), "
            f"{self.default:.0f} with {self.num_threads} ({self.ours / self.default:.2f}x)"
        )


def blas_threads() -> int:
    """Return how many threads BLAS takes by itself; ask before a strategy is opened."""
    counts = [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]
    return max(counts, default=1)


async def measure_steps(
    loop: str,
    strategy: ar.Strategy,
    name: str,
    *,
    batch_size: int,
    num_steps: int,
    num_rounds: int,
    num_threads: int,
) -> tuple[list[Row], Speed]:
    """Whole steps: gradients of the parts, then one update."""
    count = strategy.num_replicas_in_sync
    images, labels = made_up_batch(batch_size)
    batch = _parts(batch_size, count)
    variables, optimizer = _made(strategy, name)
    sequential, backprop = SEQUENTIAL[name](initial_parameters()), Backprop(batch_size)

    async def ours() -> float:
        start = perf_counter()
        for _ in range(num_steps):
            await strategy.run(_step, args=(variables, optimizer, *batch))
        return (perf_counter() - start) / num_steps * 1e6

    def one_by_one() -> None:
        found = backprop(sequential.parameters, images, labels)
        sequential.apply(found, batch_size)

    looped, loop_optimizer = _made(strategy, name)
    threads = BareThreads(name, count, batch_size)

    async def in_device_loop() -> float:
        step = partial(_device_step, looped, loop_optimizer)
        start = perf_counter()
        await strategy.run_steps(step, [batch] * num_steps, num_steps)
        return (perf_counter() - start) / num_steps * 1e6

    contenders = {
        "ours": ours,
        "device loop": in_device_loop,
        "one": _limited(one_by_one, 1, num_steps),
        "default": _limited(one_by_one, num_threads, num_steps),
        "threads": _limited(partial(threads.run, num_steps), 1, 1, num_steps),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    title = f"{name}, batch {batch_size}"
    promised = Target("ratio", 1 / SPEEDUP) if (count, batch_size) == (2, 256) else None
    one, more = "NumPy, 1 BLAS thread", f"NumPy, {num_threads} BLAS threads"
    rows = [
        compared_row(
            measured, loop, count, "us/step", ours=samples[key], against=against,
            floor=samples[floor], target=target,
        )
        for measured, key, floor, against, target in (
            (title, "ours", "one", one, promised),
            (title, "ours", "default", more, None),
            (title, "ours", "threads", "bare threads", None),
            (f"{title}, run_steps", "device loop", "one", one, promised),
            (f"{title}, run_steps", "device loop", "threads", "bare threads", None),
            (f"{title}, bare threads", "threads", "one", one, None),
        )
        if count > 1 or "threads" not in (key, floor)
    ]  # fmt: skip
    speeds = [1e6 / sorted(samples[key])[num_rounds // 2] for key in ("ours", "one", "default")]
    return rows, Speed(title, count, *speeds, num_threads)


async def measure_overhead(
    loop: str, strategy: ar.Strategy, name: str, *, num_steps: int, num_rounds: int
) -> list[Row]:
    """Steps of a batch of 256 beside the same ones with bare sums and array updates at the end.

    The last row is the update alone, over and over.
    """
    count = strategy.num_replicas_in_sync
    batch = _parts(256, count)
    variables, optimizer = _made(strategy, name)
    bare = BareUpdate(name, count)

    async def ours() -> float:
        start = perf_counter()
        for _ in range(num_steps):
            await strategy.run(_step, args=(variables, optimizer, *batch))
        return (perf_counter() - start) / num_steps * 1e6

    async def with_bare_updates() -> float:
        start = perf_counter()
        for _ in range(num_steps):
            found = await strategy.run(_gradients_only, args=(bare.parameters, *batch))
            bare.apply([[parts[i] for parts in found] for i in range(count)])
        return (perf_counter() - start) / num_steps * 1e6

    found = await strategy.run(_gradients_only, args=(bare.parameters, *batch))
    fixed = [[parts[i] for parts in found] for i in range(count)]

    async def updates_only() -> float:
        start = perf_counter()
        await strategy.run(_updates, args=(variables, optimizer, ar.PerReplica(fixed), num_steps))
        return (perf_counter() - start) / num_steps * 1e6

    steps = await take_turns({"ours": ours, "bare": with_bare_updates}, num_rounds=num_rounds)
    alone = await take_turns(
        {"ours": updates_only, "bare": _limited(lambda: bare.apply(fixed), 1, num_steps)},
        num_rounds=num_rounds,
    )
    return [
        compared_row(
            f"{name}, batch 256", loop, count, "us/step", ours=steps["ours"],
            against="bare array updates", floor=steps["bare"], target=Target("ratio", OVERHEAD),
        ),
        compared_row(
            f"{name}, apply_gradients alone", loop, count, "us", ours=alone["ours"],
            against="bare array updates", floor=alone["bare"],
        ),
    ]  # fmt: skip


async def _step(
    variables: list[ar.Variable], optimizer: Any, backprop: Any, images: Any, labels: Any
) -> None:
    ctx = ar.get_replica_context()
    assert ctx is not None
    values = [variable.value for variable in variables]
    found = await ctx.run_on_device(backprop, values, images, labels)
    del values  # so that the next value can be built in the buffer of the last one
    weighted = [ar.Weighted(gradient, len(labels)) for gradient in found]
    await optimizer.apply_gradients(zip(weighted, variables, strict=True))


def _device_step(
    variables: list[ar.Variable], optimizer: Any, _ctx: Any, backprop: Any, images: Any, labels: Any
) -> None:
    values = [variable.value for variable in variables]
    found = backprop(values, images, labels)
    del values
    weighted = [ar.Weighted(gradient, len(labels)) for gradient in found]
    optimizer.blocking.apply_gradients(zip(weighted, variables, strict=True))


async def _gradients_only(
    parameters: list[Any], backprop: Any, images: Any, labels: Any
) -> list[Any]:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return await ctx.run_on_device(backprop, parameters, images, labels)


async def _updates(variables: list[ar.Variable], optimizer: Any, part: Any, count: int) -> None:
    pairs = [(ar.Weighted(g, 1), variable) for g, variable in zip(part, variables, strict=True)]
    for _ in range(count):
        await optimizer.apply_gradients(pairs)


def _parts(batch_size: int, count: int) -> tuple[ar.PerReplica, ar.PerReplica, ar.PerReplica]:
    """Return what differentiates, the images and the labels of each replica."""
    images, labels = made_up_batch(batch_size)
    split = [np.array_split(part, count) for part in (images, labels)]
    backprops = [Backprop(len(part)) for part in split[0]]
    return ar.PerReplica(backprops), ar.PerReplica(split[0]), ar.PerReplica(split[1])


def _made(strategy: ar.Strategy, name: str) -> tuple[list[ar.Variable], Any]:
    with strategy.scope():
        variables = [ar.Variable(array) for array in initial_parameters()]
        optimizer = getattr(ar.optimizers, name)(0.01 if name == "SGD" else 0.001)
    return variables, optimizer


def _limited(
    action: Callable[[], None], num_threads: int, num_calls: int, num_steps: int | None = None
) -> Contender:
    """Time calls with a limit on BLAS; each is a step unless `num_steps` says how many they are."""

    async def sample() -> float:
        with threadpool_limits(num_threads, user_api="blas"):
            start = perf_counter()
            for _ in range(num_calls):
                action()
            seconds = perf_counter() - start
        if num_threads > 1:  # its threads go on spinning for a while, at the next one's cost
            await asyncio.sleep(PAUSE_S)
        return seconds / (num_steps or num_calls) * 1e6

    return sample
