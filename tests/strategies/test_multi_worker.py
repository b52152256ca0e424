"""MultiWorkerMirroredStrategy: what is global, what is local, and what crosses workers."""

import asyncio
import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import ClusterResolver, LocalCommunicator
from aioreplica.context import PLACE
from aioreplica.errors import ContextError, MergeMismatchError, OutOfSyncError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.workers import communicator_of, on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy
DIVISIONS = [(1, 2), (2, 1), (2, 2), (3, 2)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


# ---- what is global, what is local -------------------------------------------------------------


async def test_ids_and_counts_are_global_and_local_results_local() -> None:
    async def step() -> Any:
        ctx = me()
        return ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync, repr(ctx)

    async def program(strategy: Strategy) -> Any:
        assert strategy.num_replicas_in_sync == 6
        assert strategy.extended.should_checkpoint is (rank_of(strategy) == 0)
        assert strategy.extended.should_save_summary is (rank_of(strategy) == 0)
        ids = strategy.distribute_values_from_function(lambda v: v.replica_id_in_sync_group)
        return strategy.local_results(await strategy.run(step)), strategy.local_results(ids)

    for rank, (results, ids) in enumerate(await on_workers(3, 2, program)):
        assert [(i, n) for i, n, _ in results] == [(2 * rank, 6), (2 * rank + 1, 6)]
        assert f"{2 * rank}/6" in results[0][2]
        assert ids == (2 * rank, 2 * rank + 1)


async def test_random_numbers_are_those_of_as_many_replicas_in_one_process() -> None:
    async def step() -> Any:
        return me().rng("dropout").random(), me().shared_rng("order").random()

    async def program(strategy: ar.Strategy) -> Any:
        results = await strategy.run(step, options=ar.RunOptions(seed=5))
        return strategy.local_results(results)

    async with ar.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]) as strategy:
        expected = await program(strategy)
    first, second = await on_workers(2, 2, program)
    assert (*first, *second) == expected


async def test_ops_in_device_processes_know_the_ids_among_all_workers() -> None:
    """Their context is made there of what the replica tells."""

    def seen(ctx: Any) -> Any:
        return ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync, ctx.rng("dropout").random()

    async def step() -> Any:
        own = PLACE.get().replica
        assert own is not None
        make, told = own.stand_in()
        there: Any = make(*told, None)
        assert there.local_replica_id == own.local_replica_id
        return seen(there), seen(me())

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    found = [pair for of_one in await on_workers(2, 2, program) for pair in of_one]

    assert [there for there, _ in found] == [here for _, here in found]
    assert [ids for (*ids, _), _ in found] == [[i, 4] for i in range(4)]


async def test_records_are_shown_by_the_first_worker_only() -> None:
    async def step() -> None:
        me().record("loss", 0.5)

    async def program(strategy: Strategy) -> int:
        await strategy.run(step)
        return len([event for event in strategy.events.events("scalar") if event.name == "loss"])

    assert await on_workers(2, 2, program) == [1, 0]


# ---- collectives -------------------------------------------------------------------------------


async def every_collective() -> dict[str, Any]:
    ctx = me()
    i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    handle = ctx.start_all_reduce("sum", np.full(70_000, float(i)))
    other = ctx.start_all_reduce("max", {"a": i, "b": np.array([i, -i], np.int16)})
    rows = ar.IndexedSlices(np.full((i, 2), 1.0), np.arange(i), (n, 2))
    return {
        "numbers": await ctx.all_reduce("sum", (i, float(i), i > 0, complex(0, i))),
        "mean": await ctx.all_reduce("mean", np.arange(3) * i),
        "half": await ctx.all_reduce("sum", np.full(3, 0.1, np.float16)),
        "flags": await ctx.all_reduce("max", np.array([i == 1, False])),
        "rows": (await ctx.all_reduce("sum", rows)).to_dense(),
        "weighted": await ctx.all_reduce("mean", ar.Weighted(1.0 * i, i)),
        "gather": await ctx.all_gather({"x": np.full((2, i), i)}, axis=1),
        "gather nothing": np.shape(await ctx.all_gather(np.empty((i + 1, 0)), axis=0)),
        "scatter": await ctx.reduce_scatter("sum", np.arange(2 * n + 1.0)),
        "all to all": await ctx.all_to_all(np.arange(n) + 100 * i),
        "broadcast": await ctx.broadcast({"x": (np.arange(i), None, "text", 2**70, -0.5)}, n - 1),
        "complex": await ctx.broadcast([1j, complex(-0.0, np.inf), complex(np.nan, 0.1)], n - 1),
        "any": await ctx.any(i == n - 1),
        "all": await ctx.all(i < n - 1),
        "agree": await ctx.agree({"seed": 3, "nan": float("nan")}),
        "handle": (await handle)[::10_000],
        "other": await other,
        "all of them": await ctx.group(range(n)).all_reduce("sum", 1),
        "barrier": await ctx.barrier(),
    }


