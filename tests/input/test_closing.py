"""A loop ends in many ways; the source is closed in all of them, and nothing is left behind."""

import asyncio
import contextlib
import gc
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import OwnLane
from aioreplica.errors import ContextError
from tests.conftest import mirrored
from tests.input.sources import Watched, WatchedAsync
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

BUFFERS = [0, 1, 3]
SOURCES = {"plain": Watched, "async": WatchedAsync}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Watched:
    return SOURCES[request.param](6)


@pytest.fixture(params=BUFFERS, ids=lambda size: f"buffer {size}")
def options(request: pytest.FixtureRequest) -> ar.InputOptions:
    return ar.InputOptions(per_replica_buffer_size=request.param)


@pytest.mark.asyncio
async def test_calls_of_a_source_are_given_up_at_an_interrupt_unless_they_write_files() -> None:
    found = []
    for lane in (OwnLane(), OwnLane("journal", writes_files=True)):
        op = lane.run(int)
        found.append(op.writes_files)
        await op
        lane.close()
    assert found == [False, True]


@pytest.mark.asyncio
async def test_the_end(pair: ar.MirroredStrategy, source: Watched, options: Any) -> None:
    async with pair.distribute_dataset(source, options) as batches:
        async for _ in batches:
            pass
        assert source.num_closed == 1
    assert (source.num_opened, source.num_closed) == (1, 1)


@pytest.mark.asyncio
async def test_a_break(pair: ar.MirroredStrategy, source: Watched, options: Any) -> None:
    threads = threading.active_count()
    async with pair.distribute_dataset(source, options) as batches:
        async for _ in batches:
            break
    assert source.num_closed == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threading.active_count() <= threads


@pytest.mark.asyncio
async def test_an_exception_in_the_body(
    pair: ar.MirroredStrategy, source: Watched, options: Any
) -> None:
    async def main() -> None:
        async with pair.distribute_dataset(source, options) as batches:
            async for _ in batches:
                raise KeyError("body")

    with pytest.raises(KeyError):
        await main()
    assert source.num_closed == 1


@pytest.mark.asyncio
async def test_a_step_that_fails(pair: ar.MirroredStrategy, source: Watched, options: Any) -> None:
    async def step(numbers: Any, _rows: Any) -> None:
        raise LookupError(len(numbers))

    async def main() -> None:
        async with pair.distribute_dataset(source, options) as batches:
            async for batch in batches:
                await pair.run(step, args=batch)

    with pytest.raises(LookupError):
        await main()
    assert source.num_closed == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["in the body", "at the batch"])
@pytest.mark.parametrize("level", [False, True], ids=["edge", "level"])
async def test_cancellation(
    pair: ar.MirroredStrategy, options: Any, where: str, level: bool
) -> None:
    closed = []
    reached = asyncio.Event()

    async def stalling() -> AsyncIterator[Any]:
        try:
            yield np.ones(2)
            if where == "at the batch":
                reached.set()
                await asyncio.Event().wait()
            yield np.ones(2)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def main() -> None:
        async with pair.distribute_dataset(stalling, options) as batches:
            async for _ in batches:
                if where == "in the body":
                    reached.set()
                    await asyncio.Event().wait()

    if level:
        async with anyio.create_task_group() as group:
            group.start_soon(main)
            await reached.wait()
            group.cancel_scope.cancel()
    else:
        task = asyncio.create_task(main())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert closed == [True]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", SOURCES)
async def test_cancellation_in_any_loop_cycle(
    pair: ar.MirroredStrategy, kind: str, options: Any
) -> None:
    async def step(numbers: Any, _rows: Any) -> None:
        await asyncio.sleep(0)

    async def main(source: Watched) -> None:
        async with pair.distribute_dataset(source, options) as batches:
            async for batch in batches:
                await pair.run(step, args=batch)

    for num_cycles in range(25):
        source = SOURCES[kind](3)
        task = asyncio.create_task(main(source))
        for _ in range(num_cycles):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert source.num_closed == source.num_opened, num_cycles
        assert asyncio.all_tasks() == {asyncio.current_task()}, num_cycles


@pytest.mark.asyncio
async def test_a_call_of_the_source_that_has_started_is_waited_for(
    pair: ar.MirroredStrategy, options: Any
) -> None:
    loop = asyncio.get_running_loop()
    started, gate, log = asyncio.Event(), threading.Event(), []

    def blocking() -> Iterator[Any]:
        try:
            loop.call_soon_threadsafe(started.set)
            assert gate.wait(10)
            log.append("read")
            yield np.ones(2)
        finally:
            log.append("closed")

    async def main() -> None:
        async with pair.distribute_dataset(blocking, options) as batches:
            async for _ in batches:
                pass

    task = asyncio.create_task(main())
    await started.wait()
    task.cancel()
    await idle()
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["read", "closed"]


