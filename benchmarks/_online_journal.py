"""What durability costs: examples learned per second with a journal and without."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import aioreplica as ar

from ._measure import take_turns
from ._row import Row, compared_row

NUM_FEATURES = 30
NUM_HIDDEN = 64
MAX_BATCH = 64


async def measure_journal(*, is_quick: bool) -> list[Row]:
    """Compare learners with a journal to those without, for one client and for many.

    Every client submits an example, waits until it is acknowledged, and submits the next one. The
    sample ends when all are learned.
    """
    num_rounds, per_client = (2, 8) if is_quick else (9, 40)
    rows = []
    for num_clients in (1, 16, 256):
        async with AsyncExitStack() as ends:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            with_journal = await _learner(ends, folder / "journal.db")
            without = await _learner(ends, None)
            samples = await take_turns(
                {
                    "ours": lambda: _sample(with_journal, num_clients, per_client),  # noqa: B023
                    "floor": lambda: _sample(without, num_clients, per_client),  # noqa: B023
                },
                num_rounds=num_rounds,
            )
            row = compared_row(
                f"learn, {num_clients} clients, journal", "asyncio", 2, "us per example",
                ours=samples["ours"], against="no journal", floor=samples["floor"],
            )  # fmt: skip
            rows.append(row)
            statistics = with_journal.statistics()
            print(
                f"{num_clients} clients: {1e6 / row.ours:.0f} examples/s with a journal, "
                f"{1e6 / row.floor:.0f} without; "
                f"{statistics.num_taken / statistics.num_commits:.1f} examples per commit, "
                f"{1e3 * statistics.commit_s / statistics.num_commits:.2f} ms each"
            )
    return rows


async def _learner(ends: AsyncExitStack, journal: Path | None) -> ar.online.OnlineLearner:
    strategy = await ends.enter_async_context(ar.MirroredStrategy(["cpu:0", "cpu:1"]))
    rng = np.random.default_rng(0)
    with strategy.scope():
        hidden = ar.Variable(rng.normal(0, 0.1, (NUM_FEATURES, NUM_HIDDEN)))
        out = ar.Variable(rng.normal(0, 0.1, NUM_HIDDEN))
        adam = ar.optimizers.Adam(1e-3)

    def gradients(x: Any, y: Any) -> tuple[Any, Any, float]:
        h = np.maximum(x @ hidden.value, 0.0)
        error = h @ out.value - y
        back = np.outer(error, out.value) * (h > 0)
        return x.T @ back, h.T @ error, float(error @ error)

    async def step(ctx: ar.ReplicaContext, batch: Any) -> float:
        into, onto, loss = await ctx.run_on_device(gradients, batch["x"], batch["y"])
        await adam.apply_gradients([(into, hidden), (onto, out)])
        return loss / max(1, len(batch["y"]))

    return await ends.enter_async_context(
        ar.online.OnlineLearner(
            strategy, step, {"model": [hidden, out], "adam": adam},
            max_batch=MAX_BATCH, max_delay_s=0.002, queue_size=4096, journal=journal,
        )
    )  # fmt: skip


async def _sample(learner: ar.online.OnlineLearner, num_clients: int, per_client: int) -> float:
    """Return the microseconds per example."""
    example = {"x": np.linspace(-1.0, 1.0, NUM_FEATURES), "y": 0.5}

    async def client() -> None:
        for _ in range(per_client - 1):
            await learner.submit(example)
        await (await learner.submit(example))

    start = perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return (perf_counter() - start) / (num_clients * per_client) * 1e6
