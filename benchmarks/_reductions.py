"""Reductions: what an all_reduce costs beside a blocked NumPy sum, large, small and in pieces."""

from __future__ import annotations

import aioreplica as ar

from ._blocked_sum import replica_arrays, summing
from ._measure import take_turns, timed
from ._reducing import reducing
from ._row import Row, Target, compared_row

KIB, MIB = 1024, 1024 * 1024
FLOOR = "blocked np.add"
MAX_RATIO = Target("ratio", 1.3)
MAX_DIFFERENCE_US = Target("difference", 30.0)
MAX_RATIO_OF_LEAVES = Target("ratio", 2.0)
NUM_LEAVES, LEAF_BYTES = 200, 4 * KIB


async def measure_large(
    loop: str, strategy: ar.Strategy, *, num_mib: int, num_read: int, num_rounds: int
) -> list[Row]:
    """Compare an all_reduce of large arrays with the blocked sum.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas bring an array.
        num_mib: Size of the array of each, in MiB.
        num_read: MiB read in one sample, which sets the number of reductions; at least 2 are made.
        num_rounds: Rounds of the comparison.
    """
    num_replicas = strategy.num_replicas_in_sync
    num_times = max(2, num_read // (num_mib * num_replicas))
    return [
        await _beside_floor(
            loop, strategy, f"all_reduce {num_mib} MiB", num_mib * MIB, MAX_RATIO,
            num_times=num_times, num_rounds=num_rounds,
        )
    ]  # fmt: skip


async def measure_small(
    loop: str, strategy: ar.Strategy, *, num_times: int, num_rounds: int
) -> list[Row]:
    """Compare an all_reduce of 1 KiB and of 64 KiB with the sum, by their difference.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas bring an array.
        num_times: Reductions in one sample.
        num_rounds: Rounds of the comparison.
    """
    return [
        await _beside_floor(
            loop, strategy, f"all_reduce {num_kib} KiB", num_kib * KIB, MAX_DIFFERENCE_US,
            num_times=num_times, num_rounds=num_rounds,
        )
        for num_kib in (1, 64)
    ]  # fmt: skip


async def measure_leaves(
    loop: str, strategy: ar.Strategy, *, num_times: int, num_rounds: int
) -> list[Row]:
    """Compare an all_reduce of many small leaves with one of a single array of as many bytes.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas bring them.
        num_times: Reductions in one sample.
        num_rounds: Rounds of the comparison.
    """
    num_replicas = strategy.num_replicas_in_sync
    whole = replica_arrays(num_replicas, NUM_LEAVES * LEAF_BYTES)
    size = LEAF_BYTES // 4
    lists = [[a[i * size : (i + 1) * size].copy() for i in range(NUM_LEAVES)] for a in whole]
    dicts = [{f"layer{i:03}": leaf for i, leaf in enumerate(leaves)} for leaves in lists]
    contenders = {
        name: timed(reducing(strategy, values, num_times), num_units=num_times)
        for name, values in (("list", lists), ("dict", dicts), ("whole", whole))
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    return [
        compared_row(
            f"{kind} of {NUM_LEAVES} x 4 KiB", loop, num_replicas, "us", ours=samples[kind],
            against="one 800 KiB array", floor=samples["whole"], target=MAX_RATIO_OF_LEAVES,
        )
        for kind in ("list", "dict")
    ]  # fmt: skip


async def _beside_floor(
    loop: str,
    strategy: ar.Strategy,
    name: str,
    num_bytes: int,
    target: Target,
    *,
    num_times: int,
    num_rounds: int,
) -> Row:
    num_replicas = strategy.num_replicas_in_sync
    arrays = replica_arrays(num_replicas, num_bytes)
    contenders = {
        "ours": timed(reducing(strategy, arrays, num_times), num_units=num_times),
        "floor": timed(summing(arrays, num_times), num_units=num_times),
    }
    samples = await take_turns(contenders, num_rounds=num_rounds)
    return compared_row(name, loop, num_replicas, "us", against=FLOOR, target=target, **samples)
