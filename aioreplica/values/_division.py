"""Division of an array among workers or servers: which part each has is decided here only."""

from __future__ import annotations

import math
import operator
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np

from ..tree import Array

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""The first element of each worker and the one after its last, in rank order; without gaps."""


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Sharding of a variable over workers: each has some of its rows, as even as can be.

    Attributes:
        axis: The axis that is cut: 0, whose parts are contiguous.

    Raises:
        ValueError: If it is another axis.
        TypeError: If it is not an int.

    Example:
        >>> Shard(axis=0)
        Shard(axis=0)
    """

    axis: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.axis, int) or isinstance(self.axis, bool):
            raise TypeError(f"The axis of a Shard is an int, got {self.axis!r}.")
        if self.axis != 0:
            raise ValueError(
                f"Shard(axis={self.axis}): only the first axis can be cut. Make the variable with "
                "that axis first, and transpose what is read."
            )


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
        has_rows: Whether parts are rows, as a user's variable has them, and not flat.
    """

    shape: tuple[int, ...]
    ranges: Ranges
    rank: int
    unit: int
    first: int
    has_rows: bool = False

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of this worker and the one after its last."""
        begin, end = self.ranges[self.rank]
        return begin // self.unit, end // self.unit

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of this worker's part."""
        begin, end = self.ranges[self.rank]
        return ((end - begin) // self.unit, *self.shape[1:]) if self.has_rows else (end - begin,)

    @property
    def held(self) -> Ranges:
        """Ranges of the workers that have elements; of the first one if there are none."""
        return tuple([each for each in self.ranges if each[0] < each[1]]) or self.ranges[:1]

    def among(self, rank: int, num_workers: int) -> Division:
        """Return how the array is divided among another number of workers."""
        size = math.prod(self.shape)
        return replace(self, ranges=cut(size, num_workers, self.unit, self.first), rank=rank)

    def flat(self) -> Division:
        """Return the same division of an array that is kept as a row."""
        return replace(self, has_rows=False)

    def part_of(self, whole: Array) -> Array:
        """Return this worker's part of a whole, a view where that lies in rows."""
        begin, end = self.ranges[self.rank]
        return whole.reshape(-1)[begin:end].reshape(self.part_shape)


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
    ranges = cut(math.prod(shape), num_workers, unit, first)
    return Division(tuple(shape), ranges, rank, unit, first)


def divided_rows(name: str, shape: Sequence[int], rank: int, num_workers: int) -> Division:
    """Divide the rows of an array; the first workers have the remainder.

    Raises:
        ValueError: If there is not a row for each worker, or nothing in a row.

    Example:
        >>> divided_rows("w", (5, 2), 0, 2).ranges
        ((0, 6), (6, 10))
    """
    unit = math.prod(shape[1:])
    if not shape or shape[0] < num_workers or not unit:
        raise ValueError(
            f"Variable {name!r} of shape {tuple(shape)} cannot be divided among {num_workers} "
            "workers: each gets at least one row that is not empty. Leave out sharding=."
        )
    ranges = cut(shape[0] * unit, num_workers, unit, 0)
    return Division(tuple(shape), ranges, rank, unit, 0, has_rows=True)


def cut(size: int, count: int, unit: int = 1, first: int = 0) -> Ranges:
    """Return the first element of each part and the one after its last, as even as units allow.

    Args:
        size: How many elements there are.
        count: How many parts.
        unit: Parts begin at multiples of it.
        first: The number of the part, modulo `count`, from which on parts have a unit more.

    Example:
        >>> cut(5, 2)
        ((0, 3), (3, 5))
    """
    each, more = divmod(-(-size // unit), count)
    ranges, begin = [], 0
    for part in range(count):
        end = min(begin + (each + ((part - first) % count < more)) * unit, size)
        ranges.append((begin, end))
        begin = end
    return tuple(ranges)


def rows_in(rows: range, begin: int, end: int) -> tuple[slice, slice]:
    """Find those of some rows that lie between two, for a worker that has these.

    Args:
        rows: Ascending.
        begin: The first row of the worker.
        end: The one after its last.

    Returns:
        Where they are among the rows, and where in the worker's part.

    Example:
        >>> rows_in(range(1, 9, 3), 2, 6)
        (slice(1, 2, None), slice(2, 3, 3))
    """
    low, high = bisect_left(rows, begin), bisect_left(rows, end)
    if low == high:
        return slice(low, low), slice(0, 0)
    return slice(low, high), slice(rows[low] - begin, rows[high - 1] - begin + 1, rows.step)


def parts_of(shape: tuple[int, ...], index: object) -> tuple[list[range], tuple[int, ...]]:
    """Return the indices to be read along each axis, and the shape of the result.

    Raises:
        IndexError: If one is out of bounds, or there are more than axes.
        TypeError: If something is neither an integer nor a slice nor an ellipsis.

    Example:
        >>> parts_of((5, 4), (slice(1, 3), 2))
        ([range(1, 3), range(2, 3)], (2,))
    """
    items = [*index] if isinstance(index, tuple) else [] if index is None else [index]
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(items) - len(ellipses) > len(shape) or len(ellipses) > 1:
        raise IndexError(f"{index!r} has more indices than the shape {shape} has axes.")
    place = ellipses[0] if ellipses else len(items)
    rest = items[place + 1 :]
    whole = [slice(None)] * (len(shape) - place - len(rest))
    ranges, kept = [], []
    for item, size in zip([*items[:place], *whole, *rest], shape, strict=True):
        if isinstance(item, slice):
            ranges.append(range(*item.indices(size)))
            kept.append(len(ranges[-1]))
            continue
        number = _integer(item)
        if not -size <= number < size:
            raise IndexError(f"Index {number} is out of bounds for an axis of size {size}.")
        ranges.append(range(number % size, number % size + 1))
    return ranges, tuple(kept)


def as_slice(indices: range) -> slice:
    """Return what selects these indices."""
    if not indices:
        return slice(0, 0)
    stop = indices.stop if indices.stop >= 0 else None
    return slice(indices.start, stop, indices.step)


def _integer(item: Any) -> int:
    try:
        if not isinstance(item, (bool, np.bool_)):
            return operator.index(item)
    except TypeError:
        pass
    raise TypeError(
        f"A part of a tensor is named by integers, slices and `...`, got {item!r}. Read a part "
        "that holds it, and index that."
    )
