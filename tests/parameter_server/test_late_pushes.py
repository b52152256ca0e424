"""Pushes that come too late: old gradients, and workers that were thought dead."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from tests.parameter_server.coordinating import Gate, coordinating, fail, hold
from tests.sequencer import idle

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def push(w: Any, optimizer: Any, amount: float, gate: Gate | None = None) -> None:
    """Read, wait at a gate if there is one, push a gradient that adds `amount`."""
    np.asarray(w.value)
    if gate is not None:
        gate.pass_through()
    optimizer.apply_gradients([(np.full(w.shape, -amount), w)])


@pytest.mark.parametrize(
    ("bound", "value", "num_stale", "mean"),
    [(0, 1.0, 2, 0.0), (1, 2.0, 1, 1 / 2), (2, 3.0, 0, 1.0), (None, 3.0, 0, 1.0)],
)
async def test_gradients_older_than_the_bound_are_dropped_and_counted(
    bound: int | None, value: float, num_stale: int, mean: float
) -> None:
    gates = Gate(), Gate()
    async with coordinating(num_workers=3, max_staleness=bound) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros(2)), ar.optimizers.SGD(1.0)
        held = []
        for gate in gates:
            held.append(await coordinator.schedule(push, (w, optimizer, 1.0, gate)))
            await gate.reached()
        await (await coordinator.schedule(push, (w, optimizer, 1.0))).fetch()
        for gate, remote in zip(gates, held, strict=True):
            gate.open()
            await remote.fetch()
        await coordinator.join()

        assert (await w.read()).tolist() == [value, value]
        assert int(await optimizer.iterations.read()) == 3
        statistics = coordinator.statistics()
        assert statistics.pushes_stale == num_stale
        assert statistics.mean_staleness == pytest.approx(mean)
        assert statistics.max_staleness == (1 if bound == 0 else 2)


_runs: Counter[str] = Counter()


def add_late(count: Any, name: str, before: Gate, after: Gate, last: Gate) -> str:
    """Wait before the push in the first run, and after it in the second one."""
    _runs[name] += 1
    is_first = _runs[name] == 1
    if is_first:
        before.pass_through()
    count.assign_add(1.0)
    (after if is_first else last).pass_through()
    return "first" if is_first else "second"


@pytest.mark.parametrize("is_over", [False, True])
async def test_late_pushes_of_a_worker_thought_dead_count_once(is_over: bool) -> None:
    before, after, last = Gate(), Gate(), Gate()
    after.open()
    async with coordinating(num_workers=2, num_ps=1) as (strategy, coordinator):
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        args = (count, f"late {is_over}", before, after, last)
        remote = await coordinator.schedule(add_late, args)
        await before.reached()
        strategy.engine.lose_worker("worker-0")
        await last.reached()  # the second run has pushed
        if is_over:
            last.open()
            await coordinator.join()
        before.open()
        await after.reached()  # the first run has pushed, too
        last.open()

        assert await remote.fetch() == "second"
        await coordinator.join()
        assert float(await count.read()) == 1
        statistics = coordinator.statistics()
        assert (statistics.pushes, statistics.pushes_dropped) == (1, 1)
        assert statistics.num_retries == (0 if is_over else 1)
        assert statistics.num_finished == 1
        assert _runs[args[1]] == 2


def add_if(flag: Any, count: Any) -> str:
    if flag.value:
        count.assign_add(1.0)
    return "made"


async def test_a_result_is_made_again_without_pushes_while_an_older_closure_runs() -> None:
    gate = Gate()
    async with coordinating(num_workers=2, num_ps=1) as (strategy, coordinator):
        engine: Any = strategy.engine
        with strategy.scope():
            flag, count = ar.Variable(0, name="flag"), ar.Variable(np.zeros(()), name="count")
        held = await coordinator.schedule(hold, (gate,))
        await gate.reached()
        remote = await coordinator.schedule(add_if, (flag, count))
        await remote._closure.settled
        await flag.assign(1)
        engine.lose_worker("worker-1")
        engine.add_worker()
        assert await remote.fetch() == "made"
        assert float(await count.read()) == 0.0
        gate.open()
        assert await held.fetch() == "held"
        await coordinator.join()
        assert coordinator.statistics().pushes_dropped == 1


_tries: Counter[str] = Counter()


def add_in_the_first_run(count: Any, name: str, before: Gate, after: Gate) -> None:
    _tries[name] += 1
    if _tries[name] == 1:
        before.pass_through()
        count.assign_add(1.0)
        after.pass_through()


async def test_a_worker_thought_dead_adds_nothing_to_a_closure_that_has_finished() -> None:
    gate, before, after = Gate(), Gate(), Gate()
    after.open()
    async with coordinating(num_workers=2, num_ps=1) as (strategy, coordinator):
        engine: Any = strategy.engine
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        args = (count, "in the first run", before, after)
        remote = await coordinator.schedule(add_in_the_first_run, args)
        await before.reached()
        coordinator._runner._next_report = 1
        engine.lose_worker("worker-1")
        engine.add_worker()
        await remote.fetch()
        await idle()  # the servers know
        before.open()
        await after.reached()
        assert float(await count.read()) == 0.0
        gate.open()
        await coordinator.join()


def add_around(count: Any, between: Gate, after: Gate) -> None:
    count.assign_add(1.0)
    between.pass_through()
    count.assign_add(1.0)
    after.pass_through()


@pytest.mark.parametrize("way", ["schedule", "schedule_nowait", "done", "join", "fetch"])
async def test_cancelled_closures_write_nothing_once_the_error_is_seen(way: str) -> None:
    between, after = Gate(), Gate()
    async with coordinating(num_workers=2) as (strategy, coordinator):
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        await coordinator.schedule(add_around, (count, between, after))
        await between.reached()
        bad = await coordinator.schedule(fail)
        with pytest.raises(ValueError, match="bad batch"):
            await seen_by(coordinator, bad, way)
        between.open()
        await after.reached()  # it has pushed again
        after.open()
        assert float(await count.read()) == 1


async def seen_by(coordinator: Any, bad: Any, way: str) -> None:
    """Wait until something raises the error."""
    if way == "fetch":
        await bad.fetch()
    elif way == "join":
        await coordinator.join()
    while True:
        try:
            if way == "schedule":
                await coordinator.schedule(float, (1,))
            elif way == "schedule_nowait":
                coordinator.schedule_nowait(float, (1,))
            else:
                assert not coordinator.done()
        except anyio.WouldBlock:
            pass
        await asyncio.sleep(0)


def add_and_fail(count: Any, gate: Gate) -> None:
    count.assign_add(1.0)
    gate.pass_through()
    fail("alone")


async def test_an_isolated_closure_fails_alone() -> None:
    gate = Gate()
    async with coordinating(num_workers=2) as (strategy, coordinator):
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        remotes = [
            await coordinator.schedule(add_and_fail, (count, gate), isolate=True),
            await coordinator.schedule(add_and_fail, (count, gate), isolate=True),
        ]
        await gate.reached(2)
        good = await coordinator.schedule(float, (3,))
        gate.open()
        for remote in remotes:
            with pytest.raises(ValueError, match="alone"):
                await remote.fetch()
        await coordinator.join()
        assert coordinator.done()
        assert await good.fetch() == 3.0
        statistics = coordinator.statistics()
        assert (statistics.num_failed, statistics.num_cancelled) == (2, 0)


async def test_all_who_join_hear_of_the_error() -> None:
    gate = Gate()
    async with coordinating(num_workers=1) as (_, coordinator):
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        await coordinator.schedule(fail)
        joins = [asyncio.ensure_future(coordinator.join()) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open()
        for join in joins:
            with pytest.raises(ValueError, match="bad batch"):
                await join
        await coordinator.join()


async def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"aioreplica\[dask\]"):
        ar.ParameterServerStrategy()
