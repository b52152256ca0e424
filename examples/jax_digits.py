"""Train a network of jax on several replicas, compiled, with dropout and running statistics.

    python examples/jax_digits.py --replicas 4

The network is a pure function of a dict of parameters, as flax has them. `jax_variables` makes
variables of the parameters and of the state, every replica differentiates the compiled function on
its part of the batch, and the state is what the replicas have seen on average.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from sklearn.datasets import load_digits

import aioreplica as ar

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
Tree = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What training leaves behind: a loss per epoch, the accuracy, parameters and state."""

    losses: list[float]
    accuracy: float
    params: Tree
    state: Tree


def new_params(seed: int) -> Tree:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, 128)) / 8, "bias": jnp.zeros(128)},
        "out": {"kernel": jax.random.normal(second, (128, 10)) / 11, "bias": jnp.zeros(10)},
    }


def scores_of(params: Tree, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


@jax.jit
def training_loss(
    params: Tree, state: Tree, key: jax.Array, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Tree]:
    """Return the summed cross entropy, and the running mean of the images with these."""
    kept = jax.random.bernoulli(key, 0.9, images.shape) / 0.9
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(images, axis=0)
    scores = scores_of(params, (images - state["mean"]) * kept)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1)
    return -jnp.sum(chosen), {"mean": mean}


@jax.jit
def predictions(params: Tree, state: Tree, images: jax.Array) -> jax.Array:
    return jnp.argmax(scores_of(params, images - state["mean"]), axis=1)


def load_data() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Return (images, labels) to train with, and every fifth one to test with."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    tested = np.arange(len(images)) % 5 == 0
    return (images[~tested], digits.target[~tested]), (images[tested], digits.target[tested])


async def train(
    *,
    replicas: int = 4,
    epochs: int = 10,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Result:
    """Train on the given number of CPU devices; `report` is told each epoch's number and loss."""
    train_data, test_data = load_data()
    batches = ar.ArrayDataset(train_data, 64, shuffle=True, seed=seed, drop_remainder=True)
    losses: list[float] = []

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            params = ar.autodiff.jax_variables(new_params(seed))
            start = {"mean": jnp.zeros(64)}
            state = ar.autodiff.jax_variables(start, trainable=False, name="state")
            optimizer = ar.optimizers.Adam(0.002)

        def gradients(images: Images, labels: Labels) -> tuple[ar.Weighted, list[Any]]:
            key = ar.autodiff.jax_key("dropout")

            def loss() -> tuple[ar.Weighted, Tree]:
                total, seen = training_loss(params.value, state.value, key, images, labels)
                return ar.Weighted(total, len(labels)), seen

            (value, seen), pairs = ar.autodiff.differentiate_variables(
                loss, params.variables, has_aux=True
            )
            state.set_value(seen)
            return value, [(ar.Weighted(g, len(labels)), variable) for g, variable in pairs]

        async def step(images: Images, labels: Labels) -> ar.Weighted:
            ctx = ar.get_replica_context()
            value, pairs = await ctx.run_on_device(gradients, images, labels)
            await optimizer.apply_gradients(pairs)
            return value

        async with strategy.distribute_dataset(batches) as train_set:
            for epoch in range(epochs):
                total = ar.Weighted(0.0, 0)
                async for batch in train_set:
                    found = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    total = ar.Weighted(total.total + found.total, total.weight + found.weight)
                losses.append(float(total.mean()))
                report(epoch, losses[-1])

        images, labels = test_data
        guesses = predictions(params.value, state.value, images)
        accuracy = float(np.mean(np.asarray(guesses) == labels))
        return Result(losses, accuracy, params.value, state.value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a network of jax on several replicas.")
    parser.add_argument("--replicas", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    console = Console()
    ar.set_logical_devices("cpu", max(2, options.replicas))

    def show(epoch: int, loss: float) -> None:
        console.print(f"epoch {epoch + 1}: loss {loss:.4f}", highlight=False)

    result = asyncio.run(train(replicas=options.replicas, epochs=options.epochs, report=show))
    console.print(f"test accuracy: {result.accuracy:.1%}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
