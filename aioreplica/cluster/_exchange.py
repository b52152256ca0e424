"""Collectives made of three exchanges of bytes, so that results do not depend on the engine.

An engine only moves bytes: every worker gives to all, all give to one place, or one gives to all.
Sums are made here, by the same code as those of replicas in one process, in ascending rank.

Two workers exchange whole arrays and each adds up all of it: as many bytes as in any other way,
in one exchange. More workers each add up one part (an all-to-all) and exchange the sums (an
all-gather): 2 (n - 1) / n of the array go in and out of each, which is the least there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, final

import numpy as np

from ..collectives import BufferPool
from ..devices.backends import reduce_arrays, reduce_into, result_dtype
from ..typing import ReduceOp
from ._communicator import AGREE, ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST, Call

Poll: TypeAlias = Callable[[float], bool]
"""Tells whether an exchange is over, after a pause of so many seconds if it is not."""

Finish: TypeAlias = Callable[[Poll, int], None]

SMALL_BYTES = 128 * 1024  # an exchange costs more than to add up so much
SEGMENT_BYTES = 4 * 1024 * 1024  # stays in the cache between the exchange and the sum
MAX_BYTES = 2**31 - 1  # of one message: MPI counts in C integers


class Exchange(ABC):
    """Moves bytes between the workers of a group; every method starts and returns at once.

    All arrays are flat, contiguous and of bytes, and are held by the poll function until it has
    told that the exchange is over. What a worker would send to itself may be left out.
    """

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, send: Any, recv: Any) -> Poll:
        """Collect the bytes of all workers, by rank; `send` may be its own place in `recv`."""

    @abstractmethod
    def all_to_all(self, send: Any, recv: Any, counts: list[int]) -> Poll:
        """Give each worker its part of `send`: `counts` bytes, by rank; collect the others'."""

    @abstractmethod
    def broadcast(self, buffer: Any, root: int) -> Poll:
        """Fill the buffer with that of `root`."""

    @abstractmethod
    def barrier(self) -> Poll:
        """Wait for all workers."""

    @abstractmethod
    def add(self, source: Any, target: Any) -> Poll | None:
        """Fill `target` with the sum of two workers' arrays; None if the engine is slow at that.

        Both are flat and have their own dtype. Two numbers have only one sum, so any engine's
        will do.
        """


