"""Exhaustive search against brute force, with and without what sleep sets leave out."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import aioreplica.testing as art
from aioreplica.testing import _branches, _exhaustive
from aioreplica.testing._branches import Search
from aioreplica.testing._execute import Outcome
from aioreplica.testing._participants import CLOCK, Participant
from aioreplica.testing._runner import Runner
from aioreplica.testing._sandbox import Sandbox
from aioreplica.testing._schedule import Schedule
from aioreplica.testing._strategies import FIFO, mix

BOUNDS = (0, 1, 2, None)
LIMIT = 300
"""Programs with more schedules are not compared."""
Main = Callable[[], Any]
Ends = frozenset[tuple[str, str, str]]
"""How schedules ended: kind, value, error."""


# ---- three ways to run every schedule -----------------------------------------------------------


@dataclass
class Path:
    """Chooses by the positions of options, and notes what every option would have cost."""

    positions: tuple[int, ...]
    taken: list[int] = field(default_factory=list)
    costs: list[list[int]] = field(default_factory=list)
    last: int = -1

    def __call__(self, options: list[Participant]) -> int:
        is_task = [hasattr(each, "number") for each in options]
        is_outside = [each.index == CLOCK or hasattr(each, "deadline") for each in options]
        if any(is_task):  # one may have gone on since, when nobody else could
            self.last = options[is_task.index(True)]._loop.sim_tasks.last  # type: ignore[attr-defined]
        goes_on = any(each.index == self.last for each in options)
        costs = [
            int(not all(is_outside) if each.index == CLOCK else goes_on and task)
            * (each.index != self.last)
            for each, task in zip(options, is_task, strict=True)
        ]
        depth = len(self.taken)
        at = self.positions[depth] if depth < len(self.positions) else costs.index(0)
        self.taken.append(at)
        self.costs.append(costs)
        return at


def by_brute_force(runner: Runner, base: Schedule, bound: int | None) -> tuple[Ends, int]:
    """Run every path of options whose preemptions are within the bound."""
    todo: list[tuple[int, ...]] = [()]
    ends, num_run = set(), 0
    while todo:
        positions = todo.pop()
        outcome, path = runner.choose(base, partial(Path, positions))
        num_run += 1
        ends.add(end_of(outcome))
        spent = 0
        for depth, (at, costs) in enumerate(zip(path.taken, path.costs, strict=True)):
            if depth >= len(positions):
                todo += [
                    (*path.taken[:depth], other)
                    for other, cost in enumerate(costs)
                    if other != at and (bound is None or spent + cost <= bound)
                ]
            spent += costs[at]
    return frozenset(ends), num_run


def by_search(runner: Runner, base: Schedule, bound: int | None) -> tuple[Ends | None, int]:
    """Run the search; None if it takes too many schedules."""
    search = Search(runner, base, bound, LIMIT)
    ends = frozenset(end_of(outcome) for _, outcome in search.outcomes())
    return ends if search.is_complete else None, search.num_run


def end_of(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.kind, repr(outcome.value), repr(outcome.error)


@dataclass
class Counts:
    """Sums over what was compared: searches, schedules with and without sleep sets."""

    compared: int = 0
    run: int = 0
    all: int = 0

    def compare(self, main: Main, monkeypatch: pytest.MonkeyPatch, fidelity: str) -> None:
        """Compare the outcomes of one program at every bound."""
        with Sandbox() as sandbox:
            runner = Runner(main, sandbox)
            base = Schedule(FIFO, mix(0, 0), fidelity=fidelity)
            for bound in BOUNDS if fidelity == "reorder" else (None,):
                with monkeypatch.context() as patched:
                    patched.setattr(_branches, "kit_step", lambda option: None)
                    expected, num_all = by_search(runner, base, bound)
                if expected is None:
                    return
                found, num_run = by_search(runner, base, bound)
                brute = by_brute_force(runner, base, bound)
                assert (expected, num_all) == brute, bound
                assert found == expected, bound
                self.compared += 1
                self.run += num_run
                self.all += num_all


# ---- random programs ----------------------------------------------------------------------------


class RandomProgram:
    """Few tasks that sleep, call pools, cancel each other and wait for all in some way.

    Args:
        seed: Draws them.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        pools = rng.choice([2, 2, 3])
        self.workers = [rng.choice([1, 1, 2]) for _ in range(pools)]
        steps: list[tuple[Any, ...]] = [
            (self.wait,), (self.call, pools), (self.call, pools), (self.call_two, pools, pools),
            (self.submit, pools), (self.sleep, 3), (self.cancel, 2),
        ]  # fmt: skip
        self.scripts: list[list[Callable[[str], Awaitable[Any]]]] = []
        for _ in range(rng.choice([1, 2, 2])):
            drawn = [rng.choice(steps) for _ in range(rng.choice([1, 1, 1, 2]))]
            self.scripts.append([partial(do, *map(rng.randrange, ends)) for do, *ends in drawn])
        self.join: Any = rng.choice([self.gather, asyncio.wait, self.wait_for_each])

    async def __call__(self) -> list[Any]:
        self.log: list[Any] = []
        self.pools = [ThreadPoolExecutor(number) for number in self.workers]
        self.tasks: list[asyncio.Task[None]] = []
        for name, script in zip("ab", self.scripts, strict=False):
            self.tasks.append(asyncio.ensure_future(self.follow(name, script)))
        await self.join(self.tasks)
        for pool in self.pools:
            pool.shutdown(wait=False)
        return [*self.log, asyncio.get_running_loop().time()]

    async def follow(self, name: str, script: list[Callable[[str], Awaitable[Any]]]) -> None:
        try:
            for number, do in enumerate(script):
                await do(name)
                self.log.append((name, number))
        except asyncio.CancelledError:
            self.log.append((name, "cancelled"))
            raise

    async def wait(self, name: str) -> None:
        await asyncio.sleep(0)

    async def sleep(self, which: int, name: str) -> None:
        await asyncio.sleep((0.001, 0.005, 0.3)[which])

    async def cancel(self, which: int, name: str) -> None:
        if which < len(self.tasks):
            self.tasks[which].cancel()

    async def call(self, pool: int, name: str) -> None:
        await self.called(pool, f"{name} calls")

    async def call_two(self, one: int, other: int, name: str) -> None:
        await asyncio.gather(self.called(one, f"{name} 1"), self.called(other, f"{name} 2"))

    async def submit(self, pool: int, name: str) -> None:
        await asyncio.wrap_future(self.pools[pool].submit(self.log.append, f"{name} submits"))

    def called(self, pool: int, text: str) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.pools[pool], self.log.append, text)

    async def gather(self, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_each(self, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*[asyncio.wait([task]) for task in tasks])


# ---- the tests ----------------------------------------------------------------------------------


async def calls_in_two_pools() -> None:
    loop = asyncio.get_running_loop()
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    await asyncio.gather(*[loop.run_in_executor(pool, int) for pool in pools])


def test_orders_that_differ_for_nobody_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    counts.compare(calls_in_two_pools, monkeypatch, "reorder")

    assert counts == Counts(len(BOUNDS), run=32, all=56)


async def goes_on_after_each_wake_up() -> None:
    """Fail where each side, when it has woken the other, takes one more step first."""
    turns, log = (asyncio.Event(), asyncio.Event()), list[int]()

    async def side(me: int) -> None:
        for _ in range(3):
            await turns[me].wait()
            turns[me].clear()
            log.append(me)
            turns[1 - me].set()
            await asyncio.sleep(0)
            log.append(me)

    turns[0].set()
    await asyncio.gather(side(0), side(1))
    assert log != [0, 0, 1, 1] * 3


def test_a_task_that_goes_on_after_a_step_without_a_choice_preempts_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_exhaustive, "CROSS_CHECK", 1)  # no sample helps

    report = art.exhaustive(goes_on_after_each_wake_up, max_preemptions=0)

    assert report.failed
    assert report.cross_checked == 0


@pytest.mark.xslow
@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_no_outcome_of_random_programs_is_lost(
    fidelity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts()
    for seed in range(3, 13):
        counts.compare(RandomProgram(seed), monkeypatch, fidelity)

    assert counts.compared >= (20 if fidelity == "reorder" else 5)
    assert counts.run < counts.all


@pytest.mark.xslow
@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_no_outcome_of_many_random_programs_is_lost(
    fidelity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts()
    for seed in range(100, 160):
        counts.compare(RandomProgram(seed), monkeypatch, fidelity)
    print(counts)

    assert counts.compared >= (50 if fidelity == "reorder" else 15)
    assert counts.run < counts.all
