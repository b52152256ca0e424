"""Train a digit classifier on several replicas, reproducibly to the last bit.

    python examples/train_digits.py --replicas 4
    python examples/train_digits.py --epochs 1 --trace digits.json   # open it in ui.perfetto.dev

Every batch is split over the replicas, each replica differentiates the loss of its part on its own
device, and the optimizer merges the gradients. The result does not depend on the number of
replicas, except for rounding.
"""

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import autograd.numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits

import aioreplica as ar

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Status:
    """How far training is: told after every step."""

    step: int
    num_steps: int
    loss: float
    accuracy: float  # on the test images, after the last whole epoch


@dataclass(frozen=True)
class Result:
    """What training leaves behind: one loss per step, and the parameters by name."""

    losses: list[float]
    test_accuracy: float
    parameters: dict[str, Array]

    @property
    def fingerprint(self) -> str:
        """A hash of the parameters: equal exactly if they are equal in every bit."""
        digest = hashlib.sha256()
        for name, value in sorted(self.parameters.items()):
            digest.update(name.encode() + value.tobytes())
        return digest.hexdigest()[:16]


class Network:
    """64 inputs, 128 hidden units, 10 classes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.hidden = ar.Variable(rng.normal(0, 1 / 8, (64, 128)), name="hidden")
        self.hidden_bias = ar.Variable(np.zeros(128), name="hidden_bias")
        self.out = ar.Variable(rng.normal(0, 1 / 11, (128, 10)), name="out")
        self.out_bias = ar.Variable(np.zeros(10), name="out_bias")

    def scores(self, images: Array) -> Array:
        hidden = np.dot(images, self.hidden.value) + self.hidden_bias.value
        return np.dot(np.maximum(hidden, 0), self.out.value) + self.out_bias.value

    def loss(self, images: Array, labels: Labels) -> ar.Weighted:
        """Cross entropy, as a sum and the number of images behind it: parts may differ in size."""
        scores = self.scores(images)
        highest = np.max(scores, axis=1, keepdims=True)
        log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
        return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))

    def hits(self, images: Array, labels: Labels) -> ar.Weighted:
        return ar.Weighted(int(np.sum(self.scores(images).argmax(axis=1) == labels)), len(labels))


def load_data() -> tuple[tuple[Array, Labels], tuple[Array, Labels]]:
    """Return (images, labels) to train with, and every fifth one to test with."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    tested = np.arange(len(labels)) % 5 == 0
    return (images[~tested], labels[~tested]), (images[tested], labels[tested])


async def train(
    *,
    replicas: int = 4,
    epochs: int = 30,
    batch_size: int = 64,
    seed: int = 0,
    trace: Path | None = None,
    report: Callable[[Status], None] = lambda status: None,
) -> Result:
    """Train on the given number of CPU devices and return what came of it."""
    train_data, test_data = load_data()
    batches = ar.ArrayDataset(train_data, batch_size, shuffle=True, seed=seed)
    tests = ar.ArrayDataset(test_data, batch_size=len(test_data[1]))
    losses: list[float] = []
    accuracy = 0.0

    def tell() -> None:
        report(Status(len(losses), epochs * len(batches), losses[-1], accuracy))

    strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    tracing = nullcontext() if trace is None else strategy.trace(trace)
    async with strategy, tracing:
        with strategy.scope():
            network = Network(np.random.default_rng(seed))
            optimizer = ar.optimizers.Adam(learning_rate=0.004)

        async def step(images: Array, labels: Labels) -> ar.Weighted:
            return await optimizer.minimize(lambda: network.loss(images, labels))

        async with (
            strategy.distribute_dataset(batches) as train_set,
            strategy.distribute_dataset(tests) as test_set,
        ):
            for _ in range(epochs):
                async for batch in train_set:
                    loss = await strategy.reduce("sum", await strategy.run(step, args=batch))
                    losses.append(float(loss.mean()))
                    tell()
                async for batch in test_set:  # a plain function runs whole on each device
                    hits = await strategy.reduce("sum", await strategy.run(network.hits, batch))
                    accuracy = hits.mean()
                tell()

        parameters = {v.name: v.value for v in strategy.trainable_variables}
    return Result(losses, accuracy, parameters)


def plot_losses(losses: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")  # without pyplot, so drawn by Agg
    axes = figure.subplots()
    axes.semilogy(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross entropy", title="Training loss of the digit classifier")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]:.1%}"),
        TimeElapsedColumn(),
        console=console,
    )


def run(options: argparse.Namespace, console: Console) -> Result:
    """Train with a live bar, or with a line now and then."""
    settings = {
        "replicas": options.replicas,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "trace": options.trace,
    }
    if options.no_progress:

        def show_line(status: Status) -> None:
            if status.step % 100 == 0:
                print(f"step {status.step}/{status.num_steps}: loss {status.loss:.4f}", flush=True)

        return asyncio.run(train(**settings, report=show_line))

    with progress_bar(console) as progress:
        bar = progress.add_task("training", total=None, loss=float("nan"), accuracy=0.0)

        def move_bar(now: Status) -> None:
            progress.update(
                bar, completed=now.step, total=now.num_steps, loss=now.loss, accuracy=now.accuracy
            )

        return asyncio.run(train(**settings, report=move_bar))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier on several replicas.")
    parser.add_argument("--replicas", type=positive, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("loss_curve.png"))
    parser.add_argument("--trace", type=Path, help="write a time line, .json or .pftrace")
    parser.add_argument("--no-progress", action="store_true", help="print lines, not a live bar")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    console = Console()
    ar.set_logical_devices("cpu", max(2, options.replicas))
    try:
        result = run(options, console)
    except KeyboardInterrupt:
        console.print("Interrupted: training stopped cleanly, nothing was saved.")
        return 130
    plot_losses(result.losses, options.output)
    console.print(f"loss curve: {options.output}", highlight=False)
    console.print(f"parameters: {result.fingerprint}", highlight=False)
    console.print(f"test accuracy: {result.test_accuracy:.1%}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
