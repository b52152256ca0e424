"""The floor of a reduction: NumPy adds arrays block by block into a buffer made before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

BLOCK_BYTES = 256 * 1024
"""Of 16 KiB to 4 MiB this is within a twentieth of the fastest for arrays of 1 to 64 MiB: the
block of the sum stays in the cache of a core, and few calls are made."""


def replica_arrays(num_replicas: int, num_bytes: int) -> list[Any]:
    """Make one array of random float32 for each replica, every one different."""
    size = num_bytes // 4
    return [np.random.default_rng(i).random(size, np.float32) for i in range(num_replicas)]


def sum_blocks(arrays: Sequence[Any], total: Any, start: int = 0, stop: int | None = None) -> None:
    """Sum flat arrays into `total`, from element `start` to `stop`, left to right."""
    first, second, *rest = arrays
    stop = total.size if stop is None else stop
    block = BLOCK_BYTES // total.itemsize
    if total.size <= block:  # what is small needs no slices
        np.add(first, second, out=total)
        for array in rest:
            np.add(total, array, out=total)
        return
    for begin in range(start, stop, block):
        part = slice(begin, min(begin + block, stop))
        out = total[part]
        np.add(first[part], second[part], out=out)
        for array in rest:
            np.add(out, array[part], out=out)


def summing(arrays: Sequence[Any], num_times: int) -> Callable[[], Awaitable[None]]:
    """Return what sums the arrays that often, on the event loop, into one buffer made now."""
    total = np.zeros_like(arrays[0])

    async def sum_often() -> None:
        for _ in range(num_times):
            sum_blocks(arrays, total)

    return sum_often
