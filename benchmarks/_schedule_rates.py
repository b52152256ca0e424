"""How many schedules a second: the kit beside other tools and the stock loop, same program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, final

import aioreplica as ar
import aioreplica.testing as art

from ._row import Row, Target, compared_row

NUM_REPLICAS = 4
NUM_STEPS = 5
MAX_US = Target("ours", 1e6 / 3000)
MAX_RATIO_TO_TOOL = Target("ratio", 1 / 8)
TOOLS = ("simloom", "simloop")


@final
class Barrier:
    """One shared future per round."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait for the others."""
        self._arrived += 1
        if self._arrived == self._parties:
            self._arrived = 0
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                waiter.set_result(None)
            return
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


async def bare_program(*_: Any) -> None:
    """4 replicas x 5 steps: an op on a pool of one's own, and a bare barrier."""
    loop, barrier = asyncio.get_running_loop(), Barrier(NUM_REPLICAS)
    pools = [ThreadPoolExecutor(1) for _ in range(NUM_REPLICAS)]

    async def replica(i: int) -> None:
        for step in range(NUM_STEPS):
            await loop.run_in_executor(pools[i], abs, step)
            await barrier.wait()

    await asyncio.gather(*[replica(i) for i in range(NUM_REPLICAS)])
    for pool in pools:
        pool.shutdown(wait=False)


async def library_program() -> None:
    """The same with a strategy of the library: a device op and a `merge_call` each."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")[:NUM_REPLICAS]) as strategy:
        await strategy.run(_replica)


async def _replica() -> None:
    context = ar.get_replica_context()
    assert context is not None
    for step in range(NUM_STEPS):
        await context.run_on_device(abs, step)
        await context.merge_call(_merge, (step,))


def _merge(strategy: ar.Strategy, step: Any) -> None:
    """Merge nothing."""


def measure_rates(*, num_schedules: int, num_rounds: int) -> list[Row]:
    """Compare the time of a schedule, ours and others', in turns.

    Args:
        num_schedules: Schedules that make one sample.
        num_rounds: Rounds of the comparison.
    """
    contenders: dict[str, Callable[[int], object]] = {
        "bare": lambda num: art.explore(bare_program, schedules=num).check(),
        "library": lambda num: art.explore(library_program, schedules=num).check(),
        "asyncio.run": lambda num: [asyncio.run(bare_program()) for _ in range(num)],
    }
    contenders |= {name: run for name in TOOLS if (run := find_tool(name)) is not None}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for round_id in range(num_rounds + 1):
        for name, run in contenders.items():
            num = num_schedules if name in {"bare", "library"} else max(20, num_schedules // 8)
            gc.collect()  # so that no contender pays for another's garbage
            start = perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                run(num)
            if round_id > 0:
                samples[name].append((perf_counter() - start) / num * 1e6)
    rows = [
        _row("schedule, bare barrier", samples, "bare", "asyncio.run", MAX_US),
        _row("schedule, library", samples, "library", "asyncio.run", None),
    ]
    return rows + [
        _row("schedule, bare barrier", samples, "bare", name, MAX_RATIO_TO_TOOL)
        for name in TOOLS
        if name in samples
    ]


def _row(
    name: str, samples: dict[str, Sequence[float]] | Any, ours: str, other: str, target: Any
) -> Row:
    return compared_row(
        name, "simulated", NUM_REPLICAS, "us", ours=samples[ours], against=other,
        floor=samples[other], target=target,
    )  # fmt: skip


def find_tool(name: str) -> Callable[[int], object] | None:
    """Return what explores a number of schedules with another tool; None if it is not there."""
    if importlib.util.find_spec(name) is None:
        return None
    tool = importlib.import_module(name)
    if name == "simloom":
        return lambda num: tool.explore(simple_program, runs=num)
    return lambda num: tool.explore(simple_program, range(num))


async def simple_program(*_: Any) -> None:
    """`bare_program` on the default pool: other tools run no pools of one's own."""
    loop, barrier = asyncio.get_running_loop(), Barrier(NUM_REPLICAS)

    async def replica() -> None:
        for step in range(NUM_STEPS):
            await loop.run_in_executor(None, abs, step)
            await barrier.wait()

    await asyncio.gather(*[replica() for _ in range(NUM_REPLICAS)])
