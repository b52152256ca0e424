"""What TensorFlow tests of several workers, asked of this strategy.

The facts are those of collective_all_reduce_strategy_test, of the multi-worker parts of
mirrored_strategy_test and input_lib_test, and of the strategy_test_lib that they share. Left out is
what belongs to graphs, sessions, servers and device filters.
"""

from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import ClusterResolver
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.workers import on_workers, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy
DIVISIONS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


# ---- collective_all_reduce_strategy_test -------------------------------------------------------


@pytest.mark.parametrize("division", DIVISIONS)
async def test_minimizing_brings_a_kernel_near_its_target_on_every_worker(
    division: tuple[int, int],
) -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            kernel = ar.Variable(np.random.default_rng(rank_of(strategy)).uniform(size=(1, 1)))
            sgd = ar.optimizers.SGD(0.2, loss_reduction="mean")

        async def step() -> None:
            one = anp.ones((1, 1))
            await sgd.minimize(
                lambda: anp.sum((anp.matmul(one, kernel.value) - 1.0) ** 2), [kernel]
            )

        errors = [abs(float(kernel.value[0, 0]) - 1)]
        for _ in range(10):
            await strategy.run(step)
            errors.append(abs(float(kernel.value[0, 0]) - 1))
        return errors

    results = await on_workers(*division, program)

    for errors in results:
        assert errors[-1] < errors[1] * 0.1
        assert errors[1:] == results[0][1:]


@pytest.mark.parametrize("division", DIVISIONS)
async def test_random_initial_values_are_equal_on_all_workers(division: tuple[int, int]) -> None:
    async def step(x: ar.Variable) -> Any:
        return x.value.tolist()

    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            x = ar.Variable(lambda: np.random.default_rng(rank_of(strategy)).uniform(10, 20, 3))
        return strategy.local_results(await strategy.run(step, (x,)))

    expected = np.random.default_rng(0).uniform(10, 20, 3).tolist()
    assert await on_workers(*division, program) == [(expected,) * division[1]] * division[0]


@pytest.mark.parametrize("division", DIVISIONS)
async def test_reducing_replica_ids_to_the_cpu(division: tuple[int, int]) -> None:
    async def step() -> Any:
        return np.array(1.0 + me().replica_id_in_sync_group)

    async def program(strategy: Strategy) -> Any:
        value = await strategy.run(step)
        to = await strategy.extended.reduce_to("sum", value, "cpu:0")
        pairs = [(value, "cpu:0"), (value, "cpu:0")]
        batch = await strategy.extended.batch_reduce_to("mean", pairs)
        return float(await strategy.reduce("sum", value)), float(to), [float(x) for x in batch]

    n = division[0] * division[1]
    total = n * (n + 1) / 2
    assert await on_workers(*division, program) == [(total, total, [total / n] * 2)] * division[0]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("division", DIVISIONS)
async def test_gradients_through_all_reduce(division: tuple[int, int], op: str) -> None:
    """The gradient of a sum over n replicas is n times that of one; of a mean, the same."""

    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            w = ar.Variable(3.0)

        async def step() -> Any:
            i = 1.0 + me().replica_id_in_sync_group

            def loss() -> Any:
                return ar.autodiff.all_reduce(op, w.value * i)

            [(gradient, _)] = await ar.optimizers.SGD.compute_gradients(sgd, loss, [w])
            return float(gradient)

        with strategy.scope():
            sgd = ar.optimizers.SGD(1.0)
        return strategy.local_results(await strategy.run(step))

    n = division[0] * division[1]
    found = [g for of_one in await on_workers(*division, program) for g in of_one]
    scale = n if op == "sum" else 1
    assert found == pytest.approx([scale * (i + 1) for i in range(n)])


async def test_only_replica_0_of_all_workers_writes_summaries() -> None:
    async def step() -> None:
        me().record("a", float(me().replica_id_in_sync_group))

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step)
        scalars = strategy.events.events("scalar")
        return [event.value for event in scalars], strategy.extended.should_save_summary

    assert await on_workers(2, 2, program) == [([0.0], True), ([], False)]


async def test_a_deep_copy_is_a_strategy_of_the_same_cluster() -> None:
    resolver = ClusterResolver({"worker": ["a:1", "b:1"]}, task_id=1)
    first = Strategy(resolver)

    assert first.num_replicas_in_sync == 2 * len(first.extended.worker_devices)
    assert first.cluster_resolver is resolver
    assert not first.extended.should_checkpoint


# ---- mirrored_strategy_test, with several workers ----------------------------------------------


@pytest.mark.parametrize("division", DIVISIONS)
async def test_the_number_of_replicas_is_that_of_all_workers(division: tuple[int, int]) -> None:
    async def program(strategy: Strategy) -> Any:
        return strategy.num_replicas_in_sync, len(strategy.extended.worker_devices)

    expected = (division[0] * division[1], division[1])
    assert await on_workers(*division, program) == [expected] * division[0]


