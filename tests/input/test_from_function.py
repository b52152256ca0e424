"""distribute_datasets_from_function: batches of one replica's size, dealt out or from one each."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import mirrored
from tests.input.sources import Watched
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

PER_REPLICA = {"fetch_to_device": False, "replication_mode": ar.InputReplicationMode.PER_REPLICA}


def parts(batch: Any) -> list[list[int]]:
    return [part.tolist() for part in batch.values]


def numbered(start: int, count: int, size: int = 2) -> list[np.ndarray]:
    return [np.arange(start + i * size, start + (i + 1) * size) for i in range(count)]


# ---- one dataset per worker -------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_function_is_called_once_with_its_pipeline_id(
    triple: ar.MirroredStrategy,
) -> None:
    contexts = []

    def dataset_fn(context: ar.InputContext) -> Any:
        contexts.append(context)
        return ar.ArrayDataset(np.arange(12), context.get_per_replica_batch_size(6))

    async with triple.distribute_datasets_from_function(dataset_fn) as batches:
        assert contexts == [ar.InputContext(1, 0, 3)]
        for _ in range(2):
            assert [parts(batch) async for batch in batches] == [
                [[0, 1], [2, 3], [4, 5]],
                [[6, 7], [8, 9], [10, 11]],
            ]
        assert len(batches) == 2
    assert len(contexts) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1, 2])
async def test_replicas_without_a_batch_get_an_empty_one(
    triple: ar.MirroredStrategy, buffer: int
) -> None:
    options = ar.InputOptions(per_replica_buffer_size=buffer)

    def dataset_fn(_context: Any) -> Any:
        return lambda: iter([np.ones((2, 5), np.float32)] * 4)

    async with triple.distribute_datasets_from_function(dataset_fn, options) as batches:
        shapes = [[part.shape for part in batch.values] async for batch in batches]

    assert shapes == [[(2, 5)] * 3, [(2, 5), (0, 5), (0, 5)]]


@pytest.mark.asyncio
async def test_incomplete_steps_can_be_dropped_or_refused(pair: ar.MirroredStrategy) -> None:
    def dataset_fn(_context: Any) -> Any:
        return numbered(0, 3)

    drop = ar.InputOptions(remainder="drop")
    async with pair.distribute_datasets_from_function(dataset_fn, drop) as batches:
        assert [parts(batch) async for batch in batches] == [[[0, 1], [2, 3]]]
        assert len(batches) == 1
    error = ar.InputOptions(remainder="error")
    async with pair.distribute_datasets_from_function(dataset_fn, error) as batches:
        loop = aiter(batches)
        await anext(loop)
        with pytest.raises(ValueError, match=r"Step 1 .*\[2, 0\] examples"):
            await anext(loop)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["one per worker", "one per replica"])
async def test_dropping_makes_a_step_even_and_goes_on(pair: ar.MirroredStrategy, mode: str) -> None:
    """A short batch in the middle costs its own step's surplus, not the rest of the epoch."""

    def dataset_fn(context: ar.InputContext) -> Any:
        sizes = [4, 3, 0, 2, 4, 4, 1]
        if mode == "one per replica":
            sizes = sizes[context.input_pipeline_id :: 2]
        return [np.arange(size) for size in sizes]

    given = PER_REPLICA if mode == "one per replica" else {}
    options = ar.InputOptions(**given, remainder="drop")
    expected = [[[0, 1, 2]] * 2, [[0, 1, 2, 3]] * 2]
    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        states = []
        for _ in range(2):
            seen = []
            async for batch in batches:
                seen.append(parts(batch))
                states.append(batches.state_dict())
            assert seen == expected
        batches.load_state_dict(states[0])
        assert [parts(batch) async for batch in batches] == expected[1:]


@pytest.mark.asyncio
async def test_dropping_keeps_the_even_part_of_the_last_step(pair: ar.MirroredStrategy) -> None:
    def dataset_fn(_context: Any) -> Any:
        return ar.ArrayDataset(np.arange(15), 4)

    options = ar.InputOptions(remainder="drop")
    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        seen = [parts(batch) async for batch in batches]
        assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [12, 13, 14]]]
        assert len(batches) == len(seen)


@pytest.mark.asyncio
async def test_a_generator_function_is_called_again_for_each_epoch(
    pair: ar.MirroredStrategy,
) -> None:
    calls = []

    def dataset_fn(context: ar.InputContext) -> Iterator[Any]:
        calls.append(context)
        yield from numbered(0, 2)

    async with pair.distribute_datasets_from_function(dataset_fn) as batches:
        for _ in range(3):
            assert [parts(batch) async for batch in batches] == [[[0, 1], [2, 3]]]
    assert calls == [ar.InputContext(1, 0, 2)] * 3


