"""Packs: many small arrays joined, reduced in one go, and taken apart again as views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.backends import reduce_block
from ..typing import ReduceOp
from ._layout import Pack, Portion


def reduce_pack(
    op: ReduceOp, total: Any, columns: Sequence[Sequence[Any]], portions: Sequence[Portion]
) -> None:
    """Combine small arrays of one dtype, in replica order.

    Args:
        op: The operator.
        total: Receives the results one behind the other, flat.
        columns: The arrays of each replica, equal in number and shapes.
        portions: Which arrays are joined in one go.

    Determinism:
        Element by element as if each array were reduced alone.
    """
    dtype, count = columns[0][0].dtype, len(columns)
    for start, stop, begin, end in portions:
        # Made while they are read, so that only two exist at a time.
        parts = (_joined(arrays[start:stop], dtype) for arrays in columns)
        reduce_block(op, total[begin:end], parts, count)


def _joined(arrays: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Lay arrays out one behind the other, in C order; bytes are copied without looking inside."""
    try:
        return np.frombuffer(b"".join(arrays), dtype)
    except (ValueError, TypeError, BufferError):  # strided, empty, or of a dtype without buffers
        return np.concatenate(arrays, axis=None)


def views_into(flat: Any, pack: Pack) -> list[Any]:
    """Take the flat result of a pack apart into arrays of the leaves' shapes."""
    if pack.common_shape:
        return list(flat.reshape(len(pack.shapes), *pack.common_shape))
    views, start = [], 0
    for shape in pack.shapes:
        stop = start + math.prod(shape)
        views.append(flat[start:stop].reshape(shape))
        start = stop
    return views