@pytest.mark.asyncio
async def test_a_source_that_closes_its_own_dataset_is_an_error(
    pair: ar.MirroredStrategy, options: Any
) -> None:
    """It would wait for itself, forever."""

    async def quitter() -> AsyncIterator[Any]:
        yield np.ones(2)
        await batches.aclose()

    async def read() -> None:
        async with batches, asyncio.timeout(10):
            async for _ in batches:
                pass

    batches = pair.distribute_dataset(quitter, options)
    with pytest.raises(ContextError, match=r"closes the loop that reads it|dataset was closed"):
        await read()


@pytest.mark.asyncio
async def test_an_iterator_that_was_never_used_is_closed_too(pair: ar.MirroredStrategy) -> None:
    class Handle:
        is_closed = False

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise StopIteration

        def close(self) -> None:
            self.is_closed = True

    handle = Handle()
    async with pair.distribute_dataset(handle):
        pass
    assert handle.is_closed


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", SOURCES)
async def test_an_error_while_closing_is_raised(
    pair: ar.MirroredStrategy, kind: str, options: Any
) -> None:
    def plain() -> Iterator[Any]:
        try:
            yield np.ones(2)
            yield np.ones(2)
            yield np.ones(2)
            yield np.ones(2)
            yield np.ones(2)
        finally:
            raise OSError("disk gone")

    async def closing() -> AsyncIterator[Any]:
        try:
            while True:
                yield np.ones(2)
        finally:
            raise OSError("disk gone")

    async def main() -> None:
        dataset = plain if kind == "plain" else closing
        async with pair.distribute_dataset(dataset, options) as batches:
            async for _ in batches:
                break

    with pytest.raises(OSError, match="disk gone"):
        await main()


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
async def test_a_generator_with_a_task_group_can_be_left(
    pair: ar.MirroredStrategy, fails: bool
) -> None:
    async def grouped() -> AsyncIterator[Any]:
        async with anyio.create_task_group() as group:
            group.start_soon(asyncio.Event().wait)
            try:
                while True:
                    yield np.ones(2)
            finally:
                if fails:
                    raise OSError("disk gone")

    async def main() -> None:
        async with pair.distribute_dataset(grouped) as batches:
            async for _ in batches:
                break

    if not fails:
        await main()
        return
    with pytest.raises(ExceptionGroup) as caught:
        await main()
    assert [str(error) for error in caught.value.exceptions] == ["disk gone"]


# ---- without `async with` ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_bare_loop_that_was_broken_off_is_closed_with_the_strategy(
    source: Watched, options: Any
) -> None:
    strategy = mirrored(2)
    async for _ in strategy.distribute_dataset(source, options):
        break

    with pytest.warns(ResourceWarning, match="1 loops .*broken off.*async with"):
        await strategy.aclose()

    assert source.num_closed == 1
    await strategy.aclose()  # warns once


@pytest.mark.asyncio
async def test_an_iterator_that_is_still_held_is_closed_with_the_strategy(
    source: Watched, options: Any
) -> None:
    strategy = mirrored(2)
    loop = aiter(strategy.distribute_dataset(source, options))
    await anext(loop)

    with pytest.warns(ResourceWarning, match="broken off"):
        await strategy.aclose()

    assert source.num_closed == 1
    with pytest.raises(ContextError, match=r"ended because <MirroredStrategy .* was closed"):
        await anext(loop)


@pytest.mark.asyncio
async def test_warnings_that_are_errors_do_not_prevent_closing(options: Any) -> None:
    sources = [Watched(), WatchedAsync()]
    strategy = mirrored(2)
    for source in sources:
        async for _ in strategy.distribute_dataset(source, options):
            break

    with pytest.raises(ResourceWarning, match="2 loops"):
        await strategy.aclose()

    assert [source.num_closed for source in sources] == [1, 1]


