"""The inline threshold: from which size on a reduction is faster in other threads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, final
from unittest import mock

import aioreplica as ar
from aioreplica.devices import num_collective_streams

from ._blocked_sum import replica_arrays
from ._measure import take_turns, timed
from ._reducing import reducing
from ._row import Row, compared_row

REDUCER = "aioreplica.collectives._reducer"
KIB, MIB = 1024, 1024 * 1024


@final
@dataclass(frozen=True, slots=True)
class Crossing:
    """Where reductions in threads begin to be faster than those on the event loop.

    Attributes:
        against: Which threads.
        num_bytes: Bytes read by one reduction; 0 if the threads always were faster, infinite if
            never.
    """

    against: str
    num_bytes: float

    def __str__(self) -> str:
        """Say it in MiB."""
        if math.isinf(self.num_bytes):
            return f"{self.against}: never"
        return f"{self.against}: from {self.num_bytes / MIB:.1f} MiB on"


async def measure_inline(
    loop: str, strategy: ar.Strategy, *, totals: Sequence[int], num_read: int, num_rounds: int
) -> tuple[list[Row], list[Crossing]]:
    """Compare all_reduce on the event loop with the same in one thread and in all of them.

    The library's threshold is moved, so that a size goes the way that is measured.

    Args:
        loop: Name of the running event loop.
        strategy: Says how many replicas reduce.
        totals: Bytes read by one reduction, ascending.
        num_read: Bytes read in one sample, which sets the number of reductions.
        num_rounds: Rounds of each comparison.
    """
    size = strategy.num_replicas_in_sync
    threads = {"one thread": 1, "all threads": num_collective_streams()}
    rows: dict[str, list[Row]] = {against: [] for against in threads}
    for total in totals:
        num_times = max(4, num_read // total)
        reduce = reducing(strategy, replica_arrays(size, total // size), num_times)
        actions = {"inline": _moved(reduce, total)} | {
            against: _moved(reduce, _threshold(total, count)) for against, count in threads.items()
        }
        samples = await take_turns(
            {name: timed(action, num_units=num_times) for name, action in actions.items()},
            num_rounds=num_rounds,
        )
        for against, column in rows.items():
            column.append(
                compared_row(
                    f"inline, reads {_show(total)}", loop, size, "us", ours=samples["inline"],
                    against=against, floor=samples[against],
                )
            )  # fmt: skip
    crossings = [
        Crossing(against, find_crossing(totals, [row.ratio for row in column]))
        for against, column in rows.items()
    ]
    return [row for column in rows.values() for row in column], crossings


def find_crossing(sizes: Sequence[float], ratios: Sequence[float]) -> float:
    """Return the size at which the ratio passes 1 for the last time.

    Between two sizes it is taken to be a straight line over the logarithm of the size.

    Args:
        sizes: Ascending.
        ratios: Of the time on the loop to that in threads, one for each size.

    Returns:
        0 if every ratio is at least 1, infinity if the last one is less.

    Example:
        >>> round(find_crossing([1, 4, 16], [0.5, 0.8, 1.2]), 3)
        8.0
    """
    below = [i for i, ratio in enumerate(ratios) if ratio < 1]
    if not below:
        return 0.0
    last = below[-1]
    if last == len(sizes) - 1:
        return math.inf
    share = (1 - ratios[last]) / (ratios[last + 1] - ratios[last])
    crossing: float = sizes[last] * (sizes[last + 1] / sizes[last]) ** share
    return crossing


def _threshold(num_bytes: int, num_threads: int) -> int:
    """Return the threshold at which that many bytes go to that many threads."""
    return num_bytes - 1 if num_threads == 1 else num_bytes // num_threads


def _moved(action: Callable[[], Awaitable[None]], threshold: int) -> Callable[[], Awaitable[None]]:
    """Return the action with the threshold moved; arrays of any size are put to it."""

    async def moved() -> None:
        changes: dict[str, Any] = {
            "INLINE_SUM_BYTES": threshold,
            "SUM_THREAD_BYTES": threshold,
            "POOLED_BYTES": 0,
        }
        with mock.patch.multiple(REDUCER, **changes):
            await action()

    return moved


def _show(num_bytes: int) -> str:
    return f"{num_bytes // KIB} KiB" if num_bytes < MIB else f"{num_bytes // MIB} MiB"
