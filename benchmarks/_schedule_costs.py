"""What the testing kit costs beside schedules: memory of long runs, and points outside of it."""

from __future__ import annotations

import asyncio
import timeit
from collections.abc import Awaitable, Callable

import psutil

import aioreplica.testing as art

MIB = 2**20
NUM_CALLS = 100_000


def memory_of_steps(num_steps: int) -> dict[str, float]:
    """Return by how many MiB one schedule of so many steps leaves the process larger, by kind."""
    grown = {}
    for name, once in (("yields", 0.0), ("timers", 0.001)):
        art.explore(_repeating(once, 1000), schedules=3)
        before = psutil.Process().memory_info().rss
        report = art.explore(_repeating(once, num_steps), schedules=1, max_steps=4 * num_steps)
        report.check()
        grown[name] = (psutil.Process().memory_info().rss - before) / MIB
    return grown


def cost_of_a_point() -> tuple[float, float]:
    """Return the nanoseconds of `art.fault_point` outside the kit, and of a call of nothing."""
    pairs = [
        [min(timeit.repeat(call, number=NUM_CALLS, repeat=3)) / NUM_CALLS * 1e9 for call in calls]
        for calls in [(lambda: art.fault_point("name"), lambda: _nothing("name"))] * 5
    ]
    return min(ours for ours, _ in pairs), min(floor for _, floor in pairs)


def _repeating(seconds: float, times: int) -> Callable[[], Awaitable[None]]:
    async def program() -> None:
        for _ in range(times):
            await asyncio.sleep(seconds)

    return program


def _nothing(_name: str) -> None:
    """Return at once."""