def as_text(results: Any) -> str:
    return json.dumps(
        [{key: repr(value) for key, value in result.items()} for result in results], indent=1
    )


@pytest.mark.parametrize("division", DIVISIONS)
async def test_every_collective_gives_what_as_many_replicas_of_one_worker_get(
    division: tuple[int, int],
) -> None:
    num_workers, num_replicas = division
    names = [f"cpu:{i}" for i in range(num_workers * num_replicas)]
    async with ar.MirroredStrategy(names) as strategy:
        expected = strategy.local_results(await strategy.run(every_collective))

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(every_collective))

    found = await on_workers(*division, program)

    assert as_text([result for of_one in found for result in of_one]) == as_text(expected)


async def test_containers_of_a_broadcast_belong_to_one_replica() -> None:
    async def step() -> Any:
        got = await me().broadcast({"seen": []})
        got["seen"].append(me().replica_id_in_sync_group)
        await me().barrier()
        return got["seen"]

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [([0], [1]), ([2], [3])]


async def test_plain_step_functions_meet_other_workers_too() -> None:
    def step() -> Any:
        ctx = me().blocking
        i = ctx.replica_id_in_sync_group
        return ctx.all_reduce("sum", i), ctx.all_gather(np.array([i]), 0).tolist()

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    for of_one in await on_workers(2, 2, program):
        assert of_one == ((6, [0, 1, 2, 3]),) * 2


async def test_groups_of_the_replicas_of_one_worker_meet_without_the_others() -> None:
    async def step() -> Any:
        ctx = me()
        i = ctx.replica_id_in_sync_group
        own = ctx.group([i - i % 2, i - i % 2 + 1])
        assert own.members == (i - i % 2, i - i % 2 + 1)

        async def merge(view: Any, value: Any) -> Any:
            return await view.reduce("sum", value)

        return await own.all_reduce("sum", i), await own.merge_call(merge, (i,))

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [((1, 1), (1, 1)), ((5, 5), (5, 5))]


async def test_a_merge_function_runs_once_per_worker_over_its_own_replicas() -> None:
    async def merge(strategy: Strategy, value: Any) -> Any:
        seen = strategy.local_results(value)
        total, joined = await strategy.reduce("sum", value), await strategy.gather(value, 0)
        to = await strategy.extended.reduce_to("mean", value, "cpu:0")
        return seen, float(total[0]), joined.tolist(), float(to[0])

    async def step() -> Any:
        return await me().merge_call(merge, (np.array([me().replica_id_in_sync_group]),))

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))[0]

    for rank, (seen, total, joined, mean) in enumerate(await on_workers(2, 2, program)):
        assert [int(each[0]) for each in seen] == [2 * rank, 2 * rank + 1]
        assert (total, joined, mean) == (6.0, [0, 1, 2, 3], 1.5)


