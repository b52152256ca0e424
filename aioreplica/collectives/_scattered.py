"""Sums over workers of which each gets a part, and parts that are brought together.

Large arrays are sent from where they are, and received where they belong. Small ones travel
together, in one buffer for each dtype with a row for each worker.
"""

from __future__ import annotations

import asyncio
import operator
import struct
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TypeAlias, final

import numpy as np

from ..devices import INLINE_BYTES, run_on_host
from ..tree import Array, DType
from ..typing import ReduceOp
from ._across import Turn, Wire, gather_bytes
from ._plan import BufferPool, Job, num_threads, run_here, run_on_threads
from ._sent import SLOT_BYTES

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""The first element of each worker and the one after its last, in rank order, of a flat array."""

LARGE_BYTES = 512 * 1024
"""An array from this size on goes alone: an exchange of its own costs less than copies of it."""

FUSED_BYTES = 16 * 1024 * 1024
"""What small arrays are sent at once: memory of that size is used again without page faults."""


@final
class Dealt:
    """Arrays as they are dealt out among workers: large ones alone, small ones in groups.

    Args:
        forms: Dtype and ranges of each array.
        rank: The number of this worker.

    Attributes:
        rank: The same.
        layout: Describes it; the same on all workers.
    """

    __slots__ = ("_groups", "_large", "_ranges", "layout", "rank")

    def __init__(self, forms: Sequence[tuple[DType, Ranges]], rank: int) -> None:
        self.rank = rank
        self.layout = ", ".join(f"{dtype}[{ranges[-1][1]}]" for dtype, ranges in forms)
        self._ranges = [ranges for _, ranges in forms]
        self._large: list[int] = []
        self._groups: list[tuple[DType, list[int]]] = []
        newest: dict[DType, tuple[list[int], int]] = {}
        for number, (dtype, ranges) in enumerate(forms):
            num_bytes = ranges[-1][1] * dtype.itemsize
            if num_bytes >= LARGE_BYTES:
                self._large.append(number)
                continue
            group, size = newest.get(dtype, ([], FUSED_BYTES))
            if size + num_bytes > FUSED_BYTES:
                group, size = [], 0
                self._groups.append((dtype, group))
            group.append(number)
            newest[dtype] = (group, size + num_bytes)

    async def packed(
        self, flat: Sequence[Array], pool: BufferPool, *, are_lent: bool
    ) -> list[Array]:
        """Return what is sent: large arrays, and for each group a buffer with a row per worker.

        Args:
            flat: The arrays, as rows.
            pool: Memory for copies.
            are_lent: Whether large ones are copied, too: whoever brought them may write them as
                soon as its wait is cancelled.

        Cancellation:
            Waits for copying that has begun.
        """
        pool.next_call()
        sent = [flat[number] for number in self._large]
        jobs: list[Job] = []
        if are_lent:
            sent = [pool.array(each.shape, each.dtype) for each in sent]
            for number, copy in zip(self._large, sent, strict=True):
                jobs.append((2 * copy.nbytes, partial(np.copyto, copy, flat[number])))
        for dtype, group in self._groups:
            buffer = pool.array((len(self._ranges[group[0]]), self._width(group)), dtype)
            sent.append(buffer)
            jobs.append((2 * buffer.nbytes, partial(self._pack, flat, group, buffer)))
        num_bytes = sum(size for size, _ in jobs)
        if num_bytes < INLINE_BYTES:
            run_here(jobs)
        else:
            await run_on_threads(jobs, num_threads(num_bytes, FUSED_BYTES))
        return sent

    async def scatter(self, wire: Wire, sent: Sequence[Array]) -> list[Array]:
        """Sum what `packed` gave over all workers; return this worker's part of each array."""
        numbers = self._large
        sizes = map(self._sizes, numbers)
        coming = [
            wire.reduce_scatter(each, ReduceOp.SUM, cut)
            for each, cut in zip(sent, sizes, strict=False)
        ]
        coming += [wire.reduce_scatter(each, ReduceOp.SUM) for each in sent[len(numbers) :]]
        found: dict[int, Array] = {}
        for number, part in zip(numbers, coming, strict=False):
            found[number] = await part
        for (_, group), rows in zip(self._groups, coming[len(numbers) :], strict=True):
            row, start = (await rows).reshape(-1), 0
            for number in group:
                begin, end = self._ranges[number][self.rank]
                found[number] = row[start : start + end - begin]
                start += end - begin
        return [found[number] for number in range(len(found))]

    async def gather(self, wire: Wire, flat: Sequence[Array]) -> None:
        """Fill in the parts of the other workers, given this worker's in their places."""
        coming = [wire.all_gather(flat[number], self._sizes(number)) for number in self._large]
        for dtype, group in self._groups:
            row = np.empty(self._width(group), dtype)
            await _run(partial(self._pack_row, flat, group, self.rank, row), row.nbytes)
            rows = np.asarray(await wire.all_gather(row))
            await _run(partial(self._fill, flat, group, rows), rows.nbytes)
        for each in coming:
            await each

    def _sizes(self, number: int) -> list[int]:
        return [end - begin for begin, end in self._ranges[number]]

    def _width(self, group: Sequence[int]) -> int:
        return max(1, *map(sum, zip(*map(self._sizes, group), strict=True)))

    def _pack(self, flat: Sequence[Array], group: Sequence[int], buffer: Array) -> None:
        for rank, row in enumerate(buffer):
            self._pack_row(flat, group, rank, row)

    def _pack_row(self, flat: Sequence[Array], group: Sequence[int], rank: int, row: Array) -> None:
        start = 0
        for number in group:
            begin, end = self._ranges[number][rank]
            row[start : start + end - begin] = flat[number][begin:end]
            start += end - begin
        row[start:] = 0

    def _fill(self, flat: Sequence[Array], group: Sequence[int], rows: Array) -> None:
        for rank, row in enumerate(rows):
            start = 0
            for number in group:
                begin, end = self._ranges[number][rank]
                if rank != self.rank:
                    flat[number][begin:end] = row[start : start + end - begin]
                start += end - begin


def scatter_across(
    turn: Turn, dealt: Dealt, sent: Sequence[Array], numbers: Sequence[float]
) -> asyncio.Future[tuple[list[Array], list[float]]]:
    """Sum arrays over all workers, of which each gets its part, and numbers.

    Args:
        turn: Of the collective.
        dealt: Who gets what.
        sent: What this worker brings, see `Dealt.packed`.
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
        parts = await dealt.scatter(wire, sent)
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
