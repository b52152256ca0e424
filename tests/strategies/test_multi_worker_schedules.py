"""Several workers under many schedules: orders of frames, slow and lost workers, cancellations."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, StallError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.workers import on_workers, outcomes, strategies

Strategy = MultiWorkerMirroredStrategy
EXPECTED = (WorkerLostError, StallError, MergeMismatchError)


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def busy_step() -> Any:
    """Collectives of all kinds, some in flight together, after ops that take their time."""
    ctx = me()
    i = ctx.replica_id_in_sync_group
    first = ctx.start_all_reduce("sum", np.full(200, float(i)))
    await ctx.run_on_device(int)
    second = ctx.start_all_reduce("max", i)

    async def merge(strategy: Any, value: Any) -> Any:
        await asyncio.sleep(0)
        return await strategy.reduce("sum", value)

    merged = await ctx.merge_call(merge, (i,))
    joined = await ctx.all_gather(np.full(i, i), 0)
    return merged, joined.sum(), await second, float((await first)[0])


async def train(strategy: Strategy) -> Any:
    with strategy.scope():
        w = ar.Variable(np.full(2, float(strategy._runtime.workers.rank)))  # type: ignore[union-attr]
        sgd = ar.optimizers.SGD(0.5)

    async def step() -> None:
        i = me().replica_id_in_sync_group
        await me().run_on_device(int)
        await sgd.apply_gradients([(ar.Weighted(np.full(2, float(i)), i), w)])

    await strategy.run(step)
    results = await strategy.run(busy_step)
    await strategy.run(step)
    return w.value.tolist(), strategy.local_results(results)


@pytest.mark.explore(schedules=15)
async def test_results_do_not_depend_on_the_order_of_anything() -> None:
    results = await on_workers(2, 2, train)

    assert results == [([-1.0, -1.0], ((6, 14, 3, 6.0),) * 2)] * 2


@pytest.mark.explore(schedules=15)
async def test_a_failure_reaches_every_worker_whatever_comes_first() -> None:
    async def step() -> Any:
        await busy_step()
        if me().replica_id_in_sync_group == 1:
            raise ValueError("bad")
        return await busy_step()

    results = await outcomes(strategies(2, 2), [lambda strategy: strategy.run(step)] * 2)

    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], WorkerLostError)
    assert "ValueError: bad" in str(results[1])


@pytest.mark.explore(schedules=15)
async def test_a_mismatch_is_the_same_error_on_every_worker() -> None:
    async def step(rank: int) -> Any:
        await busy_step()
        return await (me().barrier() if rank else me().all_reduce("sum", 1))

    results = await outcomes(
        strategies(2, 2),
        [lambda strategy: strategy.run(step, (strategy._runtime.workers.rank,))] * 2,
    )

    assert all(isinstance(result, MergeMismatchError) for result in results)
    assert str(results[0]) == str(results[1])


@pytest.mark.explore(schedules=15, faults=art.Faults().slow_device("worker:1"))
async def test_slow_messages_change_nothing() -> None:
    results = await on_workers(2, 1, train)

    assert results == [([-0.5 * 2, -0.5 * 2], ((1, 1, 1, 1.0),))] * 2


@pytest.mark.explore(schedules=15, faults=art.Faults().lose_worker("worker:1"))
async def test_a_lost_worker_is_an_error_on_every_worker_and_never_a_hang() -> None:
    results = await outcomes(strategies(2, 2), [train] * 2)

    lost = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, EXPECTED) for error in lost)
    assert lost or results[0] == results[1]  # it was lost after the last message


@pytest.mark.explore(schedules=15, faults=art.Faults().hang_op(device="worker:1"))
async def test_a_silent_worker_is_a_stall_at_the_deadline() -> None:
    results = await outcomes(strategies(2, 2, timeout=5), [train] * 2)

    for result in results:
        assert isinstance(result, EXPECTED) or not isinstance(result, BaseException)


@pytest.mark.explore(schedules=15, faults=art.Faults().cancel_task("worker"))
async def test_a_cancelled_worker_leaves_no_other_one_waiting() -> None:
    made = strategies(2, 2, timeout=60)

    async def worker(strategy: Strategy) -> Any:
        async with strategy:
            return await train(strategy)

    tasks = [asyncio.create_task(worker(strategy)) for strategy in made]
    results = await asyncio.gather(*tasks, return_exceptions=True)

    for result in results:
        allowed = (*EXPECTED, asyncio.CancelledError)
        assert isinstance(result, allowed) or not isinstance(result, BaseException)


@pytest.mark.explore(schedules=60, faults=art.Faults().cancel_task("writer"))
async def test_writes_after_a_cancellation_do_not_reach_others() -> None:
    """A single replica's array is sent as it lies, so the cancelled worker copies it or waits."""
    own = np.ones(200)

    async def step(array: Any) -> Any:
        return await me().all_reduce("sum", array)

    async def writer(strategy: Strategy) -> None:
        async with strategy:
            try:
                await strategy.run(step, (own,))
            finally:
                own[:] = np.nan

    async def reader(strategy: Strategy) -> Any:
        async with strategy:
            return strategy.local_results(await strategy.run(step, (np.ones(200),)))[0]

    one, other = strategies(2, 1, timeout=60)
    tasks = [asyncio.create_task(writer(one)), asyncio.create_task(reader(other))]
    _, result = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(result, EXPECTED) or result.tolist() == [2.0] * 200


