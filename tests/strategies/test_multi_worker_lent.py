"""Arrays of a replica that are sent to other workers: a cancelled step may write them at once."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.collectives import Summands
from aioreplica.replica._meeting_point import MeetingPoint
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.workers import outcomes, strategies


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
