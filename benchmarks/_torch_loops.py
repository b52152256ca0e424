"""A transformer of torch, trained by `prepare` and by `torch_module` beside plain torch."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import aioreplica as ar

from ._measure import take_turns
from ._row import Row, Target, compared_row

PREPARED, MODULE = Target("ratio", 1.05), Target("ratio", 1.2)
BATCH, LENGTH, WIDTH, NUM_TOKENS = 16, 16, 64, 100


async def measure_torch_loops(loop: str, *, num_steps: int, num_rounds: int) -> list[Row]:
    """Steps of one replica, with Adam; none if torch is not installed.

    Args:
        loop: Name of the event loop.
        num_steps: Steps that make one sample.
        num_rounds: Rounds of the comparison.
    """
    if find_spec("torch") is None:
        return []
    batches = _batches(num_steps)
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        prepared = ar.prepare(*_made(), batches, strategy=strategy)
        with strategy.scope():
            model = ar.autodiff.torch_module(_made()[0])
            adam = ar.optimizers.Adam(1e-3)
        samples = await take_turns(
            {
                "prepare": partial(_prepared, strategy, prepared, num_steps),
                "module": partial(_module, strategy, model, adam, batches),
                "plain": partial(_plain, *_made(), batches),
            },
            num_rounds=num_rounds,
        )
    return [
        compared_row(
            f"transformer, {name}", loop, 1, "us/step", ours=samples[key], against="plain torch",
            floor=samples["plain"], target=target,
        )
        for key, name, target in (
            ("prepare", "prepare", PREPARED), ("module", "torch_module", MODULE)
        )
    ]  # fmt: skip


def _batches(num_steps: int) -> list[Any]:
    import torch

    drawn = torch.Generator().manual_seed(0)
    shape = (BATCH, LENGTH + 1)
    return [torch.randint(0, NUM_TOKENS, shape, generator=drawn) for _ in range(num_steps)]


def _made() -> tuple[Any, Any]:
    """Return a network that predicts the next token, and its optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    module = nn.Sequential(
        nn.Embedding(NUM_TOKENS, WIDTH),
        nn.TransformerEncoder(layer, 2),
        nn.Linear(WIDTH, NUM_TOKENS),
    )
    return module, torch.optim.Adam(module.parameters(), lr=1e-3)


def _loss(module: Any, tokens: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(module(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def _train(module: Any, optimizer: Any, batches: Any) -> None:
    for tokens in batches:
        _loss(module, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


async def _plain(module: Any, optimizer: Any, batches: list[Any]) -> float:
    start = perf_counter()
    _train(module, optimizer, batches)
    return (perf_counter() - start) / len(batches) * 1e6


async def _prepared(strategy: ar.Strategy, prepared: Any, num_steps: int) -> float:
    start = perf_counter()
    await strategy.run(_train, args=prepared)
    return (perf_counter() - start) / num_steps * 1e6


async def _module(strategy: ar.Strategy, model: Any, adam: Any, batches: list[Any]) -> float:
    async def step(tokens: Any) -> None:
        await adam.minimize(lambda: _loss(model, tokens), model.variables)

    start = perf_counter()
    for tokens in batches:
        await strategy.run(step, args=(tokens,))
    return (perf_counter() - start) / len(batches) * 1e6