@pytest.mark.asyncio
async def test_it_resumes_with_another_number_of_replicas() -> None:
    async def numbers(num_replicas: int, state: Any, stop: int) -> tuple[list[int], Any]:
        found: list[int] = []
        async with (
            mirrored(num_replicas) as strategy,
            strategy.distribute_datasets_from_function(lambda _: Watched(9)) as batches,
        ):
            if state is not None:
                batches.load_state_dict(state)
            async for ids, _ in batches:
                found += np.concatenate(ids.values).tolist()
                stop -= 1
                if stop == 0:
                    break
            return found, batches.state_dict()

    before, state = await numbers(3, None, 1)
    after, _ = await numbers(2, state, 99)

    assert before + after == list(range(36))


# ---- one dataset per replica ------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1, 2])
async def test_each_replica_reads_its_own(triple: ar.MirroredStrategy, buffer: int) -> None:
    contexts = []
    options = ar.InputOptions(**PER_REPLICA, per_replica_buffer_size=buffer)

    def dataset_fn(context: ar.InputContext) -> Any:
        contexts.append(context)
        return lambda: iter(numbered(10 * context.input_pipeline_id, 2))

    async with triple.distribute_datasets_from_function(dataset_fn, options) as batches:
        assert [parts(batch) async for batch in batches] == [
            [[0, 1], [10, 11], [20, 21]],
            [[2, 3], [12, 13], [22, 23]],
        ]
    assert contexts == [ar.InputContext(3, i, 3) for i in range(3)]


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:.* gave no step")  # of (0, 2), as it should
@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (0, 2), (0, 0)])
async def test_all_replicas_end_together(
    pair: ar.MirroredStrategy, lengths: tuple[int, int]
) -> None:
    def dataset_fn(context: ar.InputContext) -> Any:
        return numbered(10 * context.input_pipeline_id, lengths[context.input_pipeline_id])

    for remainder, num_steps in (("weight", max(lengths)), ("drop", min(lengths))):
        options = ar.InputOptions(**PER_REPLICA, remainder=remainder)
        async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
            seen = [batch async for batch in batches]
            assert len(seen) == len(batches) == num_steps
    totals = [sum(len(part) for part in batch.values) for batch in seen]
    assert all(total == 4 for total in totals)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["arrays", "list", "generator"])
async def test_it_resumes_with_as_many_replicas(pair: ar.MirroredStrategy, kind: str) -> None:
    lengths = (6, 3)

    def dataset_fn(context: ar.InputContext) -> Any:
        found = numbered(100 * context.input_pipeline_id, lengths[context.input_pipeline_id])
        if kind == "arrays":
            return ar.ArrayDataset(np.concatenate(found), 2, shuffle=True)
        return found if kind == "list" else lambda: iter(found)

    options = ar.InputOptions(**PER_REPLICA)
    states, seen = [], []
    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        async for batch in batches:
            seen.append(parts(batch))
            states.append(batches.state_dict())
    assert len(seen) == 6

    for number, state in enumerate(states):
        async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
            batches.load_state_dict(state)
            assert [parts(batch) async for batch in batches] == seen[number + 1 :]
    async with mirrored(3) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: [], options)
        with pytest.raises(ValueError, match=r"2 input pipelines.*has 3"):
            batches.load_state_dict(states[0])


@pytest.mark.parametrize("build", ["arrays", "pipeline"])
def test_a_state_that_counts_steps_needs_the_same_batch_size(build: str) -> None:
    """Three steps of 2 are not three steps of 3: going on would skip examples in silence."""

    def batches_of(size: int) -> ar.input.DistributedDataset:
        def dataset_fn(_context: Any) -> Any:
            if build == "arrays":
                return ar.ArrayDataset(np.arange(12), size)
            return ar.Dataset([*range(12)]).batch(size)

        options = ar.InputOptions(**PER_REPLICA)
        return mirrored(2).distribute_datasets_from_function(dataset_fn, options)

    state = batches_of(2).state_dict()
    batches_of(2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"another dataset.*batch size"):
        batches_of(3).load_state_dict(state)


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1])
async def test_all_sources_are_closed(pair: ar.MirroredStrategy, buffer: int) -> None:
    sources = [Watched(), Watched()]
    options = ar.InputOptions(**PER_REPLICA, per_replica_buffer_size=buffer)

    def dataset_fn(context: ar.InputContext) -> Any:
        return sources[context.input_pipeline_id]

    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        async for _ in batches:
            break
    assert [source.num_closed for source in sources] == [1, 1]


@pytest.mark.asyncio
async def test_a_cancelled_wait_for_one_replica_loses_no_batch_of_another(
    pair: ar.MirroredStrategy,
) -> None:
    gates = [asyncio.Semaphore(0), asyncio.Semaphore(0)]

    def dataset_fn(context: ar.InputContext) -> Any:
        async def source() -> AsyncIterator[Any]:
            for number in range(3):
                await gates[context.input_pipeline_id].acquire()
                yield np.full(1, 10 * context.input_pipeline_id + number)

        return source

    async with pair.distribute_datasets_from_function(
        dataset_fn, ar.InputOptions(**PER_REPLICA)
    ) as batches:
        loop, seen = aiter(batches), []
        for _ in range(3):
            gates[0].release()
            waiting = asyncio.create_task(anext(loop))
            await idle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gates[1].release()
            seen.append(parts(await anext(loop)))
        assert await anext(loop, None) is None

    assert seen == [[[0], [10]], [[1], [11]], [[2], [12]]]


