"""Device loops of several workers: how many steps all run, and what ends them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.test_multi_worker_shrink import lose
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy
X = np.arange(96.0).reshape(24, 4)


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


def summing(strategy: Strategy) -> tuple[ar.Variable, Any]:
    """Return a variable and a step that adds the sum over all replicas to it."""
    with strategy.scope():
        total = ar.Variable(0.0, aggregation="mean")

    def step(ctx: ar.device_loop.MultiStepContext, x: Any) -> None:
        mine = float(np.sum(x)) * (1 + me().replica_id_in_sync_group)
        got = me().blocking.all_reduce("sum", mine)
        total.blocking.assign_add(got)
        ctx.set_last_step_output("got", got, "mean")

    return total, step


async def alone(count: int, items: list[float]) -> float:
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(count)]) as strategy:
        total, step = summing(strategy)  # type: ignore[arg-type]
        await strategy.run_steps(step, iter(items), len(items))
        return float(total.value)


# ---- what is equal to one worker ----------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "num_replicas"), [(2, 1), (2, 2), (3, 2)])
async def test_a_loop_gives_what_one_worker_with_all_replicas_gives(
    num_workers: int, num_replicas: int
) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        with strategy.scope():
            w = ar.Variable(np.zeros(4))
            sgd = ar.optimizers.SGD(0.5, momentum=0.5)

        def step(ctx: ar.device_loop.MultiStepContext, x: Any) -> None:
            sgd.blocking.apply_gradients([(x.sum(axis=0) if len(x) else np.zeros(4), w)])
            ctx.set_last_step_output("first", float(x[:1].sum()), "sum")
            ctx.set_last_step_output("random", me().rng("a").random(), "max")
            ctx.set_last_step_output("id", me().replica_id_in_sync_group)
            ctx.record("loss", 1.0)

        data = ar.ArrayDataset(X, batch_size=6)
        steps, records = [], 0
        options = ar.InputOptions(sharding="data")
        async with strategy.distribute_dataset(data, options) as batches:
            for _ in range(2):
                iterator = aiter(batches)
                while (result := await strategy.run_steps(step, iterator, 3)).steps_run:
                    steps.append(result.steps_run)
                    outputs = result.last_step_outputs
                place = batches.state_dict()
        records = len(list(strategy.events.events("scalar")))
        ids = strategy.local_results(outputs.pop("id"))
        assert sgd.iterations.value == 8
        return w.value.tolist(), outputs, steps, (place["epoch"], place["position"]), ids, records

    count = num_workers * num_replicas
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(count)]) as strategy:
        *expected, ids, records = await program(strategy)
    results = await on_workers(num_workers, num_replicas, program)
    assert [result[:4] for result in results] == [tuple(expected)] * num_workers
    assert sum([result[4] for result in results], ()) == ids
    assert [result[5] for result in results] == [records] + [0] * (num_workers - 1)


@pytest.mark.parametrize("kind", ["in memory", "thread", "async"])
async def test_all_stop_at_the_step_of_the_worker_that_has_no_more(kind: str) -> None:
    """The others keep what they have read, and a later loop ends at once on all."""
    counts = [5, 3, 4]

    def elements(rank: int) -> Any:
        items = [float(i) for i in range(counts[rank])]
        if kind == "in memory":
            return iter(items)
        if kind == "thread":
            return (item for item in items)

        async def given() -> AsyncIterator[float]:
            for item in items:
                await asyncio.sleep(0)
                yield item

        return given()

    async def program(strategy: Strategy) -> Any:
        total, step = summing(strategy)
        iterator = elements(rank_of(strategy))
        result = await strategy.run_steps(step, iterator, 10)
        again = await strategy.run_steps(step, iterator, 10)
        assert again.steps_run == 0
        assert again.last_step_outputs == {}
        exhausted = [e.value for e in strategy.events.events("infeed") if e.name == "exhausted"]
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
        return result.steps_run, float(total.value), result.last_step_outputs, exhausted

    expected = await alone(3, [0.0, 1.0, 2.0])
    results = await on_workers(3, 1, program)
    assert results == [(3, expected, {"got": 12.0}, [3, 0])] * 3


async def test_what_was_read_ahead_is_not_lost_when_the_others_get_more() -> None:
    async def program(strategy: Strategy) -> Any:
        seen: list[float] = []

        def step(ctx: Any, x: float) -> None:
            seen.append(x)
            me().blocking.barrier()

        many, few = iter(range(5)), iter(range(2))
        first = few if rank_of(strategy) else many
        assert (await strategy.run_steps(step, first, 5)).steps_run == 2
        second = many if rank_of(strategy) else first
        assert (await strategy.run_steps(step, second, 3)).steps_run == 3
        return seen

    assert await on_workers(2, 1, program) == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]


class Numbers:
    """Batches 0, 1, ..., and nobody knows how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (np.array([float(i)]) for i in range(self.count))


