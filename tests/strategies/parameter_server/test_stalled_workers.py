"""Workers that hang, end or have too much to do, and the closures that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from anyio import WouldBlock

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import ClosureCancelledError, StallError, WorkerLostError
from tests.strategies.parameter_server.opening import UNDER_WAY, count_twice, fail, opened, until


@pytest.mark.asyncio
async def test_a_full_queue() -> None:
    gate.clear()
    async with (
        ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy,
        ar.ClusterCoordinator(strategy, queue_size=1) as coordinator,
    ):
        for _ in range(UNDER_WAY + 1):  # one in the queue
            coordinator.schedule_nowait(wait_for_gate)
            await asyncio.sleep(0)
        with pytest.raises(WouldBlock):
            coordinator.schedule_nowait(wait_for_gate)
        waiting = asyncio.ensure_future(coordinator.schedule(wait_for_gate))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await waiting
        await coordinator.join()
        assert coordinator.done()


gate = threading.Event()


def wait_for_gate() -> None:
    gate.wait(10)


@pytest.mark.asyncio
async def test_a_closure_that_takes_too_long() -> None:
    gate.clear()
    async with opened(1) as (_, coordinator):
        await coordinator.schedule(wait_for_gate, timeout_s=0.01)
        with pytest.raises(StallError, match=r"has not ended within 0\.01 s"):
            await coordinator.join()
        gate.set()


gates: dict[int, asyncio.Event] = {}
began: list[int] = []


async def wait_for_own_gate(number: int) -> None:
    began.append(number)
    await gates.setdefault(number, asyncio.Event()).wait()


async def note_begun(number: int) -> None:
    began.append(number)


async def ignore_all_until_gate_0() -> None:
    """Hang as a worker does whose thread never comes back."""
    while not gates.setdefault(0, asyncio.Event()).is_set():
        with suppress(asyncio.CancelledError):
            await gates[0].wait()


@pytest.fixture
def no_gates() -> Iterator[None]:
    gates.clear()
    began.clear()
    yield
    gates.clear()


@pytest.mark.usefixtures("no_gates")
def test_a_worker_that_hangs_is_restarted_and_its_place_is_taken() -> None:
    async def main() -> None:
        async with opened(1) as (_, coordinator):
            await coordinator.schedule(ignore_all_until_gate_0, timeout_s=1.0)
            with pytest.raises(StallError, match=r"has not answered for 11 s.*is told to restart"):
                await coordinator.join()
            await coordinator.schedule(note_begun, (1,))
            await coordinator.join()
            gates[0].set()
        assert began == [1]

    art.run(main)


@pytest.mark.usefixtures("no_gates")
@pytest.mark.parametrize("isolate", [False, True])
def test_closures_that_hang_together_cost_their_worker_only(
    isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it was taken away the other one got the second of them, and was restarted as well."""
    restarted, restart = [], LocalClosureEngine.restart_worker

    async def noted(engine: LocalClosureEngine, worker: str) -> bool:
        restarted.append(worker)
        return await restart(engine, worker)

    two_each = property(lambda engine: dict.fromkeys(engine._workers, 2))
    monkeypatch.setattr(LocalClosureEngine, "workers_now", two_each)
    monkeypatch.setattr(LocalClosureEngine, "restart_worker", noted)

    async def main() -> None:
        async with opened(1) as (strategy, coordinator):
            remotes = [
                await coordinator.schedule(ignore_all_until_gate_0, timeout_s=1.0, isolate=isolate)
                for _ in range(2)
            ]
            await until(lambda: 0 in gates)
            strategy.engine.add_worker()
            for remote in remotes if isolate else remotes[:1]:
                with pytest.raises(StallError, match="its worker worker-0 has not answered"):
                    await remote.fetch()
            await until(lambda: "worker-2" in strategy.engine.workers_now)
            assert restarted == ["worker-0"]
            with suppress(StallError):
                await coordinator.join()
            gates[0].set()

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_a_healthy_worker_with_much_to_do_is_not_thought_to_hang() -> None:
    """The clock of a closure starts when the one before has ended."""

    async def main() -> None:
        async with opened(1) as (strategy, coordinator):
            for _ in range(60):
                coordinator.schedule_nowait(asyncio.sleep, (0.9,), timeout_s=1.0)
            await coordinator.join()
            assert [*strategy.engine.workers_now] == ["worker-0"]

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_without_any_worker_all_that_waits_is_lost_in_the_end() -> None:
    async def main() -> None:
        async with opened(2) as (strategy, coordinator):
            done = await coordinator.schedule(abs, (-1,))
            await coordinator.join()
            begun = [
                await coordinator.schedule(wait_for_own_gate, (number,)) for number in range(12)
            ]
            await until(lambda: len(began) == 2)
            for name in [*strategy.engine.workers_now]:
                strategy.engine.lose_worker(name)
            clock = asyncio.get_running_loop().time
            start_s = clock()
            with pytest.raises(WorkerLostError, match="no worker for 60 s"):
                await done.fetch()  # its result has gone with the worker
            assert clock() - start_s == pytest.approx(60.0)
            for remote in begun:
                with pytest.raises(WorkerLostError, match="no worker for 60 s, and 12 closures"):
                    await remote.fetch()
            with pytest.raises(WorkerLostError, match="no worker"):
                await coordinator.join()
            strategy.engine.add_worker()
            assert await done.fetch() == 1
            assert await (await coordinator.schedule(abs, (-2,))).fetch() == 2

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_one_that_ends_with_each_of_its_workers_is_given_up() -> None:
    async def main() -> None:
        async with opened(1) as (strategy, coordinator):
            await coordinator.schedule(wait_for_own_gate, (0,))
            later = await coordinator.schedule(note_begun, (1,))
            for turn in range(5):
                await until(lambda turn=turn: began.count(0) == turn + 1)  # type: ignore[misc]
                strategy.engine.lose_worker(f"worker-{turn}")
                strategy.engine.add_worker()
            with pytest.raises(WorkerLostError, match=r"wait_for_own_gate #0 .* worker-0, .*-4"):
                await coordinator.join()
            with pytest.raises(ClosureCancelledError):
                await later.fetch()

    art.run(main)


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_an_async_closure_that_cancels_itself_has_failed() -> None:
    async with opened(1) as (_, coordinator):
        remote = await coordinator.schedule(cancel_itself)
        with pytest.raises(RuntimeError, match="cancelled its own task"):
            await remote.fetch()
        with pytest.raises(RuntimeError, match="cancelled its own task"):
            await coordinator.join()


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_gates")
async def test_strategies_that_share_an_engine_end_only_what_is_their_own() -> None:
    engine = LocalClosureEngine(2)
    async with (
        ar.ParameterServerStrategy(engine) as kept,
        ar.ClusterCoordinator(kept) as coordinator,
    ):
        with kept.scope():
            counter = ar.Variable(0)
        mine = await coordinator.schedule(wait_for_own_gate, (0,))
        await until(lambda: began == [0])
        await coordinator.schedule(count_twice, (counter,))
        async with (
            ar.ParameterServerStrategy(engine) as other,
            ar.ClusterCoordinator(other) as another,
        ):
            for number in (1, 2):
                await another.schedule(wait_for_own_gate, (number,))
            await until(lambda: len(began) == 2)
        assert engine.num_workers == 2
        gates[0].set()
        await mine.fetch()
        await coordinator.join()
        assert int(await counter.read()) == 2


