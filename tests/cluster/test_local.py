"""The communicators of one process: the contract, and groups that end under every schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aioreplica.testing as art
from aioreplica.cluster import ClusterResolver, LocalCommunicator, connect
from aioreplica.devices import lane_table
from aioreplica.errors import ContextError, LoopMismatchError, StallError, WorkerLostError
from tests.cluster.communicator_contract import CHECKS
from tests.cluster.thread_engine import ThreadCommunicator

Check = Callable[[LocalCommunicator], Awaitable[Any]]


async def by_all(size: int, work: Check, *, timeout: float | None = None) -> list[Any]:
    group = LocalCommunicator.group(size, timeout=timeout)
    return await asyncio.gather(*map(work, group), return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, size: int) -> None:
    async def work(c: LocalCommunicator) -> None:
        if check.__name__ == "splits" and size == 1:
            return
        if check.__name__ == "bad_arguments_change_nothing" and size == 1:
            return
        await check(c)
        await c.aclose()

    for result in await by_all(np.int64(size), work):  # type: ignore[arg-type]
        if result is not None:
            raise result


async def train(c: LocalCommunicator) -> list[float]:
    """A few steps that wait for each other, as every worker makes them."""
    async with c:
        steps = [c.all_reduce(np.full(3, float(c.rank + step))) for step in range(2)]
        totals = [float((await each)[0]) for each in steps]
        parts = await c.all_gather(totals)
        await c.barrier()
        return [*totals, float(parts.sum())]


def test_messages_that_overtake_each_other_change_nothing() -> None:
    results = set()

    async def main() -> None:
        results.add(repr(await by_all(3, train)))

    art.explore(main, schedules=100, faults=art.Faults().slow_device("worker:1")).check()
    assert results == {repr([[3.0, 6.0, 27.0]] * 3)}


@pytest.mark.parametrize("at", [0, 2, None])
def test_a_lost_worker_is_named_to_all_of_them(at: int | None) -> None:
    seen = []

    async def main() -> None:
        results = await by_all(3, train)
        lost = [each for each in results if isinstance(each, BaseException)]
        seen.append(len(lost))
        for error in lost:
            assert isinstance(error, WorkerLostError), error
            assert error.ranks == (2,)
            assert str(error).startswith("Worker 2 is gone: ")

    art.explore(main, schedules=60, faults=art.Faults().lose_worker("worker:2", at=at)).check()
    if at is not None:
        assert set(seen) == {3}
    else:
        assert {0, 3} <= set(seen)


def test_a_message_that_hangs_is_a_stall_that_names_the_worker() -> None:
    async def main() -> None:
        for error in await by_all(3, train, timeout=5.0):
            assert isinstance(error, StallError)
            assert (error.ranks, error.timeout_s) == ((1,), 5.0)
            assert "Worker 1 did not come to all_reduce #1 within 5 s" in str(error)

    faults = art.Faults().hang_op("worker:1", at=1)
    art.explore(main, schedules=40, faults=faults).check()


def test_the_timeout_of_a_call_begins_when_the_calls_before_it_have_ended() -> None:
    """Of eight calls that were queued at once the fourth was a stall, though all came in time."""

    async def many(c: LocalCommunicator) -> list[float]:
        return [float(each) for each in await asyncio.gather(*map(c.all_reduce, range(8)))]

    async def main() -> None:
        assert await by_all(2, many, timeout=1.0) == [[2.0 * n for n in range(8)]] * 2

    art.explore(main, schedules=10, faults=art.Faults().slow_device("worker:1", factor=300)).check()


async def until_it_ends(c: LocalCommunicator) -> None:
    while True:
        await c.all_reduce(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("sizes", [(3, 3), (3, 4)])
async def test_an_error_between_frames_and_sums_ends_the_group(
    sizes: tuple[int, int],
) -> None:
    async def worker(c: LocalCommunicator) -> None:
        def agrees(_rows: Any) -> bool:
            if sizes[0] == sizes[1] and c.rank == 0:
                raise ZeroDivisionError("while looking")
            return True

        match = "while looking" if sizes[0] == sizes[1] else "agreement #0 failed"
        with pytest.raises(WorkerLostError, match=match):
            await c.all_gather_then_reduce([1], agrees, [np.ones(sizes[c.rank])], "sum")
        with pytest.raises(WorkerLostError, match=match):
            await c.barrier()
        await c.aclose()

    assert await by_all(2, worker) == [None, None]


def test_an_abort_reaches_those_that_wait_and_those_that_come_later() -> None:
    async def work(c: LocalCommunicator) -> str:
        await c.barrier()
        if c.rank == 1:
            c.abort("the disk is full")
            c.abort("not heard")
        with pytest.raises(WorkerLostError, match="Worker 1 ended the group: the disk is full"):
            await asyncio.wait_for(until_it_ends(c), 100.0)
        with pytest.raises(WorkerLostError, match="disk"):
            c.barrier()
        await c.aclose()
        return "told"

    async def main() -> None:
        assert await by_all(3, work) == ["told"] * 3

    art.explore(main, schedules=60).check()


def test_a_worker_that_leaves_early_is_named() -> None:
    async def work(c: LocalCommunicator) -> Any:
        async with c:
            await c.barrier()
            if c.rank == 0:
                return "left"
            return await c.all_reduce(1)

    async def main() -> None:
        left, *errors = await by_all(3, work)
        assert left == "left"
        for error in errors:
            assert isinstance(error, WorkerLostError)
            assert error.ranks == (0,)
            assert "Worker 0 has closed the communicator before all_reduce #1" in str(error)

    art.explore(main, schedules=60).check()


def test_an_error_in_a_worker_is_told_to_the_others() -> None:
    async def work(c: LocalCommunicator) -> None:
        async with c:
            await c.barrier()
            if c.rank == 1:
                raise ValueError("bad batch")
            await c.all_reduce(1)

    async def main() -> None:
        first, own = await by_all(2, work)
        assert isinstance(own, ValueError)
        assert str(first) == "Worker 1 ended the group: ValueError: bad batch"

    art.explore(main, schedules=40).check()


@pytest.mark.asyncio
async def test_workers_that_make_different_calls_are_named() -> None:
    async def work(c: LocalCommunicator) -> None:
        await c.all_reduce(np.ones(2 + c.rank))

    for error in await by_all(2, work):
        assert isinstance(error, WorkerLostError)
        assert "Worker 1 called all_reduce(float64[3], SUM) where worker 0 called" in str(error)


@pytest.mark.asyncio
async def test_a_split_ends_with_its_group() -> None:
    first, second = LocalCommunicator.group(2)
    pair = first.split([0, 1])
    await first.split([0]).barrier()
    second.abort("enough")
    with pytest.raises(WorkerLostError, match="enough"):
        await pair.barrier()


def test_a_worker_that_closes_takes_its_splits_along_and_the_others_are_told() -> None:
    """Also of a split that it has never asked for, or that is made when it has left."""

    async def work(c: LocalCommunicator) -> str:
        async with c:
            if c.rank == 2:
                with pytest.raises(WorkerLostError, match=r"Worker 0 has closed .* before all_re"):
                    await c.split([0, 2]).all_reduce(1)
                return "told"
            pair = c.split([0, 1])
            await pair.barrier()
            if c.rank == 1:
                with pytest.raises(WorkerLostError, match=r"Worker 0 has closed .* before all_re"):
                    await pair.all_reduce(1)
                return "told"
        assert pair.is_closed
        with pytest.raises(ContextError, match="that this is a split of was closed"):
            pair.barrier()
        return "left"

    async def main() -> None:
        assert await by_all(3, work) == ["left", "told", "told"]
        assert not {"worker:0", "worker:1"} & lane_table().statistics().keys()

    art.explore(main, schedules=60).check()


@pytest.mark.asyncio
async def test_errors_of_a_split_name_workers_of_the_whole_group() -> None:
    group = LocalCommunicator.group(3, timeout=0.05)
    first, second = (group[rank].split([1, 2]) for rank in (1, 2))
    assert (await asyncio.gather(first.all_gather(0), second.all_gather(1)))[0].tolist() == [0, 1]
    with pytest.raises(StallError, match="Worker 2 did not come to barrier #1") as stalled:
        await first.barrier()
    assert stalled.value.ranks == (2,)


@pytest.mark.asyncio
async def test_closing_twice_and_using_it_afterwards() -> None:
    (alone,) = LocalCommunicator.group(1)
    assert repr(alone) == "<LocalCommunicator | rank 0 of 1, open>"
    await alone.aclose()
    await alone.aclose()
    with pytest.raises(ContextError, match="was closed"):
        alone.barrier()


@pytest.mark.parametrize("group", [LocalCommunicator.group, ThreadCommunicator.group])
def test_an_abort_that_cannot_be_told_to_others_changes_nothing(group: Any) -> None:
    """It ended the group here only, and the others waited for ever: a second one did nothing."""
    first, second = group(2)
    with pytest.raises(ContextError, match="abort needs a running event loop"):
        first.abort("enough")
    assert not first.has_failed

    async def use() -> None:
        await asyncio.gather(first.barrier(), second.barrier())
        first.abort("enough")
        with pytest.raises(WorkerLostError, match="Worker 0 ended the group: enough"):
            await second.barrier()
        await asyncio.gather(first.aclose(), second.aclose())

    asyncio.run(use())


def test_an_abort_on_another_loop_changes_nothing() -> None:
    first, second = LocalCommunicator.group(2)

    async def use() -> None:
        await asyncio.gather(first.barrier(), second.barrier())

    async def abort() -> None:
        first.abort("enough")

    asyncio.run(use())
    with pytest.raises(LoopMismatchError, match="Make a group per loop"):
        asyncio.run(abort())
    assert not first.has_failed


def test_one_loop_per_group() -> None:
    (alone,) = LocalCommunicator.group(1)

    async def use() -> Any:
        return await alone.all_reduce(1)

    assert asyncio.run(use()) == 1
    with pytest.raises(LoopMismatchError, match="Make a group per loop"):
        asyncio.run(use())
    with pytest.raises(ContextError, match="all_reduce needs a running event loop"):
        alone.all_reduce(1)


def test_a_group_may_be_closed_when_its_loop_is_gone() -> None:
    """Nobody can wait any more: its lanes are given back, and its splits with them."""
    group = LocalCommunicator.group(20)

    async def use() -> None:
        await asyncio.gather(*(c.barrier() for c in group))
        await asyncio.gather(*(c.split(range(20)).barrier() for c in group))

    async def close() -> None:
        await asyncio.gather(*(c.aclose() for c in group))

    asyncio.run(use())
    assert "worker:19" in lane_table().statistics()
    asyncio.run(close())
    assert "worker:19" not in lane_table().statistics()


@pytest.mark.asyncio
async def test_a_close_on_another_loop_is_refused_before_it_changes_anything() -> None:
    first, second = LocalCommunicator.group(2)
    await asyncio.gather(first.barrier(), second.barrier())

    with pytest.raises(LoopMismatchError, match="Make a group per loop"):
        await asyncio.to_thread(asyncio.run, first.aclose())

    assert not first.is_closed
    await asyncio.gather(first.barrier(), second.barrier())
    await asyncio.gather(first.aclose(), second.aclose())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"size": 0}, ValueError, "at least 1 worker, got 0"),
        ({"size": 2.0}, ValueError, "at least 1 worker, got 2.0"),
        ({"size": 2, "timeout": "5"}, TypeError, "number of seconds or None, got '5'"),
        ({"size": 2, "timeout": 0}, ValueError, "above 0 seconds"),
    ],
)
def test_bad_groups(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LocalCommunicator.group(**arguments)


@pytest.mark.asyncio
async def test_bad_connections() -> None:
    with pytest.raises(TypeError, match="takes a ClusterResolver, got 3"):
        await connect(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mpi, torch, local or None, got 'smoke'"):
        await connect(ClusterResolver(), engine="smoke")
    with pytest.raises(ValueError, match='"local" is for one worker, but arguments tells of 2'):
        await connect(ClusterResolver(num_workers=2), engine="local")
    with pytest.raises(ValueError, match="'ps' is not a worker"):
        await connect(ClusterResolver({"worker": ["a:1"], "ps": ["b:1"]}, "ps"))
    with pytest.raises(ValueError, match="needs an address where the workers meet"):
        await connect(ClusterResolver(num_workers=2), engine="torch")


def test_failures_survive_pickling() -> None:
    import pickle

    for error in (WorkerLostError("gone", ranks=(1,)), StallError("late", ranks=(0, 2))):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.ranks) == (str(error), error.ranks)
