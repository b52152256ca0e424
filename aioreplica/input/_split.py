"""Splitting a global batch: contiguous, balanced, earlier replicas get the remainder."""

from __future__ import annotations

from typing import Any

from ..tree import leaves, unflatten
from ..values import DistributedValues
from ._arrays import Array, BatchReader


def split_sizes(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Return how many examples each replica gets; sizes differ by at most one.

    Example:
        >>> split_sizes(6, 4)
        (2, 2, 1, 1)
    """
    share, remainder = divmod(num_examples, num_replicas)
    return tuple(share + (i < remainder) for i in range(num_replicas))


def cut_leaves(arrays: list[Array], sizes: tuple[int, ...]) -> list[list[Array]]:
    """Return one list of views per replica, contiguous and in order."""
    bounds = []
    start = 0
    for size in sizes:
        bounds.append(slice(start, start + size))
        start += size
    return [[array[cut] for array in arrays] for cut in bounds]


def split_batch(batch: Any, num_replicas: int) -> list[Any]:
    """Cut a pytree of arrays along the leading axis into one contiguous part per replica.

    The parts are views. A replica beyond the batch's size gets an empty part.

    Raises:
        ValueError: If a leaf is a scalar, or leaves have different numbers of examples.

    Shapes:
        Each leaf: (num_examples, ...). Each part: (share, ...).
    """
    arrays, spec = BatchReader("batch", "split_batch").read(batch)
    parts = cut_leaves(arrays, split_sizes(arrays[0].shape[0], num_replicas))
    return [unflatten(spec, part) for part in parts]


def num_examples(batch: Any) -> int:
    """Return how many examples a batch holds: a whole one, or a replica's part.

    The weight of a batch: what a total over it has to be divided by.

    Raises:
        ValueError: If there is no array in it.

    Example:
        >>> import numpy as np
        >>> from aioreplica import PerReplica
        >>> num_examples(
        ...     (PerReplica([np.ones(2), np.ones(1)]), PerReplica([np.ones(2), np.ones(1)]))
        ... )
        3
    """
    for leaf in leaves(batch):
        parts = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        if all(getattr(part, "ndim", 0) for part in parts):
            return sum(part.shape[0] for part in parts)
    raise ValueError(f"A batch holds arrays with one row per example, got {batch!r}.")