def in_memory(count: int) -> Any:
    return ar.ArrayDataset(np.arange(float(count)), batch_size=1)


@pytest.mark.parametrize("kind", [Numbers, in_memory])
async def test_an_epoch_ends_on_all_workers_with_that_of_the_shortest(kind: Any) -> None:
    """Also for a state, and for a loop over the next one."""

    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)

        def make(context: ar.InputContext) -> Any:
            return kind([7, 5][context.input_pipeline_id])

        async with strategy.distribute_datasets_from_function(make) as batches:
            iterator = aiter(batches)
            counts = [(await strategy.run_steps(step, iterator, 3)).steps_run for _ in range(3)]
            state = batches.state_dict()
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            counts.append(len([1 async for _ in batches]))
            return counts, state["epoch"], batches.statistics().num_delivered

    assert await on_workers(2, 1, program) == [([3, 2, 0, 5], 1, 10)] * 2


@pytest.mark.parametrize("kind", [Numbers, in_memory])
async def test_a_loop_and_single_batches_of_one_iterator_may_take_turns(kind: Any) -> None:
    """What a loop has read ahead, and others have not, is agreed on when it is given."""

    async def program(strategy: Strategy) -> Any:
        rank, seen = rank_of(strategy), list[float]()

        def step(ctx: Any, x: Any) -> None:
            if rank and len(seen) == 3:
                raise ValueError("once")
            me().blocking.barrier()
            seen.append(float(x[0]))

        def make(context: ar.InputContext) -> Any:
            return kind([9, 7][context.input_pipeline_id])

        def value(batch: Any) -> float:
            return float(strategy.local_results(batch)[0][0])

        async with strategy.distribute_datasets_from_function(make) as batches:
            iterator = aiter(batches)
            first = value(await anext(iterator))
            await strategy.run_steps(step, iterator, 2)
            second = value(await anext(iterator))
            with pytest.raises((ValueError, WorkerLostError), match="once"):
                await strategy.run_steps(step, iterator, 9)
            rest = [value(batch) async for batch in iterator]
            return first, second, seen, rest

    assert await on_workers(2, 1, program) == [(0.0, 3.0, [1.0, 2.0, 4.0], [5.0, 6.0])] * 2


# ---- failures and cancellations ------------------------------------------------------------------


@pytest.mark.parametrize("is_thread", [True, False])
async def test_an_iterator_that_raises_is_told_behind_the_steps_before_it(is_thread: bool) -> None:
    async def program(strategy: Strategy) -> Any:
        total, step = summing(strategy)
        rank = rank_of(strategy)

        def given() -> Iterator[float]:
            yield from (0.0, 1.0, 2.0)
            if rank == 1:
                raise OSError("disk")
            yield from (3.0, 4.0)

        async def given_async() -> AsyncIterator[float]:
            for item in given():
                yield item

        iterator: Any = given() if is_thread else given_async()
        with pytest.raises((OSError, WorkerLostError)) as caught:
            await strategy.run_steps(step, iterator, 10)
        after = await strategy.run_steps(step, iter([5.0]), 1)
        if not is_thread:
            await iterator.aclose()
        return float(total.value), caught.value, after.steps_run

    results = await on_workers(3, 1, program)
    expected = await alone(3, [0.0, 1.0, 2.0, 5.0])
    assert [(value, steps) for value, _, steps in results] == [(expected, 1)] * 3
    error = results[1][1]
    assert isinstance(error, OSError)
    assert error.__notes__ == ["Raised by the infeed of run_steps, after 3 complete steps."]
    for rank in (0, 2):
        told = results[rank][1]
        assert isinstance(told, WorkerLostError)
        assert told.ranks == (1,)
        assert "OSError: disk" in str(told)


