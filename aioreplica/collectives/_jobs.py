"""Pieces of arithmetic that can run in any order and on any thread, dealt to threads evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from ..devices import num_collective_streams, run_together

Job: TypeAlias = tuple[int, Callable[[], None]]
"""How many bytes a piece reads and writes, and the piece."""


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
