"""Groups of several workers of which a member has left, was evicted, or goes on at once."""

import asyncio
import warnings
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalCommunicator, _run
from aioreplica.devices import lane_table
from aioreplica.errors import ContextError, StallError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy as Strategy
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


def column() -> Any:
    """Return the group of this replica and those of other workers with its device."""
    ctx = me()
    i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    return ctx.group(range(i % 2, n, 2))


@pytest.mark.parametrize("have_met", [False, True])
async def test_a_member_that_closes_and_never_came_to_the_group_is_told_of_at_once(
    have_met: bool,
) -> None:
    async def step(rank: int) -> Any:
        if have_met:
            await me().barrier()
        if rank:
            await column().all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step, (rank_of(strategy),))

    first, *others = await outcomes(strategies(3, 2), [program] * 3)
    assert first is None
    for error in others:
        assert isinstance(error, WorkerLostError)
        assert error.ranks == (0,)
        assert "has closed its strategy" in str(error)


async def test_a_member_that_leaves_by_an_exception_is_told_of_with_it() -> None:
    async def step(rank: int) -> Any:
        await me().barrier()
        if rank:
            await column().all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step, (rank_of(strategy),))
        raise OSError("disk full")

    _, error = await outcomes(strategies(2, 2), [program] * 2)
    assert isinstance(error, WorkerLostError)
    assert "OSError: disk full" in str(error)


@pytest.mark.parametrize("is_in_group", [False, True])
async def test_who_leaves_by_an_exception_before_the_first_exchange_is_told_of_with_it(
    is_in_group: bool,
) -> None:
    async def step() -> None:
        await (column() if is_in_group else me()).all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        if rank_of(strategy) == 0:
            raise OSError("disk full")
        await strategy.run(step)

    made = strategies(2, 2)
    _, error = await outcomes(made, [program] * 2)
    assert isinstance(error, WorkerLostError)
    assert error.ranks == (0,)
    assert "OSError: disk full" in str(error)
    assert made[0]._runtime.workers is not None
    assert made[0]._runtime.workers.left_by is None


SUBSETS = [(0, *some) for n in (1, 2, 3) for some in combinations(range(1, 6), n)]


async def test_a_worker_of_many_groups_that_leaves_is_told_of_in_one_that_it_never_came_to() -> (
    None
):
    """An alarm has no room for the counts of more than 16 groups."""

    async def step(all_ids: list[tuple[int, ...]]) -> None:
        for ids in all_ids:
            if me().replica_id_in_sync_group in ids:
                await me().group(ids).all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step, (SUBSETS[:-1],))
        if rank_of(strategy) in SUBSETS[-1][1:]:
            await strategy.run(step, (SUBSETS[-1:],))

    results = await outcomes(strategies(6, 1), [program] * 6)
    assert results[:3] == [None] * 3
    for error in results[3:]:
        assert isinstance(error, WorkerLostError)
        assert error.ranks[0] == 0
        assert "has closed its strategy" in str(error)


