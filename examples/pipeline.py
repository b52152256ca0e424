"""Train a network in four stages, one per device, which hand micro-batches on.

    python examples/pipeline.py --steps 60

It tells ten noisy pictures apart. Then it shows how close the pipeline comes to theory, with stages
that sleep in place of computing: (m + p - 1) / m of the time that one of p stages needs for all of
m micro-batches.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import autograd.numpy as anp
import numpy as np

import aioreplica as ar

NUM_STAGES, NUM_MICRO_BATCHES = 4, 16
WIDTHS = (64, 64, 48, 32, 10)


def make_stages(variables: list[tuple[ar.Variable, ar.Variable]]) -> list[Callable[..., Any]]:
    """Return one function per stage; each reads its own variables."""

    def layer(weights: ar.Variable, bias: ar.Variable) -> Callable[[Any], Any]:
        return lambda x: anp.tanh(anp.dot(x, weights.value) + bias.value)

    def loss(x: Any, labels: Any) -> Any:
        weights, bias = variables[-1]
        scores = anp.dot(x, weights.value) + bias.value
        shifted = scores - anp.max(scores, axis=1, keepdims=True)
        log_sums = anp.log(anp.sum(anp.exp(shifted), axis=1))
        picked = shifted[np.arange(len(labels)), labels]
        return ar.Weighted(anp.sum(log_sums - picked), len(labels))

    return [*(layer(*pair) for pair in variables[:-1]), loss]


async def train(strategy: ar.Strategy, steps: int) -> list[float]:
    """Train for so many steps; return the loss of each."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(10, 64))
    with strategy.scope():
        variables = [
            (ar.Variable(rng.normal(size=(m, n)) / np.sqrt(m)), ar.Variable(np.zeros(n)))
            for m, n in pairwise(WIDTHS)
        ]
        adam = ar.optimizers.Adam(0.01)
    stages = make_stages(variables)

    async def step(inputs: Any, labels: Any) -> float:
        parts = zip(*(np.array_split(x, NUM_MICRO_BATCHES) for x in (inputs, labels)), strict=True)
        loss, pairs = await ar.pipeline(stages, list(parts))
        await adam.apply_gradients(pairs, aggregate=False)
        return float(loss)

    losses = []
    for _ in range(steps):
        labels = rng.integers(0, 10, 256)
        inputs = drawn[labels] + rng.normal(size=(256, 64))
        result = await strategy.run(step, args=(inputs, labels))
        losses.append(strategy.local_results(result)[0])
    return losses


async def measure(strategy: ar.Strategy, seconds: float) -> float:
    """Return the time of a step over what theory says: (m + p - 1) / m of one stage's work."""
    with strategy.scope():
        number = ar.Variable(1.0)

    def stage(x: Any) -> Any:
        time.sleep(seconds)
        return x * number.value

    def last(x: Any, _target: Any) -> Any:
        time.sleep(2 * seconds)  # the others run twice, forward and on the way back
        return anp.sum(x * number.value)

    async def step() -> None:
        parts = [(np.ones(1), None)] * NUM_MICRO_BATCHES
        await ar.pipeline([stage] * (NUM_STAGES - 1) + [last], parts)

    await strategy.run(step)
    begun = time.perf_counter()
    await strategy.run(step)
    took = time.perf_counter() - begun
    return took / ((NUM_MICRO_BATCHES + NUM_STAGES - 1) * 2 * seconds)


async def run(steps: int, seconds: float) -> tuple[list[float], float]:
    """Train, and measure."""
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(NUM_STAGES)]) as strategy:
        return await train(strategy, steps), await measure(strategy, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a network in four stages.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.05, help="that stages sleep")
    options = parser.parse_args(arguments)
    ar.set_logical_devices("cpu", NUM_STAGES)
    losses, ratio = asyncio.run(run(options.steps, options.seconds))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")
    print(f"a step of {NUM_STAGES} stages takes {ratio:.2f} of what theory says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
