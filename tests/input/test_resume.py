"""state_dict: wherever a run is stopped, the next one goes on at the exact next example."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.input import KeyedPermutation
from tests.conftest import mirrored
from tests.input.sources import RESTARTABLE, Watched
from tests.replica.gated import me, my_id, spawn

pytestmark = pytest.mark.usefixtures("no_task_left")

NUM_EXAMPLES = 23
DATA = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)


def shuffled(batch_size: int = 4) -> ar.ArrayDataset:
    return ar.ArrayDataset((np.arange(NUM_EXAMPLES), DATA), batch_size, shuffle=True, seed=5)


def mapped(batch_size: int = 4) -> ar.Dataset:
    return ar.Dataset(shuffled(batch_size)).map(lambda item: (item[0], item[1] + 1)).prefetch(3)


def unbatched(batch_size: int = 4) -> ar.Dataset:
    def generate() -> Iterator[Any]:
        yield from zip(range(NUM_EXAMPLES), DATA, strict=True)

    return ar.Dataset(generate).batch(batch_size)


def generator(batch_size: int = 4) -> Callable[[], Iterator[Any]]:
    def generate() -> Iterator[Any]:
        for start in range(0, NUM_EXAMPLES, batch_size):
            yield (
                np.arange(NUM_EXAMPLES)[start : start + batch_size],
                DATA[start : start + batch_size],
            )

    return generate


def async_generator(batch_size: int = 4) -> Callable[[], AsyncIterator[Any]]:
    async def agenerate() -> AsyncIterator[Any]:
        for item in generator(batch_size)():
            yield item

    return agenerate


class Stateful:
    """A loader with a state of its own, like torchdata's: no batch is read twice."""

    def __init__(self, batch_size: int = 4) -> None:
        self.batch_size = batch_size
        self.number = 0
        self.loaded = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        self.number, self.loaded = self.loaded, 0
        for item in list(generator(self.batch_size)())[self.number :]:
            self.number += 1
            self.num_read += 1
            yield item

    def state_dict(self) -> Any:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["number"]


KINDS: dict[str, Callable[..., Any]] = {
    "arrays": shuffled,
    "pipeline": mapped,
    "pipeline of examples": unbatched,
    "generator function": generator,
    "async generator function": async_generator,
    "own state": Stateful,
}


def bits(batch: Any) -> bytes:
    """Return the global batch, whichever way it is split."""
    return b"".join(np.concatenate(leaf.values).tobytes() for leaf in batch)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [0, 1, 3])
async def test_stopped_at_any_batch_the_rest_is_bitwise_the_same(kind: str, buffer: int) -> None:
    options = ar.InputOptions(per_replica_buffer_size=buffer)
    states, seen = [], []
    async with (
        mirrored(2) as strategy,
        strategy.distribute_dataset(KINDS[kind](), options) as batches,
    ):
        for _ in range(2):
            states.append(json.dumps(batches.state_dict()))
            async for batch in batches:
                seen.append(bits(batch))
                states.append(json.dumps(batches.state_dict()))
            del states[-1]  # behind the last batch: another test's
    num_batches = len(seen) // 2
    assert len(states) == len(seen)

    for number, state in enumerate(states):
        num_replicas = 1 + number % 4
        async with (
            mirrored(num_replicas) as strategy,
            strategy.distribute_dataset(KINDS[kind](), options) as batches,
        ):
            batches.load_state_dict(json.loads(state))
            assert batches.epoch == number // num_batches
            again = []
            while batches.epoch < 2:
                again += [bits(batch) async for batch in batches]
        assert again == seen[number:], f"stopped behind batch {number}"


@pytest.mark.asyncio
async def test_the_state_behind_the_last_batch_resumes_at_the_end_of_the_epoch(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset(shuffled()) as batches:
        async for _ in batches:
            state = batches.state_dict()

    async with pair.distribute_dataset(shuffled()) as batches:
        batches.load_state_dict(state)
        assert [batch async for batch in batches] == []
        assert batches.epoch == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["arrays", "pipeline", "pipeline of examples"])
