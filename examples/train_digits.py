"""Train a digit classifier on several replicas, reproducibly to the last bit.

    python examples/train_digits.py --replicas 4
    python examples/train_digits.py --epochs 1 --trace digits.json   # open it in ui.perfetto.dev

Each replica differentiates the loss of its part of the batch on its own device, and the optimizer
merges the gradients. The result depends on the number of replicas by rounding alone.
"""

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autograd.numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits

import aioreplica as ar

Array = NDArray[Any]
Report = Callable[[int, int, float], None]  # step, number of steps, loss


@dataclass(frozen=True)
class Result:
    """What training leaves behind: one loss per step, and the parameters by name."""

    losses: list[float]
    test_accuracy: float
    parameters: dict[str, Array]

    @property
    def fingerprint(self) -> str:
        """A hash of the parameters: equal exactly if they are equal in every bit."""
        parts = (name.encode() + value.tobytes() for name, value in sorted(self.parameters.items()))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


class Network:  # 64 inputs, 128 hidden units, 10 classes
    def __init__(self, rng: np.random.Generator) -> None:
        self.hidden = ar.Variable(rng.normal(0, 1 / 8, (64, 128)), name="hidden")
        self.hidden_bias = ar.Variable(np.zeros(128), name="hidden_bias")
        self.out = ar.Variable(rng.normal(0, 1 / 11, (128, 10)), name="out")
        self.out_bias = ar.Variable(np.zeros(10), name="out_bias")

    def scores(self, images: Array) -> Array:
        hidden = np.dot(images, self.hidden.value) + self.hidden_bias.value
        return np.dot(np.maximum(hidden, 0), self.out.value) + self.out_bias.value

    def loss(self, images: Array, labels: Array) -> ar.Weighted:
        scores = self.scores(images)
        highest = np.max(scores, axis=1, keepdims=True)
        log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
        return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))

    def hits(self, images: Array, labels: Array) -> ar.Weighted:
        return ar.Weighted(int(np.sum(self.scores(images).argmax(axis=1) == labels)), len(labels))


async def train(
    *, replicas: int = 4, epochs: int = 30, batch_size: int = 64, seed: int = 0,
    trace: Path | None = None, report: Report = lambda *_: None,
) -> Result:  # fmt: skip
    """Train on the given number of CPU devices and return what came of it."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    tested = np.arange(len(labels)) % 5 == 0
    tests = ar.ArrayDataset((images[tested], labels[tested]), batch_size=len(labels))
    data = ar.ArrayDataset((images[~tested], labels[~tested]), batch_size, shuffle=True, seed=seed)
    losses: list[float] = []
    strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    async with strategy, strategy.trace(trace) if trace else nullcontext():
        with strategy.scope():
            network = Network(np.random.default_rng(seed))
            optimizer = ar.optimizers.Adam(learning_rate=0.004)

        async def step(images: Array, labels: Array) -> ar.Weighted:
            return await optimizer.minimize(lambda: network.loss(images, labels))

        async with strategy.distribute_dataset(data) as batches:
            for _ in range(epochs):
                async for batch in batches:
                    loss = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    losses.append(float(loss.mean()))
                    report(len(losses), epochs * len(data), losses[-1])
        async with strategy.distribute_dataset(tests) as batches:
            async for batch in batches:  # a plain function runs whole on each device
                hits = await strategy.reduce("sum", await strategy.run(network.hits, batch))
        return Result(losses, hits.mean(), {v.name: v.value for v in strategy.trainable_variables})


def plot_losses(losses: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")  # without pyplot, so drawn by Agg
    axes = figure.subplots()
    axes.semilogy(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross entropy", title="Training loss of the digit classifier")
    figure.savefig(path, dpi=120, format="png")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a digit classifier on several replicas.")
    parser.add_argument("--replicas", type=positive, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("loss_curve.png"))
    parser.add_argument("--trace", type=Path, help="write a time line, .json")
    parser.add_argument("--no-progress", action="store_true", help="print lines, not a live bar")
    options = vars(parser.parse_args(arguments))
    output, is_quiet = options.pop("output"), options.pop("no_progress")
    console = Console(highlight=False)
    ar.set_logical_devices("cpu", max(2, options["replicas"]))
    with Progress(console=console, disable=is_quiet) as progress:
        bar = progress.add_task("training", total=None)

        def show(step: int, total: int, loss: float) -> None:
            progress.update(bar, completed=step, total=total, description=f"loss {loss:.4f}")
            if is_quiet and step % 100 == 0:
                print(f"step {step}/{total}: loss {loss:.4f}", flush=True)

        try:
            result = asyncio.run(train(**options, report=show))
        except KeyboardInterrupt:
            console.print("Interrupted: training stopped cleanly, nothing was saved.")
            return 130
    plot_losses(result.losses, output)
    console.print(f"loss curve: {output}\nparameters: {result.fingerprint}")
    console.print(f"test accuracy: {result.test_accuracy:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
