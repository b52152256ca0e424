"""Sums over workers of which each gets a part, and parts that are brought together.

Parts of several arrays travel together, in one buffer for each dtype with a row for each worker.
"""

from __future__ import annotations

import asyncio
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..devices import INLINE_BYTES, run_on_host
from ..typing import ReduceOp
from ._across import SLOT_BYTES, Turn, Wire, gather_bytes
from ._plan import BufferPool, Job, num_threads, run_here, run_on_threads

Array: TypeAlias = npt.NDArray[Any]
Ranges: TypeAlias = Sequence[tuple[int, int]]
"""The first element of each worker and the one after its last, in rank order, of a flat array."""


FUSED_BYTES = 16 * 1024 * 1024
"""What is sent at once: memory of that size is used again without page faults."""

Piece: TypeAlias = tuple[int, Ranges]
"""The number of an array, and which of its elements of each worker."""


@final
class Dealt:
    """Arrays as they are dealt out among workers: in pieces, and these in groups sent at once.

    Args:
        forms: Dtype and ranges of each array.
        rank: The number of this worker.

    Attributes:
        rank: The same.
        layout: Describes it; the same on all workers.
    """

    __slots__ = ("_groups", "layout", "rank")

    def __init__(self, forms: Sequence[tuple[np.dtype[Any], Ranges]], rank: int) -> None:
        self.rank = rank
        self.layout = ", ".join(f"{dtype}[{ranges[-1][1]}]" for dtype, ranges in forms)
        self._groups: list[tuple[np.dtype[Any], list[Piece]]] = []
        newest: dict[np.dtype[Any], tuple[list[Piece], int]] = {}
        for number, (dtype, ranges) in enumerate(forms):
            for piece in _pieces(ranges, FUSED_BYTES // dtype.itemsize):
                num_bytes = sum(end - begin for begin, end in piece) * dtype.itemsize
                group, size = newest.get(dtype, ([], FUSED_BYTES))
                if size + num_bytes > FUSED_BYTES:
                    group, size = [], 0
                    self._groups.append((dtype, group))
                group.append((number, piece))
                newest[dtype] = (group, size + num_bytes)

    async def packed(self, flat: Sequence[Array], pool: BufferPool) -> list[Array]:
        """Return a buffer for each group, with a row for each worker: copies.

        Args:
            flat: The arrays, as rows.
            pool: Memory for the buffers.

        Cancellation:
            Waits for copying that has begun.
        """
        pool.next_call()
        buffers = []
        jobs: list[Job] = []
        for dtype, group in self._groups:
            buffer = pool.array((len(group[0][1]), _width(group)), dtype)
            buffers.append(buffer)
            jobs.append((2 * buffer.nbytes, partial(_pack, flat, group, buffer)))
        num_bytes = sum(size for size, _ in jobs)
        if num_bytes < INLINE_BYTES:
            run_here(jobs)
        else:
            await run_on_threads(jobs, num_threads(num_bytes, FUSED_BYTES))
        return buffers

    async def scatter(self, wire: Wire, buffers: Sequence[Array]) -> list[Array]:
        """Sum buffers over all workers; return this worker's part of each array."""
        found: dict[int, list[Array]] = {}
        for (_, group), buffer in zip(self._groups, buffers, strict=True):
            row = (await wire.reduce_scatter(buffer, ReduceOp.SUM)).reshape(-1)
            start = 0
            for number, ranges in group:
                begin, end = ranges[self.rank]
                found.setdefault(number, []).append(row[start : start + end - begin])
                start += end - begin
        parts = (found[number] for number in range(len(found)))
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    async def gather(self, wire: Wire, flat: Sequence[Array]) -> None:
        """Fill in the parts of the other workers, given this worker's in their places."""
        behind: list[Callable[[], None]] = []
        for dtype, group in self._groups:
            row = np.empty(_width(group), dtype)
            await _run(partial(_pack_row, flat, group, self.rank, row), row.nbytes)
            coming = wire.all_gather(row)
            if behind:  # while the next ones travel
                await _run(behind.pop(), FUSED_BYTES)
            rows = np.asarray(await coming)
            behind.append(partial(_fill, flat, group, self.rank, rows))
        for fill in behind:
            await _run(fill, sum(each.nbytes for each in flat))


def scatter_across(
    turn: Turn, dealt: Dealt, buffers: Sequence[Array], numbers: Sequence[float]
) -> asyncio.Future[tuple[list[Array], list[float]]]:
    """Sum arrays over all workers, of which each gets its part, and numbers.

    Args:
        turn: Of the collective.
        dealt: Who gets what.
        buffers: What this worker brings, see `Dealt.packed`.
        numbers: As many on each worker.

    Returns:
        A future of this worker's part of each sum, flat; and of the sums of the numbers.

    Determinism:
        In rank order, element by element, as `reduce_across`.
    """
    form = f"<{len(numbers)}d"
    mine = struct.pack(form, *numbers)
    in_slot = len(mine) <= SLOT_BYTES

    async def carry(wire: Wire, slots: list[bytes]) -> tuple[list[Array], list[float]]:
        parts = await dealt.scatter(wire, buffers)
        rows = slots if in_slot else await gather_bytes(wire, mine)
        columns = zip(*(struct.unpack(form, row) for row in rows), strict=True)
        return parts, [reduce(operator.add, column) for column in columns]

    slot = mine if in_slot else b""
    return turn.exchange(slot, carry, layout=f"{turn.num_workers} parts of {dealt.layout}")


def gather_parts(
    turn: Turn,
    dealt: Dealt,
    flat: Sequence[Array],
    slot: bytes,
    is_wanted: Callable[[Sequence[bytes]], bool],
) -> asyncio.Future[list[bytes]]:
    """Bring the parts of all workers together, if what they say beside them allows it.

    Args:
        turn: Of the collective.
        dealt: Who has what.
        flat: Arrays with the part of this worker; those of the others are filled in.
        slot: What this worker says.
        is_wanted: Whether to send the parts, given the slots of all; the same everywhere.

    Returns:
        A future of the slots of all workers.
    """

    async def carry(wire: Wire, slots: list[bytes]) -> list[bytes]:
        if is_wanted(slots):
            await dealt.gather(wire, flat)
        return slots

    return turn.exchange(slot, carry, what="new values", layout=dealt.layout)


async def _run(work: Callable[[], None], num_bytes: int) -> None:
    if num_bytes < INLINE_BYTES:
        work()
    else:
        await run_on_host(work)


def _pieces(ranges: Ranges, most: int) -> Iterator[Ranges]:
    """Cut the range of every worker into as many pieces, so that together they are not too many."""
    total = sum(end - begin for begin, end in ranges)
    count = max(1, -(-total // most))
    for i in range(count):
        yield [
            (begin + (end - begin) * i // count, begin + (end - begin) * (i + 1) // count)
            for begin, end in ranges
        ]


def _width(group: Sequence[Piece]) -> int:
    sizes = ([end - begin for begin, end in ranges] for _, ranges in group)
    return max(1, *map(sum, zip(*sizes, strict=True)))


def _pack(flat: Sequence[Array], group: Sequence[Piece], buffer: Array) -> None:
    for rank, row in enumerate(buffer):
        _pack_row(flat, group, rank, row)


def _pack_row(flat: Sequence[Array], group: Sequence[Piece], rank: int, row: Array) -> None:
    start = 0
    for number, ranges in group:
        begin, end = ranges[rank]
        row[start : start + end - begin] = flat[number][begin:end]
        start += end - begin
    row[start:] = 0


def _fill(flat: Sequence[Array], group: Sequence[Piece], own: int, rows: Array) -> None:
    for rank, row in enumerate(rows):
        start = 0
        for number, ranges in group:
            begin, end = ranges[rank]
            if rank != own:
                flat[number][begin:end] = row[start : start + end - begin]
            start += end - begin
