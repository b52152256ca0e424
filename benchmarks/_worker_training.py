"""Training the digits on two workers: `python -m benchmarks._worker_training WHO ROUNDS PATH`.

WHO is "workers" (two processes of one replica each, MPI or torch.distributed), "replicas" (one
process of two replicas), "prepared-workers" and "prepared-replicas" (a loop of torch that
`ar.prepare` has made ready,
in these) or "ddp" (torch's DistributedDataParallel over Gloo, two processes). All train the same
network on the same batches; the first process writes the steps per second as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar

NUM_STEPS = 60
BATCH, NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 64, 64, 128, 10
RATE = 0.05
TIMEOUT_S = 120.0


def digits() -> tuple[Any, Any]:
    """Return the images and labels of one step after the other, as many as one round needs."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.resize(np.random.default_rng(0).permutation(len(labels)), NUM_STEPS * BATCH)
    return (images[order] / 16).astype(np.float32), labels[order]


def first_weights() -> dict[str, Any]:
    """Return what all begin with."""
    rng = np.random.default_rng(1)
    return {
        "hidden": rng.normal(0, 1 / 8, (NUM_INPUTS, NUM_HIDDEN)).astype(np.float32),
        "hidden_bias": np.zeros(NUM_HIDDEN, np.float32),
        "out": rng.normal(0, 1 / 11, (NUM_HIDDEN, NUM_CLASSES)).astype(np.float32),
        "out_bias": np.zeros(NUM_CLASSES, np.float32),
    }


def gradients(weights: list[Any], images: Any, labels: Any) -> list[Any]:
    """Return the gradients of the mean cross-entropy of a part of a batch, by hand."""
    hidden, hidden_bias, out, out_bias = weights
    active = np.maximum(images @ hidden + hidden_bias, 0)
    scores = active @ out + out_bias
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    shares /= len(labels)
    back = (shares @ out.T) * (active > 0)
    return [images.T @ back, back.sum(axis=0), active.T @ shares, shares.sum(axis=0)]


async def train(strategy: ar.Strategy, num_rounds: int) -> dict[str, Any]:
    """Return the steps per second of each round under a strategy, and a sum of the weights."""
    images, labels = digits()
    async with strategy:
        with strategy.scope():
            weights = [ar.Variable(value, name=name) for name, value in first_weights().items()]
            sgd = ar.optimizers.SGD(RATE)

        async def step(image_part: Any, label_part: Any) -> None:
            ctx = ar.get_replica_context()
            values = [weight.value for weight in weights]
            found = await ctx.run_on_device(gradients, values, image_part, label_part)
            await sgd.apply_gradients(list(zip(found, weights, strict=True)), aggregate=True)

        count = strategy.num_replicas_in_sync
        data = ar.ArrayDataset((images, labels), BATCH)
        batches = strategy.distribute_dataset(data, ar.InputOptions(sharding="data"))
        rates = []
        async with batches:
            for _ in range(num_rounds + 1):
                start = perf_counter()
                async for batch in batches:
                    await strategy.run(step, args=batch)
                rates.append(NUM_STEPS / (perf_counter() - start))
        total = sum(float(np.abs(weight.value).sum()) for weight in weights)
    return {"rates": rates[1:], "weights": total, "replicas": count}


def train_ddp(num_rounds: int) -> dict[str, Any]:
    """Return the same of torch's DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, sgd = network(size)
    copies = DistributedDataParallel(model)
    loss = torch.nn.CrossEntropyLoss()
    images, labels = digits()
    share = BATCH // size
    rates = []
    for _ in range(num_rounds + 1):
        start = perf_counter()
        for step in range(NUM_STEPS):
            first = step * BATCH + rank * share
            part = slice(first, first + share)
            sgd.zero_grad()
            loss(copies(torch.from_numpy(images[part])), torch.from_numpy(labels[part])).backward()
            sgd.step()
        rates.append(NUM_STEPS / (perf_counter() - start))
    dist.destroy_process_group()
    return {"rates": rates[1:], "weights": sum_of(model), "replicas": size}


async def train_prepared(strategy: ar.Strategy, num_rounds: int) -> dict[str, Any]:
    """Return the same of a loop of torch that `ar.prepare` has made ready."""
    import torch

    images, labels = (torch.from_numpy(column).split(BATCH) for column in digits())
    async with strategy:
        count = strategy.num_replicas_in_sync
        model, sgd = network(count)
        batches = list(zip(images, labels, strict=True))
        prepared = ar.prepare(model, sgd, batches, strategy=strategy)
        rates = []
        for _ in range(num_rounds + 1):
            start = perf_counter()
            await strategy.run(train_an_epoch, args=prepared)
            rates.append(NUM_STEPS / (perf_counter() - start))
    return {"rates": rates[1:], "weights": sum_of(model), "replicas": count}


def train_an_epoch(model: Any, optimizer: Any, batches: Any) -> None:
    """Train as torch's users do."""
    import torch

    loss = torch.nn.CrossEntropyLoss()
    for images, labels in batches:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()


def network(num_replicas: int) -> tuple[Any, Any]:
    """Return the network of torch and its optimizer."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(NUM_INPUTS, NUM_HIDDEN), torch.nn.ReLU(),
        torch.nn.Linear(NUM_HIDDEN, NUM_CLASSES),
    )  # fmt: skip
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first_weights().values(), strict=True):
            parameter.copy_(torch.from_numpy(value.T.copy()))
    # `train` sums the gradients of the replicas' means, DDP and `prepare` average them
    return model, torch.optim.SGD(model.parameters(), lr=RATE * num_replicas)


def sum_of(model: Any) -> float:
    """Return a number that tells networks apart."""
    return sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())


def ours(
    num_devices: int, make: Callable[[], ar.Strategy], num_rounds: int, *, is_prepared: bool
) -> dict[str, Any]:
    """Train with a strategy of so many devices in this process."""
    ar.set_logical_devices("cpu", num_devices)
    return asyncio.run((train_prepared if is_prepared else train)(make(), num_rounds))


def main(who: str, num_rounds: int, path: str) -> None:
    """Train in one of the five ways; worker 0 writes what came of it."""
    prepared, _, who_else = who.rpartition("-")
    if who_else == "replicas":
        told = ours(2, ar.MirroredStrategy, num_rounds, is_prepared=bool(prepared))
    elif who_else == "workers":
        options = ar.CommunicationOptions(timeout_seconds=TIMEOUT_S)
        told = ours(
            1,
            lambda: ar.MultiWorkerMirroredStrategy(options=options),
            num_rounds,
            is_prepared=bool(prepared),
        )
    else:
        told = train_ddp(num_rounds)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK") or "0"
    if rank == "0":
        Path(path).write_text(json.dumps(told))
    if who == "ddp":
        os._exit(0)  # torch 2.13 at times aborts as it ends: "terminate called without an ..."


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