async def test_variables_take_values_of_a_checkpoint_on_all_workers(tmp_path: Path) -> None:
    async with ar.OneDeviceStrategy("cpu:0") as alone, ar.CheckpointManager(tmp_path) as manager:
        with alone.scope():
            saved = ar.Variable([1.0, 2.0], name="v")
        await manager.save(1, {"v": saved})

    async def step(v: ar.Variable) -> Any:
        return v.value.tolist()

    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            v = ar.Variable(np.zeros(2), name="v")
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.restore({"v": v})
        return strategy.local_results(await strategy.run(step, (v,)))

    assert await on_workers(2, 2, program) == [([1.0, 2.0],) * 2] * 2


# ---- input_lib_test, with several workers ------------------------------------------------------


async def read(strategy: Strategy, dataset: Any, **options: Any) -> list[list[list[int]]]:
    """Return what this worker's replicas get, step by step."""
    async with strategy.distribute_dataset(dataset, ar.InputOptions(**options)) as batches:
        return [
            [np.asarray(part).tolist() for part in strategy.local_results(batch)]
            async for batch in batches
        ]


async def test_one_replica_per_worker_gets_its_part_of_every_batch() -> None:
    results = await on_workers(
        2, 1, lambda s: read(s, ar.ArrayDataset(np.arange(6), 2), sharding="data")
    )

    assert results == [[[[0]], [[2]], [[4]]], [[[1]], [[3]], [[5]]]]


async def test_two_replicas_per_worker_get_theirs() -> None:
    results = await on_workers(
        2, 2, lambda s: read(s, ar.ArrayDataset(np.arange(8), 4), sharding="data")
    )

    assert results == [[[[0], [1]], [[4], [5]]], [[[2], [3]], [[6], [7]]]]


async def test_without_sharding_every_worker_reads_all() -> None:
    data = ar.ArrayDataset(np.arange(4), 4)

    assert (
        await on_workers(2, 2, lambda s: read(s, data, sharding="off")) == [[[[0, 1], [2, 3]]]] * 2
    )
    assert await on_workers(2, 2, lambda s: read(s, data)) == [[[[0], [1]]], [[[2], [3]]]]


async def test_files_are_dealt_to_workers() -> None:
    files = ar.input.Files(["0", "1", "2"], lambda path: [np.full(1, int(path))] * 2)

    results = await on_workers(2, 1, lambda s: read(s, files, sharding="file"))

    assert results == [[[[0]], [[0]]], [[[1]], [[1]]]]  # file 2 is cut off: worker 1 has no more


async def test_tuples_and_a_partial_batch() -> None:
    """The last batch has one example: all other replicas get an empty part, and take part."""
    data = (np.arange(5), np.arange(5) ** 2)

    async def program(strategy: Strategy) -> Any:
        async def step(x: Any, y: Any) -> Any:
            total = await me().all_reduce("sum", (int(np.sum(x)), int(np.sum(y)), len(x)))
            return total, len(x)

        dataset = ar.ArrayDataset(data, batch_size=4)
        options = ar.InputOptions(sharding="data")
        async with strategy.distribute_dataset(dataset, options) as batches:
            return [
                strategy.local_results(await strategy.run(step, batch)) async for batch in batches
            ]

    first, second = await on_workers(2, 2, program)
    assert [[own for _, own in of_step] for of_step in first] == [[1, 1], [1, 0]]
    assert [[own for _, own in of_step] for of_step in second] == [[1, 1], [0, 0]]
    assert [of_step[0][0] for of_step in first] == [(6, 14, 4), (4, 16, 1)]


async def test_different_datasets_of_workers_end_with_the_shortest() -> None:
    async def program(strategy: Strategy) -> Any:
        def make(context: ar.InputContext) -> Any:
            assert context.num_input_pipelines == 2
            assert context.num_replicas_in_sync == 2
            assert context.get_per_replica_batch_size(4) == 2
            first = 10 * context.input_pipeline_id
            count = 3 + 2 * context.input_pipeline_id
            return ar.ArrayDataset(np.arange(first, first + count), batch_size=1)

        async with strategy.distribute_datasets_from_function(make) as batches:
            return [int(strategy.local_results(batch)[0][0]) async for batch in batches]

    assert await on_workers(2, 1, program) == [[0, 1, 2], [10, 11, 12]]


async def test_one_dataset_per_replica_counts_pipelines_over_all_workers() -> None:
    async def program(strategy: Strategy) -> Any:
        def make(context: ar.InputContext) -> Any:
            assert context.num_input_pipelines == 4
            return ar.ArrayDataset(np.full(2, context.input_pipeline_id), batch_size=1)

        options = ar.InputOptions(fetch_to_device=False, replication_mode="per_replica")
        async with strategy.distribute_datasets_from_function(make, options) as batches:
            return [
                [int(part[0]) for part in strategy.local_results(batch)] async for batch in batches
            ]

    assert await on_workers(2, 2, program) == [[[0, 1]] * 2, [[2, 3]] * 2]


async def test_a_communicator_is_no_resolver() -> None:
    (strategy,) = strategies(1, 1)  # each is given a LocalCommunicator
    assert strategy.cluster_resolver is None
