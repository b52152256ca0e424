"""Partition of a variable into shards of rows, and the server of each shard."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from ...values import cut

PartitionFn = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]


@final
class ServedRows(NamedTuple):
    """Some rows of a variable; all of it, if it is not cut.

    Attributes:
        server: Number of the parameter server.
        begin: First row.
        end: The row after the last one.
    """

    server: int
    begin: int
    end: int


class Partitioner(ABC):
    """Says into how many parts a variable is cut along each axis; only the first one is cut."""

    @abstractmethod
    def num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """Return how many shards to make, if there are enough rows."""

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each axis: 1 everywhere but along `axis`.

        Raises:
            ValueError: If there is no such axis.
        """
        sizes = tuple(map(int, shape))
        if not 0 <= axis < len(sizes):
            raise ValueError(f"There is no axis {axis} to cut in the shape {sizes}.")
        parts = [1] * len(sizes)
        parts[axis] = max(1, min(self.num_shards(sizes, np.dtype(dtype), axis), sizes[axis]))
        return parts


@final
class FixedShardsPartitioner(Partitioner):
    """Cuts every variable into a fixed number of shards, or one per row if it has fewer.

    Args:
        num_shards: How many.

    Raises:
        ValueError: If it is below 1.
        TypeError: If it is not an int.

    Example:
        >>> FixedShardsPartitioner(2)((10, 3), "float32")
        [2, 1]

    Source:
        tf.distribute.experimental.partitioners.FixedShardsPartitioner.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _at_least_one("num_shards", num_shards)

    def num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """Return the fixed number."""
        return self._num_shards

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self._num_shards})"


@final
class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many shards as there can be of a smallest size.

    Args:
        min_shard_bytes: No shard is smaller, unless the variable is.
        max_shards: How many shards there are at most.

    Raises:
        ValueError: If a number is below 1.
        TypeError: If one is not an int.

    Example:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=3)((6, 1), "float32")
        [3, 1]

    Source:
        tf.distribute.experimental.partitioners.MinSizePartitioner.
    """

    def __init__(self, min_shard_bytes: int = 256 * 1024, max_shards: int = 1) -> None:
        self._min_shard_bytes = _at_least_one("min_shard_bytes", min_shard_bytes)
        self._max_shards = _at_least_one("max_shards", max_shards)

    def num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """Return how often the smallest size fits."""
        if not shape[axis]:
            return 1
        row = math.prod(shape) // shape[axis] * dtype.itemsize
        rows_per_shard = max(1, -(-self._min_shard_bytes // max(1, row)))
        return min(self._max_shards, shape[axis] // rows_per_shard)

    def __repr__(self) -> str:
        return f"MinSizePartitioner({self._min_shard_bytes}, {self._max_shards})"


@final
class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few shards as there have to be for a largest size.

    Args:
        max_shard_bytes: No shard is larger, unless one row is, or `max_shards` does not allow it.
        max_shards: How many shards there are at most; None sets no limit.

    Raises:
        ValueError: If a number is below 1.
        TypeError: If one is not an int.

    Example:
        >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), "float32")
        [3, 1]

    Source:
        tf.distribute.experimental.partitioners.MaxSizePartitioner.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _at_least_one("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _at_least_one("max_shards", max_shards)

    def num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """Return how many shards of the largest size hold all rows."""
        if not shape[axis]:
            return 1
        row = math.prod(shape) // shape[axis] * dtype.itemsize
        rows_per_shard = max(1, self._max_shard_bytes // max(1, row))
        count = -(-shape[axis] // rows_per_shard)
        return count if self._max_shards is None else min(self._max_shards, count)

    def __repr__(self) -> str:
        return f"MaxSizePartitioner({self._max_shard_bytes}, {self._max_shards})"


def cut_rows(
    partitioner: PartitionFn | None, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> list[tuple[int, int]]:
    """Return the first row of each shard of a new variable, and the one after its last.

    Earlier shards get the remainder. What has no rows is not cut.

    Raises:
        ValueError: If the partitioner cuts another axis than the first one, or into no part, or
            into more than there are rows.
        TypeError: If it does not return a list of ints.
    """
    num_rows = shape[0] if shape else 1
    if partitioner is None or not shape:
        return [(0, num_rows)]
    parts = partitioner(shape, dtype)
    if not isinstance(parts, Sequence) or not all(isinstance(n, (int, np.integer)) for n in parts):
        raise TypeError(
            f"The partitioner {partitioner!r} must return a list with a number of shards for each "
            f"axis, got {parts!r} for variable {name!r} of shape {shape}."
        )
    if len(parts) != len(shape) or any(n != 1 for n in parts[1:]):
        raise ValueError(
            f"The partitioner {partitioner!r} returned {list(parts)} for variable {name!r} of "
            f"shape {shape}. Only the first axis can be cut: return [n{', 1' * (len(shape) - 1)}]."
        )
    count = int(parts[0])
    if count < 1 or (count > num_rows and count > 1):
        raise ValueError(
            f"The partitioner {partitioner!r} cuts variable {name!r} of {num_rows} rows into "
            f"{count} shards. Return a number from 1 to {max(1, num_rows)}."
        )
    return list(cut(num_rows, count))


def _at_least_one(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}.") from None
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return number