async def test_another_batch_size_goes_on_at_the_next_example(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    async def numbers(batch_size: int, state: Any, stop: int) -> tuple[list[int], Any]:
        found: list[int] = []
        async with pair.distribute_dataset(KINDS[kind](batch_size)) as batches:
            if state is not None:
                batches.load_state_dict(state)
            async for ids, _ in batches:
                found += np.concatenate(ids.values).tolist()
                stop -= 1
                if stop == 0:
                    break
            return found, batches.state_dict()

    whole, _ = await numbers(4, None, 99)
    before, state = await numbers(4, None, 3)
    after, _ = await numbers(5, state, 99)

    assert before + after == whole
    assert len(before) == 12


@pytest.mark.asyncio
async def test_a_state_is_a_few_integers(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(shuffled()) as batches:
        async for _ in batches:
            break
        state = batches.state_dict()

    assert all(type(value) is int for value in state.values())
    assert {name: state[name] for name in ("version", "epoch", "position", "pipelines")} == {
        "version": 2,
        "epoch": 0,
        "position": 4,
        "pipelines": 1,
    }
    assert state["fingerprint"] < 2**53


@pytest.mark.asyncio
async def test_a_source_with_a_state_of_its_own_reads_nothing_twice(
    pair: ar.MirroredStrategy,
) -> None:
    async with pair.distribute_dataset(Stateful()) as batches:
        async for _ in batches:
            if batches.statistics().position == 4:
                break
        state = json.loads(json.dumps(batches.state_dict()))
    assert state["source"] == {"number": 4}

    source = Stateful()
    async with pair.distribute_dataset(source) as batches:
        batches.load_state_dict(state)
        assert len([batch async for batch in batches]) == 2
    assert source.num_read == 2


@pytest.mark.asyncio
async def test_loading_a_state_ends_the_loop(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(shuffled()) as batches:
        loop = aiter(batches)
        await anext(loop)
        state = batches.state_dict()
        second = bits(await anext(loop))
        batches.load_state_dict(state)
        with pytest.raises(ContextError, match="ended because a state was loaded"):
            await anext(loop)
        assert bits(await anext(aiter(batches))) == second


@pytest.mark.asyncio
async def test_single_batches_go_on_where_a_loaded_state_says(pair: ar.MirroredStrategy) -> None:
    """The loop that a state has ended is the dataset's own: nobody holds it."""
    async with pair.distribute_dataset(shuffled()) as batches:
        await anext(batches)
        state = batches.state_dict()
        second = bits(await anext(batches))
        batches.load_state_dict(state)

        assert bits(await anext(batches)) == second


@pytest.mark.asyncio
async def test_skipping_lets_other_tasks_run(pair: ar.MirroredStrategy) -> None:
    async def eager() -> AsyncIterator[Any]:
        for _ in range(1000):
            yield np.ones(2)

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with pair.distribute_dataset(eager) as batches:
        batches.load_state_dict({**batches.state_dict(), "position": 999})
        task = asyncio.create_task(other())
        assert len([batch async for batch in batches]) == 1
        task.cancel()
    assert turns > 10


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [np.int64, np.asarray])
async def test_a_state_may_come_back_as_numpy_integers(
    pair: ar.MirroredStrategy, kind: Any
) -> None:
    """As it does from a checkpoint that holds arrays."""
    async with pair.distribute_dataset(shuffled()) as batches:
        await anext(aiter(batches))
        state = batches.state_dict()
        batches.load_state_dict({name: kind(number) for name, number in state.items()})
        assert batches.state_dict() == state
        assert {type(number) for number in batches.state_dict().values()} == {int}


OLD_STATE = {
    "version": 1,
    "epoch": 0,
    "position": 4,
    "pipelines": 1,
    "fingerprint": 150809284613347,
}


@pytest.mark.asyncio
async def test_a_state_of_the_first_version_keeps_its_order(pair: ar.MirroredStrategy) -> None:
    """What was delivered before, 2, 8, 3 and 5, does not come again; nor later epochs' orders."""
    dataset = ar.ArrayDataset(np.arange(9), 4, shuffle=True, seed=5)
    async with pair.distribute_dataset(dataset) as batches:
        batches.load_state_dict(OLD_STATE)
        assert batches.state_dict() == OLD_STATE
        assert await numbers_in(batches) == [0, 4, 6, 1, 7]
        state = batches.state_dict()
        assert await numbers_in(batches) == [1, 0, 5, 8, 4, 6, 2, 7, 3]
        loop = aiter(batches)
        await anext(loop)
        assert batches.state_dict() == {**OLD_STATE, "epoch": 2}

    assert state == {**OLD_STATE, "epoch": 1, "position": 0}
    async with pair.distribute_dataset(dataset) as batches:
        batches.load_state_dict(state)
        assert await numbers_in(batches) == [1, 0, 5, 8, 4, 6, 2, 7, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
async def test_so_does_one_of_whole_batches(pair: ar.MirroredStrategy, mode: str) -> None:
    options = ar.InputOptions(fetch_to_device=False, replication_mode=mode)  # type: ignore[arg-type]

    def make(_: ar.InputContext) -> ar.ArrayDataset:
        return ar.ArrayDataset(np.arange(9), 1, shuffle=True, seed=5)

    async with pair.distribute_datasets_from_function(make, options) as batches:
        batches.load_state_dict({**batches.state_dict(), "version": 1, "position": 4})
        left = await numbers_in(batches)

    order = KeyedPermutation(9, seed=5, epoch=0, version=1)(np.arange(4, 9)).tolist()
    assert left == (order if mode == "PER_WORKER" else np.repeat(order, 2).tolist())


async def numbers_in(batches: ar.DistributedDataset) -> list[int]:
    """Return the examples of one epoch."""
    return [int(n) async for batch in batches for part in batch.values for n in part]


# ---- states that do not fit -------------------------------------------------------------------


def state_of(dataset: Any, **changes: Any) -> dict[str, Any]:
    batches = ar.get_strategy().distribute_dataset(dataset)
    return {**batches.state_dict(), **changes}


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (None, TypeError, "what state_dict returned"),
        ([1], TypeError, "what state_dict returned"),
        ({}, ValueError, "version None"),
        (state_of(shuffled(), version=0), ValueError, "version 0.*reads versions 1 to 2"),
        (state_of(shuffled(), version=3), ValueError, "version 3.*reads versions 1 to 2"),
        (state_of(shuffled(), version=1.0), ValueError, "version=1.0"),
        (state_of(shuffled(), epoch=-1), ValueError, "epoch=-1"),
        (state_of(shuffled(), position="4"), ValueError, "position='4'"),
        (state_of(shuffled(), position=np.ones(2, int)), ValueError, "position=array"),
        (state_of(shuffled(), position=4.0), ValueError, "position=4.0"),
        (state_of(shuffled(), position=True), ValueError, "position=True"),
        (state_of(shuffled(), pipelines=3), ValueError, "3 input pipelines"),
        (state_of(shuffled(), fingerprint=1), ValueError, "another dataset"),
    ],
)
def test_an_invalid_state_is_refused(state: Any, error: type[Exception], text: str) -> None:
    batches = ar.get_strategy().distribute_dataset(shuffled())
    before = batches.state_dict()

    with pytest.raises(error, match=text):
        batches.load_state_dict(state)

    assert batches.state_dict() == before


@pytest.mark.parametrize(
    "other",
    [
        ar.ArrayDataset((np.arange(NUM_EXAMPLES), DATA), 4, shuffle=True, seed=6),
        ar.ArrayDataset((np.arange(NUM_EXAMPLES), DATA), 4),
        ar.ArrayDataset((np.arange(NUM_EXAMPLES), DATA + 1), 4, shuffle=True, seed=5),
        ar.ArrayDataset((np.arange(22), DATA[:22]), 4, shuffle=True, seed=5),
        ar.ArrayDataset({"x": np.arange(NUM_EXAMPLES), "y": DATA}, 4, shuffle=True, seed=5),
        ar.ArrayDataset(
            (np.arange(NUM_EXAMPLES), DATA.astype(np.float64)), 4, shuffle=True, seed=5
        ),
        generator(),
        [np.ones(2)],
    ],
    ids=["seed", "order", "values", "length", "structure", "dtype", "kind", "list"],
)
def test_the_state_of_another_dataset_is_refused(other: Any) -> None:
    batches = ar.get_strategy().distribute_dataset(other)

    with pytest.raises(ValueError, match="another dataset"):
        batches.load_state_dict(state_of(shuffled()))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", RESTARTABLE)
async def test_a_source_that_became_shorter_is_an_error(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    async with pair.distribute_dataset(RESTARTABLE[kind](2)) as batches:
        batches.load_state_dict({**batches.state_dict(), "position": 100})
        with pytest.raises(ValueError, match=r"cannot go on after (example|item) 100"):
            await anext(aiter(batches))


@pytest.mark.asyncio
async def test_a_closed_dataset_loads_nothing(pair: ar.MirroredStrategy) -> None:
    batches = pair.distribute_dataset(Watched())
    state = batches.state_dict()
    await batches.aclose()

    with pytest.raises(ContextError, match="closed"):
        batches.load_state_dict(state)


@pytest.mark.asyncio
async def test_a_state_that_was_loaded_is_the_state(pair: ar.MirroredStrategy) -> None:
    def dataset() -> Any:
        return pair.distribute_dataset(ar.ArrayDataset(np.arange(12), 4))

    async with dataset() as batches:
        await anext(batches)
        state = batches.state_dict()
    async with dataset() as batches:
        batches.load_state_dict(state)

        assert batches.state_dict() == state
        assert batches.statistics().position == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["another loop", "a state"])
async def test_batches_of_a_loop_that_was_replaced_do_not_move_the_place(
    pair: ar.MirroredStrategy, by: str
) -> None:
    """A device loop has read them; its steps end after another loop has begun, or is about to."""
    are_there, goes_on = asyncio.Event(), asyncio.Event()
    arrived: list[int] = []

    async def wait(replica_id: int) -> None:
        arrived.append(replica_id)
        if len(arrived) == 2:  # both have completed two steps
            are_there.set()
        await goes_on.wait()

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        if ctx.steps_run == 2:
            ar.outside_compilation(wait, my_id())
        me().blocking.barrier()

    states: list[Any] = []
    async with pair.distribute_dataset(ar.ArrayDataset(np.arange(16), 4)) as batches:
        beginning = batches.state_dict()
        running = spawn(pair.run_steps(step, aiter(batches), 4))
        await are_there.wait()
        states.append(batches.state_dict())
        if by == "a state":
            batches.load_state_dict(beginning)
        else:
            await anext(aiter(batches))
        states.append(batches.state_dict())
        goes_on.set()
        assert (await running).steps_run == 4
        states.append(batches.state_dict())
        assert batches.statistics().num_delivered == (2 if by == "a state" else 3)

    expected = [(0, 8)] + [(0, 0) if by == "a state" else (1, 4)] * 2
    assert [(state["epoch"], state["position"]) for state in states] == expected
