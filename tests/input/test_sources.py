"""Every kind of source gives the same batches, under every kind of strategy; others are refused."""

import asyncio
import functools
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import INLINE_BYTES, lane_table
from aioreplica.errors import ContextError
from aioreplica.input import num_examples
from tests.input.sources import ONE_SHOT, RESTARTABLE, Watched, WatchedAsync, examples, split
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

BUFFERS = [0, 1, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [*RESTARTABLE, *ONE_SHOT])
async def test_every_source_gives_the_same_batches(strategy: ar.Strategy, kind: str) -> None:
    make = RESTARTABLE.get(kind) or ONE_SHOT[kind]
    for buffer in BUFFERS:
        options = ar.InputOptions(per_replica_buffer_size=buffer)

        async with strategy.distribute_dataset(make(5), options) as batches:
            seen = [item async for item in batches]

        assert examples(seen) == split(5, strategy.num_replicas_in_sync), f"buffer {buffer}"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", RESTARTABLE)
async def test_a_second_loop_starts_anew(pair: ar.MirroredStrategy, kind: str) -> None:
    async with pair.distribute_dataset(RESTARTABLE[kind](3)) as batches:
        async for _ in batches:
            break
        for _ in range(2):
            assert examples([item async for item in batches]) == split(3, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ONE_SHOT)
@pytest.mark.parametrize("broken", [False, True])
async def test_an_iterator_read_twice_is_an_error(
    pair: ar.MirroredStrategy, kind: str, broken: bool
) -> None:
    async with pair.distribute_dataset(ONE_SHOT[kind](3)) as batches:
        async for _ in batches:
            if broken:
                break
        with pytest.raises(ContextError, match=r"can be read once only.*generator function itself"):
            await anext(aiter(batches))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [*RESTARTABLE, *ONE_SHOT])
async def test_a_source_without_batches_ends_the_loop_at_once(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    make = RESTARTABLE.get(kind) or ONE_SHOT[kind]
    if kind == "arrays":
        dataset = ar.ArrayDataset((np.zeros(0), np.zeros((0, 2))), 4)
    else:
        dataset = make(0)
    async with pair.distribute_dataset(dataset) as batches:
        assert [item async for item in batches] == []


@pytest.mark.asyncio
async def test_a_plain_source_has_a_thread_of_its_own(pair: ar.MirroredStrategy) -> None:
    source = Watched()

    async with pair.distribute_dataset(source) as batches:
        async for _ in batches:
            break

    assert len(source.threads) == 1
    assert source.threads.pop().startswith("aioreplica input:")


@pytest.mark.asyncio
async def test_a_source_bound_to_one_thread_can_be_used(pair: ar.MirroredStrategy) -> None:
    def rows() -> Iterator[np.ndarray]:
        connection = sqlite3.connect(":memory:")  # refuses other threads
        try:
            for number in range(4):
                (found,) = connection.execute("select ?", (number,)).fetchone()
                yield np.full(2, found)
        finally:
            connection.close()

    async with pair.distribute_dataset(rows) as batches:
        assert [item.values[0].tolist() async for item in batches] == [[0], [1], [2], [3]]
        async for _ in batches:
            break


def test_a_source_keeps_to_one_thread_where_devices_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_table(), "num_streams", 3)
    source = WatchedThreads()

    async def main() -> None:
        async with ar.get_strategy().distribute_dataset(source) as batches:
            assert len([item async for item in batches]) == 50

    asyncio.run(main())
    assert len(source.idents) == 1


class WatchedThreads:
    """Remembers which threads it was read on."""

    def __init__(self) -> None:
        self.idents: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(50):
            self.idents.add(threading.get_ident())
            yield np.ones(2)


