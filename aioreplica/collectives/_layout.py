"""Layout of a reduction: leaves reduced alone, in packs, or not as arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np

PACK_BYTES = 1024 * 1024
"""Small arrays are reduced in packs of this size, whose result is one piece of memory; any array in
it keeps all of it alive."""

PACKED_BYTES = 64 * 1024
"""Larger arrays go alone: joining them would cost more than it saves."""

JOINED_BYTES = 128 * 1024
"""Within a pack arrays are joined in portions of this size: small enough for the allocator to hand
out the same memory again and again, where larger portions would come as fresh pages each time."""


@final
class Portion(NamedTuple):
    """Arrays of a pack that are joined in one go.

    Attributes:
        start: First array.
        stop: One past the last.
        begin: First element in the pack.
        end: One past the last.
    """

    start: int
    stop: int
    begin: int
    end: int


@final
class Pack(NamedTuple):
    """Small arrays of one dtype that are reduced together.

    Attributes:
        indices: Which leaves.
        span: The same as a slice, if they are neighbours.
        size: Their elements.
        num_bytes: Their bytes.
        shapes: One per leaf.
        common_shape: That of all leaves, if they are equal.
        portions: What is joined in one go.
    """

    indices: Sequence[int]
    span: slice | None
    size: int
    num_bytes: int
    shapes: Sequence[tuple[int, ...]]
    common_shape: tuple[int, ...] | None
    portions: Sequence[Portion]


@final
class Layout:
    """Layout of the reduction of one kind of tree, independent of the numbers in it.

    Args:
        leaves: The leaves of one replica.
        bytes_per_pack: Size of a pack, 0 for the usual one.

    Attributes:
        packs: The small arrays.
        singles: Indices of large arrays, and of small ones without neighbours.
        others: Indices of leaves that are not arrays.
    """

    __slots__ = ("_pack_bytes", "others", "packs", "singles")

    def __init__(self, leaves: Sequence[Any], bytes_per_pack: int) -> None:
        self.packs: list[Pack] = []
        self.singles: list[int] = []
        self.others: list[int] = []
        self._pack_bytes = bytes_per_pack or PACK_BYTES
        by_dtype: dict[np.dtype[Any], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray:
                by_dtype.setdefault(leaf.dtype, []).append(index)
            else:
                self.others.append(index)
        for indices in by_dtype.values():
            self._add_arrays(leaves, indices)

    def _add_arrays(self, leaves: Sequence[Any], indices: Sequence[int]) -> None:
        """Take arrays of one dtype in their order, as many into each pack as it holds."""
        together: list[int] = []
        filled = 0
        for index in indices:
            size = leaves[index].nbytes
            if size > PACKED_BYTES or 2 * size > self._pack_bytes:
                self.singles.append(index)
                continue
            if filled + size > self._pack_bytes:
                self._add_pack(leaves, together)
                together, filled = [], 0
            together.append(index)
            filled += size
        self._add_pack(leaves, together)

    def _add_pack(self, leaves: Sequence[Any], indices: Sequence[int]) -> None:
        if len(indices) < 2:
            self.singles += indices
            return
        arrays = [leaves[index] for index in indices]
        sizes = list(map(_size_of, arrays))
        shapes = list(map(_shape_of, arrays))
        start, stop = indices[0], indices[-1] + 1
        self.packs.append(
            Pack(
                indices,
                slice(start, stop) if stop - start == len(indices) else None,
                sum(sizes),
                sum(map(_nbytes_of, arrays)),
                shapes,
                shapes[0] if shapes.count(shapes[0]) == len(shapes) else None,
                _portions(sizes, JOINED_BYTES // arrays[0].itemsize),
            )
        )


def _portions(sizes: Sequence[int], most: int) -> list[Portion]:
    ends = list(accumulate(sizes))
    portions: list[Portion] = []
    start = begin = 0
    while start < len(sizes):
        stop = max(start + 1, bisect_right(ends, begin + most, start))
        portions.append(Portion(start, stop, begin, ends[stop - 1]))
        start, begin = stop, ends[stop - 1]
    return portions


_size_of = attrgetter("size")
_nbytes_of = attrgetter("nbytes")
_shape_of = attrgetter("shape")
