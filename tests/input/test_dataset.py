"""ar.Dataset: map, batch and prefetch, in order, bounded, closed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.input.sources import Watched, WatchedAsync
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


async def items(dataset: ar.Dataset) -> list[Any]:
    return [item async for item in dataset]


def count(stop: int) -> Any:
    return lambda: iter(range(stop))


# ---- map ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("num_parallel", [1, 3, 20])
async def test_map_keeps_the_order(num_parallel: int) -> None:
    async def later(number: int) -> int:
        for _ in range(10 - number):
            await asyncio.sleep(0)
        return number * number

    expected = [number * number for number in range(10)]
    plain = ar.Dataset(count(10)).map(lambda n: n * n, num_parallel=num_parallel)
    assert await items(plain) == expected
    assert await items(ar.Dataset(count(10)).map(later, num_parallel=num_parallel)) == expected


@pytest.mark.asyncio
async def test_plain_functions_run_at_once_on_the_hosts_threads() -> None:
    barrier = threading.Barrier(3, timeout=10)

    def meet(number: int) -> str:
        barrier.wait()
        return threading.current_thread().name

    names = await items(ar.Dataset(range(3)).map(meet, num_parallel=3))

    assert {name.partition("-")[0] for name in names} == {"aioreplica host"}


@pytest.mark.asyncio
async def test_no_more_calls_than_asked_for_are_in_progress() -> None:
    running, most = 0, 0

    async def watched(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await idle()  # all that may start have started
        running -= 1
        return number

    await items(ar.Dataset([*range(20)]).map(watched, num_parallel=3))

    assert most == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("num_parallel", [1, 2, 8])
async def test_a_result_does_not_wait_for_the_next_item(num_parallel: int, kind: str) -> None:
    """A source may be a live one, whose next item depends on what was made of this one."""
    is_wanted = asyncio.Event()

    async def live() -> AsyncIterator[int]:
        for number in range(3):
            yield number
            await is_wanted.wait()
            is_wanted.clear()

    async def anegative(number: int) -> int:
        return -number

    fn = anegative if kind == "async" else lambda number: -number
    dataset = ar.Dataset(live).map(fn, num_parallel=num_parallel)
    seen = []
    async with asyncio.timeout(10), aclosing(aiter(dataset)) as loop:
        async for item in loop:
            seen.append(item)
            is_wanted.set()
    assert seen == [0, -1, -2]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_parallel", [1, 3])
async def test_map_reads_no_further_than_its_calls(num_parallel: int) -> None:
    source = WatchedAsync(10)
    dataset = ar.Dataset(source).map(lambda item: item, num_parallel=num_parallel)
    async with aclosing(aiter(dataset)) as loop:
        for number in range(3):
            await anext(loop)
            await idle()
            assert source.pulled == list(range(number + num_parallel))
    assert source.num_closed == 1


@pytest.mark.asyncio
async def test_objects_with_an_async_call_and_functions_that_return_awaitables() -> None:
    class Adder:
        async def __call__(self, number: int) -> int:
            return number + 1

    async def add(number: int) -> int:
        return number + 1

    for fn in (Adder(), lambda number: add(number)):
        assert await items(ar.Dataset([1, 2, 3]).map(fn)) == [2, 3, 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_error_of_map_comes_in_its_place(kind: str) -> None:
    def check(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    async def acheck(number: int) -> int:
        return check(number)

    dataset = ar.Dataset(count(6)).map(check if kind == "plain" else acheck)
    async with aclosing(aiter(dataset)) as loop:
        assert [await anext(loop), await anext(loop)] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            await anext(loop)


@pytest.mark.asyncio
async def test_an_error_of_the_source_comes_behind_the_items_before_it() -> None:
    source = Watched(6, fail_at=2)
    async with aclosing(aiter(ar.Dataset(source).map(lambda item: item[0][0]))) as loop:
        assert [await anext(loop), await anext(loop)] == [0, 4]
        with pytest.raises(ValueError, match="bad record 2"):
            await anext(loop)
    assert source.num_closed == 1


@pytest.mark.asyncio
async def test_an_error_of_map_comes_before_that_of_a_later_item() -> None:
    """The source, which is read ahead, has failed at item 3 when the call for item 1 fails."""
    source, has_failed = WatchedAsync(6, fail_at=3), asyncio.Event()

    async def fail(item: Any) -> Any:
        if item[0][0] == 4:
            await has_failed.wait()
            raise LookupError("item 1")
        return item

    async with aclosing(aiter(ar.Dataset(source).map(fail))) as loop:
        await anext(loop)
        await idle()
        assert source.num_closed == 1
        has_failed.set()
        with pytest.raises(LookupError, match="item 1"):
            await anext(loop)


@pytest.mark.asyncio
async def test_calls_that_are_cancelled_can_clean_up() -> None:
    is_called, may_end, log = asyncio.Event(), asyncio.Event(), []

    async def source() -> AsyncIterator[int]:
        yield 0
        yield 1
        await asyncio.Event().wait()

    async def fetch(number: int) -> int:
        if number == 0:
            await is_called.wait()
            raise LookupError("item 0")
        try:
            is_called.set()
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            log.append(number)
        return number

    async with aclosing(aiter(ar.Dataset(source).map(fetch))) as loop:
        waiting = asyncio.ensure_future(anext(loop))
        await idle()
        may_end.set()
        with pytest.raises(LookupError, match="item 0"):
            await waiting
    assert log == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("rows", [8, 400_000], ids=["small", "large"])
async def test_a_function_may_write_into_items_of_a_list(
    pair: ar.MirroredStrategy, kind: str, rows: int
) -> None:
    data = [{"x": np.full((rows, 1), 255.0), "name": np.arange(rows)} for _ in range(2)]

    def scale(item: Any) -> Any:
        item["x"] /= 255
        del item["name"]
        return item

    async def ascale(item: Any) -> Any:
        return scale(item)

    dataset = ar.Dataset(data).map(scale if kind == "plain" else ascale)
    async with pair.distribute_dataset(dataset) as batches:
        for _ in range(2):
            seen = [part for batch in [b async for b in batches] for part in batch["x"].values]
            assert [part.min() for part in seen] == [part.max() for part in seen] == [1.0] * 4

    assert [sorted(item) for item in data] == [["name", "x"]] * 2
    assert all((item["x"] == 255).all() for item in data)


@pytest.mark.asyncio
async def test_examples_of_a_list_are_copied_before_their_function_too() -> None:
    data = [np.full(2, 255.0) for _ in range(4)]

    def scale(example: Any) -> Any:
        example /= 255
        return example

    dataset = ar.Dataset(data).prefetch(1).map(scale).batch(2)
    for _ in range(2):
        assert [batch.tolist() for batch in await items(dataset)] == [[[1, 1], [1, 1]]] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_calls_in_progress_end_before_the_loop_is_left(
    pair: ar.MirroredStrategy, kind: str
) -> None:
    loop = asyncio.get_running_loop()
    gate, started, log = threading.Event(), asyncio.Event(), []

    def block(item: Any) -> Any:
        if item[0][0] == 0:
            return item
        loop.call_soon_threadsafe(started.set)
        assert gate.wait(10)
        log.append("ended")
        return item

    async def ablock(item: Any) -> Any:
        if item[0][0] == 0:
            return item
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            log.append("ended")

    source = Watched(6)
    fn = block if kind == "plain" else ablock
    async with pair.distribute_dataset(ar.Dataset(source).map(fn, num_parallel=2)) as batches:
        async for _ in batches:
            await started.wait()
            break
        gate.set()
    assert log
    assert set(log) == {"ended"}
    assert source.num_closed == 1


# ---- batch --------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("drop", "expected"), [(False, [3, 3, 1]), (True, [3, 3])])
async def test_batch_stacks_examples(drop: bool, expected: list[int]) -> None:
    examples = [{"x": np.full(2, number, np.float32), "y": number} for number in range(7)]
    dataset = ar.Dataset(examples).batch(3, drop_remainder=drop)

    batches = await items(dataset)

    assert [len(batch["y"]) for batch in batches] == expected
    assert batches[1]["x"].tolist() == [[3, 3], [4, 4], [5, 5]]
    assert batches[1]["x"].dtype == np.float32
    assert batches[1]["y"].tolist() == [3, 4, 5]


@pytest.mark.asyncio
async def test_large_batches_are_stacked_off_the_loop() -> None:
    (batch,) = await items(ar.Dataset([np.ones(20_000)] * 4).batch(4))

    assert batch.shape == (4, 20_000)


@pytest.mark.asyncio
async def test_the_length_follows_the_transforms(pair: ar.MirroredStrategy) -> None:
    examples = ar.Dataset([np.ones(2)] * 7)

    assert len(pair.distribute_dataset(examples.map(abs).batch(3).prefetch(1))) == 3
    assert len(pair.distribute_dataset(examples.batch(3, drop_remainder=True))) == 2
    with pytest.raises(TypeError, match="does not say"):
        len(pair.distribute_dataset(ar.Dataset(count(3)).batch(2)))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("examples", "text"),
    [
        ([np.ones(2), np.ones(3)], r"Example 1 of batch 0 .*\(3,\) at value.*Pad"),
        ([(1, 2), (1, 2, 3)], "Example 1 of batch 0 .*has the structure"),
        ([(), ()], "holds no array"),
    ],
)
async def test_examples_that_do_not_fit_together(examples: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        await items(ar.Dataset(examples).batch(2))


# ---- prefetch -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_prefetch_reads_ahead_up_to_its_size() -> None:
    source = WatchedAsync(10)
    async with aclosing(aiter(ar.Dataset(source).prefetch(3))) as loop:
        await anext(loop)
        await idle()
        assert source.pulled == [0, 1, 2, 3]
    assert source.num_closed == 1


@pytest.mark.asyncio
async def test_a_dataset_can_be_read_again_and_built_upon() -> None:
    base = ar.Dataset([1, 2, 3])
    doubled = base.map(lambda number: 2 * number)

    assert [await items(doubled) for _ in range(2)] == [[2, 4, 6]] * 2
    assert await items(base) == [1, 2, 3]
    assert await items(ar.Dataset(doubled)) == [2, 4, 6]


@pytest.mark.asyncio
async def test_async_sources_and_async_maps(pair: ar.MirroredStrategy) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(4):
            yield number

    async def fetch(number: int) -> Any:
        return np.full(3, number)

    dataset = ar.Dataset(numbers).map(fetch).batch(2).prefetch(1)
    async with pair.distribute_dataset(dataset) as batches:
        seen = [[part.tolist() for part in batch.values] async for batch in batches]
    assert seen == [[[[0] * 3], [[1] * 3]], [[[2] * 3], [[3] * 3]]]


@pytest.mark.asyncio
async def test_a_generator_that_was_never_read_is_closed() -> None:
    closed = []

    class Records:
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise StopIteration

        def close(self) -> None:
            closed.append(True)

    dataset = ar.Dataset(Records()).map(abs).batch(2).prefetch(1)
    async with ar.get_strategy().distribute_dataset(dataset):
        pass
    assert closed == [True]


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda dataset: dataset.map(3), TypeError, "function of one item, got 3"),
        (lambda dataset: dataset.map(abs, num_parallel=0), ValueError, "num_parallel.*got 0"),
        (lambda dataset: dataset.batch(0), ValueError, "batch_size.*got 0"),
        (lambda dataset: dataset.batch(True), ValueError, "batch_size.*got True"),
        (lambda dataset: dataset.prefetch(-1), ValueError, "buffer_size.*got -1"),
        (lambda dataset: ar.Dataset(3), TypeError, "cannot be iterated"),
    ],
)
def test_invalid_transforms_are_refused(build: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build(ar.Dataset([1]))


def test_repr_shows_the_pipeline() -> None:
    dataset = ar.Dataset([1, 2]).map(abs).batch(2)

    assert repr(dataset) == "<Dataset | <list of 2>.map(abs).batch(2)>"
