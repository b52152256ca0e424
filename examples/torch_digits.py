"""Train a convolutional network of torch on several replicas, with dropout and batch norm.

    python examples/torch_digits.py --replicas 4

The network is an ordinary `nn.Module`. `torch_module` makes variables of its parameters, every
replica calls it on its part of the batch, and at the end the trained values go back into the
module. The digits are those that scikit-learn brings along.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

import aioreplica as ar

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """What training leaves behind: a loss per epoch, the accuracy, and the trained module."""

    losses: list[float]
    accuracy: float
    module: nn.Module


def new_network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(16 * 9, 10),
        )  # fmt: skip


def load_data() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Return (images, labels) to train with, and every fifth one to test with."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
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
    batches = ar.ArrayDataset(train_data, 64, shuffle=True, seed=seed)
    network = new_network(seed)
    losses: list[float] = []

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            model = ar.autodiff.torch_module(network)
            optimizer = ar.optimizers.Adam(0.002)

        async def step(images: Images, labels: Labels) -> ar.Weighted:
            def loss() -> ar.Weighted:
                scores = model(images)
                total = nn.functional.cross_entropy(scores, torch.tensor(labels), reduction="sum")
                return ar.Weighted(total, len(labels))

            return await optimizer.minimize(loss, model.variables)

        def hits(images: Images, labels: Labels) -> ar.Weighted:
            return ar.Weighted(int((model(images).numpy().argmax(1) == labels).sum()), len(labels))

        async with strategy.distribute_dataset(batches) as train_set:
            for epoch in range(epochs):
                total = ar.Weighted(0.0, 0)
                async for batch in train_set:
                    found = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    total = ar.Weighted(total.total + found.total, total.weight + found.weight)
                losses.append(float(total.mean()))
                report(epoch, losses[-1])

        model.eval()  # dropout is off, and batch norm uses the replicas' running statistics
        tests = ar.ArrayDataset(test_data, batch_size=len(test_data[1]))
        async with strategy.distribute_dataset(tests) as test_set:
            async for batch in test_set:
                found = await strategy.reduce("sum", await strategy.run(hits, args=batch))
        model.copy_to(network)
    return Result(losses, float(found.mean()), network.eval())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a network of torch on several replicas.")
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
