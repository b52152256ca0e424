"""Reductions that were started, over workers: they go together as far as all have started them."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import Summands
from aioreplica.errors import MergeMismatchError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from aioreplica.tree import flatten
from aioreplica.typing import ReduceOp
from tests.strategies.workers import communicator_of, on_workers, outcomes, strategies

NUM = 24
PAUSES = [(), (0, 3, 4, 16), (2, 9, 10, 11, 20)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: MultiWorkerMirroredStrategy) -> int:
    workers = strategy._runtime.workers
    assert workers is not None
    return workers.rank


def brought(index: int) -> tuple[ReduceOp, Any]:
    """Numbers, trees, halves and arrays in the slot and behind it; sums that round."""
    own = me().replica_id_in_sync_group
    op = ReduceOp.MEAN if 8 <= index < 11 else ReduceOp.MAX if index == 17 else ReduceOp.SUM
    value = np.linspace(0.1 + own, index + 1 / 3, 700)
    kinds = (
        0.1 * (own + 1) + index, {"a": value.astype(np.float32), "b": [value[:3], own]},
        value.astype(np.float16), np.arange(700) * own, value, value.reshape(-1, 7) + 0.1,
    )  # fmt: skip
    return op, kinds[index % 6]


async def one_by_one() -> list[Any]:
    return [await me().all_reduce(*brought(index)) for index in range(NUM)]


async def all_started(pauses: tuple[int, ...]) -> list[Any]:
    handles, awaited = {}, {}
    for index in range(NUM):
        if index == 13:
            awaited[index] = await me().all_reduce(*brought(index))
        else:
            handles[index] = me().start_all_reduce(*brought(index))
        if index in pauses:
            await asyncio.sleep(0)
        if index == 19:
            awaited[6] = await handles[6]
            await me().barrier()
    awaited |= {index: await handle for index, handle in handles.items()}
    return [awaited[index] for index in range(NUM)]


@pytest.mark.slow
@pytest.mark.explore(schedules=20)
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(2, 1), (2, 2), (3, 1)])
async def test_reductions_started_at_other_times_give_what_each_alone_gives(
    num_workers: int, num_replicas: int
) -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        expected = strategy.local_results(await strategy.run(one_by_one))
        before = communicator_of(strategy).statistics().calls
        results = await strategy.run(all_started, (PAUSES[rank_of(strategy)],))
        assert communicator_of(strategy).statistics().calls - before < NUM * 2 // 3
        for found, right in zip(strategy.local_results(results), expected, strict=True):
            for a, b in zip(flatten(found)[0], flatten(right)[0], strict=True):
                assert type(a) is type(b)
                assert np.asarray(a).dtype == np.asarray(b).dtype
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    await on_workers(num_workers, num_replicas, program)


@pytest.mark.explore(schedules=15)
async def test_one_that_differs_is_named_and_those_before_it_have_their_results() -> None:
    found: list[list[Any]] = [[], []]

    async def step(rank: int) -> None:
        sizes = [700, 700, 700 + rank, 700]
        handles = [me().start_all_reduce("sum", np.ones(size)) for size in sizes]
        for handle in handles:
            found[rank].append((await handle).sum())

    results = await outcomes(strategies(2, 1), [lambda each: each.run(step, (rank_of(each),))] * 2)

    assert found == [[1400.0, 1400.0]] * 2
    assert [type(each) for each in results] == [MergeMismatchError] * 2
    assert "disagree in start_all_reduce #3 (SUM)" in str(results[0])
    assert str(results[0]) == str(results[1])
    for error in results:
        [note] = [each for each in error.__notes__ if "by the merge of" in each]
        assert "start_all_reduce #3" in note


@pytest.mark.explore(schedules=15)
async def test_a_cancelled_wait_ends_with_what_is_being_sent_not_with_what_was_started_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 has started two where worker 1 starts its second once that wait has ended."""
    monkeypatch.setattr(Summands, "give_back", lambda _self: False)  # the engine reads them
    ended = asyncio.Event()

    async def step(rank: int) -> list[float]:
        ctx = me()
        await ctx.barrier()
        handles = [ctx.start_all_reduce("sum", np.full(50_000, rank + 1.0))]
        if rank:
            await handles[0]
            await ended.wait()
        handles.append(ctx.start_all_reduce("sum", np.full(50_000, rank + 2.0)))
        if not rank:
            waiting = asyncio.ensure_future(_wait(handles[0]))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            ended.set()
        return [float((await handle)[-1]) for handle in handles]

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        return strategy.local_results(await strategy.run(step, (rank_of(strategy),)))

    assert await on_workers(2, 1, program) == [([3.0, 5.0],)] * 2


async def _wait(handle: ar.Handle) -> Any:
    return await handle
