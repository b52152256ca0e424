"""What workers do to each other: failures, differences, early ends, losses, cancellations."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import (
    ContextError,
    MergeMismatchError,
    NonFiniteError,
    StallError,
    WorkerLostError,
)
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.workers import communicator_of, on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


async def meet(value: Any = 1.0, op: str = "sum") -> Any:
    return await me().all_reduce(op, value)


async def test_an_exception_on_one_worker_ends_the_run_on_all_naming_rank_and_cause() -> None:
    async def step() -> None:
        await meet()
        if me().replica_id_in_sync_group == 3:
            raise ValueError("bad pixel")
        await meet()

    results = await outcomes(strategies(3, 2), [lambda strategy: strategy.run(step)] * 3)

    assert isinstance(results[1], ValueError)
    assert "Raised in replica 3 (cpu:3)" in results[1].__notes__[0]
    for result in (results[0], results[2]):
        assert isinstance(result, WorkerLostError)
        assert result.ranks == (1,)
        assert "Worker 1 failed in run 0" in str(result)
        assert "ValueError: bad pixel" in str(result)


@pytest.mark.parametrize("size", [1, 200])
async def test_a_worker_that_fails_beside_a_mean_is_told_of_and_all_go_on(size: int) -> None:
    """What tells of its failure comes with no mean."""

    async def step(is_good: bool) -> Any:
        await meet()
        if me().replica_id_in_sync_group == 1 and not is_good:
            raise ValueError("bad batch")
        return await me().all_reduce("mean", np.ones(size))

    async def program(strategy: Strategy) -> list[Any]:
        try:
            await strategy.run(step, (False,))
        except (ValueError, WorkerLostError) as error:
            mean = strategy.local_results(await strategy.run(step, (True,)))[0]
            return [type(error), str(error), mean.tolist()]
        raise AssertionError

    first, second = await on_workers(2, 1, program)
    assert first[0] is WorkerLostError
    assert "Worker 1 failed" in first[1]
    assert "ValueError: bad batch" in first[1]
    assert second[:2] == [ValueError, "bad batch"]
    assert first[2] == second[2] == [1.0] * size


async def test_a_mismatch_between_the_replicas_of_one_worker_has_their_global_ids() -> None:
    async def step() -> None:
        await meet()
        await (me().barrier() if me().replica_id_in_sync_group == 3 else meet())

    results = await outcomes(strategies(2, 2), [lambda strategy: strategy.run(step)] * 2)

    assert isinstance(results[1], MergeMismatchError)
    assert "Replica 2 is in all_reduce #2 (SUM) but replica 3 is in barrier" in results[1].reason
    assert [row.replica_id for row in results[1].rows] == [2, 3]
    assert isinstance(results[0], WorkerLostError)
    assert "MergeMismatchError: Replica 2 is in" in str(results[0])


async def test_workers_that_catch_a_failure_go_on_together() -> None:
    async def step(fails: bool) -> Any:
        if fails and me().replica_id_in_sync_group == 0:
            raise ValueError("once")
        return await meet()

    async def program(strategy: Strategy) -> Any:
        with pytest.raises((ValueError, WorkerLostError)):
            await strategy.run(step, (True,))
        return strategy.local_results(await strategy.run(step, (False,)))

    assert await on_workers(2, 2, program) == [(4.0, 4.0)] * 2


async def test_a_failure_after_the_last_collective_reaches_the_next_run_of_others() -> None:
    async def step(fails: bool) -> Any:
        total = await meet()
        if fails and me().replica_id_in_sync_group == 2:
            raise ValueError("late")
        return total

    async def program(strategy: Strategy) -> Any:
        if rank_of(strategy):
            with pytest.raises(ValueError, match="late"):
                await strategy.run(step, (True,))
        else:
            await strategy.run(step, (True,))
            with pytest.raises(WorkerLostError, match=r"Worker 1 failed in run 0 .*late"):
                await strategy.run(step, (False,))
        return strategy.local_results(await strategy.run(step, (False,)))[0]

    assert await on_workers(2, 2, program) == [4.0, 4.0]


async def test_steps_have_one_number_again_though_a_failure_is_told_of_in_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random numbers of a step, and its place in datasets, follow from its number."""

    async def step(fails: bool) -> Any:
        await meet()
        if fails and me().replica_id_in_sync_group == 2:
            raise ValueError("late")
        return float(me().shared_rng("noise").random())

    async def program(strategy: Strategy) -> Any:
        if rank_of(strategy):
            with pytest.raises(ValueError, match="late"):
                await strategy.run(step, (True,))
        else:
            await strategy.run(step, (True,))
            with pytest.raises(WorkerLostError, match="late"):
                await strategy.run(step, (False,))
        drawn = [strategy.local_results(await strategy.run(step, (False,)))[0] for _ in range(2)]
        return drawn, strategy.statistics().num_steps

    first, second = await on_workers(2, 2, program)
    assert first == second
    assert first[1] == 4
    told = [each.getMessage() for each in caplog.records if each.name == "aioreplica.cluster"]
    assert sum("workers are at steps [2, 1]" in each for each in told) == 2


