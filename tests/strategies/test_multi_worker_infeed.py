"""Device loops of several workers: iterators that fail, were closed, or wait for the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.device_loop import _feeder
from aioreplica.errors import ContextError, WorkerLostError
from tests.strategies.test_multi_worker_steps import Numbers, Strategy, me, rank_of, summing
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


@pytest.mark.parametrize("why", ["failed", "closed", "closed by one"])
async def test_an_epoch_that_was_broken_off_is_over_on_all_workers_and_keeps_its_place(
    why: str,
) -> None:
    """What no worker has run is still to come, as with one worker."""

    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)
        rank, fails = rank_of(strategy), why == "failed"

        class Source:
            def __iter__(self) -> Iterator[Any]:
                for i in range(7):
                    if i == 3 and rank and fails:
                        raise OSError("disk")
                    yield np.array([float(i)])

        async with strategy.distribute_datasets_from_function(lambda _: Source()) as batches:
            iterator = aiter(batches)
            if fails:
                with pytest.raises((OSError, WorkerLostError), match="disk"):
                    await strategy.run_steps(step, iterator, 9)
            else:
                await strategy.run_steps(step, iterator, 3)
                if rank or why == "closed":
                    await iterator.aclose()
            counts = [(await strategy.run_steps(step, iterator, 9)).steps_run for _ in range(2)]
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            state, fails = batches.state_dict(), False
            batches.load_state_dict(state)
            rest = [float(strategy.local_results(batch)[0][0]) async for batch in batches]
            return counts, (state["epoch"], state["position"]), rest

    assert await on_workers(2, 1, program) == [([0, 0], (0, 3), [3.0, 4.0, 5.0, 6.0])] * 2


@pytest.mark.parametrize("is_loop", [True, False])
@pytest.mark.parametrize("num_files", [4, 5])
async def test_a_worker_with_batches_left_says_so(
    num_files: int, is_loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(strategy: Strategy) -> int:
        _, step = summing(strategy)
        files = ar.input.Files([str(n) for n in range(num_files)], lambda path: [np.ones(1)] * 3)
        batches = strategy.distribute_dataset(files)
        if is_loop:
            return len([batch async for batch in batches])
        async with batches:
            return (await strategy.run_steps(step, aiter(batches), 99)).steps_run

    assert await on_workers(2, 1, program) == [6, 6]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == num_files % 2
    assert all("ends behind 6 batches, since another worker gives no more" in text for text in told)


@pytest.mark.parametrize("count", [5, 500])
@pytest.mark.parametrize("is_thread", [True, False])
async def test_what_an_iterable_raises_is_told_when_another_worker_ends(
    is_thread: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a read ahead, or as it is closed: no call comes to that again."""
    monkeypatch.setattr(_feeder, "GIVE_UP_S", 60.0)  # the thread may be late

    def given() -> Iterator[float]:
        try:
            yield from map(float, range(count))
        finally:
            raise OSError("disk")

    class Elements:
        async def __aiter__(self) -> AsyncIterator[float]:
            elements = given()
            try:
                for element in elements:
                    yield element
            finally:
                elements.close()

    class Iterable:
        __iter__ = staticmethod(given)

    async def program(strategy: Strategy) -> Any:
        _, step = summing(strategy)
        bad: Any = Iterable() if is_thread else Elements()
        await strategy.run_steps(step, bad if rank_of(strategy) else [0.0, 1.0], 900)

    told, raised = await outcomes(strategies(2, 1), [program] * 2)
    assert isinstance(raised, OSError)
    assert raised.__notes__ == ["Raised by the infeed of run_steps, after 2 complete steps."]
    assert isinstance(told, WorkerLostError)
    assert "disk" in str(told)


@pytest.mark.parametrize("kind", ["batches", "read_var", "outside"])
async def test_what_a_loop_waits_for_cannot_wait_for_it(kind: str) -> None:
    """No batch of the dataset is lost by that, and a task that meets the others behind it may."""

    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            count = ar.Variable(0.0, synchronization="on_read", aggregation="sum")

        async def read() -> Any:
            return await strategy.extended.read_var(count)

        async def given(batches: Any) -> AsyncIterator[Any]:
            if kind == "batches":
                async for batch in batches:
                    yield batch
            else:
                yield 1.0
                if kind == "read_var":
                    await read()
                yield 2.0

        def step(ctx: Any, x: Any) -> None:
            me().blocking.barrier()
            if kind == "outside":
                ar.outside_compilation(anext, iterator)

        async with strategy.distribute_datasets_from_function(lambda _: Numbers(3)) as batches:
            iterator = aiter(batches)
            first = strategy.local_results(await anext(iterator))
            elements = given(iterator)
            loop = asyncio.create_task(strategy.run_steps(step, elements, 2))
            later = asyncio.create_task(read())
            with pytest.raises((ContextError, WorkerLostError), match="has to meet the") as caught:
                await loop
            failed.add(caught.type)
            await elements.aclose()
            rest = [float(strategy.local_results(batch)[0][0]) async for batch in iterator]
            return float(first[0][0]), rest, float(await later)

    failed = set[type]()
    assert await on_workers(2, 1, program) == [(0.0, [1.0, 2.0], 0.0)] * 2
    assert ContextError in failed
