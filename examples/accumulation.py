"""Train with large batches that never exist: gradients of small ones are accumulated.

    python examples/accumulation.py --replicas 4

A digit classifier is trained twice from the same start: with batches of 128, and with batches of 32
of which four make a window. The last window of an epoch is shorter, and its last batch too. Totals
and weights are added up apart, so both runs end with the same parameters but for rounding.
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

LARGE = 128
WINDOW = 4


@dataclass(frozen=True)
class Result:
    """What training leaves behind: the parameters, a loss per epoch, and how many updates."""

    weights: Array
    losses: list[float]
    updates: int


def loss_of(weights: ar.Variable, images: Array, labels: Labels) -> ar.Weighted:
    """Cross entropy of a linear classifier, as a sum and the number of images behind it."""
    scores = np.dot(images, weights.value)
    highest = np.max(scores, axis=1, keepdims=True)
    log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
    return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))


async def train(
    *,
    replicas: int,
    epochs: int,
    window: int,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Result:
    """Train with windows of so many batches; `report` is told each epoch's number and loss."""
    digits = load_digits()
    batches = ar.ArrayDataset((digits.data / 16, digits.target), batch_size=LARGE // window)
    losses: list[float] = []

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            weights = ar.Variable(np.zeros((64, 10)), name="weights")
            optimizer = ar.optimizers.SGD(learning_rate=0.5, momentum=0.9)
        accumulator = ar.optimizers.GradientAccumulator(optimizer)

        async def step(images: Array, labels: Labels) -> ar.Weighted:
            ctx = ar.get_replica_context()
            loss, pairs = await ctx.run_on_device(
                ar.autodiff.differentiate_variables,
                lambda: loss_of(weights, images, labels),
                [weights],
            )
            await accumulator.add([(ar.Weighted(grad, loss.weight), v) for grad, v in pairs])
            return loss

        async with strategy.distribute_dataset(batches) as train_set:
            for epoch in range(epochs):
                total, num_added = ar.Weighted(0.0, 0), 0
                async for batch in train_set:
                    loss = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    total = ar.Weighted(total.total + loss.total, total.weight + loss.weight)
                    num_added += 1
                    if num_added == window:
                        await accumulator.apply()
                        num_added = 0
                if num_added:
                    await accumulator.apply()  # what is left of the epoch
                losses.append(float(total.mean()))
                report(epoch, losses[-1])
        return Result(weights.value, losses, int(optimizer.iterations.value))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Accumulate gradients of small batches.")
    parser.add_argument("--replicas", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    console = Console()
    ar.set_logical_devices("cpu", max(2, options.replicas))
    results = []
    with Progress(console=console) as progress:
        for window in (1, WINDOW):
            name = f"{window} x {LARGE // window}"
            bar = progress.add_task(name, total=options.epochs)

            def show(epoch: int, loss: float, name: str = name, bar: int = bar) -> None:
                progress.update(bar, completed=epoch + 1)
                console.print(f"{name}, epoch {epoch + 1}: loss {loss:.4f}", highlight=False)

            results.append(
                asyncio.run(
                    train(
                        replicas=options.replicas,
                        epochs=options.epochs,
                        window=window,
                        report=show,
                    )
                )
            )
    large, small = results
    difference = np.max(np.abs(large.weights - small.weights))
    console.print(
        f"{large.updates} updates each; largest difference of a weight: {difference:.1e}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