async def test_reduce_and_gather_outside_go_over_all_workers() -> None:
    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)
        value = ar.PerReplica([np.full(2 * rank + 1, 1.0), np.full(2 * rank + 2, 2.0)])
        return (
            float(await strategy.reduce("mean", value, axis=0)),
            float(await strategy.reduce("sum", value, axis=0)),
            float(await strategy.reduce("max", value, axis=0)),
            (await strategy.gather(value, 0)).tolist(),
            await strategy.reduce("mean", ar.PerReplica([rank, rank])),
        )

    joined = [1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    expected = (np.mean(joined), np.sum(joined), 2.0, joined, 0.5)
    assert await on_workers(2, 2, program) == [expected] * 2


@pytest.mark.parametrize("where", ["outside", "in a merge function"])
async def test_what_is_called_at_once_meets_in_the_order_of_calls_whatever_there_is_to_join(
    where: str,
) -> None:
    """What worker 0 has is joined off the event loop, what worker 1 has is so at once."""

    async def both(strategy: Any, large: Any, small: Any) -> list[int]:
        found = await asyncio.gather(strategy.gather(large, 0), strategy.gather(small, 0))
        return [len(each) for each in found]

    async def step(rows: int) -> Any:
        return await me().merge_call(both, (np.full(rows, 1.0), np.full(10, 2.0)))

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        rows = 1000 if strategy._runtime.workers.rank else 400_000
        if where != "outside":
            return strategy.local_results(await strategy.run(step, (rows,)))[0]
        values = np.full(rows, 1.0), np.full(10, 2.0)
        return await both(strategy, *[ar.PerReplica([each]) for each in values])

    assert await on_workers(2, 1, program) == [[401_000, 20]] * 2


async def test_gather_refuses_what_does_not_fit_before_others_are_asked() -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        with pytest.raises(ValueError, match="cannot be combined"):
            await strategy.gather(ar.PerReplica([np.ones((1, 2)), np.ones((1, 3))]), 0)
        found = await strategy.gather(ar.PerReplica([np.ones((1, 2))] * 2), 0)
        return found.shape

    assert await on_workers(2, 2, program) == [(4, 2)] * 2


async def test_reductions_of_the_next_bucket_run_while_the_last_one_crosses() -> None:
    """The local part of a later collective is done before the turn of an earlier one ends."""
    order: list[str] = []

    async def program(strategy: Strategy) -> None:
        workers = strategy._runtime.workers
        assert workers is not None
        real = strategy._runtime.reducer.reduce
        if rank_of(strategy) == 0:

            def reduce(*args: Any, **kwargs: Any) -> Any:
                order.append("local")
                return real(*args, **kwargs)

            communicator = communicator_of(strategy)
            settle = communicator._settle

            def settled(call: Any, result: Any) -> None:
                order.append("crossed")
                settle(call, result)

            communicator._settle = settled
            strategy._runtime.reducer = type(
                "Spy",
                (),
                {
                    "reduce": staticmethod(reduce),
                    "options": strategy._runtime.reducer.options,
                    "clear": strategy._runtime.reducer.clear,
                },
            )()

        async def step() -> Any:
            ctx = me()
            if ctx.replica_id_in_sync_group == 0:
                order.clear()  # of what was exchanged before the step
            handles = [ctx.start_all_reduce("sum", np.ones(1000)) for _ in range(3)]
            return [float((await handle)[0]) for handle in handles]

        assert strategy.local_results(await strategy.run(step))[0] == [4.0] * 3

    await on_workers(2, 2, program)
    assert order.index("crossed") > 1  # two were reduced here before the first had crossed


async def test_a_handle_that_is_done_is_awaited_without_a_turn_of_the_event_loop() -> None:
    async def step() -> tuple[bool, float, int]:
        first, second = (me().start_all_reduce("sum", np.ones(3)) for _ in range(2))
        await second
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        return first.done(), float((await first)[0]), len(turns)

    async def program(strategy: Any) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 1, program) == [((True, 2.0, 0),)] * 2


# ---- variables ---------------------------------------------------------------------------------


async def test_variables_are_those_of_worker_0_from_the_first_step() -> None:
    async def step(v: ar.Variable) -> Any:
        made = await me().variable(np.full(2, float(me().replica_id_in_sync_group)), name="made")
        return v.value.copy(), made.value.copy()

    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            v = ar.Variable(np.full(3, float(rank_of(strategy)) + 5), name="v")
        first, made = strategy.local_results(await strategy.run(step, (v,)))[1]
        return first.tolist(), made.tolist(), v.value.tolist()

    assert await on_workers(2, 2, program) == [([5.0] * 3, [0.0] * 2, [5.0] * 3)] * 2


