"""Packs: many small arrays joined, reduced in one go, and taken apart again as views."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from ..devices.backends import reduce_into
from ..typing import ReduceOp


def reduce_pack(op: ReduceOp, total: Any, columns: Sequence[Sequence[Any]]) -> None:
    """Combine small arrays of one dtype, in replica order.

    Args:
        op: The operator.
        total: Receives the results one behind the other, flat.
        columns: The arrays of each replica, equal in number and shapes.

    Determinism:
        Element by element as if each array were reduced alone.
    """
    reduce_into(op, total, [_joined(arrays) for arrays in columns])


def _joined(arrays: Sequence[Any]) -> Any:
    """Lay arrays out one behind the other, in C order; bytes are copied without looking inside."""
    try:
        return np.frombuffer(b"".join(arrays), arrays[0].dtype)
    except (ValueError, TypeError, BufferError):  # strided, or of a dtype without buffers
        return np.concatenate(arrays, axis=None)


def views_into(flat: Any, likes: Sequence[Any]) -> list[Any]:
    """Take a flat array apart into arrays of the given shapes.

    Example:
        >>> import numpy as np
        >>> [view.shape for view in views_into(np.arange(7), [np.ones((2, 2)), np.ones(3)])]
        [(2, 2), (3,)]
    """
    shapes = list(map(_shape_of, likes))
    first = shapes[0]
    if first and shapes.count(first) == len(shapes):
        return list(flat.reshape(len(shapes), *first))
    views, start = [], 0
    for like in likes:
        stop = start + like.size
        views.append(flat[start:stop].reshape(like.shape))
        start = stop
    return views


_shape_of = attrgetter("shape")