async def test_device_loops_and_runs_have_one_step_number_after_a_failure() -> None:
    def step(ctx: Any, x: float) -> None:
        me().blocking.all_reduce("sum", x)
        if x == 2.0 and me().replica_id_in_sync_group == 1:
            raise ValueError("late")

    async def draw() -> Any:
        await meet()
        return float(me().shared_rng("noise").random())

    async def program(strategy: Strategy) -> Any:
        with pytest.raises((ValueError, WorkerLostError)):
            await strategy.run_steps(step, iter([1.0, 2.0, 3.0, 4.0]), 4)
        drawn = strategy.local_results(await strategy.run(draw))
        return drawn, strategy.statistics().num_steps

    first, second = await on_workers(2, 1, program)
    assert first == second


async def test_different_collectives_are_a_mismatch_with_a_row_per_replica_of_every_worker() -> (
    None
):
    async def step(rank: int) -> None:
        await meet()
        await (me().barrier() if rank else meet())

    results = await outcomes(
        strategies(2, 2), [lambda strategy: strategy.run(step, (rank_of(strategy),))] * 2
    )

    assert str(results[0]) == str(results[1])
    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert [row.replica_id for row in result.rows] == [0, 1, 2, 3]
        assert [row.collective for row in result.rows] == ["all_reduce #2 (SUM)"] * 2 + [
            "barrier #2"
        ] * 2
        assert "Worker 0 is in all_reduce #2 (SUM) but worker 1 is in barrier #2" in result.reason


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((np.ones(3), np.ones(4)), "float64[3] on worker 0 and SUM; float64[4] on worker 1"),
        ((np.ones(3), np.ones(3, "f4")), "float64[3] on worker 0 and SUM; float32[3] on worker 1"),
        (({"a": 1}, {"b": 1}), "{'a': *}: number on worker 0"),
        ((1.0, np.ones(())), "number on worker 0 and SUM; float64[] on worker 1"),
    ],
)
async def test_values_that_differ_are_shown(values: tuple[Any, Any], shown: str) -> None:
    results = await outcomes(strategies(2, 1), [lambda s: s.run(meet, (values[rank_of(s)],))] * 2)

    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "Workers 0 and 1 disagree in all_reduce #1 (SUM)" in result.reason
        assert shown in result.reason


@pytest.mark.parametrize("prefix", ["", "a_long_name_" * 8], ids=["short", "long"])
@pytest.mark.parametrize("is_gather", [False, True])
async def test_different_functions_and_runs_are_named(prefix: str, is_gather: bool) -> None:
    """However long their names are: with 64 characters in common they were reduced together."""

    def named(name: str) -> Any:
        async def step() -> Any:
            return await (me().all_gather(np.ones(1), axis=0) if is_gather else meet())

        step.__qualname__ = prefix + name
        return step

    first, second = named("first"), named("second")
    what = "all_gather #1" if is_gather else "all_reduce #1 (SUM)"
    results = await outcomes(strategies(2, 1), [lambda s: s.run(first), lambda s: s.run(second)])

    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert f"{prefix}first) but worker 1 is in {what}" in result.reason
        assert f"of run 0 ({prefix}second)" in result.reason


async def test_a_worker_that_ends_its_step_early_is_found_by_its_next_frame() -> None:
    async def step(count: int) -> None:
        for _ in range(count):
            await meet()

    async def program(strategy: Strategy) -> None:
        await strategy.run(step, (2 if rank_of(strategy) else 1,))
        if not rank_of(strategy):
            await strategy.run(step, (1,))

    results = await outcomes(strategies(2, 1), [program] * 2)

    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "of run 1" in result.reason
        assert "of run 0" in result.reason


@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_a_worker_that_closes_early_is_named(op: str) -> None:
    async def program(strategy: Strategy) -> None:
        await strategy.run(meet)
        if not rank_of(strategy):
            await strategy.run(meet, (1.0, op))

    results = await outcomes(strategies(2, 1), [program] * 2)

    assert isinstance(results[0], WorkerLostError)
    assert results[0].ranks == (1,)
    assert "Worker 1 has closed its strategy" in str(results[0])
    assert results[1] is None