@pytest.mark.parametrize(("aggregation", "expected"), [
    ("sum", 6.0), ("mean", 1.5), ("only_first_replica", 0.0),
])  # fmt: skip
async def test_values_that_replicas_assign_are_combined_over_all_workers(
    aggregation: str, expected: float
) -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            v = ar.Variable(np.zeros(2), aggregation=aggregation)
            on_read = ar.Variable(0.0, synchronization="on_read", aggregation=aggregation)

        async def step() -> None:
            i = me().replica_id_in_sync_group
            await v.assign_add(np.full(2, float(i)))
            await on_read.assign(float(i))
            assert on_read.value == i

        await strategy.run(step)
        with pytest.raises(ContextError, match="read_var"):
            _ = on_read.value
        await strategy.check_in_sync([v])
        return v.value.tolist(), float(await strategy.extended.read_var(on_read))

    assert await on_workers(2, 2, program) == [([expected] * 2, expected)] * 2


async def test_rows_that_the_first_replica_writes_go_to_all_workers() -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            v = ar.Variable(np.zeros((4, 1)), aggregation="only_first_replica")

        async def step() -> None:
            i = me().replica_id_in_sync_group
            rows = np.full((i + 1, 1), 7.0 + i)
            await v.scatter_update(ar.IndexedSlices(rows, np.arange(i + 1), (4, 1)))

        await strategy.run(step)
        return v.value.ravel().tolist()

    assert await on_workers(2, 2, program) == [[7.0, 0.0, 0.0, 0.0]] * 2


async def test_a_write_outside_shares_a_sum_out_over_all_replicas() -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            count = ar.Variable(
                0, synchronization="on_read", aggregation="sum", dtype="int64", trainable=False
            )
        await count.assign(7)
        return [int(each) for each in count.components], int(
            await strategy.extended.read_var(count)
        )

    assert await on_workers(2, 2, program) == [([2, 2], 7), ([2, 1], 7)]


async def test_check_in_sync_compares_workers_and_names_the_replica() -> None:
    async def program(strategy: Strategy) -> None:
        with strategy.scope():
            v, w = ar.Variable(np.zeros(3), name="v"), ar.Variable(np.zeros(3), name="w")
        await strategy.check_in_sync([v, w])
        if rank_of(strategy):
            await w.assign([0.0, 2.0, 0.0])
        with pytest.raises(OutOfSyncError, match=r"replica 2 holds 2.0 at index") as caught:
            await strategy.check_in_sync([v, w])
        assert (caught.value.variable, caught.value.replica_id) == ("w", 2)
        assert caught.value.index == (1,)

    await on_workers(2, 2, program)


# ---- gradients and metrics ---------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("way", ["apply", "distributed", "summed", "accumulated", "blocking"])
async def test_gradients_go_over_all_workers_in_every_way(way: str, reduction: str) -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            w = ar.Variable(np.zeros(2))
            sgd = ar.optimizers.SGD(1.0, loss_reduction=reduction)
            total = ar.GradientAccumulator(sgd)

        async def step() -> None:
            gradient = np.full(2, 1.0 + me().replica_id_in_sync_group)
            if way == "accumulated":
                await total.add([(gradient, w)])
                await total.apply()
            elif way == "summed":
                await sgd.apply_gradients([(np.full(2, 10.0), w)], aggregate=False)
            else:
                await sgd.apply_gradients([(gradient, w)])

        def plain() -> None:
            gradient = np.full(2, 1.0 + me().blocking.replica_id_in_sync_group)
            sgd.blocking.apply_gradients([(gradient, w)])

        if way == "distributed":
            first = 1.0 + 2 * rank_of(strategy)
            parts = ar.PerReplica([np.full(2, first), np.full(2, first + 1)])
            await sgd.distributed_apply([(parts, w)])
        else:
            await strategy.run(plain if way == "blocking" else step)
        return w.value.tolist()

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
        if way == "distributed":
            divided = reduction == "mean"
            expected = [-10.0 / (4 if divided else 1)] * 2
        else:
            expected = await program(strategy)  # type: ignore[arg-type]  # it has no workers

    assert await on_workers(2, 2, program) == [expected] * 2


