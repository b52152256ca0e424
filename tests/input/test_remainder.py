"""Batches that cannot be shared out evenly: weighed, dropped or refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.input import num_examples
from tests.conftest import mirrored

pytestmark = pytest.mark.usefixtures("no_task_left")

VALUES = np.random.default_rng(1).normal(size=11)


def sizes(batch: Any) -> list[int]:
    return [len(part) for part in batch.values]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 11])
async def test_every_example_counts_once(num_replicas: int, batch_size: int) -> None:
    """A mean over the batch is that of NumPy, however it is split and with empty parts too."""
    dataset = ar.ArrayDataset(VALUES, batch_size)

    async def step(part: Any) -> Any:
        ctx = ar.get_replica_context()
        total = await ctx.all_reduce("sum", ar.Weighted(part.sum(), len(part)))
        return total.mean()

    async with (
        mirrored(num_replicas) as strategy,
        strategy.distribute_dataset(dataset) as batches,
    ):
        whole = iter(dataset)
        async for batch in batches:
            expected = next(whole).mean()
            weighted = await strategy.run(step, args=(batch,))
            reduced = await strategy.reduce("mean", batch, axis=0)
            np.testing.assert_allclose([*weighted.values, reduced], expected)
            assert num_examples(batch) == sum(sizes(batch))


@pytest.mark.asyncio
async def test_a_loss_over_an_uneven_batch_is_that_of_one_replica() -> None:
    async def train(num_replicas: int) -> Any:
        async with mirrored(num_replicas) as strategy:
            with strategy.scope():
                w = ar.Variable(np.zeros(()), name="w")
                optimizer = ar.optimizers.Adam(0.1)

            async def step(part: Any) -> None:
                gradient = ar.Weighted(np.sum(w.value - part), len(part))
                total = await ar.get_replica_context().all_reduce("sum", gradient)
                await optimizer.apply_gradients(
                    [(total.mean() / ar.get_replica_context().num_replicas_in_sync, w)]
                )

            async with strategy.distribute_dataset(ar.ArrayDataset(VALUES, 3)) as batches:
                async for batch in batches:
                    await strategy.run(step, args=(batch,))
            return w.value

    alone = await train(1)
    for num_replicas in (2, 3, 4):
        np.testing.assert_allclose(await train(num_replicas), alone)


@pytest.mark.asyncio
async def test_drop_gives_equal_parts_only(triple: ar.MirroredStrategy) -> None:
    options = ar.InputOptions(remainder="drop")
    dataset = ar.ArrayDataset(np.arange(10), 4)

    async with triple.distribute_dataset(dataset, options) as batches:
        seen = [[part.tolist() for part in batch.values] async for batch in batches]
        assert batches.state_dict()["epoch"] == 1

    assert seen == [[[0], [1], [2]], [[4], [5], [6]]]
    assert len(batches) == 2
    assert len(triple.distribute_dataset(ar.ArrayDataset(np.arange(12), 4), options)) == 3


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Global batch 0 .* of 2> was left out")  # as it should
@pytest.mark.parametrize(
    "dataset",
    [
        ar.ArrayDataset(np.arange(10), 4),
        ar.ArrayDataset(np.arange(10), 2),
        ar.ArrayDataset(np.arange(10), 4, drop_remainder=True),
        ar.Dataset(ar.ArrayDataset(np.arange(10), 4)).prefetch(1),
        ar.ArrayDataset(np.arange(0), 4),
    ],
)
async def test_the_length_leaves_out_dropped_batches(
    triple: ar.MirroredStrategy, dataset: Any
) -> None:
    options = ar.InputOptions(remainder="drop")
    async with triple.distribute_dataset(dataset, options) as batches:
        assert len(batches) == len([batch async for batch in batches])


def test_no_length_is_given_where_batches_of_any_size_may_be_dropped() -> None:
    batches = [np.ones(4), np.ones(2), np.ones(4)]
    mapped = ar.Dataset(ar.ArrayDataset(np.ones(10), 4)).map(lambda batch: batch[::4])
    for dataset in (batches, mapped):
        assert len(mirrored(3).distribute_dataset(dataset)) == 3
        dropping = mirrored(3).distribute_dataset(dataset, ar.InputOptions(remainder="drop"))
        with pytest.raises(TypeError, match="does not say how many batches"):
            len(dropping)


@pytest.mark.asyncio
async def test_remainder_error_refuses_uneven_batches(triple: ar.MirroredStrategy) -> None:
    options = ar.InputOptions(remainder="error")

    async with triple.distribute_dataset(ar.ArrayDataset(np.arange(8), 6), options) as batches:
        loop = aiter(batches)
        assert sizes(await anext(loop)) == [2, 2, 2]
        with pytest.raises(ValueError, match="has 2 examples, which 3 replicas cannot share"):
            await anext(loop)


@pytest.mark.asyncio
async def test_a_batch_smaller_than_the_replicas_leaves_some_empty(
    triple: ar.MirroredStrategy,
) -> None:
    async with triple.distribute_dataset([np.ones((2, 4))]) as batches:
        assert [sizes(batch) async for batch in batches] == [[1, 1, 0]]
    options = ar.InputOptions(remainder="error")
    async with triple.distribute_dataset([np.ones((2, 4))], options) as batches:
        with pytest.raises(ValueError, match="has 2 examples"):
            await anext(aiter(batches))


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1])
@pytest.mark.parametrize("dataset", [[np.ones((2, 4))], ar.ArrayDataset(np.arange(5), 2)])
async def test_a_loop_that_gets_nothing_is_told_of_it(
    triple: ar.MirroredStrategy, dataset: Any, buffer: int
) -> None:
    options = ar.InputOptions(remainder="drop", per_replica_buffer_size=buffer)
    async with triple.distribute_dataset(dataset, options) as batches:
        for _ in range(2):
            with pytest.warns(UserWarning, match="Global batch 0.*2 examples.*3 equal") as told:
                assert [batch async for batch in batches] == []
            assert len(told) == 1


@pytest.mark.asyncio
async def test_so_is_one_that_gets_some_batches(triple: ar.MirroredStrategy) -> None:
    data = [np.ones(size) for size in (3, 2, 1, 3)]
    async with triple.distribute_dataset(data, ar.InputOptions(remainder="drop")) as batches:
        with pytest.warns(UserWarning, match="Global batch 1 .*left out.*remainder='weight'"):
            assert [sizes(batch) async for batch in batches] == [[1, 1, 1]] * 2
        batches.load_state_dict({**batches.state_dict(), "epoch": 0, "position": 3})
        assert [sizes(batch) async for batch in batches] == [[1, 1, 1]]


@pytest.mark.asyncio
async def test_a_short_last_batch_is_left_out_without_a_word(triple: ar.MirroredStrategy) -> None:
    """Warnings are errors here. Nor is there one if a loop goes on before that batch."""
    dataset = ar.ArrayDataset(np.arange(8), 3)
    async with triple.distribute_dataset(dataset, ar.InputOptions(remainder="drop")) as batches:
        assert len([batch async for batch in batches]) == 2
        batches.load_state_dict({**batches.state_dict(), "epoch": 0, "position": 6})
        assert [batch async for batch in batches] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
async def test_a_loop_over_whole_batches_is_told_too(pair: ar.MirroredStrategy, mode: str) -> None:
    options = ar.InputOptions(
        remainder="drop",
        fetch_to_device=False,
        replication_mode=mode,  # type: ignore[arg-type]
    )

    def make(context: ar.InputContext) -> list[Any]:
        return [] if context.input_pipeline_id else [np.ones(2)]

    async with pair.distribute_datasets_from_function(make, options) as batches:
        with pytest.warns(UserWarning, match="gave no step.*each of 2 replicas"):
            assert [batch async for batch in batches] == []


@pytest.mark.asyncio
async def test_parts_are_views_and_keep_their_flags(pair: ar.MirroredStrategy) -> None:
    fresh, frozen = np.arange(4), np.arange(4)
    frozen.flags.writeable = False

    def read() -> Iterator[Any]:
        yield fresh, frozen

    async with pair.distribute_dataset(read) as batches:
        async for left, right in batches:
            assert all(np.shares_memory(part, fresh) for part in left.values)
            assert all(part.flags.writeable for part in left.values)
            assert not any(part.flags.writeable for part in right.values)