LISTS_AS_SOURCES: dict[str, Any] = {
    "list": lambda data: data,
    "tuple": tuple,
    "prefetched": lambda data: ar.Dataset(data).prefetch(1),
    "columns picked by map": lambda data: ar.Dataset(data).map(lambda batch: batch[:, :1]),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("make", LISTS_AS_SOURCES.values(), ids=LISTS_AS_SOURCES)
async def test_a_step_that_writes_into_its_batch_does_not_change_a_list(
    strategy: ar.Strategy, make: Any
) -> None:
    data = [np.full((8, 2), number, float) for number in range(3)]

    async def step(x: Any) -> None:
        x += 1

    async with strategy.distribute_dataset(make(data)) as batches:
        async for batch in batches:
            await strategy.run(step, args=(batch,))

    assert [array.sum() for array in data] == [0, 16, 32]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
async def test_nor_does_one_that_gets_whole_batches(pair: ar.MirroredStrategy, mode: str) -> None:
    data = [np.zeros(2) for _ in range(4)]
    options = ar.InputOptions(fetch_to_device=False, replication_mode=mode)  # type: ignore[arg-type]

    async def step(x: Any) -> None:
        x += 1

    async with pair.distribute_datasets_from_function(lambda _: data, options) as batches:
        async for batch in batches:
            await pair.run(step, args=(batch,))

    assert not np.any(data)


@pytest.mark.asyncio
async def test_large_batches_of_a_list_are_copied_on_a_thread(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(arrays: list[Any]) -> list[Any]:
        seen.append(threading.current_thread().name)
        return [array.copy() for array in arrays]

    monkeypatch.setattr("aioreplica.input._assemble._copy_all", watched)
    here = threading.current_thread().name
    for num_bytes in (INLINE_BYTES, INLINE_BYTES - 8):
        async with pair.distribute_dataset([np.zeros(num_bytes // 8)]) as batches:
            assert [num_examples(batch) async for batch in batches] == [num_bytes // 8]

    assert seen[0] != here
    assert seen[1] == here


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [TypeError, NotImplementedError])
async def test_a_source_need_not_know_its_length(
    pair: ar.MirroredStrategy, error: type[Exception]
) -> None:
    class Streaming(Watched):
        def __len__(self) -> int:
            raise error("unknown")

    async with pair.distribute_dataset(Streaming(3)) as batches:
        assert len([batch async for batch in batches]) == 3
        assert batches.state_dict()["epoch"] == 1
        with pytest.raises(TypeError, match="does not say how many"):
            len(batches)


@pytest.mark.asyncio
async def test_a_partial_of_a_generator_function_is_called_for_each_epoch(
    pair: ar.MirroredStrategy,
) -> None:
    def count(start: int) -> Iterator[np.ndarray]:
        yield np.array([start, start + 1])

    async with pair.distribute_dataset(functools.partial(count, 5)) as batches:
        assert [item.values[1].tolist() async for item in batches] == [[6]]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (3, "cannot be iterated"),
        (None, "cannot be iterated"),
        ("abc", "'abc'"),
        (b"abc", "b'abc'"),
        (np.ones((4, 2)), r"ar\.ArrayDataset\(arrays, batch_size\)"),
        ({"x": np.ones(4)}, r"ar\.ArrayDataset\(arrays, batch_size\)"),
        (ar.PerReplica([1, 2]), "ArrayDataset"),
        (Watched, "Watched"),
    ],
    ids=["int", "None", "str", "bytes", "array", "dict", "distributed", "class"],
)
def test_a_source_that_yields_no_batches_is_refused(dataset: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ar.get_strategy().distribute_dataset(dataset)


def test_a_distributed_dataset_is_not_distributed_again() -> None:
    batches = ar.get_strategy().distribute_dataset([np.ones(2)])

    for dataset in (batches, aiter(batches)):
        with pytest.raises(TypeError, match="is distributed already"):
            ar.get_strategy().distribute_dataset(dataset)


def test_a_coroutine_function_is_refused() -> None:
    async def not_a_generator() -> None: ...

    with pytest.raises(TypeError, match="Use `yield`"):
        ar.get_strategy().distribute_dataset(not_a_generator)


@pytest.mark.asyncio
async def test_a_function_that_returns_no_iterable_is_an_error(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(lambda: 3) as batches:
        with pytest.raises(TypeError, match=r"returned 3.*no iterable of batches"):
            await anext(aiter(batches))


@pytest.mark.asyncio
async def test_a_tuple_of_columns_is_refused(pair: ar.MirroredStrategy) -> None:
    """It would be a batch of inputs, and then one of targets."""
    x, y = np.ones((6, 7)), np.zeros(6)
    with pytest.raises(TypeError, match=r"shapes \(6, 7\), \(6,\) .* ar\.ArrayDataset\(arrays"):
        pair.distribute_dataset((x, y))
    for batches in ((x, x[:, :3]), (y, y), [x, x], ((x, y), (x, y)), (x, y[:4])):
        async with pair.distribute_dataset(batches) as taken:
            assert len([each async for each in taken]) == 2


# ---- batches that are none --------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([(np.ones(3), np.ones(4))], r"Global batch 0 .*\[0\]: \(3,\), \[1\]: \(4,\)"),
        ([np.float64(1.0)], r"value: \(\).*single examples.*\.batch\(batch_size\)"),
        ([1.5], r"value: \(\)"),
        ([[1, 2, 3]], "single examples"),
        ([(["a", "b"], np.ones(2))], r"\[0\]\[0\]: \(\).* Text is no array of numbers: encode it"),
        ([()], "no leaf"),
        ([np.ones(2), {"x": np.ones(2)}], "Global batch 1 .*has the structure"),
        ([np.ones(2), (np.ones(2),)], "has the structure"),
        ([{"x": np.ones(2)}, {"y": np.ones(2)}], "has the structure"),
    ],
    ids=[
        "lengths",
        "scalar",
        "float",
        "list",
        "text",
        "empty",
        "leaf, dict",
        "leaf, tuple",
        "keys",
    ],
)
async def test_bad_batches_are_told_at_the_loop(
    pair: ar.MirroredStrategy, items: list[Any], text: str
) -> None:
    async with pair.distribute_dataset(items) as batches:
        with pytest.raises(ValueError, match=text):
            async for _ in batches:
                pass


@pytest.mark.asyncio
async def test_a_leaf_that_is_not_an_array_is_an_error(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset([{"x": np.ones(2), "y": object()}]) as batches:
        with pytest.raises(TypeError, match=r"Leaf \['y'\] has type object, which is not an array"):
            await anext(aiter(batches))


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Watched, WatchedAsync], ids=["plain", "async"])
@pytest.mark.parametrize("buffer", BUFFERS)
async def test_an_error_comes_behind_the_batches_before_it(
    pair: ar.MirroredStrategy, make: type[Watched], buffer: int
) -> None:
    source = make(6, fail_at=3)
    options = ar.InputOptions(per_replica_buffer_size=buffer)

    async with pair.distribute_dataset(source, options) as batches:
        loop = aiter(batches)
        for _ in range(3):
            await anext(loop)
        with pytest.raises(ValueError, match="bad record 3") as caught:
            await anext(loop)
        with pytest.raises(StopAsyncIteration):
            await anext(loop)

    assert source.num_closed == 1
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in epoch 0 of ")
    assert note.endswith("behind 3 batches.")


@pytest.mark.asyncio
async def test_after_an_error_the_next_loop_is_the_next_epoch(pair: ar.MirroredStrategy) -> None:
    source = Watched(3, fail_at=1)
    async with pair.distribute_dataset(source) as batches:
        with pytest.raises(ValueError, match="bad record"):
            async for _ in batches:
                pass
        source.fail_at = None
        assert len([item async for item in batches]) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("source", asyncio.CancelledError("gone")),
        ("map", asyncio.CancelledError("gone")),
        ("map", StopAsyncIteration("stray")),
    ],
)
async def test_an_error_that_looks_like_the_end_of_iteration_is_reported(
    pair: ar.MirroredStrategy, kind: str, error: BaseException, buffer: int
) -> None:
    """A stray StopAsyncIteration is no end; an inner CancelledError is no cancellation."""

    async def fail(item: Any) -> Any:
        if item[0][0] == 8:
            raise error
        return item

    class Failing:
        def __init__(self) -> None:
            self.batches = iter(Watched(4))

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            return await fail(next(self.batches))

    dataset: Any = Failing() if kind == "source" else ar.Dataset(Watched(4)).map(fail)
    options = ar.InputOptions(per_replica_buffer_size=buffer)
    async with pair.distribute_dataset(dataset, options) as batches:
        loop = aiter(batches)
        await anext(loop)
        await anext(loop)
        with pytest.raises(RuntimeError, match=r"epoch 0 of .* raised .*would look like") as caught:
            await anext(loop)
        assert repr(caught.value.__cause__) == repr(error)
        assert batches.statistics().position == 2


@pytest.mark.asyncio
async def test_a_source_that_never_yields_can_be_waited_for_with_a_timeout(
    pair: ar.MirroredStrategy,
) -> None:
    closed = []

    async def silent() -> Any:
        try:
            await asyncio.Event().wait()
            yield np.ones(2)
        finally:
            closed.append(True)

    async with pair.distribute_dataset(silent) as batches:
        loop = aiter(batches)
        for _ in range(2):
            waiting = asyncio.create_task(anext(loop))
            await idle()
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert closed == []
    assert closed == [True]