@pytest.mark.usefixtures("no_gates")
def test_closures_sent_before_an_error_take_no_worker_after_it() -> None:
    async def main() -> None:
        async with opened(1) as (_, coordinator):
            coordinator.schedule_nowait(fail, (ValueError,))
            coordinator.schedule_nowait(wait_for_own_gate, (1,))  # begins when the first has failed
            for number in (2, 3):
                coordinator.schedule_nowait(note_begun, (number,))
            with pytest.raises(ValueError, match="no"):
                await coordinator.join()
            await coordinator.schedule(note_begun, (4,))
            gates[1].set()
            await coordinator.join()
        assert began == [1, 4]

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_room_that_is_given_to_a_cancelled_schedule_goes_to_the_next() -> None:
    """The wait is cancelled in the very step in which a closure ends and makes room for it."""

    async def main() -> None:
        async with (
            ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy,
            ar.ClusterCoordinator(strategy, queue_size=1) as coordinator,
        ):
            for number in range(UNDER_WAY + 1):  # one in the queue
                coordinator.schedule_nowait(wait_for_own_gate, (number,))
            first, second = (
                asyncio.ensure_future(coordinator.schedule(note_begun, (number,)))
                for number in (100, 101)
            )
            runner = coordinator._runner
            await until(lambda: len(runner.room) == 2 and 0 in gates)
            [waits, _], pump = runner.room, runner.pump

            def pump_and_cancel() -> None:
                pump()
                if waits.done() and not waits.cancelled():
                    first.cancel()

            runner.pump = pump_and_cancel  # type: ignore[method-assign]
            gates[0].set()
            await second
            assert first.cancelled()
            assert began[:2] == [0, 1]
            assert 2 not in began  # no other closure has ended meanwhile
            for number in range(1, UNDER_WAY + 1):
                gates.setdefault(number, asyncio.Event()).set()
            await coordinator.join()
        assert began[-1] == 101

    art.run(main)