@pytest.mark.asyncio
async def test_the_warning_does_not_replace_an_exception() -> None:
    async def main() -> None:
        async with mirrored(2) as strategy:
            async for _ in strategy.distribute_dataset(Watched()):
                raise KeyError("body")

    with pytest.raises(KeyError) as caught:
        await main()
    assert "1 loops" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_a_loop_that_waits_is_told_that_the_strategy_was_closed(options: Any) -> None:
    async def never() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async with mirrored(2) as strategy:
        batches = strategy.distribute_dataset(never, options)
        async with batches:
            waiting = asyncio.create_task(anext(aiter(batches)))
            await idle()
            await strategy.aclose()
            with pytest.raises(ContextError, match="was closed"):
                await waiting


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["exhausted", "aclosed", "next loop", "async with", "dataset"])
async def test_loops_that_were_ended_properly_are_not_warned_of(
    source: Watched, options: Any, how: str
) -> None:
    strategy = mirrored(2)
    batches = strategy.distribute_dataset(source, options)
    if how == "exhausted":
        async for _ in batches:
            pass
    elif how == "aclosed":
        loop = aiter(batches)
        await anext(loop)
        await loop.aclose()
    elif how == "next loop":
        async for _ in batches:
            break
        async for _ in batches:
            pass
    elif how == "async with":
        async with batches:
            async for _ in batches:
                break
    else:
        async for _ in batches:
            break
        await batches.aclose()
    assert source.num_closed == source.num_opened

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await strategy.aclose()


@pytest.mark.asyncio
async def test_a_loop_whose_iterator_is_gone_is_closed_soon(
    pair: ar.MirroredStrategy, source: Watched, options: Any
) -> None:
    batches = pair.distribute_dataset(source, options)
    async for _ in batches:
        break
    gc.collect()
    async with asyncio.timeout(10):
        while source.num_closed == 0:
            await asyncio.sleep(0)
    await batches.aclose()


@pytest.mark.asyncio
async def test_many_unclosed_loops_hold_bounded_memory() -> None:
    strategy = mirrored(2)
    for _ in range(200):
        async for _ in strategy.distribute_dataset([np.ones(2), np.ones(2)]):
            break
        await asyncio.sleep(0)
    assert strategy._runtime.lifecycle.open_loops.num_open == 200
    assert len(strategy._runtime.lifecycle.open_loops._epochs) <= 64

    with pytest.warns(ResourceWarning, match="200 loops"):
        await strategy.aclose()


@pytest.mark.asyncio
async def test_many_datasets_in_async_with_are_not_warned_of() -> None:
    strategy = mirrored(2)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(70):
            dataset = strategy.distribute_dataset([np.ones(2), np.ones(2)])
            batches = await stack.enter_async_context(dataset)
            async for _ in batches:
                break
            await asyncio.sleep(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await strategy.aclose()


@pytest.mark.asyncio
async def test_errors_while_the_strategy_closes_loops_come_together() -> None:
    def failing(number: int) -> Any:
        def generate() -> Iterator[Any]:
            try:
                while True:
                    yield np.ones(2)
            finally:
                raise OSError(f"disk {number}")

        return generate

    strategy = mirrored(2)
    loops = [aiter(strategy.distribute_dataset(failing(number))) for number in range(2)]
    for loop in loops:
        await anext(loop)

    with pytest.raises(ExceptionGroup) as caught:
        await strategy.aclose()

    assert sorted(map(str, caught.value.exceptions)) == ["disk 0", "disk 1"]


def test_the_end_of_the_event_loop_closes_forgotten_loops() -> None:
    source = WatchedAsync()

    async def main() -> None:
        loop = aiter(ar.get_strategy().distribute_dataset(source))
        held.append(loop)
        await anext(loop)

    held: list[Any] = []
    asyncio.run(main())

    assert source.num_closed == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("wrap", [lambda source: source, ar.Dataset])
async def test_a_loop_that_fails_to_close_does_not_keep_other_iterators_open(wrap: Any) -> None:
    """Replica 0's source is being read; replica 1's, an iterator, was never used."""
    reading = asyncio.Event()

    class Unused:
        is_closed = False

        def __iter__(self) -> "Unused":
            return self

        def __next__(self) -> Any:
            raise AssertionError("never read")

        def close(self) -> None:
            self.is_closed = True

    async def failing() -> AsyncIterator[Any]:
        try:
            reading.set()
            await asyncio.Event().wait()
            yield np.ones(2)
        finally:
            raise OSError("disk")

    unused = Unused()
    sources: list[Any] = [failing, wrap(unused)]
    options = ar.InputOptions(fetch_to_device=False, replication_mode="PER_REPLICA")  # type: ignore[arg-type]
    async with mirrored(2) as strategy:
        batches = strategy.distribute_datasets_from_function(
            lambda context: sources[context.input_pipeline_id], options
        )
        waiting = asyncio.create_task(anext(aiter(batches)))
        await reading.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        with pytest.raises(OSError, match="disk"):
            await batches.aclose()
        assert unused.is_closed
