"""Reading ahead: bounded, in order, overlapping with the step, and safe to cancel."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.conftest import mirrored
from tests.input.sources import Watched, WatchedAsync, examples, split
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1, 2, 4])
async def test_the_buffer_bounds_the_batches_read_ahead(
    pair: ar.MirroredStrategy, size: int
) -> None:
    source = WatchedAsync(10)
    options = ar.InputOptions(per_replica_buffer_size=size)

    async with pair.distribute_dataset(source, options) as batches:
        delivered = 0
        async for _ in batches:
            delivered += 1
            await idle()
            assert len(source.pulled) == min(10, delivered + size)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1])
async def test_one_task_reads_an_epoch(pair: ar.MirroredStrategy, size: int) -> None:
    """So a cancel scope that an async generator holds open over a `yield` works."""
    tasks: set[Any] = set()

    async def source() -> AsyncIterator[Any]:
        for number in range(4):
            tasks.add(asyncio.current_task())
            yield np.full(2, number)
        tasks.add(asyncio.current_task())

    options = ar.InputOptions(per_replica_buffer_size=size)
    async with pair.distribute_dataset(source, options) as batches:
        async for _ in batches:
            (reader,) = asyncio.all_tasks() - {asyncio.current_task()}
            assert reader.get_name().startswith("aioreplica input: ")

    assert tasks == {reader}


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1, 3])
async def test_a_cancelled_wait_loses_no_batch(pair: ar.MirroredStrategy, size: int) -> None:
    gate = asyncio.Semaphore(0)

    async def slow() -> AsyncIterator[Any]:
        for number in range(4):
            await gate.acquire()
            yield np.full(2, number)

    options = ar.InputOptions(per_replica_buffer_size=size)
    async with pair.distribute_dataset(slow, options) as batches:
        loop = aiter(batches)
        seen = []
        for _ in range(4):
            waiting = asyncio.create_task(anext(loop))
            await idle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.release()
            seen.append(int((await anext(loop)).values[0][0]))
        assert await anext(loop, None) is None

    assert seen == [0, 1, 2, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1])
async def test_two_tasks_cannot_wait_in_one_loop(pair: ar.MirroredStrategy, size: int) -> None:
    async def never() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    options = ar.InputOptions(per_replica_buffer_size=size)
    async with pair.distribute_dataset(never, options) as batches:
        loop = aiter(batches)
        waiting = asyncio.create_task(anext(loop))
        await idle()
        with pytest.raises(ContextError, match="Two tasks wait"):
            await anext(loop)
        with pytest.raises(ContextError, match="waits for a batch while another loop begins"):
            await anext(aiter(batches))
        await batches.aclose()
        with pytest.raises(ContextError, match="because its dataset was closed"):
            await waiting


def readers() -> list[asyncio.Task[Any]]:
    """Return the tasks that read ahead."""
    return [t for t in asyncio.all_tasks() if t.get_name().startswith("aioreplica input: ")]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Watched, WatchedAsync])
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("how", ["break", "body", "cancellation", "another loop"])
async def test_an_error_that_was_read_ahead_comes_to_who_asks_for_it_only(
    pair: ar.MirroredStrategy, kind: type[Watched], size: int, how: str
) -> None:
    source = kind(6, fail_at=2)
    options = ar.InputOptions(per_replica_buffer_size=size)
    is_there = asyncio.Event()

    async def main() -> None:
        async with pair.distribute_dataset(source, options) as batches:
            loop = aiter(batches)
            await anext(loop)
            await anext(loop)
            for reader in readers() if size else ():
                await asyncio.wait([reader])  # the error has come
            if how == "body":
                raise KeyError("body")
            if how == "cancellation":
                is_there.set()
                await asyncio.Event().wait()
            if how == "another loop":
                assert examples([await anext(batches)]) == split(1, 2)

    task = asyncio.create_task(main())
    if how == "cancellation":
        await is_there.wait()
        task.cancel()
    await asyncio.wait([task])

    assert task.cancelled() == (how == "cancellation")
    if how != "cancellation":
        assert repr(task.exception()) == ("KeyError('body')" if how == "body" else "None")
    assert source.num_closed == source.num_opened


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
@pytest.mark.parametrize("how", ["once more", "by two tasks", "by another loop"])
async def test_closing_again_waits_for_what_the_source_cleans_up(
    pair: ar.MirroredStrategy, mode: str, how: str
) -> None:
    """The iterator is dropped, so it is closed in the background; then its owner closes it."""
    waiting, cleaning, may_end = asyncio.Semaphore(0), asyncio.Semaphore(0), asyncio.Event()
    closed = []

    async def source() -> AsyncIterator[Any]:
        try:
            yield np.ones(2)
            waiting.release()
            await asyncio.Event().wait()
        finally:
            cleaning.release()
            await may_end.wait()
            closed.append(True)

    options = ar.InputOptions(fetch_to_device=False, replication_mode=mode)  # type: ignore[arg-type]
    if mode == "PER_REPLICA":
        batches = pair.distribute_datasets_from_function(lambda _: source, options)
    else:
        batches = pair.distribute_dataset(source, options)
    num_sources = 2 if mode == "PER_REPLICA" else 1
    async for _ in batches:
        for _ in range(num_sources):
            await waiting.acquire()
        break
    await cleaning.acquire()
    if how == "by another loop":
        again = [asyncio.create_task(anext(batches))]  # type: ignore[arg-type]
    else:
        again = [asyncio.create_task(batches.aclose()) for _ in range(1 + (how != "once more"))]
    await idle()
    assert not any(task.done() for task in again)
    may_end.set()
    await asyncio.gather(*again)

    assert len(closed) == num_sources
    await batches.aclose()


@pytest.mark.asyncio
async def test_two_datasets_can_be_read_side_by_side(pair: ar.MirroredStrategy) -> None:
    first, second = WatchedAsync(3), WatchedAsync(3)
    async with pair.distribute_dataset(first) as left, pair.distribute_dataset(second) as right:
        loop = aiter(right)
        seen = [(one, await anext(loop)) async for one in left]

    assert examples([one for one, _ in seen]) == examples([two for _, two in seen]) == split(3, 2)


# ---- virtual time -------------------------------------------------------------------------------


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer as soon as nothing else can be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._now = max(self._now, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def seconds_of_an_epoch(buffer_size: int, num_batches: int = 40) -> float:
    async def source() -> AsyncIterator[Any]:
        for number in range(num_batches):
            await asyncio.sleep(0.010)
            yield np.full(4, number)

    async def step(part: Any) -> None:
        await asyncio.sleep(0.010)

    async def main() -> float:
        options = ar.InputOptions(per_replica_buffer_size=buffer_size)
        async with (
            mirrored(2) as strategy,
            strategy.distribute_dataset(source, options) as batches,
        ):
            start = asyncio.get_running_loop().time()
            async for batch in batches:
                await strategy.run(step, args=(batch,))
            return asyncio.get_running_loop().time() - start

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def test_a_step_and_a_source_of_equal_length_overlap() -> None:
    without = seconds_of_an_epoch(0)
    ahead = seconds_of_an_epoch(1)

    assert without == pytest.approx(0.800)
    assert ahead == pytest.approx(0.410)
    assert without / ahead >= 1.9
