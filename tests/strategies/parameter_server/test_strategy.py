"""The strategy and its coordinator, with servers and workers in this process."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import WouldBlock

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine, current_worker_index
from aioreplica.errors import (
    ClosureCancelledError,
    ContextError,
    LoopMismatchError,
    NonFiniteError,
    StallError,
    WorkerLostError,
)
from aioreplica.strategies.parameter_server._per_worker_variable import VariableOf
from aioreplica.strategies.parameter_server._queue import FIRST_WAITING

UNDER_WAY = 1 + FIRST_WAITING
"""Closures that one worker has."""

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: ar.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: ar.optimizers.Adagrad(0.1),
    "rmsprop": lambda: ar.optimizers.RMSprop(0.1),
    "adam": lambda: ar.optimizers.Adam(0.1, clipnorm=0.5),
    "adamw": lambda: ar.optimizers.AdamW(0.1, global_clipnorm=0.5),
}


@asynccontextmanager
async def opened(num_workers: int = 1, **options: Any) -> AsyncIterator[Any]:
    engine = LocalClosureEngine(num_workers)
    async with (
        ar.ParameterServerStrategy(engine, **options) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        yield strategy, coordinator


def descend(w: Any, optimizer: Any, target: Any) -> None:
    optimizer.apply_gradients([(w.value - target, w)])


async def descend_by_rows(w: Any, optimizer: Any, rows: Any) -> None:
    slices = ar.IndexedSlices(w.rows(rows) - 1.0, rows, w.shape)
    await optimizer.apply_gradients([(slices, w)])


@pytest.mark.asyncio
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_shards", [1, 3])
async def test_closures_one_by_one_train_as_without_servers(name: str, num_shards: int) -> None:
    start = np.arange(10.0).reshape(5, 2)
    targets = np.linspace(-1, 1, 6)
    plain, rule = ar.Variable(start), OPTIMIZERS[name]()
    for target in targets:
        await rule.apply_gradients([(plain.value - target, plain)])
    partitioner = ar.FixedShardsPartitioner(num_shards)
    async with opened(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(start), OPTIMIZERS[name]()
        for target in targets:
            await coordinator.schedule(descend, (w, optimizer, target))
        await coordinator.join()
        np.testing.assert_allclose(await w.read(), plain.value, rtol=1e-12)
        assert int(await optimizer.iterations.read()) == 6


@pytest.mark.asyncio
async def test_rows_touch_only_their_shard() -> None:
    async with opened(num_ps=2, variable_partitioner=ar.FixedShardsPartitioner(2)) as opened_:
        strategy, coordinator = opened_
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adagrad(0.5)
        await coordinator.schedule(descend_by_rows, (w, optimizer, np.array([4, 5, 4])))
        await coordinator.join()
        value = await w.read()
        assert not value[:4].any()
        assert value[4:].all()
        assert coordinator.statistics().pushes == 2  # the rows and the count
        assert (await w.read([5, 0, 5])).tolist() == value[[5, 0, 5]].tolist()


def count_twice(counter: Any) -> int:
    counter.assign_add(1)
    counter.assign_add(1)
    return int(counter.value)


async def count_and_wait(counter: Any) -> int:
    counter.assign_add(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    counter.assign_add(1)
    return 7


@pytest.mark.asyncio
@pytest.mark.parametrize("lost_after", range(6))
async def test_a_closure_of_a_lost_worker_counts_once(lost_after: int) -> None:
    async with opened(2) as (strategy, coordinator):
        with strategy.scope():
            counter = ar.Variable(0)
        remotes = [await coordinator.schedule(count_and_wait, (counter,)) for _ in range(3)]
        for _ in range(lost_after):
            await asyncio.sleep(0)
        strategy.engine.lose_worker("worker-0")
        await coordinator.join()
        assert int(await counter.read()) == 6
        assert await coordinator.fetch({"all": remotes}) == {"all": [7, 7, 7]}


def fail(kind: type[BaseException]) -> None:
    raise kind("no")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StopIteration, SystemExit])
async def test_the_first_error_is_raised_once_and_cancels_the_rest(kind: Any) -> None:
    async with opened(1) as (strategy, coordinator):
        with strategy.scope():
            counter = ar.Variable(0)
        bad = await coordinator.schedule(fail, (kind,))
        later = [await coordinator.schedule(count_twice, (counter,)) for _ in range(3)]
        expected = ValueError if kind is ValueError else RuntimeError
        with pytest.raises(expected, match="no"):
            await coordinator.join()
        with pytest.raises(expected, match="no"):
            await bad.fetch()
        for remote in later:
            with pytest.raises(ClosureCancelledError, match="another one failed"):
                await remote.fetch()
        before = int(await counter.read())
        await coordinator.schedule(count_twice, (counter,))
        await coordinator.join()
        assert int(await counter.read()) == before + 2
        assert coordinator.statistics().num_cancelled == 3


def not_finite(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(np.array([1.0, np.nan]), w)])


@pytest.mark.asyncio
async def test_closures_have_the_learning_rate_of_when_they_were_scheduled() -> None:
    async with opened(1, num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable([0.0, 0.0]), ar.optimizers.SGD(1.0)
        for rate in (1.0, 10.0, 100.0, 1.0):
            optimizer.learning_rate = rate
            coordinator.schedule_nowait(push_ones, (w, optimizer))
        await coordinator.join()
        assert (await w.read()).tolist() == [1.0 + 10.0 + 100.0 + 1.0] * 2
        server: Any = strategy.servers.handles[0]
        assert len(server._state._former) == 0


def push_ones(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(-np.ones(2), w)])


@pytest.mark.asyncio
async def test_gradients_that_are_not_finite_change_nothing() -> None:
    async with opened(1) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable([1.0, 2.0]), ar.optimizers.SGD(0.1)
            skipping = ar.optimizers.SGD(0.1, on_non_finite="skip")
        await coordinator.schedule(not_finite, (w, optimizer))
        with pytest.raises(NonFiniteError, match="not finite"):
            await coordinator.join()
        await coordinator.schedule(not_finite, (w, skipping))
        await coordinator.join()
        assert (await w.read()).tolist() == [1.0, 2.0]
        assert int(await skipping.skipped_steps.read()) == 1


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


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def note_submitted(engine: LocalClosureEngine) -> list[int]:
    """Return a list that will tell how many closures were sent together each time."""
    submit, sizes = engine.submit, list[int]()

    def submit_and_note(worker: str, tasks: Any) -> Any:
        sizes.append(len(tasks))
        return submit(worker, tasks)

    engine.submit = submit_and_note  # type: ignore[method-assign]
    return sizes


@pytest.mark.asyncio
async def test_closures_that_come_together_are_sent_together() -> None:
    async with opened(1) as (strategy, coordinator):
        sizes = note_submitted(strategy.engine)
        together = [coordinator.schedule_nowait(abs, (-i,)) for i in range(5)]
        assert await coordinator.fetch(together) == [0, 1, 2, 3, 4]
        assert await (await coordinator.schedule(abs, (-5,))).fetch() == 5
        assert sizes == [5, 1]


@pytest.mark.asyncio
async def test_an_error_ends_the_closures_sent_with_it() -> None:
    async with opened(1) as (strategy, coordinator):
        sizes = note_submitted(strategy.engine)
        calls: list[Any] = [(abs, -1), (fail, ValueError), (abs, -2), (abs, -3)]
        remotes = [coordinator.schedule_nowait(fn, (argument,)) for fn, argument in calls]
        with pytest.raises(ValueError, match="no"):
            await coordinator.join()
        assert sizes == [4]
        assert await remotes[0].fetch() == 1
        with pytest.raises(ValueError, match="no"):
            await remotes[1].fetch()
        for remote in remotes[2:]:
            with pytest.raises(ClosureCancelledError):
                await remote.fetch()
        assert coordinator.statistics().num_cancelled == 2


@pytest.mark.asyncio
async def test_closures_that_cannot_be_sent_fail_together_once() -> None:
    async with opened(1) as (strategy, coordinator):

        def refuse(worker: str, tasks: Any) -> Any:
            raise OSError("no way out")

        submit, strategy.engine.submit = strategy.engine.submit, refuse
        remotes = [coordinator.schedule_nowait(abs, (-i,)) for i in range(3)]
        with pytest.raises(OSError, match="no way out"):
            await coordinator.join()
        with pytest.raises(OSError, match="no way out"):
            await remotes[0].fetch()
        for remote in remotes[1:]:
            with pytest.raises(ClosureCancelledError):
                await remote.fetch()
        statistics = coordinator.statistics()
        assert (statistics.num_failed, statistics.num_cancelled) == (1, 2)

        strategy.engine.submit = submit
        assert await (await coordinator.schedule(abs, (-7,))).fetch() == 7
        await coordinator.join()


@pytest.mark.asyncio
async def test_a_result_goes_when_it_was_fetched_or_cannot_be() -> None:
    gc.disable()  # what is in no circle goes at once
    try:
        async with opened(1) as (strategy, coordinator):
            made: list[weakref.ref[Any]] = []
            submit = strategy.engine.submit

            def submit_and_note(worker: str, tasks: Any) -> Any:
                submissions = submit(worker, tasks)
                made.extend(map(weakref.ref, submissions))
                return submissions

            strategy.engine.submit = submit_and_note
            await coordinator.schedule(str)
            kept = await coordinator.schedule(str)
            fetched = await coordinator.schedule(str)
            assert await fetched.fetch() is await fetched.fetch()
            await coordinator.join()
            await asyncio.sleep(0)  # tasks that have ended are forgotten in the next cycle
            assert [each() is None for each in made] == [True, False, True]
            assert await kept.fetch() == ""
    finally:
        gc.enable()


MAY_END = threading.Event()


def wait_for_the_end() -> bool:
    return MAY_END.wait(30)


@pytest.mark.asyncio
async def test_a_result_is_awaited_on_its_own_loop_until_it_is_there() -> None:
    """What it waits for would never wake another one."""

    def elsewhere(remote: Any) -> Any:
        return asyncio.run(remote.fetch())

    async with opened(1) as (_, coordinator):
        MAY_END.clear()
        remote = await coordinator.schedule(wait_for_the_end)
        with pytest.raises(LoopMismatchError, match="belongs to"):
            await asyncio.to_thread(elsewhere, remote)
        MAY_END.set()
        assert await remote.fetch()
        assert await asyncio.to_thread(elsewhere, remote)


def index_and_next(iterator: Any, resource: Any) -> tuple[int, int, int]:
    return current_worker_index(), next(iterator), id(resource)


def elements(context: Any) -> Any:
    return range(context.input_pipeline_id * 10, 100)


@pytest.mark.asyncio
async def test_workers_have_their_own_datasets_and_resources() -> None:
    async with opened(1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        resource = coordinator.create_per_worker_resource(threading.Lock)
        remotes = [await coordinator.schedule(index_and_next, (iterator, resource)) for _ in "abc"]
        found = await coordinator.fetch(remotes)
        assert [each[:2] for each in found] == [(0, 0), (0, 1), (0, 2)]
        assert len({each[2] for each in found}) == 1
        with pytest.raises(ContextError, match="on the workers"):
            next(iterator)
    with pytest.raises(ContextError, match="outside a closure"):
        current_worker_index()


def count_here(counter: Any) -> int:
    counter.assign_add(1)
    return current_worker_index()


async def count_here_async(counter: Any) -> int:
    await counter.assign_add(1)
    return current_worker_index()


@pytest.mark.asyncio
@pytest.mark.parametrize("fn", [count_here, count_here_async])
async def test_each_worker_has_a_variable_for_itself(fn: Any) -> None:
    async with opened(3) as (_, coordinator):
        counter = coordinator.create_per_worker_variable(lambda: np.int64(10), name="counter")
        unused = coordinator.create_per_worker_variable([1.0, 2.0])
        remotes = [await coordinator.schedule(fn, (counter,)) for _ in range(20)]
        indices = await coordinator.fetch(remotes)

        assert await counter.read_all() == [10 + indices.count(i) for i in range(3)]
        assert (await counter.read_all())[0].dtype == np.int64
        np.testing.assert_array_equal(await unused.read_all(), [[1.0, 2.0]] * 3)
    with pytest.raises(ContextError, match=r"read_all\(\) of .*counter.*closed"):
        await counter.read_all()


@pytest.mark.asyncio
async def test_a_variable_of_a_lost_worker_begins_anew_and_that_is_told() -> None:
    async with opened(2) as (strategy, coordinator):
        engine = strategy.engine
        counter = coordinator.create_per_worker_variable(0, name="counter")
        remotes = [await coordinator.schedule(count_here, (counter,)) for _ in range(8)]
        indices = await coordinator.fetch(remotes)
        engine.lose_worker("worker-0")
        with pytest.warns(RuntimeWarning, match=r"1 workers were lost.*counter.*worker-0"):
            assert await counter.read_all() == [indices.count(1)]
        engine.add_worker()
        assert await counter.read_all() == [0, indices.count(1)]
        late = coordinator.create_per_worker_variable(5)
        assert await late.read_all() == [5, 5]

        await coordinator.aclose()
        engine.lose_worker("worker-1")  # it is told although the coordinator did not look
        async with coordinator:
            with pytest.warns(RuntimeWarning, match="worker-1"):
                assert await counter.read_all() == [0]


def wait_at_the_gate(counter: Any) -> None:
    counter.assign_add(1)
    assert MAY_END.wait(10.0)


@pytest.mark.asyncio
async def test_a_worker_that_is_lost_while_its_variable_is_read_is_left_out() -> None:
    async with opened(2) as (strategy, coordinator):
        counter = coordinator.create_per_worker_variable(0, name="counter")
        MAY_END.clear()
        remotes = [await coordinator.schedule(wait_at_the_gate, (counter,)) for _ in "ab"]
        while None in [each.running for each in strategy.engine._workers.values()]:
            await asyncio.sleep(0)
        reading = asyncio.ensure_future(counter.read_all())
        submitted = strategy.engine._workers["worker-0"].waiting
        while not submitted:  # behind the closure
            await asyncio.sleep(0)
        strategy.engine.lose_worker("worker-0")
        MAY_END.set()
        with pytest.warns(RuntimeWarning, match="worker-0"):
            assert await reading == [1]
        assert await coordinator.fetch(remotes) == [None, None]


def broken_value() -> Any:
    raise ValueError("no value today")


@pytest.mark.asyncio
async def test_an_initial_value_that_cannot_be_made_is_told() -> None:
    async with opened(1) as (_, coordinator):
        counter = coordinator.create_per_worker_variable(broken_value)
        with pytest.raises(ValueError, match="no value today"):
            await counter.read_all()
        await coordinator.join()
        with pytest.raises(TypeError, match="cannot be sent"):
            coordinator.create_per_worker_variable(threading.Lock())


@pytest.mark.asyncio
async def test_threads_of_a_worker_write_a_variable_one_at_a_time() -> None:
    variable = VariableOf(0, "counter")()

    def write() -> None:
        for _ in range(200):
            variable.assign_add(1)

    await asyncio.gather(*(asyncio.to_thread(write) for _ in range(4)))
    assert variable.value == 800
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros(2))


# ---- checkpoints, and what is lost ---------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_restored_checkpoint_goes_on_as_before(is_lost: bool, tmp_path: Path) -> None:
    rows = [np.array([i % 6, (i * 5) % 6]) for i in range(6)]
    options: dict[str, Any] = {"num_ps": 2, "variable_partitioner": ar.FixedShardsPartitioner(2)}
    async with opened(1, **options) as (strategy, coordinator):
        manager = ar.CheckpointManager(tmp_path)
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        state = {"w": w, "optimizer": optimizer}

        async def train() -> Any:
            for each in rows:
                await coordinator.schedule(descend_by_rows, (w, optimizer, each))
            await coordinator.join()
            return await w.read()

        await train()
        await manager.save(1, state)
        expected = await train()
        if is_lost:
            strategy.engine.lose_server(1)
            with pytest.raises(
                WorkerLostError, match=r"Parameter server 1 .* 'variable'"
            ) as caught:
                await train()
            assert "variable" in caught.value.variables
        await manager.restore(state)
        assert strategy.lost_variables == ()
        np.testing.assert_array_equal(await train(), expected)
        await manager.aclose()
    async with opened(1) as (strategy, coordinator):  # another number of servers
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        async with ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore({"w": w, "optimizer": optimizer}) == 1
        np.testing.assert_array_equal(await train(), expected)


@pytest.mark.asyncio
async def test_what_is_saved_on_cancel_is_on_the_servers(tmp_path: Path) -> None:
    rows = [np.array([0, 1]), np.array([1, 2]), np.array([0, 2])]
    async with opened(1, num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        state, is_trained = {"w": w, "optimizer": optimizer}, asyncio.Event()

        async def train() -> None:
            for each in rows:
                await coordinator.schedule(descend_by_rows, (w, optimizer, each))
            await coordinator.join()
            is_trained.set()
            await asyncio.Event().wait()

        async with ar.CheckpointManager(tmp_path) as manager:
            saving = asyncio.create_task(manager.save_on_cancel(train(), state, lambda: 3))
            await is_trained.wait()
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            await manager.save(4, state)
            keys = [each.key for each in manager.describe(4).entries]
            assert [each.key for each in manager.describe(3).entries] == keys
            assert len(keys) == 4  # with the slots
            for key in keys:
                stopped, saved = await manager.read(3, key), await manager.read(4, key)
                np.testing.assert_array_equal(stopped, saved, err_msg=key)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_values_are_not_in_the_program() -> None:
    async with opened(1) as (strategy, _):
        with strategy.scope():
            w, optimizer = ar.Variable([1.0, 2.0], name="w"), ar.optimizers.SGD(0.1)
        with pytest.raises(ContextError, match=r"await variable\.read\(\)"):
            _ = w.value
        with pytest.raises(ContextError, match=r"await variable\.read\(\)"):
            _ = w + 1
        with pytest.raises(ContextError, match="snapshot"):
            strategy.snapshot(w)
        with pytest.raises(ContextError, match="schedule"):
            await strategy.run(print)
        with pytest.raises(ContextError):
            await optimizer.apply_gradients([(np.ones(2), w)])
        with pytest.raises(ContextError):
            await optimizer.distributed_apply([(np.ones(2), w)])
        assert (await w.assign_add([1.0, 1.0])).tolist() == [2.0, 3.0]
        with pytest.raises(ValueError, match="Row 2 is out of range"):
            await w.read(2)


@pytest.mark.asyncio
async def test_arguments_that_cannot_be_pickled_are_named() -> None:
    lock = threading.Lock()
    async with opened(1) as (_, coordinator):
        with pytest.raises(TypeError, match=r"captured variable 'lock' \(a .*lock\)"):
            await coordinator.schedule(lambda: lock)
        with pytest.raises(ContextError, match="lives in the program"):
            await coordinator.schedule(lambda: coordinator.strategy)
        with pytest.raises(ContextError, match="lives in the program"):
            await coordinator.schedule(str, ({"inside": [coordinator.strategy]},))
        other = ar.Variable(1.0, name="other")
        with pytest.raises(ContextError, match="'other' belongs to no strategy"):
            await coordinator.schedule(count_twice, (other,))
        with pytest.raises(ContextError, match="made outside the scope"):
            await coordinator.schedule(fail, (ar.optimizers.SGD(0.1),))
        remote = await coordinator.schedule(str)
        with pytest.raises(TypeError, match="cannot be an argument of a closure"):
            await coordinator.schedule(str, (remote,))
        await coordinator.schedule(threading.Lock)
        with pytest.raises(TypeError, match=r"its result \(a .*lock\) cannot be pickled"):
            await coordinator.join()
        with pytest.raises(ValueError, match="tuple or list"):
            await coordinator.schedule(str, 3)
        with pytest.raises(TypeError, match="needs a function"):
            await coordinator.schedule(3)


@pytest.mark.asyncio
async def test_variables_live_beside_another_one() -> None:
    partitioner = ar.MinSizePartitioner(8, 2)
    async with opened(1, num_ps=3, variable_partitioner=partitioner) as (strategy, _):
        with strategy.scope():
            _first, table = ar.Variable(0.0), ar.Variable(np.zeros(4))
        with strategy.extended.colocate_vars_with(table) as here:
            assert here is strategy
            beside, small = ar.Variable(np.ones(6)), ar.Variable(1.0)
        with strategy.scope():
            later = ar.Variable(0.0)
        servers = [[shard.server for shard in v.shards] for v in (table, beside, small, later)]
        assert servers == [[1, 2], [1, 2], [1], [0]]
        assert (await beside.read()).tolist() == [1.0] * 6


@pytest.mark.asyncio
async def test_one_coordinator_at_a_time() -> None:
    async with opened(1) as (strategy, coordinator):
        with pytest.raises(ContextError, match="has a coordinator already"):
            await ar.ClusterCoordinator(strategy).join()
        await coordinator.aclose()
        with pytest.raises(ContextError, match="is closed"):
            await coordinator.schedule(str)
        async with ar.ClusterCoordinator(strategy) as another:
            assert await (await another.schedule(str)).fetch() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_ps": 0}, "num_ps must be at least 1"),
        ({"max_staleness": -1}, "at least 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ar.ParameterServerStrategy(LocalClosureEngine(1), **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_half_precision_has_masters_on_the_servers(dtype: str, tmp_path: Path) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    start, one = np.ones((6, 2), dtype), np.ones((6, 2), dtype)

    def pull_down(w: Any, optimizer: Any) -> None:
        optimizer.apply_gradients([(one, w)])

    partitioner = ar.FixedShardsPartitioner(2)
    async with opened(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(start, name="w"), ar.optimizers.SGD(2.0**-12)
        state = {"w": w, "optimizer": optimizer}
        manager = ar.CheckpointManager(tmp_path)

        async def steps(count: int) -> Any:
            for _ in range(count):
                await coordinator.schedule(pull_down, (w, optimizer))
            await coordinator.join()
            return np.array(await w.read()).astype(np.float32)

        await steps(32)
        await manager.save(1, state)
        expected = await steps(32)
        await manager.restore(state)
        np.testing.assert_array_equal(await steps(32), expected)
        assert expected.tolist() == [[1 - 2.0**-6] * 2] * 6
