"""Carrying out pieces of arithmetic: here if they are few, on several threads if they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ..devices import num_collective_streams, run_together
from ._application import Piece

INLINE_BYTES = 12 * 1024 * 1024
"""A step that reads and writes no more than this runs on the event loop, which takes it up to a
millisecond; a thread would have it done 0.2 ms later."""

THREAD_BYTES = 64 * 1024 * 1024
"""What a further thread has to read and write to be worth waking: two threads of short NumPy calls
wait for each other's lock, and up to here that costs more than the second core brings."""

Work = Iterator[Sequence[Piece]]
"""Arithmetic in stages: a stage is complete before the next one is asked for."""


def num_bytes(pieces: Iterable[Piece]) -> int:
    """Return how much some pieces read and write."""
    return sum(piece.num_bytes for piece in pieces)


def fits_inline(size: int) -> bool:
    """Tell whether so many bytes are few enough for the event loop."""
    return size <= INLINE_BYTES


def run_here(work: Work) -> None:
    """Carry out all stages in the calling thread."""
    for pieces in work:
        for piece in pieces:
            piece.run()


async def run_in_threads(work: Work) -> None:
    """Carry out all stages off the event loop, except those that are small.

    Cancellation:
        What has started ends first; the stages after that are not begun.
    """
    for pieces in work:
        size = num_bytes(pieces)
        if fits_inline(size):
            for piece in pieces:
                piece.run()
            continue
        count = max(1, min(num_collective_streams(), size // THREAD_BYTES))
        await run_together(_shares(pieces, count))


def _shares(pieces: Sequence[Piece], count: int) -> list[Callable[[], None]]:
    """Deal pieces into at most `count` shares of about the same size."""
    shares: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda each: each.num_bytes, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece.num_bytes
    return [partial(_run_all, share) for share in shares if share]


def _run_all(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece.run()
