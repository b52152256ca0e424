"""DistributedDataset: PerReplica batches, one epoch per loop, closed for good."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, LoopMismatchError
from aioreplica.input import ArraySpec
from tests.conftest import mirrored
from tests.input.sources import Watched


def parts(batch: object) -> list[list[int]]:
    assert isinstance(batch, ar.PerReplica)
    return [component.tolist() for component in batch]


@pytest.mark.asyncio
async def test_batches_are_split_over_the_replicas(triple: ar.MirroredStrategy) -> None:
    async with triple.distribute_dataset(ar.ArrayDataset(np.arange(7), 4)) as batches:
        seen = [parts(batch) async for batch in batches]

    assert seen == [[[0, 1], [2], [3]], [[4], [5], [6]]]
    assert len(batches) == 2


@pytest.mark.asyncio
async def test_a_replica_may_get_an_empty_part(triple: ar.MirroredStrategy) -> None:
    async with triple.distribute_dataset(ar.ArrayDataset(np.arange(5), 4)) as batches:
        seen = [parts(batch) async for batch in batches]

    assert seen[-1] == [[4], [], []]


@pytest.mark.asyncio
async def test_a_tree_keeps_its_structure_and_feeds_run(pair: ar.MirroredStrategy) -> None:
    data = ar.ArrayDataset((np.arange(4.0), {"y": np.arange(4)}), 4)

    async def step(x: Any, labels: Any) -> Any:
        return x.sum(), labels["y"].tolist()

    async with pair.distribute_dataset(data) as batches:
        async for batch in batches:
            total, labels = await pair.run(step, args=batch)

    assert list(total) == [1.0, 5.0]
    assert [list(part) for part in labels] == [[0, 2], [1, 3]]


@pytest.mark.asyncio
async def test_each_loop_is_the_next_epoch(pair: ar.MirroredStrategy) -> None:
    data = ar.ArrayDataset(np.arange(8), 8, shuffle=True)

    async with pair.distribute_dataset(data) as batches:
        epochs = [
            [np.concatenate(batch.values).tolist() async for batch in batches] for _ in range(3)
        ]

    assert epochs == [[batch.tolist() for batch in data.batches(epoch)] for epoch in range(3)]


@pytest.mark.asyncio
async def test_a_loop_that_was_broken_off_is_closed_with_the_dataset(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2)) as batches:
        loop = aiter(batches)
        first = parts(await anext(loop))

    assert first == [[0], [1]]
    with pytest.raises(StopAsyncIteration):
        await anext(loop)


@pytest.mark.asyncio
async def test_the_dataset_itself_can_be_asked_for_the_next_batch(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(4), 2)) as batches:
        for epoch in range(2):
            assert [parts(await anext(batches)) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
            assert batches.epoch == epoch
            with pytest.raises(StopAsyncIteration):
                await anext(batches)
        await anext(batches)
        assert len([batch async for batch in batches]) == 2
        with pytest.raises(ContextError, match="another loop over its dataset began"):
            await anext(batches)
        assert parts(await anext(batches)) == [[0], [1]]
    with pytest.raises(ContextError, match="is closed"):
        await anext(batches)


@pytest.mark.asyncio
async def test_a_loop_whose_dataset_is_closed_in_its_body_does_not_end_quietly(
    pair: ar.MirroredStrategy,
) -> None:
    """Otherwise an epoch would look complete that another task has cut short."""
    batches = pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2))
    loop = aiter(batches)
    await anext(loop)
    await batches.aclose()
    with pytest.raises(ContextError, match="because its dataset was closed"):
        await anext(loop)
    assert batches.statistics().position == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["closed", "failed"])
async def test_a_loop_that_ends_early_keeps_its_place(pair: ar.MirroredStrategy, how: str) -> None:
    """Asking once more, as after the end of a generator, must not skip the rest of the epoch."""
    async with pair.distribute_dataset(Watched(4, fail_at=2)) as batches:
        loop = aiter(batches)
        await anext(loop)
        if how == "closed":
            await loop.aclose()
        else:
            await anext(loop)
            with pytest.raises(ValueError, match="bad record 2"):
                await anext(loop)
        before = batches.state_dict()
        with pytest.raises(StopAsyncIteration):
            await anext(loop)
        assert batches.state_dict() == before
        assert before["epoch"] == 0
        assert before["position"] > 0


@pytest.mark.asyncio
async def test_after_a_broken_loop_the_next_one_starts_an_epoch(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2)) as batches:
        async with aclosing(aiter(batches)) as loop:
            async for _ in loop:
                break
        again = [parts(batch) async for batch in batches]

    assert again == [[[0], [1]], [[2], [3]], [[4], [5]]]


@pytest.mark.asyncio
async def test_a_closed_dataset_cannot_be_used(pair: ar.MirroredStrategy) -> None:
    batches = pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2))
    await batches.aclose()
    await batches.aclose()

    with pytest.raises(ContextError, match="is closed"):
        aiter(batches)


@pytest.mark.asyncio
async def test_a_long_loop_lets_other_tasks_run(pair: ar.MirroredStrategy) -> None:
    turns = []

    async def other() -> None:
        while len(turns) < 3:
            turns.append(1)
            await asyncio.sleep(0)

    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(20), 2)) as batches:
        task = asyncio.create_task(other())
        async for _ in batches:
            pass

    assert len(turns) == 3
    await task


@pytest.mark.asyncio
async def test_the_default_strategy_gives_the_batches_as_they_are() -> None:
    batches = ar.get_strategy().distribute_dataset(ar.ArrayDataset(np.arange(3), 2))

    async with batches:
        assert [batch.tolist() async for batch in batches] == [[0, 1], [2]]


@pytest.mark.asyncio
async def test_a_second_loop_ends_the_first(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2)) as batches:
        first, second = aiter(batches), aiter(batches)
        await anext(first)
        again = parts(await anext(second))

        assert again == [[0], [1]]
        with pytest.raises(ContextError, match=r"epoch 0 .* was ended because another loop"):
            await anext(first)
        assert parts(await anext(second)) == [[2], [3]]


@pytest.mark.asyncio
async def test_a_loop_begins_with_its_first_batch(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(6), 2)) as batches:
        aiter(batches)
        assert (batches.epoch, batches.statistics().state) == (0, "new")
        async for _ in batches:
            assert (batches.epoch, batches.statistics().state) == (0, "open")
        assert (batches.epoch, batches.statistics().state) == (1, "idle")
        assert batches.statistics().num_delivered == 3
    assert batches.statistics().state == "closed"


@pytest.mark.asyncio
async def test_after_its_end_an_iterator_stays_at_its_end(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset([np.arange(2)]) as batches:
        loop = aiter(batches)
        assert parts(await anext(loop)) == [[0], [1]]
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(loop)
        await loop.aclose()


@pytest.mark.asyncio
async def test_iterating_inside_a_replica_is_refused(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset([np.arange(2)]) as batches:

        async def step() -> None:
            await anext(aiter(batches))

        with pytest.raises(ContextError, match="Iterate outside the step"):
            await pair.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "call",
    [
        lambda strategy: strategy.distribute_dataset([]),
        lambda strategy: strategy.distribute_datasets_from_function(lambda context: []),
        lambda strategy: strategy.distribute_values_from_function(lambda context: 1),
    ],
)
async def test_distributing_inside_a_replica_is_refused(
    pair: ar.MirroredStrategy, call: Any
) -> None:
    async def step() -> None:
        call(pair)

    with pytest.raises(ContextError, match="distribute_"):
        await pair.run(step)


def test_a_loop_stays_on_its_event_loop() -> None:
    strategy = ar.get_strategy()
    batches = strategy.distribute_dataset([np.arange(2), np.arange(2)])
    loop = aiter(batches)

    async def take() -> None:
        await anext(loop)

    async def whole() -> int:
        return len([batch async for batch in batches])

    asyncio.run(take())
    with pytest.raises(LoopMismatchError, match="Begin a new loop"):
        asyncio.run(take())
    assert asyncio.run(whole()) == 2


@pytest.mark.asyncio
async def test_a_dataset_of_a_closed_strategy_is_an_error() -> None:
    async with mirrored(2) as strategy:
        batches = strategy.distribute_dataset([np.arange(2)])

    with pytest.raises(ContextError, match="closed"):
        await anext(aiter(batches))


@pytest.mark.asyncio
async def test_the_length_is_that_of_the_source(pair: ar.MirroredStrategy) -> None:
    assert len(pair.distribute_dataset([np.arange(2)] * 3)) == 3
    with pytest.raises(TypeError, match="does not say how many"):
        len(pair.distribute_dataset(lambda: iter([])))


@pytest.mark.asyncio
async def test_element_spec_has_none_for_the_batch(pair: ar.MirroredStrategy) -> None:
    expected = {"x": ArraySpec((None, 3), np.dtype("f4")), "y": ArraySpec((None,), np.dtype("i8"))}
    data = {"x": np.zeros((5, 3), "f4"), "y": np.arange(5)}

    assert pair.distribute_dataset(ar.ArrayDataset(data, 2)).element_spec == expected
    assert pair.distribute_dataset([data]).element_spec == expected


@pytest.mark.asyncio
async def test_element_spec_of_a_generator_is_known_from_its_first_batch(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset(lambda: iter([np.zeros((4, 2))])) as batches:
        with pytest.raises(ContextError, match="not known before the first batch"):
            batches.element_spec  # noqa: B018
        async for _ in batches:
            assert batches.element_spec == ArraySpec((None, 2), np.dtype("f8"))
        assert aiter(batches).element_spec == batches.element_spec


@pytest.mark.asyncio
async def test_repr_shows_the_state(pair: ar.MirroredStrategy) -> None:
    batches = pair.distribute_dataset(ar.ArrayDataset(np.arange(3), 2))

    assert repr(batches).endswith("for 2 | epoch 0>")
    await batches.aclose()
    assert repr(batches).endswith("for 2 | closed>")