async def test_an_error_behind_the_end_of_another_worker_is_told_by_who_comes_to_it() -> None:
    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)

        def given() -> Iterator[float]:
            yield from (0.0, 1.0, 2.0)
            raise OSError("disk")

        first: Any = given() if rank_of(strategy) else iter([0.0, 1.0])
        assert (await strategy.run_steps(step, first, 10)).steps_run == 2
        second = first if rank_of(strategy) else iter([2.0, 3.0])
        with pytest.raises((OSError, WorkerLostError), match="disk"):
            await strategy.run_steps(step, second, 10)
        return strategy.events.events("loop")[-1].value

    assert await on_workers(2, 1, program) == [1, 1]


async def test_an_element_that_does_not_fit_is_told_with_its_step() -> None:
    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)

        def step(ctx: Any, x: Any) -> None:
            me().blocking.barrier()

        shapes = [2, 2, 3 if rank else 2]
        try:
            await strategy.run_steps(step, iter([np.ones(size) for size in shapes]), 3)
        finally:
            assert list(strategy.events.events("loop"))[-1].value == 2

    results = await outcomes(strategies(2, 1), [program] * 2)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[0], WorkerLostError)
    assert str(results[1]).partition(":")[0] in str(results[0])


async def test_a_step_that_fails_is_run_again_on_all_workers() -> None:
    async def program(strategy: Strategy) -> Any:
        total, step = summing(strategy)
        fails = [rank_of(strategy) == 0]

        def sometimes(ctx: Any, x: float) -> None:
            if x == 2.0 and fails and fails.pop():
                raise ValueError("once")
            step(ctx, x)

        iterator = iter([0.0, 1.0, 2.0, 3.0])
        with pytest.raises((ValueError, WorkerLostError), match="once"):
            await strategy.run_steps(sometimes, iterator, 4)
        rest = await strategy.run_steps(sometimes, iterator, 4)
        return rest.steps_run, float(total.value)

    expected = await alone(2, [0.0, 1.0, 2.0, 3.0])
    assert await on_workers(2, 1, program) == [(2, expected)] * 2


async def test_a_cancellation_while_a_worker_waits_for_its_elements_leaves_one_step_on_all() -> (
    None
):
    """Worker 1 has no element yet; worker 0 waits for it, and is told."""
    dry = asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        total, step = summing(strategy)
        rank = rank_of(strategy)

        async def given() -> AsyncIterator[float]:
            yield 1.0
            yield 2.0
            if rank:
                dry.set()
                await asyncio.Event().wait()
            yield 3.0

        iterator = given()
        loop = asyncio.create_task(strategy.run_steps(step, iterator, 9))
        if rank:
            await dry.wait()
            while float(total.value) < 9.0:
                await asyncio.sleep(0)
            loop.cancel()
        with pytest.raises((asyncio.CancelledError, WorkerLostError)) as caught:
            await loop
        again = await strategy.run_steps(step, iter([4.0]), 1)
        await iterator.aclose()
        return float(total.value), type(caught.value), again.steps_run, str(caught.value)

    expected = await alone(2, [1.0, 2.0, 4.0])
    first, second = await on_workers(2, 1, program)
    assert first[:3] == (expected, WorkerLostError, 1)
    assert "CancelledError" in first[3]
    assert second[:3] == (expected, asyncio.CancelledError, 1)


async def test_a_thread_that_waits_for_its_iterator_is_let_go_when_another_worker_ends() -> None:
    gate = threading.Event()

    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)

        def given() -> Iterator[float]:
            yield from (0.0, 1.0)
            gate.wait()

        iterator: Any = given() if rank_of(strategy) else iter([0.0])
        return (await strategy.run_steps(step, iterator, 9)).steps_run

    made = strategies(2, 1)
    try:
        assert await outcomes(made, [program] * 2) == [1, 1]
    finally:
        gate.set()


