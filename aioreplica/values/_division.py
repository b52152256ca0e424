"""Division of an array among workers: which elements each has is decided here only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from ..tree import Array

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""The first element of each worker and the one after its last, in rank order; without gaps."""


@final
@dataclass(frozen=True, slots=True)
class Division:
    """Division of an array among workers.

    Attributes:
        shape: That of the whole.
        ranges: Elements of each worker, of the whole as a row.
        rank: The number of this worker.
        unit: Ranges begin at multiples of it.
        first: Number that says which workers have a unit more.
    """

    shape: tuple[int, ...]
    ranges: Ranges
    rank: int
    unit: int
    first: int

    def among(self, rank: int, num_workers: int) -> Division:
        """Return how the array is divided among another number of workers."""
        ranges = _ranges(self.shape, num_workers, self.unit, self.first)
        return Division(self.shape, ranges, rank, self.unit, self.first)

    def part_of(self, whole: Array) -> Array:
        """Return this worker's elements of a whole, a view where it lies in rows."""
        begin, end = self.ranges[self.rank]
        return whole.reshape(-1)[begin:end]


def divided(name: str, shape: Sequence[int], rank: int, num_workers: int, unit: int) -> Division:
    """Divide an array in units of so many elements, as evenly as they allow.

    Which workers have a unit more follows from the name, so that many small arrays even out.

    Args:
        name: Of the variable; the same on all workers.
        shape: That of the whole.
        rank: The number of this worker.
        num_workers: How many there are.
        unit: Ranges begin at multiples of it.

    Example:
        >>> divided("w", (10,), 0, 2, 2).ranges
        ((0, 6), (6, 10))
    """
    first = zlib.crc32(name.encode())
    ranges = _ranges(shape, num_workers, unit, first)
    return Division(tuple(shape), ranges, rank, unit, first)


def _ranges(shape: Sequence[int], num_workers: int, unit: int, first: int) -> Ranges:
    size = int(np.prod(shape, dtype=np.int64))
    each, more = divmod(-(-size // unit), num_workers)
    ranges, begin = [], 0
    for worker in range(num_workers):
        count = each + ((worker - first) % num_workers < more)
        end = min(begin + count * unit, size)
        ranges.append((begin, end))
        begin = end
    return tuple(ranges)
