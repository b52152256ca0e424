"""Training on a GPU: the digits with a network of torch, and compiled steps of jax."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar

from ._gpu_place import Place
from ._measure import take_turns
from ._row import Row, Target, compared_row

BATCH = 256
ONE_OP, PER_STEP = Target("ratio", 1.05), Target("ratio", 1.5)
SCAN, CALLS = Target("ratio", 1.1), Target("ratio", 1.0)
NEAR = 0.01
"""How far weights may be apart, in units of the largest: finds another model, not a rounding."""


class LeftOutError(Exception):
    """Says why a part cannot run here."""


async def measure_digits(place: Place) -> list[Row]:
    """Compare a network's training by plain torch with that by one replica, and by two.

    Raises:
        AssertionError: If not all have trained the same.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    num_steps = 5 if place.is_quick else 100
    batches = _digits(num_steps, place.device)
    halves = [[tuple(part.chunk(2)[i] for part in batch) for batch in batches] for i in range(2)]
    start = _network().to(place.device)
    async with place.strategy(1) as one, place.strategy(2) as two:
        ways: dict[str, Any] = {
            "plain": partial(_plain, batches),
            "one op": partial(_in_one_run, one, [batches]),
            "a run each": partial(_run_per_step, one, batches),
            "two": partial(_in_one_run, two, halves),
        }
        weights = {}
        for name, way in ways.items():
            models = [copy.deepcopy(start) for _ in range(2)]
            await way(models)
            place.wait()
            weights[name] = torch.nn.utils.parameters_to_vector(models[0].parameters()).detach()
        for name, found in weights.items():
            apart = float((found - weights["plain"]).abs().max() / found.abs().max())
            assert apart < NEAR, f"{name}: the weights differ by {apart:.1e} of the largest."

        async def sample(way: Any) -> float:
            models = [copy.deepcopy(start) for _ in range(2)]
            place.wait()
            begin = perf_counter()
            await way(models)
            place.wait()
            return (perf_counter() - begin) / num_steps * 1e6

        contenders = {name: partial(sample, way) for name, way in ways.items()}
        samples = await take_turns(contenders, num_rounds=place.num_rounds)
    return [
        compared_row(
            f"CNN of digits, {words}", "asyncio", count, "us/step", ours=samples[key],
            against="plain torch", floor=samples["plain"], target=target,
        )
        for key, words, count, target in (
            ("one op", "one run of all steps", 1, ONE_OP),
            ("a run each", "a run per step", 1, PER_STEP),
            ("two", "two replicas, one run", 2, None),
        )
    ]  # fmt: skip


def _network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _digits(num_steps: int, device: str) -> list[tuple[Any, Any]]:
    """Return batches on the device: scikit-learn's digits, or noise of their shape without it."""
    import torch

    rng = np.random.default_rng(0)
    if find_spec("sklearn") is not None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images / 16, digits.target
    else:
        images, labels = rng.random((1797, 8, 8)), rng.integers(0, 10, 1797)
    chosen = [rng.integers(0, len(labels), BATCH) for _ in range(num_steps)]
    return [
        (
            torch.tensor(images[i][:, None], dtype=torch.float32, device=device),
            torch.tensor(labels[i], dtype=torch.int64, device=device),
        )
        for i in chosen
    ]


def _train(model: Any, optimizer: Any, batches: Iterable[tuple[Any, Any]]) -> None:
    """Train as plain torch does; in several replicas, with the mean of their gradients."""
    from torch.nn.functional import cross_entropy

    ctx = ar.get_replica_context()
    shares = ctx is not None and ctx.num_replicas_in_sync > 1
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        if ctx is not None and shares:
            parameters = list(model.parameters())
            means = ctx.blocking.all_reduce("mean", [each.grad for each in parameters])
            for each, mean in zip(parameters, means, strict=True):
                each.grad = mean
        optimizer.step()


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05)


async def _plain(batches: Sequence[tuple[Any, Any]], models: Sequence[Any]) -> None:
    _train(models[0], _sgd(models[0]), batches)


async def _in_one_run(
    strategy: ar.Strategy, parts: Sequence[Sequence[tuple[Any, Any]]], models: Sequence[Any]
) -> None:
    def run() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        i = ctx.replica_id_in_sync_group
        _train(models[i], _sgd(models[i]), parts[i])

    await strategy.run(run)


async def _run_per_step(
    strategy: ar.Strategy, batches: Sequence[tuple[Any, Any]], models: Sequence[Any]
) -> None:
    sgd = _sgd(models[0])

    def step(number: int) -> None:
        _train(models[0], sgd, batches[number : number + 1])

    for number in range(len(batches)):
        await strategy.run(step, args=(number,))


async def measure_jax(place: Place) -> list[Row]:
    """Compare compiled steps with a scan by hand, and with a jitted call for each step.

    Raises:
        LeftOutError: If jax is not installed, or has no GPU.
    """
    if find_spec("jax") is None:
        raise LeftOutError("jax is not installed")
    import jax

    from ._compiled_programs import ByHand, Case, Ours

    kind = "gpu" if place.is_gpu else "cpu"
    try:
        jax.devices(kind)
    except RuntimeError as error:
        raise LeftOutError(f"jax has no GPU ({str(error).splitlines()[0]})") from error
    sizes, batch = ((8, 16, 4), 32) if place.is_quick else ((784, 512, 512, 10), 256)
    num_chunks = 1 if place.is_quick else 8
    case = Case("MLP", sizes, batch, 1, "SGD")
    async with ar.MirroredStrategy([f"{kind}:0"]) as strategy:
        ours = Ours(case, strategy)
        scan, calls = (ByHand(case, scans=scans, kind=kind) for scans in (True, False))
        await ours.sample(1)
        await scan.sample(1)
        for mine, other in zip(ours.weights, scan.weights, strict=True):
            apart = float(np.max(np.abs(mine - other)) / np.max(np.abs(other)))
            assert apart < NEAR, f"jax: the weights differ by {apart:.1e} of the largest."
        ways = {"ours": ours, "scan": scan, "calls": calls}
        samples = await take_turns(
            {name: partial(way.sample, num_chunks) for name, way in ways.items()},
            num_rounds=place.num_rounds,
        )
    return [
        compared_row(
            f"compiled steps of jax, {'-'.join(map(str, sizes))}", "asyncio", 1, "us/step",
            ours=samples["ours"], against=against, floor=samples[key], target=target,
        )
        for key, against, target in (
            ("scan", "lax.scan by hand", SCAN), ("calls", "jit, a call per step", CALLS)
        )
    ]  # fmt: skip
