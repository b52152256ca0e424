"""A service whose model counts how often each example was learned: must be once."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

import aioreplica as ar
from aioreplica.integrations.asgi import Limits, OnlineService
from aioreplica.online import Journal, OnlineLearner

SIZE = 50_000
POISON = SIZE - 1  # an example that cannot be learned


def build(strategy: ar.Strategy, folder: Path) -> OnlineService:
    """Return the service; its journal and checkpoints are in the folder."""
    with strategy.scope():
        counts = ar.Variable(np.zeros(SIZE, np.int32), name="counts", aggregation="sum")

    async def step(ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
        if (batch["input"] == POISON).any():
            raise ValueError(f"{POISON} cannot be learned.")
        found = await ctx.run_on_device(count, batch["input"])
        await counts.assign_add(found)
        return {"size": float(len(batch["input"]))}

    learner = OnlineLearner(
        strategy,
        step,
        {"counts": counts},
        max_batch=16,
        max_delay_s=0.002,
        queue_size=256,
        journal=Journal(folder / "journal.sqlite"),
        checkpoints=ar.CheckpointManager(folder / "checkpoints"),
        checkpoint_every_s=0.2,
        max_failures_in_a_row=None,  # at the end of a long load nothing but poison is sent
    )

    def predict(snapshot: Any, inputs: Any) -> Any:
        values = snapshot[counts]
        return {"count": values[inputs], "total": np.full(len(inputs), values.sum())}

    return OnlineService(
        learner,
        predict,
        input_like=np.int64(0),
        target_like=np.int64(0),
        limits=Limits(body_s=2.0),
        event_interval_s=0.05,
    )


def count(numbers: Any) -> Any:
    return np.bincount(numbers, minlength=SIZE).astype(np.int32)


async def serve(folder: Path, port: int) -> None:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        service = build(strategy, folder)
        config = uvicorn.Config(
            service, log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=3
        )
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listening:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            print(listening.getsockname()[1], flush=True)
            await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    ar.set_logical_devices("cpu", 2)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
