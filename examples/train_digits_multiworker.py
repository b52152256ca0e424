"""Train the digit classifier on several workers, each with several replicas.

One program, started once per worker. Alone it is one worker:

    python examples/train_digits_multiworker.py

Two workers of two replicas on one machine, with Open MPI (pip install "aioreplica[mpi]"):

    mpirun --map-by :OVERSUBSCRIBE -n 2 python -m mpi4py examples/train_digits_multiworker.py

or with torch.distributed over Gloo:

    torchrun --nproc-per-node 2 examples/train_digits_multiworker.py

On several hosts (the code and --checkpoints at the same path on each; the folder is shared):

    mpirun -n 2 --host first:1,second:1 python -m mpi4py examples/train_digits_multiworker.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint first:29400 \
        examples/train_digits_multiworker.py     # the same line on each host

Every epoch ends with a checkpoint; the same command goes on from it, with any number of workers.
Each takes its parts of the same batches, so their number changes roundings only; worker 0 reports.
"""

import argparse
import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autograd.numpy as np
from sklearn.datasets import load_digits

import aioreplica as ar


@dataclass(frozen=True)
class Result:  # the same on every worker
    first_epoch: int
    test_accuracy: float
    steps_per_second: float
    fingerprint: str  # a hash of the parameters: equal exactly if they are equal in every bit


class Network:  # 64 inputs, 128 hidden units, 10 classes
    def __init__(self, rng: np.random.Generator) -> None:
        self.hidden = ar.Variable(rng.normal(0, 1 / 8, (64, 128)), name="hidden")
        self.hidden_bias = ar.Variable(np.zeros(128), name="hidden_bias")
        self.out = ar.Variable(rng.normal(0, 1 / 11, (128, 10)), name="out")
        self.out_bias = ar.Variable(np.zeros(10), name="out_bias")

    def scores(self, images: Any) -> Any:
        hidden = np.dot(images, self.hidden.value) + self.hidden_bias.value
        return np.dot(np.maximum(hidden, 0), self.out.value) + self.out_bias.value

    def loss(self, images: Any, labels: Any) -> ar.Weighted:
        scores = self.scores(images)
        highest = np.max(scores, axis=1, keepdims=True)
        log_sum = np.log(np.sum(np.exp(scores - highest), axis=1)) + highest[:, 0]
        return ar.Weighted(np.sum(log_sum - scores[np.arange(len(labels)), labels]), len(labels))


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:  # to train and to test with
    images, labels = load_digits(return_X_y=True)
    images, tested = images / 16, np.arange(len(labels)) % 5 == 0
    return (images[~tested], labels[~tested]), (images[tested], labels[tested])


async def train(
    strategy: ar.Strategy, *, epochs: int = 10, batch_size: int = 64, seed: int = 0,
    checkpoints: Path | None = None, report: Callable[[str], None] = lambda line: None,
) -> Result:  # fmt: skip
    """Train under a strategy of any number of workers; only the first one calls `report`."""
    train_data, test_data = load_data()
    tell = report if strategy.extended.should_save_summary else lambda line: None
    async with strategy:
        with strategy.scope():
            network = Network(np.random.default_rng(seed))
            optimizer = ar.optimizers.Adam(learning_rate=0.004)
            loss, accuracy = ar.metrics.Mean("loss"), ar.metrics.Mean("accuracy")

        async def step(images: Any, labels: Any) -> None:
            loss.update_state(await optimizer.minimize(lambda: network.loss(images, labels)))

        def test(images: Any, labels: Any) -> None:  # runs whole on each device
            accuracy.update_state(network.scores(images).argmax(axis=1) == labels)

        async def tested() -> float:
            accuracy.reset_state()
            async for batch in test_set:
                await strategy.run(test, args=batch)
            return float(await accuracy.read())

        batches = ar.ArrayDataset(train_data, batch_size, shuffle=True, seed=seed)
        tests = ar.ArrayDataset(test_data, batch_size=len(test_data[1]))
        train_set = strategy.distribute_dataset(batches, ar.InputOptions(sharding="data"))
        test_set = strategy.distribute_dataset(tests, ar.InputOptions(sharding="data"))
        async with train_set, test_set:
            state = {"network": vars(network), "optimizer": optimizer, "batches": train_set}
            manager = None if checkpoints is None else ar.CheckpointManager(checkpoints)
            if manager is not None and manager.latest() is not None:
                tell(f"goes on from checkpoint {await manager.restore(state)}")
            first_epoch, num_steps, share, began = train_set.epoch, 0, 0.0, time.perf_counter()
            for epoch in range(first_epoch, epochs):
                loss.reset_state()
                async for batch in train_set:
                    await strategy.run(step, args=batch)
                    num_steps += 1
                mean, share = await loss.read(), await tested()
                if manager is not None:
                    await manager.save(epoch + 1, state)
                tell(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {share:.1%}")
            rate = num_steps / (time.perf_counter() - began)
            share = share if num_steps else await tested()  # all was done before, and restored
            if manager is not None:
                await manager.aclose()
        await strategy.check_in_sync(strategy.trainable_variables)
        parts = [each.name.encode() + each.value.tobytes() for each in strategy.trainable_variables]
        return Result(first_epoch, share, rate, hashlib.sha256(b"".join(parts)).hexdigest()[:16])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a digit classifier on several workers.")
    add = parser.add_argument
    add("--replicas", type=int, default=2, help="of each worker")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=64, help="images per step, of all")
    add("--seed", type=int, default=0)
    add("--checkpoints", type=Path, help="a folder that all workers share")
    add("--timeout", type=float, default=60.0, help="for a worker to come, seconds")
    options = parser.parse_args(arguments)
    ar.set_logical_devices("cpu", options.replicas)
    waits = ar.CommunicationOptions(timeout_seconds=options.timeout)
    strategy = ar.MultiWorkerMirroredStrategy(options=waits)
    result = asyncio.run(train(
        strategy, epochs=options.epochs, batch_size=options.batch_size, seed=options.seed,
        checkpoints=options.checkpoints, report=lambda line: print(line, flush=True),
    ))  # fmt: skip
    if strategy.extended.should_save_summary:
        print(f"replicas: {strategy.num_replicas_in_sync}, {result.steps_per_second:.1f} steps/s")
        print(f"parameters: {result.fingerprint}\ntest accuracy: {result.test_accuracy:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
