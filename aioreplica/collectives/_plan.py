"""Planning a reduction: which leaves go through together, and which pieces threads can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, final

import numpy as np

from ..devices.backends import reduce_into, result_dtype
from ..typing import ReduceOp
from ._buffers import BufferPool
from ._pack import reduce_pack, views_into
from ._reduce import leaf_bytes, reduce_leaves

Row = Sequence[Any]  # the leaves of one replica
Piece = Callable[[], None]

PACK_BYTES = 256 * 1024
"""Small arrays are joined in packs of this size: what is copied is still in the cache when it is
added, and the result of a pack is kept alive as a whole by any array in it."""


@final
class Plan:
    """The pieces of one reduction, which can run in any order and on any thread.

    Args:
        op: The operator.
        rows: The leaves of each replica, of equal structure.
        pool: Lends the memory of large results.
        bytes_per_pack: Size of a pack, 0 for the usual one.

    Attributes:
        num_bytes: How much is read.
    """

    __slots__ = ("_op", "_pieces", "_pool", "_results", "_rows", "num_bytes")

    def __init__(
        self, op: ReduceOp, rows: Sequence[Row], pool: BufferPool, bytes_per_pack: int
    ) -> None:
        self._op = op
        self._rows = rows
        self._pool = pool
        self._results: list[Any] = [None] * len(rows[0])
        self._pieces: list[tuple[int, Piece]] = []  # what each reads, in bytes
        first = rows[0]
        pack = bytes_per_pack or PACK_BYTES
        dtypes = set(map(_dtype_of, first)) if set(map(type, first)) == _ARRAYS else ()
        if len(dtypes) == 1:
            self._add_arrays(range(len(first)), pack)
        else:
            self._add_mixed(first, pack)
        self.num_bytes = sum(size for size, _ in self._pieces)

    def run(self) -> list[Any]:
        """Run everything here; return one result per leaf."""
        for _, piece in self._pieces:
            piece()
        return self._results

    def shares(self, count: int) -> list[Piece]:
        """Deal the pieces into `count` shares that read about as much."""
        shares: list[list[Piece]] = [[] for _ in range(count)]
        loads = [0] * count
        for size, piece in sorted(self._pieces, key=_size_of, reverse=True):
            lightest = loads.index(min(loads))
            shares[lightest].append(piece)
            loads[lightest] += size
        return [partial(_run_all, share) for share in shares if share]

    def cut(self, num_bytes: int) -> None:
        """Cut arrays of which more than that is read into ranges, for several threads."""
        pieces: list[tuple[int, Piece]] = []
        for size, piece in self._pieces:
            if isinstance(piece, partial) and piece.func is reduce_into and size > num_bytes:
                pieces += _ranges(size, piece, num_bytes)
            else:
                pieces.append((size, piece))
        self._pieces = pieces

    @property
    def results(self) -> list[Any]:
        """One per leaf, once all pieces have run."""
        return self._results

    def _add_mixed(self, first: Row, pack: int) -> None:
        """Sort leaves by what they are: arrays of one dtype go together."""
        by_dtype: dict[Any, list[int]] = {}
        for index, leaf in enumerate(first):
            if type(leaf) is np.ndarray:
                by_dtype.setdefault(leaf.dtype, []).append(index)
            else:
                size = sum(leaf_bytes(row[index]) for row in self._rows)
                self._pieces.append((size, partial(self._reduce_other, index)))
        for indices in by_dtype.values():
            self._add_arrays(indices, pack)

    def _add_arrays(self, indices: Sequence[int], pack: int) -> None:
        """Plan arrays of one dtype: large ones alone, small neighbours in packs."""
        first = self._rows[0]
        together: list[int] = []
        filled = 0
        for index in indices:
            size = first[index].nbytes
            if 2 * size > pack:
                self._add_array(index)
                continue
            if filled + size > pack and together:
                self._add_pack(together)
                together, filled = [], 0
            together.append(index)
            filled += size
        if together:
            self._add_pack(together)

    def _add_array(self, index: int) -> None:
        column = [row[index] for row in self._rows]
        first = column[0]
        total = self._pool.array(first.shape, result_dtype(self._op, first.dtype))
        self._pieces.append(
            (first.nbytes * len(column), partial(reduce_into, self._op, total, column))
        )
        shared = total.view()
        shared.flags.writeable = False
        self._results[index] = shared

    def _add_pack(self, indices: list[int]) -> None:
        if len(indices) == 1:
            self._add_array(indices[0])
            return
        start, stop = indices[0], indices[-1] + 1
        if stop - start == len(indices):
            columns = [row[start:stop] for row in self._rows]
        else:
            columns = [[row[index] for index in indices] for row in self._rows]
        first = columns[0]
        dtype = first[0].dtype
        num_bytes = sum(map(_nbytes_of, first))
        size = num_bytes // dtype.itemsize
        total = np.empty(size, result_dtype(self._op, dtype))
        self._pieces.append(
            (num_bytes * len(columns), partial(reduce_pack, self._op, total, columns))
        )
        shared = total.view()
        shared.flags.writeable = False
        for index, view in zip(indices, views_into(shared, first), strict=True):
            self._results[index] = view

    def _reduce_other(self, index: int) -> None:
        self._results[index] = reduce_leaves(self._op, [row[index] for row in self._rows])


def _ranges(size: int, piece: partial[None], num_bytes: int) -> list[tuple[int, Piece]]:
    op, total, column = piece.args
    if not all(array.flags.c_contiguous for array in column):
        return [(size, piece)]
    count = -(-size // num_bytes)
    edges = [total.size * i // count for i in range(count + 1)]
    return [
        (size // count, partial(reduce_into, op, total, column, start, stop))
        for start, stop in pairwise(edges)
    ]


def _run_all(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece()


def _size_of(entry: tuple[int, Piece]) -> int:
    return entry[0]


_ARRAYS = {np.ndarray}
_dtype_of = attrgetter("dtype")
_nbytes_of = attrgetter("nbytes")
