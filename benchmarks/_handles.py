"""Handles: what starting a reduction costs, and what going on meanwhile saves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import sleep
from typing import Any

import numpy as np

import aioreplica as ar

from ._blocked_sum import replica_arrays
from ._measure import take_turns, timed
from ._reducing import reducing, replica_context
from ._row import Row, compared_row

NUM_OPS = 4
NUM_BYTES = 16 * 1024 * 1024
OP_S = 0.005  # about as long as one of the reductions takes

Action = Callable[[], Awaitable[None]]


async def measure_handles(
    loop: str, strategy: ar.Strategy, *, num_times: int, num_rounds: int
) -> list[Row]:
    """Compare a started reduction that is awaited at once with an all_reduce.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas reduce.
        num_times: Reductions in one sample.
        num_rounds: Rounds of the comparison.
    """
    size = strategy.num_replicas_in_sync
    arrays = replica_arrays(size, 1024)

    async def step() -> None:
        ctx = replica_context()
        array = arrays[ctx.replica_id_in_sync_group]
        for _ in range(num_times):
            await ctx.start_all_reduce("sum", array)

    contenders = {
        "ours": timed(lambda: strategy.run(step), num_units=num_times),
        "floor": timed(reducing(strategy, arrays, num_times), num_units=num_times),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    return [
        compared_row(
            "start + await 1 KiB", loop, size, "us", ours=samples["ours"],
            against="all_reduce", floor=samples["floor"],
        )
    ]  # fmt: skip


async def measure_overlap(loop: str, strategy: ar.Strategy, *, num_rounds: int) -> list[Row]:
    """Compare device ops during started reductions with ops and reductions in turn.

    One kind of op only waits, as for an accelerator; the other keeps the cores busy that the
    reductions need too.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas reduce.
        num_rounds: Rounds of the comparison.
    """
    size = strategy.num_replicas_in_sync
    arrays = replica_arrays(size, NUM_BYTES)
    numbers = np.linspace(0.0, 1.0, 500_000)
    ops: dict[str, Callable[[], Any]] = {
        "waiting": lambda: sleep(OP_S),
        "computing": lambda: np.tanh(numbers),
    }
    rows = []
    for kind, op in ops.items():
        contenders = {
            "ours": timed(_overlapped(strategy, arrays, op), num_units=NUM_OPS),
            "floor": timed(_in_turn(strategy, arrays, op), num_units=NUM_OPS),
        }
        samples = await take_turns(contenders, num_rounds=num_rounds)
        row = compared_row(
            f"overlap, {kind} ops", loop, size, "us/op", ours=samples["ours"],
            against="one by one", floor=samples["floor"],
        )  # fmt: skip
        rows.append(row)
    return rows


def _overlapped(strategy: ar.Strategy, arrays: list[Any], op: Callable[[], Any]) -> Action:
    async def step() -> None:
        ctx = replica_context()
        array = arrays[ctx.replica_id_in_sync_group]
        handles = []
        for _ in range(NUM_OPS):
            await ctx.run_on_device(op)
            handles.append(ctx.start_all_reduce("sum", array))
        for handle in handles:
            await handle

    return lambda: strategy.run(step)


def _in_turn(strategy: ar.Strategy, arrays: list[Any], op: Callable[[], Any]) -> Action:
    async def step() -> None:
        ctx = replica_context()
        array = arrays[ctx.replica_id_in_sync_group]
        for _ in range(NUM_OPS):
            await ctx.run_on_device(op)
            await ctx.all_reduce("sum", array)

    return lambda: strategy.run(step)
