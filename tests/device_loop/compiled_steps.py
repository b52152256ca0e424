"""Steps, models and elements that tests of compiled steps share. Needs jax."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar

jnp = pytest.importorskip("jax.numpy")


def elements(strategy: ar.Strategy, count: int, size: int = 4, seed: int = 0) -> list[Any]:
    """Elements of a matrix and a vector for each replica; plain under the default strategy."""
    rng, n = np.random.default_rng(seed), strategy.num_replicas_in_sync
    found = []
    for _ in range(count):
        x = [rng.normal(size=(size, 3)).astype(np.float32) for _ in range(n)]
        y = [rng.normal(size=size).astype(np.float32) for _ in range(n)]
        plain = isinstance(strategy, ar.DefaultStrategy)
        found.append((x[0], y[0]) if plain else (ar.PerReplica(x), ar.PerReplica(y)))
    return found


def model(strategy: ar.Strategy, optimizer: Callable[[], ar.optimizers.Optimizer]) -> Any:
    """Return a variable, an optimizer and a step that fits a line."""
    with strategy.scope():
        w = ar.Variable(np.linspace(-1, 1, 3).astype(np.float32))
        made = optimizer()

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        def loss() -> ar.Weighted:
            return ar.Weighted(jnp.sum((x @ w.value - y) ** 2), len(x))

        value = made.blocking.minimize(loss, backend="jax")
        ctx.set_last_step_output("loss", value, "sum")

    return w, made, step


def adam() -> ar.optimizers.Optimizer:
    return ar.optimizers.Adam(0.05)


async def ended(strategy: ar.Strategy, count: int, **options: Any) -> tuple[Any, ...]:
    w, optimizer, step = model(strategy, adam)
    result = await strategy.run_steps(step, iter(elements(strategy, count)), count, **options)
    loss = result.last_step_outputs["loss"].mean()
    return w.value.copy(), float(loss), w.version, int(optimizer.iterations.value)


def vectors(strategy: ar.Strategy, count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    n = strategy.num_replicas_in_sync
    return [
        (ar.PerReplica([rng.normal(size=4).astype(np.float32) for _ in range(n)]),)
        for _ in range(count)
    ]


def line_of(step: Callable[..., Any]) -> str:
    """Return `file:line` of the line marked "here"."""
    lines, first = inspect.getsourcelines(step)
    [at] = [i for i, line in enumerate(lines) if line.rstrip().endswith("here")]
    return f"{inspect.getfile(step)}:{first + at}"