def loops(strategy: Strategy) -> tuple[ar.Variable, Any]:
    """Return a variable, and a function that runs a loop of unequal numbers of elements."""
    rank = strategy._runtime.workers.rank  # type: ignore[union-attr]
    with strategy.scope():
        total = ar.Variable(0.0, aggregation="mean")

    def step(ctx: Any, x: float) -> None:
        got = me().blocking.all_reduce("sum", x * (1 + me().replica_id_in_sync_group))
        total.blocking.assign_add(got)
        ctx.set_last_step_output("got", got, "max")

    async def given(count: int) -> Any:
        for i in range(count):
            await asyncio.sleep(0)
            yield float(i + 1)

    async def run() -> Any:
        source: Any = (float(i + 1) for i in range(3)) if rank else given(4)
        try:
            return await strategy.run_steps(step, source, 9)
        finally:
            if not rank:
                await source.aclose()

    return total, run


@pytest.mark.explore(schedules=15)
async def test_loops_stop_at_one_step_whatever_is_read_first() -> None:
    async def program(strategy: Strategy) -> Any:
        total, run = loops(strategy)
        first, second = await run(), await run()
        return first.steps_run, second.steps_run, second.last_step_outputs, float(total.value)

    results = await on_workers(2, 2, program)

    assert results == [(3, 3, {"got": 30.0}, 120.0)] * 2


@pytest.mark.explore(schedules=20, faults=art.Faults().cancel_task("worker"))
async def test_a_cancelled_loop_leaves_the_others_at_its_step_or_in_the_next() -> None:
    made, totals = strategies(2, 2, timeout=60), list[float]()

    async def worker(strategy: Strategy) -> Any:
        async with strategy:
            total, run = loops(strategy)
            try:
                return (await run()).steps_run
            finally:
                totals.append(float(total.value))

    tasks = [asyncio.create_task(worker(strategy)) for strategy in made]
    results = await asyncio.gather(*tasks, return_exceptions=True)

    for result in results:
        assert result == 3 or isinstance(result, (*EXPECTED, asyncio.CancelledError))
    steps = [[0.0, 10.0, 30.0, 60.0].index(value) for value in totals]  # complete here
    assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.explore(schedules=15, faults=art.Faults().lose_worker("worker:1"))
async def test_a_worker_lost_in_a_loop_is_an_error_and_never_a_hang() -> None:
    async def program(strategy: Strategy) -> Any:
        _, run = loops(strategy)
        return (await run()).steps_run

    results = await outcomes(strategies(2, 2), [program] * 2)

    assert all(result == 3 or isinstance(result, EXPECTED) for result in results)


@pytest.mark.explore(schedules=5)
async def test_a_worker_that_has_no_element_in_time_is_a_stall_that_names_it() -> None:
    made = strategies(2, 1, timeout=60)

    async def worker(rank: int) -> None:
        async def given() -> Any:
            yield 1.0
            if rank:
                await asyncio.Event().wait()
            yield 2.0

        source = given()
        async with made[rank]:
            try:
                await made[rank].run_steps(lambda ctx, x: me().blocking.barrier(), source, 9)
            finally:
                await source.aclose()

    tasks = [asyncio.create_task(worker(rank)) for rank in range(2)]
    with pytest.raises(StallError) as caught:
        await tasks[0]
    assert caught.value.ranks == (1,)
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