async def test_who_closes_and_waits_too_long_for_the_last_step_of_others_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_run, "CLOSING_S", 1e-3)

    async def step(rank: int) -> None:
        await me().barrier()
        if rank != 2:
            communicator = made[rank]._runtime.workers._communicator
            while not communicator.has_failed:  # until the end of the group has come here
                await asyncio.sleep(0)
            await me().group([0, 1]).all_reduce("sum", 1)

    async def program(strategy: Strategy) -> None:
        await strategy.run(step, (rank_of(strategy),))

    made = strategies(3, 1)
    *others, last = await outcomes(made, [program] * 3)
    assert last is None
    for error in others:
        assert isinstance(error, WorkerLostError)
        assert "did not come to close their strategies within 0.001 s" in str(error)
        assert "set a timeout that is longer" in str(error)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_merge_function_of_a_row_cannot_wait_for_its_own_run(num_workers: int) -> None:
    async def program(strategy: Strategy) -> Any:
        n = strategy.num_local_replicas

        async def merge(_: Any, __: Any) -> Any:
            with pytest.raises(ContextError, match="in a merge function of Multi"):
                await strategy.reduce("sum", ar.PerReplica([1] * n))
            return 7

        async def step() -> Any:
            i = me().replica_id_in_sync_group
            return await me().group([i // 2 * 2, i // 2 * 2 + 1]).merge_call(merge, (i,))

        return strategy.local_results(await strategy.run(step))

    assert await on_workers(num_workers, 4, program) == [(7,) * 4] * num_workers


async def total_of(view: Any, value: Any) -> Any:
    return await view.reduce("sum", value)


@pytest.mark.explore(schedules=4)
@pytest.mark.parametrize("cycles", [21, 30, 32])  # of these the old code failed
async def test_exchanges_that_wait_for_the_end_of_a_failure_keep_their_order(
    cycles: int,
) -> None:
    """The next run starts at once, before the other worker knows, and goes on at any moment."""

    async def failing() -> Any:
        i = me().replica_id_in_sync_group
        if i == 0:
            raise ValueError("bad batch")
        return await column().all_reduce("sum", i)

    async def step() -> Any:
        group = column()
        handle = group.start_all_reduce("sum", 1)
        for _ in range(cycles):
            await asyncio.sleep(0)
        largest = group.start_all_reduce("max", 7)
        total = await group.merge_call(total_of, (1,))
        return int(await handle), int(await largest), total

    async def program(strategy: Strategy) -> Any:
        await strategy.run(column_of_ones)
        with pytest.raises((ValueError, WorkerLostError)):
            await strategy.run(failing)
        return strategy.local_results(await strategy.run(step))

    async def column_of_ones() -> None:
        await column().all_reduce("sum", 1)

    assert await on_workers(2, 2, program) == [((2, 7, 2),) * 2] * 2


@pytest.mark.explore(schedules=6)
async def test_a_late_failure_of_an_evicted_worker_is_not_that_of_who_has_its_number_now() -> None:
    have_shrunk, is_over, done = asyncio.Event(), asyncio.Event(), []

    async def step(hangs: bool) -> Any:
        ctx = me()
        if hangs:
            await have_shrunk.wait()
            raise ValueError("disk full")
        i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
        if i < 2:
            await ctx.group([0, 1]).all_reduce("sum", 1)
        return int(await ctx.all_reduce("sum", 1)) == n

    async def program(strategy: Strategy) -> Any:
        is_first = rank_of(strategy) == 0
        await strategy.reduce("sum", ar.PerReplica([1]))
        try:
            await strategy.run(step, (is_first,))
        except StallError:
            await strategy.shrink()
            have_shrunk.set()
            await is_over.wait()
            assert all(strategy.local_results(await strategy.run(step, (False,))))
            done.append(rank_of(strategy))
        finally:
            if is_first:
                is_over.set()

    first, *_ = await outcomes(strategies(4, 1, timeout=30.0), [program] * 4)
    assert isinstance(first, (ValueError, WorkerLostError))
    assert sorted(done) == [0, 1, 2]


async def test_all_replicas_are_members_of_the_group_of_all() -> None:
    async def step() -> Any:
        return me().group(range(4)).members

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [((0, 1, 2, 3),) * 2] * 2


async def test_warnings_and_errors_name_replicas_by_their_numbers_among_all() -> None:
    async def step() -> Any:
        column().start_all_reduce("sum", 1)
        await me().barrier()

    async def forgets() -> Any:
        if me().replica_id_in_sync_group == 3:
            column().barrier()

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step)
        try:
            await strategy.run(forgets)
        except Exception as error:
            return str(error)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = await on_workers(2, 2, program)
    lost = [str(each.message) for each in caught if "never awaited" in str(each.message)]
    assert [each for each in lost if "in replicas 2, 3" in each or "in replica 3" in each], lost
    assert "replica 3: barrier" in texts[1]


async def test_a_failure_in_a_split_names_workers_by_their_ranks_among_all() -> None:
    group = LocalCommunicator.group(3)

    async def worker(communicator: LocalCommunicator) -> Any:
        async with communicator:
            if communicator.rank == 0:
                return None
            return await communicator.split([1, 2]).all_reduce(np.ones(communicator.rank))

    _, *errors = await asyncio.gather(*map(worker, group), return_exceptions=True)
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert error.ranks == (1, 2)
        assert "Worker 2 called all_reduce(float64[2]" in str(error)
        assert "where worker 1 called" in str(error)


@pytest.mark.explore(schedules=4)
async def test_nobody_is_evicted_for_a_circle_of_groups() -> None:
    """Both named workers are well: the order of their calls differs."""

    async def step(rank: int) -> Any:
        for ids in [(0, 1), (0, 2), (1, 2)]:  # makes what is made once
            if rank in ids:
                await me().group(ids).barrier()
        for ids in [((0, 2), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 2))][rank]:
            await me().group(ids).all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        with pytest.raises(StallError, match="waits in all_reduce"):
            await strategy.run(step, (rank_of(strategy),))
        await strategy.shrink()
        return strategy.num_replicas_in_sync

    assert await on_workers(3, 1, program, timeout=30.0) == [3, 3, 3]


async def test_to_close_twice_leaves_no_lane() -> None:
    made = strategies(2, 1)
    await outcomes(made, [lambda strategy: strategy.reduce("sum", ar.PerReplica([1]))] * 2)
    closed = set(lane_table()._lanes)
    for strategy in made:
        await strategy.aclose()

    assert set(lane_table()._lanes) <= closed
