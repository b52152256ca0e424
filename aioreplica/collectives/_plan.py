"""The jobs of one reduction: layouts of packs, result buffers, and pieces for threads."""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from ..devices import num_collective_streams, run_together
from ..devices.backends import reduce_block, reduce_into, result_dtype
from ..tree import DType
from ..typing import ReduceOp
from ..values import CAN_COUNT_REFERENCES
from ._reduce import leaf_bytes, reduce_leaves

PACK_BYTES = 1024 * 1024
"""Small arrays are reduced in packs of this size, whose result is one piece of memory; any array in
it keeps all of it alive."""

PACKED_BYTES = 64 * 1024
"""Larger arrays go alone: joining them would cost more than it saves."""

JOINED_BYTES = 128 * 1024
"""Within a pack arrays are joined in portions of this size: small enough for the allocator to hand
out the same memory again and again, where larger portions would come as fresh pages each time."""

_num_elements_of = attrgetter("size")
_nbytes_of = attrgetter("nbytes")
_shape_of = attrgetter("shape")
Leaves: TypeAlias = Sequence[Any]  # of one replica
POOLED_BYTES = 128 * 1024  # from there on the allocator gives fresh pages
KEPT_CALLS = 8  # how many reductions a buffer may go unused
Job: TypeAlias = tuple[int, Callable[[], None]]
"""How many bytes a piece reads and writes, and the piece."""


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

    def __init__(self, leaves: Sequence[object], bytes_per_pack: int) -> None:
        self.packs: list[Pack] = []
        self.singles: list[int] = []
        self.others: list[int] = []
        self._pack_bytes = bytes_per_pack or PACK_BYTES
        by_dtype: dict[DType, list[int]] = {}
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
        sizes = list(map(_num_elements_of, arrays))
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