async def test_survivors_of_a_worker_lost_in_a_loop_go_on_with_what_they_have_read() -> None:
    async def program(strategy: Strategy) -> Any:
        total, step = summing(strategy)
        rank = rank_of(strategy)

        def last(ctx: Any, x: float) -> None:
            step(ctx, x)
            if rank == 2 and x == 2.0:
                strategy._runtime.lifecycle._loop.call_soon_threadsafe(lose, strategy)  # type: ignore[union-attr]

        iterator = (float(i) for i in range(6))
        try:
            await strategy.run_steps(last, iterator, 9)
        except WorkerLostError:
            if rank == 2:
                return None
            await strategy.shrink()
        result = await strategy.run_steps(step, iterator, 9)
        await strategy.check_in_sync([total])
        return strategy.num_replicas_in_sync, result.last_step_outputs["got"]

    results = await outcomes(strategies(3, 1), [program] * 3)
    assert results[:2] == [(2, 15.0)] * 2


# ---- differences ---------------------------------------------------------------------------------


async def test_other_numbers_of_steps_are_a_mismatch_that_shows_both() -> None:
    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)
        await strategy.run_steps(step, iter([1.0] * 9), 2 + rank_of(strategy))

    results = await outcomes(strategies(2, 1), [program] * 2)
    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "infeed #1 (of 2 steps)" in str(result)
        assert "infeed #1 (of 3 steps)" in str(result)


async def test_a_collective_in_a_step_does_not_meet_the_infeed() -> None:
    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)

        def step(ctx: Any, x: float) -> None:
            me().blocking.barrier()
            if rank and x == 1.0:
                me().blocking.barrier()

        await strategy.run_steps(step, iter([0.0, 1.0]), 9)

    results = await outcomes(strategies(2, 1), [program] * 2)
    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "infeed" in str(result)
        assert "barrier" in str(result)


async def test_outputs_that_only_some_workers_set_are_a_mismatch() -> None:
    async def program(strategy: Strategy) -> Any:
        def step(ctx: Any, x: float) -> None:
            ctx.set_last_step_output("a", x, "sum")
            ctx.set_last_step_output("b" if rank_of(strategy) else "c", x, "sum")

        await strategy.run_steps(step, iter([1.0]), 1)

    results = await outcomes(strategies(2, 2), [program] * 2)
    for result in results:
        assert isinstance(result, MergeMismatchError)
        assert "'b' to be reduced by SUM" in str(result)
        assert "'c' to be reduced by SUM" in str(result)


async def test_outputs_that_a_worker_has_none_of_are_a_mismatch() -> None:
    async def program(strategy: Strategy) -> Any:
        def step(ctx: Any, x: float) -> None:
            if rank_of(strategy):
                ctx.set_last_step_output("a", x, "sum")

        with pytest.raises(MergeMismatchError) as caught:
            await strategy.run_steps(step, iter([1.0]), 1)
        result = await strategy.run_steps(lambda ctx, x: None, iter([1.0]), 1)
        return str(caught.value), result.steps_run, result.last_step_outputs

    for text, *result in await on_workers(2, 1, program):
        assert "'a' to be reduced by SUM" in text
        assert "none on worker 0" in text
        assert result == [1, {}]


async def test_outputs_are_reduced_by_name_whatever_order_they_were_set_in() -> None:
    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)

        def step(ctx: Any, x: float) -> None:
            for name in "ba" if rank else "ab":
                ctx.set_last_step_output(name, 10.0 if name == "a" else 1.0, "sum")

        result = await strategy.run_steps(step, iter([1.0]), 1)
        return result.last_step_outputs

    assert await on_workers(2, 2, program) == [{"a": 40.0, "b": 4.0}] * 2


async def test_a_run_that_queues_behind_a_loop_comes_behind_its_outputs() -> None:
    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)

        async def meet() -> Any:
            return await me().all_reduce("sum", 1)

        loop = asyncio.create_task(strategy.run_steps(step, iter([1.0, 2.0]), 2))
        if rank_of(strategy):
            await idle()
        run = asyncio.create_task(strategy.run(meet))
        result = await loop
        return result.last_step_outputs["got"], strategy.local_results(await run)

    assert await on_workers(2, 1, program) == [(6.0, (2,))] * 2
