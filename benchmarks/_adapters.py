"""Optimizers of optax and torch beside the same ones without the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar

from ._measure import Contender, take_turns
from ._mlp import initial_parameters
from ._row import Row, Target, compared_row

RATIO = 1.5  # promised for a network of 784-512-512-10
SMALL = [(8, 16), (16,), (16, 16), (16,), (16, 4), (4,)]  # nothing but overhead


async def measure_adapters(loop: str, *, num_steps: int, num_rounds: int) -> list[Row]:
    """Updates of one replica with AdamW of each library that is installed, large and small.

    Args:
        loop: Name of the event loop.
        num_steps: Updates that make one sample.
        num_rounds: Rounds of each comparison.
    """
    large = [start.astype(np.float32) for start in initial_parameters()]
    small = [np.ones(shape, np.float32) for shape in SMALL]
    rows = []
    for name, make in (("optax", _optax), ("torch", _torch)):
        if find_spec(name) is not None:
            rows.append(await _measure(name, make, large, "", loop, num_steps, num_rounds))
            rows.append(await _measure(name, make, small, ", small", loop, num_steps, num_rounds))
    return rows


async def _measure(
    library: str,
    make: Callable[[list[Any], list[Any]], tuple[Any, Callable[[], None]]],
    starts: list[Any],
    suffix: str,
    loop: str,
    num_steps: int,
    num_rounds: int,
) -> Row:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=start.shape).astype(np.float32) for start in starts]
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            variables = [ar.Variable(start) for start in starts]
            optimizer, plain = make(starts, gradients)
        pairs = list(zip(gradients, variables, strict=True))
        samples = await take_turns(
            {
                "ours": partial(_ours, strategy, optimizer, pairs, num_steps),
                "plain": _timed(plain, num_steps),
            },
            num_rounds=num_rounds,
        )
    return compared_row(
        f"from_{library}, AdamW{suffix}", loop, 1, "us/update", ours=samples["ours"],
        against=f"{library} alone", floor=samples["plain"],
        target=None if suffix else Target("ratio", RATIO),
    )  # fmt: skip


async def _ours(strategy: ar.Strategy, optimizer: Any, pairs: Any, num_steps: int) -> float:
    async def step() -> None:
        for _ in range(num_steps):
            await optimizer.apply_gradients(pairs)

    start = perf_counter()
    await strategy.run(step)
    return (perf_counter() - start) / num_steps * 1e6


def _timed(update: Callable[[], None], num_steps: int) -> Contender:
    async def sample() -> float:
        start = perf_counter()
        for _ in range(num_steps):
            update()
        return (perf_counter() - start) / num_steps * 1e6

    return sample


def _optax(starts: list[Any], gradients: list[Any]) -> tuple[Any, Callable[[], None]]:
    import jax
    import optax

    transformation = optax.adamw(1e-3)

    @jax.jit
    def step(values: Any, found: Any, state: Any) -> Any:
        updates, state = transformation.update(found, state, values)
        return optax.apply_updates(values, updates), state

    known = list(map(jax.numpy.asarray, gradients))
    values = list(map(jax.numpy.asarray, starts))
    held = [values, transformation.init(values)]

    def update() -> None:
        held[:] = jax.block_until_ready(step(held[0], known, held[1]))

    return ar.optimizers.from_optax(transformation), update


def _torch(starts: list[Any], gradients: list[Any]) -> tuple[Any, Callable[[], None]]:
    import torch

    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    plain = torch.optim.AdamW(parameters, lr=1e-3)
    return ar.optimizers.from_torch(torch.optim.AdamW, lr=1e-3), plain.step