@final
class ReductionPlan:
    """Work of one reduction.

    Args:
        op: The operator.
        rows: The leaves of each replica, of equal structure.
        layout: Which leaves go together.
        pool: Lends the memory of large results.

    Attributes:
        jobs: What has to be done, in any order.
        num_bytes: How much is read.
        results: One per leaf, once all jobs have run.
    """

    __slots__ = ("_op", "_pool", "_rows", "jobs", "num_bytes", "results")

    def __init__(
        self, op: ReduceOp, rows: Sequence[Leaves], layout: Layout, pool: BufferPool
    ) -> None:
        self._op = op
        self._rows = rows
        self._pool = pool
        self.results: list[Any] = [None] * len(rows[0])
        self.jobs: list[Job] = []
        for pack in layout.packs:
            self._add_pack(pack)
        for index in layout.singles:
            self._add_array(index)
        for index in layout.others:
            size = sum(leaf_bytes(row[index]) for row in rows)
            self.jobs.append((size, partial(self._reduce_other, index)))
        self.num_bytes = sum(size for size, _ in self.jobs)

    def run(self) -> list[Any]:
        """Run everything here; return one result per leaf."""
        run_here(self.jobs)
        return self.results

    def cut(self, num_bytes: int) -> None:
        """Cut arrays of which more than that is read into ranges, for several threads."""
        jobs: list[Job] = []
        for size, work in self.jobs:
            if isinstance(work, partial) and work.func is reduce_into and size > num_bytes:
                jobs += _ranges(size, work, num_bytes)
            else:
                jobs.append((size, work))
        self.jobs = jobs

    def _add_pack(self, pack: Pack) -> None:
        span = pack.span
        if span is not None:
            columns = [row[span] for row in self._rows]
        else:
            columns = [[row[index] for index in pack.indices] for row in self._rows]
        total = self._pool.array((pack.size,), result_dtype(self._op, columns[0][0].dtype))
        self.jobs.append(
            (
                pack.num_bytes * len(columns),
                partial(_reduce_pack, self._op, total, columns, pack.portions),
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
        self.jobs.append(
            (first.nbytes * len(column), partial(reduce_into, self._op, total, column))
        )
        self.results[index] = _read_only(total)

    def _reduce_other(self, index: int) -> None:
        self.results[index] = reduce_leaves(self._op, [row[index] for row in self._rows])


def _read_only(total: Any) -> object:
    shared = total.view()
    shared.flags.writeable = False
    return shared


def _ranges(size: int, work: partial[None], num_bytes: int) -> list[Job]:
    op, total, column = work.args
    if not all(array.flags.c_contiguous for array in column):
        return [(size, work)]
    count = -(-size // num_bytes)
    edges = [total.size * i // count for i in range(count + 1)]
    return [
        (size // count, partial(reduce_into, op, total, column, start, stop))
        for start, stop in pairwise(edges)
    ]


def _reduce_pack(
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


def _joined(arrays: Sequence[Any], dtype: DType) -> object:
    """Lay arrays out one behind the other, in C order; bytes are copied without looking inside."""
    try:
        return np.frombuffer(b"".join(arrays), dtype)
    except (ValueError, TypeError, BufferError):  # strided, empty, or of a dtype without buffers
        return np.concatenate(arrays, axis=None)


def joined(leaves: Sequence[Any], pack: Pack) -> Any:
    """Return the arrays of a pack, one behind the other, in one of their own."""
    arrays = [leaves[index] for index in pack.indices]
    return _joined(arrays, arrays[0].dtype)


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


@final
class BufferPool:
    """Lends the memory of large results.

    A fresh large array costs a page fault every 4 KiB, which for 64 MiB takes as long as summing
    two arrays. A buffer is free if nothing but the pool refers to it: arrays that lie in it do.

    Invariants:
        * A buffer that was not lent for `KEPT_CALLS` calls is let go.
    """

    __slots__ = ("_buffers", "_call", "_lock")

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Any]] = []  # when each was lent last, and the buffer
        self._call = 0
        self._lock = threading.Lock()  # the default strategy's pool serves every loop

    def next_call(self) -> None:
        """Begin a reduction: let go of buffers that have not been of use."""
        with self._lock:
            self._call += 1
            oldest = self._call - KEPT_CALLS
            self._buffers = [entry for entry in self._buffers if entry[0] >= oldest]

    def array(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a C-contiguous array with whatever numbers are in it."""
        size = math.prod(shape) * dtype.itemsize
        if size < POOLED_BYTES or not CAN_COUNT_REFERENCES:
            return np.empty(shape, dtype)
        with self._lock:
            return self._buffer(size).view(dtype).reshape(shape)

    def clear(self) -> None:
        """Let go of every buffer."""
        with self._lock:
            self._buffers.clear()

    def _buffer(self, size: int) -> Any:
        for index, entry in enumerate(self._buffers):
            buffer = entry[1]
            # Its references here: the entry, `buffer`, and the argument of getrefcount.
            if buffer.size == size and sys.getrefcount(buffer) == 3:
                self._buffers[index] = (self._call, buffer)
                return buffer
        buffer = np.empty(size, np.uint8)
        self._buffers.append((self._call, buffer))
        return buffer

    def __repr__(self) -> str:
        total = sum(buffer.size for _, buffer in self._buffers)
        return f"<BufferPool | {len(self._buffers)} buffers, {total} bytes>"


def deal(jobs: Sequence[Job], count: int) -> list[Callable[[], None]]:
    """Deal jobs into at most `count` shares of about the same size, the largest jobs first."""
    shares: list[list[Job]] = [[] for _ in range(count)]
    loads = [0] * count
    for job in sorted(jobs, key=_size_of, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(job)
        loads[lightest] += job[0]
    return [partial(run_here, share) for share in shares if share]


def run_here(jobs: Sequence[Job]) -> None:
    """Run jobs in the calling thread."""
    for _, work in jobs:
        work()


def num_threads(num_bytes: int, thread_bytes: int) -> int:
    """Return how many threads are worth waking if each is for at least `thread_bytes`."""
    return max(1, min(num_collective_streams(), num_bytes // thread_bytes))


async def run_on_threads(jobs: Sequence[Job], count: int) -> None:
    """Run jobs off the event loop, on at most `count` threads.

    Cancellation:
        What has started ends first.
    """
    await run_together(deal(jobs, count))


def _size_of(job: Job) -> int:
    return job[0]