@pytest.mark.parametrize(
    ("error", "name"),
    [(ValueError("bad batch"), "ValueError: bad batch"), (KeyError(), "KeyError")],
)
async def test_an_error_between_steps_is_told_with_its_cause(error: Exception, name: str) -> None:
    async def program(strategy: Strategy) -> None:
        await strategy.run(meet)
        if rank_of(strategy):
            raise error
        await strategy.run(meet)

    first, second = await outcomes(strategies(2, 1), [program] * 2)

    assert second is error
    assert isinstance(first, WorkerLostError)
    assert first.ranks == (1,)
    assert f"Worker 1 has left its strategy by {name}." in str(first)


async def test_an_absent_worker_is_a_stall_at_the_deadline() -> None:
    forever = asyncio.Event()

    async def program(strategy: Strategy) -> None:
        if rank_of(strategy):
            await forever.wait()
        try:
            await strategy.run(meet)
        finally:
            forever.set()

    results = await outcomes(strategies(2, 1, timeout=0.05), [program] * 2)

    assert isinstance(results[0], StallError)
    assert results[0].ranks == (1,)
    assert isinstance(results[1], WorkerLostError | StallError)


async def test_different_variables_are_a_mismatch() -> None:
    async def program(strategy: Strategy) -> None:
        with strategy.scope():
            ar.Variable(np.zeros(3 + rank_of(strategy)), name="w")
            kept = ar.Variable(np.zeros(3 + rank_of(strategy)), name="v")
        await strategy.run(meet)
        del kept

    results = await outcomes(strategies(2, 1), [program] * 2)

    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "disagree in new variables" in result.reason
        assert "'v': float64[3] on worker 0" in result.reason


async def test_runs_at_once_queue_in_the_order_of_their_calls() -> None:
    async def step(value: int) -> Any:
        await asyncio.sleep(0)
        first = await meet(value)
        return await meet(first)

    async def program(strategy: Strategy) -> Any:
        runs = [strategy.run(step, (i,)) for i in range(4)]
        return [strategy.local_results(each)[0] for each in await asyncio.gather(*runs)]

    assert await on_workers(2, 2, program) == [[0, 16, 32, 48]] * 2


async def test_a_cancelled_run_ends_the_run_of_others_and_the_next_one_works() -> None:
    inside = asyncio.Event()

    async def step(waits: bool) -> Any:
        total = await meet()
        if waits:
            inside.set()
            await asyncio.Event().wait()
        return total + await meet()

    async def program(strategy: Strategy) -> Any:
        if rank_of(strategy):
            run = asyncio.create_task(strategy.run(step, (True,)))
            await inside.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
        else:
            with pytest.raises(WorkerLostError, match=r"Worker 1 failed .*CancelledError"):
                await strategy.run(step, (False,))
        return strategy.local_results(await strategy.run(step, (False,)))[0]

    assert await on_workers(2, 2, program) == [8.0, 8.0]


async def test_a_run_cancelled_while_its_collective_crosses_workers_leaves_the_others_whole() -> (
    None
):
    """What was begun goes on: the other worker gets its result, and hears of it afterwards."""
    come = asyncio.Event()

    async def step() -> Any:
        return await meet(np.ones(1000))

    async def program(strategy: Strategy) -> Any:
        if rank_of(strategy):
            run = asyncio.create_task(strategy.run(step))
            await idle()
            assert strategy._runtime.workers is not None
            assert strategy._runtime.workers.queue
            run.cancel()  # it has begun, and the other worker has not
            with pytest.raises(asyncio.CancelledError):
                await run
            come.set()
            return None
        await come.wait()
        result = await strategy.run(step)
        with pytest.raises(WorkerLostError, match=r"failed|closed"):
            await strategy.run(step)
        return strategy.local_results(result)[0][0]

    results = await outcomes(strategies(2, 2), [program] * 2)
    assert results[0] == 4.0


