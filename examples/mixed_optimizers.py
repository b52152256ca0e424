"""Train two parts of one model with two optimizers in one step.

    python examples/mixed_optimizers.py --replicas 4

The hidden layer of a digit classifier takes small, careful steps; the output layer large ones. One
backward pass gives all gradients, and each optimizer applies those of its own variables, in a
merge of its own. Every replica applies them in the same order, as all collectives.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import autograd.numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits

import aioreplica as ar

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """What training leaves behind: a loss per epoch, and how often each optimizer moved."""

    losses: list[float]
    accuracy: float
    updates: tuple[int, int]


class Network:
    """64 inputs, 32 hidden units, 10 classes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.hidden = ar.Variable(rng.normal(0, 1 / 8, (64, 32)), name="hidden")
        self.out = ar.Variable(rng.normal(0, 1 / 6, (32, 10)), name="out")

    def scores(self, images: Array) -> Array:
        return np.dot(np.tanh(np.dot(images, self.hidden.value)), self.out.value)

    def loss(self, images: Array, labels: Labels) -> ar.Weighted:
        """Cross entropy, as a sum and the number of images behind it."""
        scores = self.scores(images)
        highest = np.max(scores, axis=1, keepdims=True)
        log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
        return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))

    def hits(self, images: Array, labels: Labels) -> ar.Weighted:
        return ar.Weighted(int(np.sum(self.scores(images).argmax(axis=1) == labels)), len(labels))


async def train(
    *, replicas: int = 4, epochs: int = 8, report: Callable[[int, float], None] = lambda *_: None
) -> Result:
    """Train on the given number of CPU devices; `report` is told each epoch's number and loss."""
    digits = load_digits()
    data = digits.data / 16, digits.target
    batches = ar.ArrayDataset(data, batch_size=64, shuffle=True, seed=0)
    losses: list[float] = []
    hits = ar.Weighted(0, 0)

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            network = Network(np.random.default_rng(0))
            careful = ar.optimizers.Adam(learning_rate=0.002)
            bold = ar.optimizers.Adam(learning_rate=0.02)

        async def step(images: Array, labels: Labels) -> ar.Weighted:
            ctx = ar.get_replica_context()
            loss, pairs = await ctx.run_on_device(
                ar.autodiff.differentiate_variables,
                lambda: network.loss(images, labels),
                [network.hidden, network.out],
            )
            weighted = [(ar.Weighted(grad, loss.weight), variable) for grad, variable in pairs]
            await careful.apply_gradients(weighted[:1])
            await bold.apply_gradients(weighted[1:])
            return loss

        async with strategy.distribute_dataset(batches) as train_set:
            for epoch in range(epochs):
                total = ar.Weighted(0.0, 0)
                async for batch in train_set:
                    loss = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    total = ar.Weighted(total.total + loss.total, total.weight + loss.weight)
                losses.append(float(total.mean()))
                report(epoch, losses[-1])

        everything = ar.ArrayDataset(data, batch_size=len(data[1]))
        async with strategy.distribute_dataset(everything) as tests:
            async for batch in tests:  # one batch, of which each replica looks at its part
                hits = await strategy.reduce("sum", await strategy.run(network.hits, args=batch))
    updates = int(careful.iterations.value), int(bold.iterations.value)
    return Result(losses, float(hits.mean()), updates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train one model with two optimizers.")
    parser.add_argument("--replicas", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    console = Console()
    ar.set_logical_devices("cpu", max(2, options.replicas))
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=options.epochs)

        def show(epoch: int, loss: float) -> None:
            progress.update(bar, completed=epoch + 1)
            console.print(f"epoch {epoch + 1}: loss {loss:.4f}", highlight=False)

        result = asyncio.run(train(replicas=options.replicas, epochs=options.epochs, report=show))
    console.print(f"accuracy on the training images: {result.accuracy:.1%}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