@final
class Collectives:
    """Performs calls one after the other, on the thread of an engine.

    Args:
        exchange: Moves the bytes.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._finish: Finish = _not_in_a_call
        self._scratch = np.empty(0, np.uint8)
        self._results = BufferPool()

    def perform(self, call: Call, finish: Finish) -> Any:
        """Return the result of a call.

        Args:
            call: The call.
            finish: Waits until a poll function tells that so many bytes were exchanged; raises
                what ends the group.
        """
        self._finish = finish
        array = call.array
        if call.kind == BARRIER or not array.nbytes:
            self._finish(self._exchange.barrier(), 0)
        if call.kind == BARRIER:
            return None
        if call.kind == BROADCAST:
            return self._broadcast(array, call.root)
        if call.kind == ALL_GATHER:
            return self._all_gather(array)
        assert call.op is not None  # those that are left reduce
        if call.kind == AGREE:
            assert call.agrees is not None
            rows = self._all_gather(array)
            if not call.agrees(rows):
                return rows, None
            return rows, [self._all_reduce(each, call.op) for each in call.summands]
        if call.kind == ALL_REDUCE:
            return self._all_reduce(array, call.op)
        return self._reduce_scatter(array, call.op)

    def _broadcast(self, array: Any, root: int) -> Any:
        result = array.copy() if self._exchange.rank == root else np.empty_like(array)
        for part in _segments(result.reshape(-1), MAX_BYTES):
            self._finish(self._exchange.broadcast(as_bytes(part), root), part.nbytes)
        return result

    def _all_gather(self, array: Any) -> Any:
        rows = np.empty((self._exchange.size, *array.shape), array.dtype)
        if array.nbytes:
            rows[self._exchange.rank] = array
            self._gather(array, rows)
        return rows

    def _gather(self, array: Any, rows: Any) -> None:
        require_size(array.nbytes)
        self._finish(self._exchange.all_gather(as_bytes(array), as_bytes(rows)), rows.nbytes)

    def _all_reduce(self, array: Any, op: ReduceOp) -> Any:
        size = self._exchange.size
        if array.nbytes <= SMALL_BYTES // size:
            return reduce_arrays(op, list(self._all_gather(array)))
        self._results.next_call()
        result = self._results.array(array.shape, result_dtype(op, array.dtype))
        source, target = array.reshape(-1), result.reshape(-1)
        if size == 2 and op is ReduceOp.SUM and result.dtype == array.dtype:
            poll = self._exchange.add(source, target)
            if poll is not None:
                self._finish(poll, target.nbytes)
                return result
        length = max(1, SEGMENT_BYTES // array.itemsize // size) * size
        whole = source.size - source.size % size  # what can be cut into equal parts
        for start in range(0, whole, length):
            part = slice(start, min(start + length, whole))
            if size <= 2:
                self._reduce_whole(op, source[part], target[part])
            else:
                self._reduce_parts(op, source[part], target[part])
        if whole < source.size:
            self._reduce_whole(op, source[whole:], target[whole:])
        return result

    def _reduce_whole(self, op: ReduceOp, source: Any, target: Any) -> None:
        """Exchange everything, and add up all of it."""
        rows = self._rows(source.size, source.dtype)
        self._gather(source, rows)
        reduce_into(op, target, self._with_own(rows, source))

    def _reduce_parts(self, op: ReduceOp, source: Any, target: Any) -> None:
        """Add up one part, and exchange the sums."""
        rank, size = self._exchange.rank, self._exchange.size
        length = source.size // size
        own = slice(rank * length, (rank + 1) * length)
        rows = self._rows(length, source.dtype)
        counts = [length * source.itemsize] * size
        poll = self._exchange.all_to_all(as_bytes(source), as_bytes(rows), counts)
        self._finish(poll, source.nbytes)
        reduce_into(op, target[own], self._with_own(rows, source[own]))
        self._gather(target[own], target)

    def _reduce_scatter(self, array: Any, op: ReduceOp) -> Any:
        rank, size = self._exchange.rank, self._exchange.size
        parts = np.array_split(array, size)
        rows = np.empty((size, *parts[rank].shape), array.dtype)
        if array.nbytes:
            require_size(max(array.nbytes, rows.nbytes))
            counts = [part.nbytes for part in parts]
            poll = self._exchange.all_to_all(as_bytes(array), as_bytes(rows), counts)
            self._finish(poll, array.nbytes)
        return reduce_arrays(op, self._with_own(rows, parts[rank]))

    def _with_own(self, rows: Any, own: Any) -> list[Any]:
        """Return the rows of all workers, where this one's need not have been sent."""
        arrays = list(rows)
        arrays[self._exchange.rank] = own
        return arrays

    def _rows(self, length: int, dtype: Any) -> Any:
        """Return memory for one row per worker, the same again and again."""
        num_bytes = self._exchange.size * length * dtype.itemsize
        if self._scratch.nbytes < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes].view(dtype).reshape(self._exchange.size, length)


def _not_in_a_call(poll: Poll, num_bytes: int) -> None:
    raise AssertionError("Exchanges belong to calls.")


def as_bytes(array: Any) -> Any:
    """Return a flat view of the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def require_size(num_bytes: int) -> None:
    """Check that an engine can count so many bytes.

    Raises:
        ValueError: If it cannot.
    """
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"A worker sends at most 2 GiB at once in all_gather and reduce_scatter; this is "
            f"{num_bytes / 2**30:.1f} GiB. Cut the array, or use all_reduce, which does."
        )


def _segments(array: Any, num_bytes: int) -> list[Any]:
    length = max(1, num_bytes // array.itemsize)
    return [array[start : start + length] for start in range(0, array.size, length)]