@pytest.mark.parametrize("num_cycles", range(5))
@pytest.mark.parametrize("what", ["merge_call", "all_gather", "all_reduce"])
async def test_a_run_cancelled_as_its_merge_begins_leaves_nothing(
    num_cycles: int, what: str
) -> None:
    """Neither a coroutine that nobody awaits nor a turn that nobody ends."""
    runs: list[asyncio.Task[Any]] = []

    async def merge(_strategy: Strategy) -> int:
        await asyncio.sleep(0)
        return 1

    async def step() -> Any:
        await me().barrier()
        if me().replica_id_in_sync_group == 1:
            loop = asyncio.get_running_loop()
            cancel: Callable[[], object] = runs[0].cancel
            for _ in range(num_cycles):
                cancel = partial(loop.call_soon, cancel)
            cancel()
        if what == "merge_call":
            return await me().merge_call(merge)
        if what == "all_gather":
            return await me().all_gather(np.ones(2), axis=0)
        return await me().all_reduce("sum", np.ones(2))

    async def program(strategy: Strategy) -> Any:
        run = asyncio.create_task(strategy.run(step))
        if rank_of(strategy):
            runs.append(run)
            with pytest.raises(asyncio.CancelledError):
                await run
        else:
            try:
                await run
            except WorkerLostError:
                pass
            else:  # it was over before it could hear
                with pytest.raises(WorkerLostError, match="Worker 1 failed"):
                    await strategy.run(meet)
        gc.collect()  # what was never awaited is told then
        return strategy.local_results(await strategy.run(meet))[0]

    assert await on_workers(2, 1, program) == [2.0, 2.0]


async def test_a_merge_function_that_fails_on_one_worker_ends_the_run_on_all() -> None:
    async def merge(strategy: Strategy, value: Any) -> Any:
        await strategy.reduce("sum", value)
        if rank_of(strategy):
            raise KeyError("lost")
        return await strategy.reduce("sum", value)

    async def step() -> Any:
        return await me().merge_call(merge, (1.0,))

    results = await outcomes(strategies(2, 2), [lambda strategy: strategy.run(step)] * 2)

    assert isinstance(results[0], WorkerLostError)
    assert "KeyError: 'lost'" in str(results[0])
    assert isinstance(results[1], KeyError)


async def test_a_run_in_a_merge_function_is_refused() -> None:
    async def merge(strategy: Strategy) -> Any:
        with pytest.raises(ContextError, match="in a merge function"):
            await strategy.run(meet)
        return 1

    async def step() -> Any:
        return await me().merge_call(merge)

    await on_workers(2, 1, lambda strategy: strategy.run(step))


async def test_workers_of_different_sizes_are_refused() -> None:
    [one, _] = strategies(2, 1)
    assert one._runtime.workers is not None
    one._runtime.workers.num_local_replicas = 3
    other = _

    results = await outcomes([one, other], [lambda strategy: strategy.run(meet)] * 2)

    for result in results:
        assert isinstance(result, ValueError)
        assert "[3, 1] replicas" in str(result)


async def test_a_gradient_that_is_not_finite_names_the_replica_on_every_worker() -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            w, sgd = ar.Variable(np.ones(3), name="w"), ar.optimizers.SGD(0.1)

        async def step() -> None:
            gradient = np.ones(3)
            if me().replica_id_in_sync_group == 2:
                gradient[1] = np.nan
            await sgd.apply_gradients([(gradient, w)])

        with pytest.raises(NonFiniteError, match="replica 2, of worker 1") as caught:
            await strategy.run(step)
        assert caught.value.replica_id == 2
        assert caught.value.index == (1,)
        return w.value.tolist()

    assert await on_workers(2, 2, program) == [[1.0, 1.0, 1.0]] * 2


async def test_a_closed_strategy_can_not_be_opened_with_a_communicator_that_is_used_up() -> None:
    made = strategies(2, 1)
    await outcomes(made, [lambda strategy: strategy.run(meet)] * 2)

    results = await outcomes(made, [lambda strategy: strategy.run(meet)] * 2)

    assert all(isinstance(result, ContextError) for result in results)


async def test_a_worker_that_leaves_before_its_first_operation_is_not_waited_for() -> None:
    """Such as one whose program raises while it reads its settings; nobody has a timeout."""
    first, second = strategies(2, 1)

    async def step() -> Any:
        return await meet()

    async with second:
        running = asyncio.create_task(second.run(step))
        with pytest.raises(KeyError):
            async with first:
                raise KeyError("no such setting")
        async with asyncio.timeout(30):
            with pytest.raises(WorkerLostError, match="has left its strategy by KeyError"):
                await running


async def test_a_worker_whose_source_can_not_be_closed_leaves_the_others_all_the_same() -> None:
    made = strategies(2, 1)
    held: list[Any] = []

    class Source:
        def __iter__(self) -> Iterator[Any]:
            try:
                while True:
                    yield np.ones(2)
            finally:
                raise OSError("disk gone")

    async def break_off(strategy: ar.Strategy) -> None:
        held.append(aiter(strategy.distribute_dataset(Source())))
        await anext(held[-1])

    results = await outcomes(made, [break_off, break_off])

    assert [str(result) for result in results] == ["disk gone"] * 2
    assert all(communicator_of(strategy).is_closed for strategy in made)