async def add_to(counter: Any, number: int) -> None:
    began.append(number)
    await counter.assign_add(1)


@pytest.mark.usefixtures("no_gates")
def test_what_runs_when_its_strategy_is_reopened_keeps_its_place() -> None:
    """The clocks of new closures start when an old one has ended, which nobody can end before."""

    async def main() -> None:
        gates.clear()
        began.clear()
        async with opened(1) as (strategy, coordinator):
            with strategy.scope():
                counter = ar.Variable(0.0, name="counter")
            await coordinator.schedule(ignore_all_until_gate_0, timeout_s=None)
            await until(lambda: 0 in gates)
            strategy.engine.lose_server(0)
            with pytest.raises(WorkerLostError):
                await counter.read()
            await strategy.reopen()
            await counter.assign(np.float64(0))
            for number in range(1, 4):
                await coordinator.schedule(add_to, (counter, number), timeout_s=1.0)
            await asyncio.sleep(60.0)
            assert began == []
            gates[0].set()
            await coordinator.join()
            assert began == [1, 2, 3]
            assert float(await counter.read()) == 3.0
            assert [*strategy.engine.workers_now] == ["worker-0"]

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_one_that_hangs_when_its_strategy_is_reopened_costs_its_worker() -> None:
    async def main() -> None:
        gates.clear()
        began.clear()
        async with opened(1) as (strategy, coordinator):
            await coordinator.schedule(ignore_all_until_gate_0, timeout_s=1.0)
            await until(lambda: 0 in gates)
            strategy.engine.lose_server(0)
            await strategy.reopen()
            remote = await coordinator.schedule(abs, (-1,), timeout_s=1.0)
            assert await remote.fetch() == 1
            await coordinator.join()
            assert [*strategy.engine.workers_now] == ["worker-1"]
            gates[0].set()

    art.run(main)


async def end_at_gate_0() -> None:
    """Wait for ever; once cancelled, end when gate 0 opens."""
    began.append(0)
    try:
        await asyncio.Event().wait()
    finally:
        await gates.setdefault(0, asyncio.Event()).wait()


@pytest.mark.usefixtures("no_gates")
def test_what_can_be_ended_is_when_its_strategy_is_reopened() -> None:
    """It has no timeout, so it would have its worker for ever; it has it until it has ended."""

    async def main() -> None:
        async with opened(1) as (strategy, coordinator):
            with strategy.scope():
                counter = ar.Variable(0.0, name="counter")
            await coordinator.schedule(end_at_gate_0, timeout_s=None)
            await until(lambda: bool(began))
            strategy.engine.lose_server(0)
            await strategy.reopen()
            await counter.assign(np.float64(0))
            await coordinator.schedule(add_to, (counter, 1), timeout_s=1.0)
            await until(lambda: 0 in gates)  # it has been cancelled
            await asyncio.sleep(60.0)
            assert began == [0]
            gates[0].set()
            await coordinator.join()
            assert began == [0, 1]
            assert [*strategy.engine.workers_now] == ["worker-0"]

    art.run(main)


@pytest.mark.usefixtures("no_gates")
def test_what_runs_on_another_engine_has_no_place_in_the_new_one() -> None:
    """Its worker has the name of a new one, which is idle."""

    async def main() -> None:
        async with opened(1) as (strategy, coordinator):
            former = strategy.engine
            async with ar.ParameterServerStrategy(former) as other:  # so it stays open
                with other.scope():
                    kept = ar.Variable(0.0, name="kept")
                await kept.read()
                await coordinator.schedule(ignore_all_until_gate_0, timeout_s=None)
                await until(lambda: 0 in gates)
                former.lose_server(0)
                await strategy.reopen(LocalClosureEngine(1))
                assert coordinator._runner.queue.with_workers() == []
                remote = await coordinator.schedule(abs, (-1,), timeout_s=1.0)
                assert await remote.fetch() == 1
                assert former.workers_now == strategy.engine.workers_now
                gates[0].set()

    art.run(main)