async def test_metrics_are_exact_over_all_workers() -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            mean = ar.metrics.Mean("mean")
            table = ar.metrics.MeanIoU(10)

        async def step() -> None:
            i = me().replica_id_in_sync_group
            mean.update_state(np.arange(i + 1.0))
            assert mean.result() == i / 2
            table.update_state([i], [i])

        await strategy.run(step)
        mean.update_state(100.0)  # outside it counts once
        with pytest.raises(ContextError, match=r"await metric.read"):
            mean.result()
        assert "read" in repr(mean)
        return await mean.read(), await table.read()

    values = [0.0, 0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 100.0]
    for mean, table in await on_workers(2, 2, program):
        assert mean == np.mean(values)
        assert table == 1.0


# ---- input -------------------------------------------------------------------------------------


async def test_datasets_are_shared_by_data_and_by_function() -> None:
    data = np.arange(10)

    async def program(strategy: Strategy) -> Any:
        options = ar.InputOptions(sharding="data")
        dataset = ar.ArrayDataset(data, batch_size=6)
        async with strategy.distribute_dataset(dataset, options) as batches:
            parts = [np.concatenate(strategy.local_results(batch)) async for batch in batches]

        def make(context: ar.InputContext) -> Any:
            seen.append(context)
            return ar.ArrayDataset(data[context.input_pipeline_id :: 2], batch_size=2)

        seen: list[ar.InputContext] = []
        async with strategy.distribute_datasets_from_function(make) as batches:
            count = sum([1 async for _ in batches])
        return parts, count, seen[0]

    (first, count, zero), (second, _, one) = await on_workers(2, 2, program)
    joined = [np.concatenate(pair).tolist() for pair in zip(first, second, strict=True)]
    assert joined == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert count == 2
    assert zero == ar.InputContext(2, 0, 4)
    assert one == ar.InputContext(2, 1, 4)


async def test_a_loop_ends_on_all_workers_together() -> None:
    async def step(batch: Any) -> Any:
        return await me().all_reduce("sum", float(np.sum(batch)))

    async def program(strategy: Strategy) -> Any:
        def make(context: ar.InputContext) -> Any:
            return ar.ArrayDataset(np.ones(4 + 8 * context.input_pipeline_id), batch_size=1)

        counts = []
        async with strategy.distribute_datasets_from_function(make) as batches:
            for _ in range(2):
                count = 0
                async for batch in batches:
                    await strategy.run(step, (batch,))
                    count += 1
                counts.append(count)
        return counts

    assert await on_workers(2, 2, program) == [[2, 2]] * 2


@pytest.mark.parametrize("size", [3, 1000, 100_000])
async def test_scalars_beside_arrays_keep_their_kinds_and_shapes(size: int) -> None:
    async def step() -> Any:
        tree = {
            "loss": np.float32(2), "count": np.array(3), "row": np.ones((1, 1)),
            "big": np.ones(size, ">f8"),
        }  # fmt: skip
        found = []
        for _ in range(2):  # behind the frame, too
            total = await me().all_reduce("sum", tree)
            found.append({key: (type(x), x.dtype.str, x.shape) for key, x in total.items()})
        return found

    async def program(strategy: ar.Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))[0]

    first, again = (await on_workers(2, 1, program))[0]
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        expected = (await program(strategy))[0]
    expected["big"] = (np.ndarray, "<f8", (size,))  # what is sent is in native order
    assert first == again == expected