@pytest.mark.asyncio
async def test_a_source_that_fails_to_close_does_not_keep_the_others_open(
    pair: ar.MirroredStrategy,
) -> None:
    closed: list[int] = []

    def dataset_fn(context: ar.InputContext) -> Any:
        async def source() -> AsyncIterator[Any]:
            try:
                while True:
                    yield np.ones(1)
            finally:
                closed.append(context.input_pipeline_id)
                if context.input_pipeline_id == 0:
                    raise OSError("disk")

        return source

    batches = pair.distribute_datasets_from_function(dataset_fn, ar.InputOptions(**PER_REPLICA))
    await anext(batches)
    with pytest.raises(OSError, match="disk"):
        await batches.aclose()

    assert closed == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("place", "where"), [(True, ["cpu:0", "cpu:1"]), (False, ["cpu:0", "cpu:0"])]
)
async def test_only_datasets_placed_on_devices_are_made_there(
    pair: ar.MirroredStrategy, place: bool, where: list[str]
) -> None:
    devices = []

    def dataset_fn(_context: Any) -> Any:
        devices.append(str(ar.current_device()))
        return numbered(0, 1)

    options = ar.InputOptions(**PER_REPLICA, place_on_device=place)
    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        assert [parts(batch) async for batch in batches] == [[[0, 1], [0, 1]]]
    assert devices == where


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_datasets_placed_on_devices_are_read_there(
    pair: ar.MirroredStrategy, kind: str, buffer: int
) -> None:
    """A generator makes its batches later than it is made, and closes later still."""
    devices: list[list[str]] = [[], []]

    def dataset_fn(context: ar.InputContext) -> Any:
        seen = devices[context.input_pipeline_id]

        def generate() -> Iterator[Any]:
            try:
                for _ in range(2):
                    seen.append(str(ar.current_device()))
                    yield np.ones(2)
            finally:
                seen.append(str(ar.current_device()))

        async def agenerate() -> AsyncIterator[Any]:
            for item in generate():
                yield item

        return generate if kind == "plain" else agenerate

    options = ar.InputOptions(**PER_REPLICA, place_on_device=True, per_replica_buffer_size=buffer)
    async with pair.distribute_datasets_from_function(dataset_fn, options) as batches:
        async for _ in batches:
            pass
    assert devices == [["cpu:0"] * 3, ["cpu:1"] * 3]


@pytest.mark.asyncio
async def test_one_replica_and_plain_values() -> None:
    strategy = ar.get_strategy()
    for options in (None, ar.InputOptions(**PER_REPLICA)):
        batches = strategy.distribute_datasets_from_function(lambda _: numbered(0, 2), options)
        async with batches:
            assert [batch.tolist() async for batch in batches] == [[0, 1], [2, 3]]


# ---- bad input ----------------------------------------------------------------------------------


def test_one_dataset_per_replica_needs_a_function() -> None:
    with pytest.raises(ValueError, match="distribute_datasets_from_function"):
        mirrored(2).distribute_dataset([], ar.InputOptions(**PER_REPLICA))


@pytest.mark.parametrize("dataset_fn", [None, [1], 3])
def test_an_argument_that_is_not_a_function_is_refused(dataset_fn: Any) -> None:
    with pytest.raises(TypeError, match="dataset_fn must be a function"):
        mirrored(2).distribute_datasets_from_function(dataset_fn)


def test_the_function_must_return_a_dataset() -> None:
    with pytest.raises(TypeError, match="cannot be iterated"):
        mirrored(2).distribute_datasets_from_function(lambda _: 3)


def test_the_function_must_not_be_a_coroutine_function() -> None:
    async def fetch(_context: Any) -> Any:
        return []

    with pytest.raises(TypeError, match=r"fetch.* is a coroutine function.*plain function"):
        mirrored(2).distribute_datasets_from_function(fetch)
    with pytest.raises(TypeError, match=r"fetch.* is a coroutine function.*plain function"):
        mirrored(2).distribute_values_from_function(fetch)


def test_sharding_is_the_functions_own_task() -> None:
    with pytest.raises(ValueError, match="input_pipeline_id"):
        mirrored(2).distribute_datasets_from_function(
            lambda _: [], ar.InputOptions(sharding="data")
        )


def test_options_must_be_input_options() -> None:
    for distribute in (
        mirrored(2).distribute_dataset,
        mirrored(2).distribute_datasets_from_function,
    ):
        with pytest.raises(TypeError, match=r"ar\.InputOptions"):
            distribute(lambda _: [], {"remainder": "drop"})


@pytest.mark.asyncio
async def test_an_error_of_the_function_is_raised_where_it_is_called() -> None:
    def dataset_fn(_context: Any) -> Any:
        raise ContextError("no data today")

    with pytest.raises(ContextError, match="no data today"):
        mirrored(2).distribute_datasets_from_function(dataset_fn)
