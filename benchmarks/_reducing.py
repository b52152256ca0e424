"""Replicas that reduce over and over inside one run, so that starting them does not show."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aioreplica as ar


def reducing(
    strategy: ar.Strategy, values: Sequence[Any], num_times: int
) -> Callable[[], Awaitable[None]]:
    """Return what runs a step that many all_reduce in a row; no result is kept.

    Args:
        strategy: Runs the step.
        values: What each replica brings, made before.
        num_times: Reductions in one step.
    """

    async def step() -> None:
        ctx = replica_context()
        value = values[ctx.replica_id_in_sync_group]
        for _ in range(num_times):
            await ctx.all_reduce("sum", value)

    return lambda: strategy.run(step)


def replica_context() -> ar.ReplicaContext:
    """Return the context of the replica that runs this."""
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx
