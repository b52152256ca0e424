"""Arrays of a replica that are sent to other workers: a cancelled step may write them at once."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster._exchange import Exchange
from aioreplica.collectives import Reducer, Summands
from aioreplica.replica._meeting_point import MeetingPoint
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.workers import on_workers, outcomes, strategies


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def meet() -> Any:
    return await me().all_reduce("sum", 1.0)


async def with_a_task(value: Any) -> Any:
    try:
        return await me().all_reduce("sum", value)
    finally:
        value[:] = -5.0


async def with_a_handle(value: Any) -> Any:
    handle = me().start_all_reduce("sum", value)
    try:
        return await handle
    finally:
        value[:] = -5.0


def plain(value: Any) -> Any:
    try:
        return me().blocking.all_reduce("sum", value)
    finally:
        value[:] = -5.0


async def in_an_op(value: Any) -> Any:
    return await me().run_on_device(plain, value)


@pytest.mark.parametrize("is_read", [False, True], ids=["waits", "is read"])
@pytest.mark.parametrize("fn", [with_a_task, with_a_handle, in_an_op, plain])
def test_writes_of_a_cancelled_step_do_not_reach_the_others(
    fn: Callable[[Any], Any], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single replica's array is lent: it is copied, or not written before it was sent."""
    if is_read:
        monkeypatch.setattr(Summands, "give_back", lambda _self: False)
    post = MeetingPoint.post

    async def main() -> None:
        cancelled, is_cancelled = asyncio.Event(), threading.Event()
        mine = np.ones(50_000)

        def post_and_pause(point: MeetingPoint, call: Callable[..., None], *args: Any) -> bool:
            posted = post(point, call, *args)
            is_cancelled.wait()  # the merge begins, and is cancelled, before its thread waits
            return posted

        monkeypatch.setattr(MeetingPoint, "post", post_and_pause)

        async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
            await strategy.run(meet)
            if not (strategy._runtime.workers and strategy._runtime.workers.rank):
                await cancelled.wait()
                return strategy.local_results(await strategy.run(fn, (np.ones(50_000),)))[0]
            entered, workers = asyncio.Event(), strategy._runtime.workers
            assert workers is not None
            before = workers.before
            monkeypatch.setattr(workers, "before", lambda: entered.set() or before())
            run = asyncio.create_task(strategy.run(fn, (mine,)))
            await entered.wait()
            run.cancel()
            is_cancelled.set()
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert mine[0] == -5.0
            return None

        results = await outcomes(strategies(2, 1), [program] * 2)
        assert np.unique(results[0]).tolist() == [2.0]

    art.explore(main, schedules=20).check()


@pytest.mark.asyncio
async def test_threads_of_a_cancelled_step_wait_until_no_group_reads_their_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group that began last is over first; what the other one reads is not written yet."""
    has_begun, may_come = threading.Event(), threading.Event()
    have_begun, is_cancelled, has_met = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(value: Any) -> Any:
        i = me().replica_id_in_sync_group
        if i in (1, 2):
            (has_begun if i == 1 else may_come).wait(10)
        try:
            return me().blocking.group([i % 2, i % 2 + 2]).all_reduce("sum", value)
        finally:
            if i < 2:
                value[:] = -5.0
            if i == 3:
                loop.call_soon_threadsafe(has_met.set)

    async def first(strategy: MultiWorkerMirroredStrategy) -> Any:
        run = asyncio.ensure_future(strategy.run(step, (ar.PerReplica(arrays()),)))
        await have_begun.wait()
        monkeypatch.setattr(Summands, "give_back", lambda _self: False)
        run.cancel()
        await idle()
        is_cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await run

    async def second(strategy: MultiWorkerMirroredStrategy) -> Any:
        await is_cancelled.wait()
        run = asyncio.ensure_future(strategy.run(step, (ar.PerReplica(arrays()),)))
        await has_met.wait()
        await idle()
        may_come.set()
        return [np.unique(each).tolist() for each in strategy.local_results(await run)]

    def arrays() -> list[Any]:
        return [np.ones(50_000), np.ones(50_000)]

    made = strategies(2, 2)
    workers = made[0]._runtime.workers
    assert workers is not None
    enter, entered = Exchange.enter, []

    def note(exchange: Exchange[Any], **options: Any) -> None:
        enter(exchange, **options)
        if exchange.run.workers.outer is workers:
            entered.append(exchange)
            (has_begun if len(entered) == 1 else have_begun).set()

    monkeypatch.setattr(Exchange, "enter", note)
    _, results = await outcomes(made, [first, second])
    assert results == [[2.0], [2.0]]


@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_integers_beside_a_large_array_cost_no_copy_of_it(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one replica brings goes to the others as it is; only a mean makes floats of integers."""
    reduced = []
    reduce = Reducer.reduce

    def counted(self: Reducer, op: Any, rows: Any, *args: Any) -> Any:
        reduced.append([leaf.dtype.name for leaf in rows[0]])
        return reduce(self, op, rows, *args)

    monkeypatch.setattr(Reducer, "reduce", counted)

    async def step(rank: int) -> Any:
        value = [np.full(50_000, rank + 1.0), np.int64([rank, 2]), np.uint8([3])]
        return await me().all_reduce(op, value), await me().all_reduce("mean", value[1])

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        workers = strategy._runtime.workers
        assert workers is not None
        return strategy.local_results(await strategy.run(step, (workers.rank,)))[0]

    results = asyncio.run(on_workers(2, 1, program))

    first, counts, last, half = {
        "sum": (3.0, [1, 4], 6, 0.5), "min": (1.0, [0, 2], 3, 0.5), "max": (2.0, [1, 2], 3, 0.5)
    }[op]  # fmt: skip
    for values, mean in results:
        assert np.unique(values[0]).tolist() == [first]
        assert [value.tolist() for value in values[1:]] == [counts, [last]]
        assert [value.dtype.name for value in values] == ["float64", "int64", "uint8"]
        assert mean.tolist() == [half, 2.0]
    assert reduced == [["int64"]] * 2
