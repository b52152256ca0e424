"""Arrival orders: does the order of arrival, the pack size or the thread that adds change a bit?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import reduce
from multiprocessing import get_context
from operator import add
from typing import Any, final
from unittest import mock

import numpy as np

import aioreplica as ar
from aioreplica.devices import set_lane_options

from ._inline import REDUCER
from ._loops import find_loop_factory
from ._reducing import replica_context
from ._row import Row, Target, compared_row

NUM_REPLICAS = 8
PACK_SIZES = (8 * 1024, 0, 4 * 1024 * 1024)  # 0 is the usual one
SMALL_SIZES = tuple(range(1, 4_000, 101))
LARGE_SIZE = 300_001  # 8 replicas bring enough for 4 threads, cut unevenly
THRESHOLD = 2 * 1024 * 1024  # of the bytes for a thread, moved so that such arrays need several
NONE = Target("ours", 0.0)


@final
@dataclass(frozen=True, slots=True)
class OrderCount:
    """What came of the check.

    Attributes:
        num_results: How many results were compared, one per replica and reduction.
        num_different: How many of them were not, bit for bit, the plain sum in replica order.
    """

    num_results: int
    num_different: int


def check_orders(
    loop: str, *, num_orders: int, stream_counts: Sequence[int]
) -> tuple[list[Row], OrderCount]:
    """Count results that differ, in a process of its own for each number of threads.

    The number of threads is set at program start, hence the processes.

    Args:
        loop: Name of the event loop to run on.
        num_orders: How many random orders of arrival to try, for each number and pack size.
        stream_counts: Numbers of threads that reduce.
    """
    counts = []
    for num_streams in stream_counts:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            counts.append(process.submit(_check, loop, num_streams, num_orders).result())
    count = OrderCount(
        sum(part.num_results for part in counts), sum(part.num_different for part in counts)
    )
    row = compared_row(
        "different bits", loop, NUM_REPLICAS, "results", ours=[count.num_different],
        against="results compared", floor=[count.num_results], target=NONE,
    )  # fmt: skip
    return [row], count


async def count_different(
    strategy: ar.Strategy, trees: Sequence[Any], expected: Sequence[Any], *, num_orders: int
) -> OrderCount:
    """Reduce in random orders of arrival with every pack size; compare with what is expected.

    Args:
        strategy: Runs the step.
        trees: A list of arrays for each replica.
        expected: The sums of the leaves.
        num_orders: How many orders to try with each pack size.
    """
    size = strategy.num_replicas_in_sync
    rng = np.random.default_rng(1)
    places = [rng.permutation(size).tolist() for _ in range(num_orders)]
    bits = [array.tobytes() for array in expected]
    are_equal: list[bool] = []

    for bytes_per_pack in PACK_SIZES:
        options = ar.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        num_arrived = 0

        async def step(options: ar.CommunicationOptions) -> None:
            nonlocal num_arrived
            ctx = replica_context()
            replica_id = ctx.replica_id_in_sync_group
            for round_id, place in enumerate(places):
                while num_arrived < round_id * size + place[replica_id]:  # noqa: ASYNC110 - its turn is some cycles away
                    await asyncio.sleep(0)
                num_arrived += 1
                result = await ctx.all_reduce("sum", trees[replica_id], options)
                are_equal.append([array.tobytes() for array in result] == bits)

        await strategy.run(step, (options,))
    return OrderCount(len(are_equal), are_equal.count(False))


def make_trees(num_replicas: int) -> list[list[Any]]:
    """Make small leaves and a large one for each replica.

    Their numbers differ by twelve orders of magnitude, so a sum in another order has other bits.
    """
    rng = np.random.default_rng(0)

    def leaf(size: int) -> Any:
        return (rng.standard_normal(size) * 10 ** rng.uniform(-6, 6, size)).astype(np.float32)

    return [[leaf(size) for size in (*SMALL_SIZES, LARGE_SIZE)] for _ in range(num_replicas)]


def plain_sums(trees: Sequence[Sequence[Any]]) -> list[Any]:
    """Add leaf by leaf, in the order of the trees, with nothing but `+`."""
    return [reduce(add, leaves) for leaves in zip(*trees, strict=True)]


def _check(loop: str, num_streams: int, num_orders: int) -> OrderCount:
    """Check with one number of threads; called in a new process."""
    set_lane_options(num_collective_streams=num_streams)
    ar.set_logical_devices("cpu", NUM_REPLICAS)
    trees = make_trees(NUM_REPLICAS)

    async def check() -> OrderCount:
        async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
            return await count_different(strategy, trees, plain_sums(trees), num_orders=num_orders)

    moved = mock.patch.multiple(REDUCER, INLINE_SUM_BYTES=THRESHOLD, SUM_THREAD_BYTES=THRESHOLD)
    with moved, asyncio.Runner(loop_factory=find_loop_factory(loop)) as runner:
        return runner.run(check())
