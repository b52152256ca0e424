"""The pieces of one reduction, which can run in any order and on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, final

from ..devices.backends import reduce_into, result_dtype
from ..typing import ReduceOp
from ._buffers import BufferPool
from ._layout import Layout, Pack
from ._pack import reduce_pack, views_into
from ._reduce import leaf_bytes, reduce_leaves

Row = Sequence[Any]  # the leaves of one replica
Piece = Callable[[], None]


@final
class Plan:
    """What has to be done in one reduction.

    Args:
        op: The operator.
        rows: The leaves of each replica, of equal structure.
        layout: Which leaves go together.
        pool: Lends the memory of large results.

    Attributes:
        num_bytes: How much is read.
        results: One per leaf, once all pieces have run.
    """

    __slots__ = ("_op", "_pieces", "_pool", "_rows", "num_bytes", "results")

    def __init__(self, op: ReduceOp, rows: Sequence[Row], layout: Layout, pool: BufferPool) -> None:
        self._op = op
        self._rows = rows
        self._pool = pool
        self.results: list[Any] = [None] * len(rows[0])
        self._pieces: list[tuple[int, Piece]] = []  # what each reads, in bytes
        for pack in layout.packs:
            self._add_pack(pack)
        for index in layout.singles:
            self._add_array(index)
        for index in layout.others:
            size = sum(leaf_bytes(row[index]) for row in rows)
            self._pieces.append((size, partial(self._reduce_other, index)))
        self.num_bytes = sum(size for size, _ in self._pieces)

    def run(self) -> list[Any]:
        """Run everything here; return one result per leaf."""
        for _, piece in self._pieces:
            piece()
        return self.results

    def cut(self, num_bytes: int) -> None:
        """Cut arrays of which more than that is read into ranges, for several threads."""
        pieces: list[tuple[int, Piece]] = []
        for size, piece in self._pieces:
            if isinstance(piece, partial) and piece.func is reduce_into and size > num_bytes:
                pieces += _ranges(size, piece, num_bytes)
            else:
                pieces.append((size, piece))
        self._pieces = pieces

    def shares(self, count: int) -> list[Piece]:
        """Deal the pieces into at most `count` shares that read about as much."""
        shares: list[list[Piece]] = [[] for _ in range(count)]
        loads = [0] * count
        for size, piece in sorted(self._pieces, key=_first_of, reverse=True):
            lightest = loads.index(min(loads))
            shares[lightest].append(piece)
            loads[lightest] += size
        return [partial(_run_all, share) for share in shares if share]

    def _add_pack(self, pack: Pack) -> None:
        span = pack.span
        if span is not None:
            columns = [row[span] for row in self._rows]
        else:
            columns = [[row[index] for index in pack.indices] for row in self._rows]
        total = self._pool.array((pack.size,), result_dtype(self._op, columns[0][0].dtype))
        self._pieces.append(
            (
                pack.num_bytes * len(columns),
                partial(reduce_pack, self._op, total, columns, pack.portions),
            )
        )
        views = views_into(_read_only(total), pack)
        if span is not None:
            self.results[span] = views
        else:
            for index, view in zip(pack.indices, views, strict=True):
                self.results[index] = view

    def _add_array(self, index: int) -> None:
        column = [row[index] for row in self._rows]
        first = column[0]
        total = self._pool.array(first.shape, result_dtype(self._op, first.dtype))
        self._pieces.append(
            (first.nbytes * len(column), partial(reduce_into, self._op, total, column))
        )
        self.results[index] = _read_only(total)

    def _reduce_other(self, index: int) -> None:
        self.results[index] = reduce_leaves(self._op, [row[index] for row in self._rows])


def _read_only(total: Any) -> Any:
    shared = total.view()
    shared.flags.writeable = False
    return shared


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


def _first_of(entry: tuple[int, Piece]) -> int:
    return entry[0]