async def test_a_step_that_repeats_sends_its_arrays_with_the_frames() -> None:
    """The first time they follow in a message of their own; results and errors are the same."""
    rng = np.random.default_rng(0)
    sizes = (300, 300, 60, 20_000, 300, 300)
    values = {(rank, size): rng.normal(size=size) for rank in range(2) for size in {*sizes}}

    async def step(size: int) -> Any:
        await me().barrier()
        mean = await me().all_reduce("mean", values[me().replica_id_in_sync_group, size])
        return mean.tobytes()

    async def mismatch() -> None:
        await me().all_reduce("sum", np.ones(100 + me().replica_id_in_sync_group))

    async def program(strategy: Strategy) -> Any:
        communicator, counts = communicator_of(strategy), []
        launch, followed = communicator._launch, []

        def noting(call: Any) -> Any:
            then, after = call.then, call.summands

            def note(came: Any) -> None:
                followed.extend(after)
                then(came)

            call.then = note if then is not None else None
            return launch(call)

        communicator._launch = noting
        for size in sizes:
            before = communicator.statistics().calls
            followed.clear()
            found = strategy.local_results(await strategy.run(step, (size,)))[0]
            assert found == np.mean([values[rank, size] for rank in range(2)], axis=0).tobytes()
            counts.append((communicator.statistics().calls - before, len(followed)))
        with pytest.raises(MergeMismatchError, match=r"100.*101|101.*100"):
            await strategy.run(mismatch)
        return counts

    greeting, barrier, frame = 1, 1, 1
    followed, behind = (barrier + frame, 1), (barrier + frame, 0)
    first = (greeting + barrier + frame, 1)
    assert (
        await on_workers(2, 1, program) == [[first, behind, behind, followed, behind, behind]] * 2
    )


async def test_workers_agree_once_on_the_batches_that_lie_in_memory() -> None:
    async def program(strategy: Strategy) -> Any:
        def make(context: ar.InputContext) -> Any:
            return ar.ArrayDataset(np.ones(6 + context.input_pipeline_id), batch_size=1)

        async with strategy.distribute_datasets_from_function(make) as batches:
            count = len([batch async for batch in batches])
        return count, communicator_of(strategy).statistics().calls

    greeting, begin, end = 1, 1, 1
    assert await on_workers(2, 1, program) == [(6, greeting + begin + end)] * 2


async def test_a_cancelled_wait_for_other_workers_loses_no_batch() -> None:
    arrived = asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        options = ar.InputOptions(sharding="data")
        dataset = ar.ArrayDataset(np.arange(6), batch_size=2)
        async with strategy.distribute_dataset(dataset, options) as batches:
            loop = aiter(batches)
            if rank_of(strategy):
                waiting = asyncio.create_task(anext(loop))
                await idle()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                arrived.set()
            else:
                await arrived.wait()
            return [strategy.local_results(batch)[0].tolist() async for batch in loop]

    assert await on_workers(2, 1, program) == [[[0], [2], [4]], [[1], [3], [5]]]


# ---- making one --------------------------------------------------------------------------------


async def test_without_a_launcher_it_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Strategy(ClusterResolver()) as strategy:
        assert strategy.num_replicas_in_sync == 8
        assert await strategy.reduce("sum", ar.PerReplica([1] * 8)) == 8


async def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an ar\.cluster.ClusterResolver"):
        Strategy("worker 0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="CommunicationOptions"):
        Strategy(ClusterResolver(), options=1)  # type: ignore[arg-type]
    options = ar.CommunicationOptions(compression=ar.collectives.Float16())
    with pytest.raises(ValueError, match="compression"):
        Strategy(ClusterResolver(), options=options)
    ps = ClusterResolver({"worker": ["a:1"], "ps": ["b:1"]}, task_type="ps")
    with pytest.raises(ValueError, match="This process is ps 0 of the cluster"):
        Strategy(ps)
    with pytest.raises(ValueError, match="9 workers in one process need a device each"):
        Strategy(LocalCommunicator.group(9)[0])


async def test_compiled_device_loops_are_refused_by_name() -> None:
    pytest.importorskip("jax")  # without it, that is what is said

    async def program(strategy: Strategy) -> None:
        with pytest.raises(ContextError, match=r'cannot run_steps with compile="jax"'):
            await strategy.run_steps(lambda ctx, x: None, iter([1]), compile="jax")

    await on_workers(2, 2, program)


async def test_copies_are_made_of_a_resolver_only() -> None:
    strategy = Strategy(ClusterResolver(num_workers=2, task_id=1))
    assert copy.deepcopy(strategy).num_replicas_in_sync == 16
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(strategies(1, 2)[0])


async def test_a_strategy_that_was_never_used_closes_at_once() -> None:
    [one, two] = strategies(2, 1)
    await one.aclose()
    await two.aclose()
    assert await outcomes(strategies(2, 1), [lambda _: asyncio.sleep(0)] * 2) == [None, None]
