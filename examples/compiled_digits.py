"""Train a digit classifier with one step function, eagerly or compiled by jax.

    python examples/compiled_digits.py             # the step runs as it is
    python examples/compiled_digits.py --compile   # an epoch of steps is one program

The accuracy is the same; only the rounding of fused operations differs.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
from rich.console import Console
from sklearn.datasets import load_digits

import aioreplica as ar


@dataclass(frozen=True)
class Result:
    """What training leaves behind: a loss per epoch, the accuracy, and how long it took."""

    losses: list[float]
    accuracy: float
    seconds: float


class Network:  # 64 inputs, 128 hidden units, 10 classes
    def __init__(self, rng: np.random.Generator) -> None:
        self.hidden = ar.Variable(rng.normal(0, 1 / 8, (64, 128)).astype(np.float32))
        self.hidden_bias = ar.Variable(np.zeros(128, np.float32))
        self.out = ar.Variable(rng.normal(0, 1 / 11, (128, 10)).astype(np.float32))
        self.out_bias = ar.Variable(np.zeros(10, np.float32))

    def scores(self, images: Any, xp: Any = np) -> Any:
        hidden = xp.maximum(images @ self.hidden.value + self.hidden_bias.value, 0)
        return hidden @ self.out.value + self.out_bias.value


async def train(
    *,
    replicas: int = 4,
    epochs: int = 30,
    compiler: Literal["jax"] | None = None,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Result:
    """Train on the given number of CPU devices; `report` is told each epoch's number and loss."""
    import jax
    import jax.numpy as jnp

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    tested = np.arange(len(labels)) % 5 == 0
    data = ar.ArrayDataset(
        (images[~tested], labels[~tested]), 64, shuffle=True, seed=0, drop_remainder=True
    )
    losses: list[float] = []
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            network = Network(np.random.default_rng(0))
            optimizer = ar.optimizers.Adam(learning_rate=0.004)

        def step(ctx: ar.MultiStepContext, images: Any, labels: Any) -> None:
            def loss() -> ar.Weighted:
                chances = jax.nn.log_softmax(network.scores(images, jnp))
                chosen = jnp.take_along_axis(chances, labels[:, None], axis=1)
                return ar.Weighted(-jnp.sum(chosen), len(labels))

            value = optimizer.blocking.minimize(loss, backend="jax")
            ctx.set_last_step_output("loss", value, "sum")

        begin = perf_counter()
        async with strategy.distribute_dataset(data) as batches:
            for epoch in range(epochs):
                steps = aiter(batches)
                last = await strategy.run_steps(step, steps, len(data), compile=compiler)
                losses.append(float(last.last_step_outputs["loss"].mean()))
                report(epoch, losses[-1])
        seconds = perf_counter() - begin
        guesses = network.scores(images[tested]).argmax(axis=1)
        return Result(losses, float(np.mean(guesses == labels[tested])), seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a digit classifier, compiled or not.")
    parser.add_argument("--replicas", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--compile", action="store_const", const="jax", help="by jax")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    ar.set_logical_devices("cpu", max(2, options.replicas))  # before jax is imported

    def show(epoch: int, loss: float) -> None:
        console.print(f"epoch {epoch + 1}: loss {loss:.4f}")

    training = train(
        replicas=options.replicas, epochs=options.epochs, compiler=options.compile, report=show
    )
    try:
        result = asyncio.run(training)
    except ModuleNotFoundError as missing:
        console.print(
            f"{missing}. Run: pip install 'aioreplica[examples,jax]'", markup=False, soft_wrap=True
        )
        return 1
    console.print(f"test accuracy: {result.accuracy:.1%}, after {result.seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
