"""A deep network of torch on two workers: `python -m benchmarks._worker_deep ROUNDS PATH`.

In one process per worker, in turns: torch's DistributedDataParallel over Gloo, the same loop made
ready by `ar.prepare`, and the network as a `torch_module` with an optimizer of this library. All
see the same batches from the same weights, so their losses have to be the same. Worker 0 writes
milliseconds per step and losses as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import aioreplica as ar
from aioreplica.cluster import Communicator, connect

NUM_LAYERS, WIDTH, BATCH, NUM_STEPS = 20, 512, 128, 10
RATE, TIMEOUT_S = 0.05, 120.0

Round = Callable[[], Awaitable[list[float]]]
"""Takes `NUM_STEPS` steps; gives the loss of each, of this worker's part."""


def network() -> torch.nn.Sequential:
    """Return the network that all begin with."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(NUM_LAYERS - 1):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def batches() -> list[list[torch.Tensor]]:
    """Return the batches of all workers, inputs and targets."""
    rng = torch.Generator().manual_seed(1)
    shapes = [(BATCH, WIDTH), (BATCH, 1)]
    return [[torch.randn(shape, generator=rng) for shape in shapes] for _ in range(NUM_STEPS)]


def train(model: Any, optimizer: Any, parts: Any) -> list[float]:
    """Train as torch's users do, once over the batches."""
    losses = []
    for inputs, targets in parts:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_ddp(c: Communicator) -> Round:
    """Return the rounds of DDP."""
    model = network()
    copies = DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    parts = [[each.chunk(c.size)[c.rank] for each in batch] for batch in batches()]

    async def take() -> list[float]:
        return train(copies, sgd, parts)  # blocks the loop: nothing else is to run meanwhile

    return take


def of_prepare(strategy: ar.Strategy) -> Round:
    """Return the rounds of the same loop, made ready by `ar.prepare`."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    prepared = ar.prepare(model, sgd, batches(), strategy=strategy)

    async def take() -> list[float]:
        [losses] = strategy.local_results(await strategy.run(train, args=prepared))
        return losses  # type: ignore[no-any-return]  # of train

    return take


def of_module(c: Communicator, strategy: ar.Strategy) -> Round:
    """Return the rounds of a step function with a `torch_module`."""
    with strategy.scope():
        model = ar.autodiff.torch_module(network())
        sgd = ar.optimizers.SGD(RATE / c.size)
    parts = [[each.chunk(c.size)[c.rank] for each in batch] for batch in batches()]

    async def step(inputs: Any, targets: Any) -> Any:
        def loss() -> Any:
            return torch.nn.functional.mse_loss(model(inputs), targets)

        return await sgd.minimize(loss, model.variables)

    async def take() -> list[float]:
        losses = []
        for part in parts:
            [loss] = strategy.local_results(await strategy.run(step, args=part))
            losses.append(float(loss))
        return losses

    return take


async def measure(num_rounds: int) -> dict[str, Any]:
    """Take all in turns; return milliseconds per step, and the losses of the first worker."""
    torch.set_num_threads(1)
    ar.set_logical_devices("cpu", 1)
    c = await connect(engine="torch", timeout=TIMEOUT_S)  # DDP uses its group, too
    async with ar.MultiWorkerMirroredStrategy(c) as strategy:
        contenders = {
            "ddp": of_ddp(c), "prepare": of_prepare(strategy), "module": of_module(c, strategy),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(num_rounds + 1):
            for name, take in contenders.items():
                dist.barrier()
                start = perf_counter()
                losses[name] += await take()
                if turn:
                    times[name].append((perf_counter() - start) * 1000 / NUM_STEPS)
        rank = c.rank
    return {"rank": rank, "times": times, "losses": losses}


if __name__ == "__main__":
    told = asyncio.run(measure(int(sys.argv[1])))
    if told["rank"] == 0:
        Path(sys.argv[2]).write_text(json.dumps(told))
    os._exit(0)  # as in `_worker_training`
