"""Groups of some replicas of several workers: who meets, and what a failure does to the rest."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import ContextError, MergeMismatchError, StallError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.test_multi_worker_grow import kept_of, outcomes_of_all
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]
Strategy = MultiWorkerMirroredStrategy
Step = Callable[..., Any]


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


def leaves(value: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in value]


# ---- who meets ---------------------------------------------------------------------------------


async def every_collective(group: Any, i: int) -> list[Any]:
    """Call every collective in a group; return what each gave."""

    async def merge(view: Any, value: Any) -> Any:
        await asyncio.sleep(0)
        total, joined = await view.reduce("sum", value), await view.gather(value, 0)
        to = await view.extended.reduce_to("mean", value, "cpu:0")
        return view.num_replicas_in_sync, float(total[0]), joined.tolist(), float(to[0])

    own = np.full(3, float(i))
    handles = [group.start_all_reduce("sum", own * k) for k in range(3)]
    found = [
        await group.all_reduce("sum", {"a": own, "b": i}),
        await group.all_reduce("mean", own),
        await group.all_reduce("max", i),
        leaves([await group.reduce_scatter("sum", np.arange(7.0) + i)]),
        leaves([await group.all_gather(np.full(i + 1, i), 0)]),
        leaves([await group.all_to_all(np.arange(8.0) + i)]),
        await group.broadcast(f"of {i}", 1),
        await group.any(i == 0),
        await group.all(i >= 0),
        await group.agree("same"),
        await group.barrier(),
        await group.merge_call(merge, (np.array([i]),)),
        leaves([await handle for handle in handles]),
    ]
    return [str(each) for each in found]


@pytest.mark.parametrize(
    "ids_of",
    [lambda i, n: range(i % 2, n, 2), lambda i, n: range(n - 2) if i < n - 2 else [n - 2, n - 1]],
    ids=["columns", "some workers"],
)
@pytest.mark.parametrize("num_workers", [2, 3])
async def test_every_collective_gives_what_the_group_gets_on_one_worker(
    num_workers: int, ids_of: Callable[[int, int], Any]
) -> None:
    async def step() -> Any:
        ctx = me()
        i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
        group = ctx.group(ids_of(i, n))
        about = group.members, group.replica_id_in_sync_group, group.num_replicas_in_sync
        found = await every_collective(group, i), await every_collective(ctx, i)
        return about, found, await every_collective(group, i)

    async def program(strategy: ar.Strategy) -> Any:
        for _ in range(2):
            results = await strategy.run(step)
        return strategy.local_results(results)

    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(2 * num_workers)]) as strategy:
        expected = await program(strategy)
    found = await on_workers(num_workers, 2, program)
    assert [result for of_one in found for result in of_one] == list(expected)


async def test_plain_step_functions_meet_in_them() -> None:
    def step() -> Any:
        ctx = me().blocking
        i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
        group = ctx.group(range(i % 2, n, 2))
        return group.members, group.all_reduce("sum", i), ctx.all_reduce("sum", i)

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [(((0, 2), 2, 6), ((1, 3), 4, 6))] * 2


async def test_device_loops_meet_in_them() -> None:
    def step(ctx: Any, x: float) -> None:
        own = me().blocking
        i, n = own.replica_id_in_sync_group, own.num_replicas_in_sync
        ctx.set_last_step_output("sum", own.group(range(i % 2, n, 2)).all_reduce("sum", x), "max")

    async def program(strategy: Strategy) -> Any:
        loop = await strategy.run_steps(step, iter([1.0, 2.0, 3.0]), 3)
        return loop.steps_run, loop.last_step_outputs

    assert await on_workers(2, 2, program) == [(3, {"sum": 6.0})] * 2


async def test_they_may_be_used_in_another_order_on_each_worker_and_all_at_once() -> None:
    async def step() -> Any:
        ctx = me()
        i = ctx.replica_id_in_sync_group
        groups = [ctx.group([i, i + 2 if i < 2 else i - 2]), ctx.group([i, 3 - i])]
        handles = [group.start_all_reduce("sum", i) for group in groups[:: 1 if i < 2 else -1]]
        inner, outer = handles if i < 2 else handles[::-1]
        return await outer, await inner

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [((3, 2), (3, 4))] * 2


async def test_other_workers_are_not_asked() -> None:
    finished = asyncio.Event()

    async def step(rank: int) -> Any:
        ctx = me()
        if rank == 2:
            await finished.wait()
            return await ctx.barrier()
        group = ctx.group(range(4))
        found = [await group.all_reduce("sum", ctx.replica_id_in_sync_group) for _ in range(3)]
        if rank == 0:
            finished.set()
        await ctx.barrier()
        return found

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step, (rank_of(strategy),)))

    results = await on_workers(3, 2, program)
    assert results == [([6, 6, 6],) * 2] * 2 + [(None,)]


async def test_merge_functions_of_groups_run_at_once_and_reduce_over_their_members() -> None:
    met = asyncio.Barrier(4)

    async def merge(view: Any, value: Any) -> Any:
        await met.wait()  # those of both groups are running, on both workers
        with pytest.raises(ContextError, match="the view that it gets"):
            await view.strategy.reduce("sum", ar.PerReplica([1, 1]))
        return await view.reduce("sum", value)

    async def step() -> Any:
        return await column().merge_call(merge, (me().replica_id_in_sync_group,))

    async def program(strategy: Strategy) -> Any:
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [(2, 4)] * 2


@pytest.mark.parametrize("is_row", [True, False])
async def test_merge_functions_that_some_workers_do_not_run_write_no_variables(
    is_row: bool,
) -> None:
    async def program(strategy: Strategy) -> Any:
        with strategy.scope():
            weight = ar.Variable(0.0, name="weight")

        async def merge(view: Any) -> None:
            writes: list[Callable[[], Any]] = [
                lambda: view.extended.update(weight, lambda v: v.assign_add(1.0)),
                lambda: view.strategy.extended.update(weight, lambda v: v.assign_add(1.0)),
                lambda: view.extended.update_non_slot(["cpu:0"], lambda: None),
                lambda: weight.assign_add(1.0),
            ]
            for write in writes if is_row else writes[:2]:
                if is_row:
                    with pytest.raises(ContextError, match="runs on some of the workers only"):
                        await write()
                else:
                    await write()

        async def step() -> None:
            i = me().replica_id_in_sync_group
            if i % 2 == 0 or is_row:
                await (me().group([i // 2 * 2, i // 2 * 2 + 1]) if is_row else column()).merge_call(
                    merge
                )

        await strategy.run(step)
        await strategy.check_in_sync([weight])
        return float(weight.value)

    assert await on_workers(2, 2, program) == [0.0 if is_row else 2.0] * 2


async def test_a_view_is_of_no_use_outside_its_merge_function() -> None:
    async def program(strategy: Strategy) -> Any:
        views: list[Any] = []

        async def step() -> None:
            await column().merge_call(views.append)

        await strategy.run(step)
        with pytest.raises(ContextError, match="the view that it gets"):
            await views[0].reduce("sum", ar.PerReplica([1]))

    await on_workers(2, 2, program)


async def test_as_many_replicas_of_each_worker_are_asked_for() -> None:
    async def step() -> Any:
        if me().replica_id_in_sync_group in (0, 1, 2):
            with pytest.raises(ValueError, match=r"got \[0, 1, 2\], which are 2 of worker 0, 1 of"):
                me().group([0, 1, 2])

    await on_workers(2, 2, lambda strategy: strategy.run(step))


async def test_splits_are_made_once_and_closed_with_the_strategy() -> None:
    async def step() -> Any:
        return await column().all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        await strategy.run(step)
        workers = strategy._runtime.workers
        assert workers is not None
        made = list(workers.groups)
        await strategy.run(step)
        assert list(workers.groups) == made
        assert len(made) == 2
        return [each.connected for each in made]

    for splits in await on_workers(2, 2, program):
        assert all(split.is_closed and not split.statistics().pending for split in splits)


# ---- failures ----------------------------------------------------------------------------------


async def good() -> Any:
    """Use a column and then all replicas."""
    i = me().replica_id_in_sync_group
    return await column().all_reduce("sum", i), await me().all_reduce("sum", i)


async def caught(strategy: Strategy, step: Step, *args: Any) -> Any:
    """Run a step that fails, then one that all workers do; return the error of the first."""
    try:
        await strategy.run(step, args)
    except Exception as error:
        assert strategy.local_results(await strategy.run(good)) == good_results(strategy)
        return error
    raise AssertionError("the step has not failed")


def good_results(strategy: Strategy) -> Any:
    n = strategy.num_replicas_in_sync
    first = rank_of(strategy) * strategy.num_local_replicas
    ids = range(first, first + strategy.num_local_replicas)
    return tuple((sum(range(i % 2, n, 2)), sum(range(n))) for i in ids)


async def before_it(i: int) -> Any:
    if i == 0:
        raise ValueError("bad batch")
    return await column().all_reduce("sum", i)


async def between_two(i: int) -> Any:
    group = column()
    await group.all_reduce("sum", i)
    if i == 0:
        raise ValueError("bad batch")
    return await group.all_reduce("sum", i)


async def beside_all(i: int) -> Any:
    """One replica of each worker waits among all, where worker 0 never comes."""
    if i == 0:
        await me().run_on_device(int)
        raise ValueError("bad batch")
    return await (me() if i % 2 else column()).all_reduce("sum", i)


async def with_handles(i: int) -> Any:
    handles = [column().start_all_reduce("sum", np.full(9, i)) for _ in range(3)]
    if i == 0:
        await handles[0]
        raise ValueError("bad batch")
    await column().barrier()
    return await handles[2]


async def in_a_merge(i: int) -> Any:
    async def merge(view: Any, value: Any) -> Any:
        if view.members == (0,) and value[0] == 0:
            raise ValueError("bad batch")
        return await view.reduce("sum", value)

    return await column().merge_call(merge, (i,))


FAILING: list[Step] = [before_it, between_two, beside_all, with_handles, in_a_merge]


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("num_workers", [2, 3])
async def test_who_waits_in_a_group_for_a_worker_that_failed_is_told_and_all_go_on(
    num_workers: int, failing: Step
) -> None:
    async def step() -> Any:
        await good()
        return await failing(me().replica_id_in_sync_group)

    made = strategies(num_workers, 2)
    programs = [lambda strategy: caught(strategy, step)] * num_workers
    first, *others = await outcomes(made, programs)

    assert isinstance(first, ValueError)
    for error in others:
        assert isinstance(error, WorkerLostError)
        assert error.ranks == (0,)
        assert "ValueError: bad batch" in str(error)


async def test_device_threads_that_wait_in_a_group_are_told_too() -> None:
    def step(rank: int) -> Any:
        ctx = me().blocking
        i, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
        if i == 0:
            raise ValueError("bad batch")
        return ctx.group(range(i % 2, n, 2)).all_reduce("sum", i)

    made = strategies(2, 2)
    results = await outcomes(made, [lambda s: caught(s, step, rank_of(s))] * 2)
    assert [type(each) for each in results] == [ValueError, WorkerLostError]


async def test_a_failure_is_handed_on_by_those_who_are_waited_for() -> None:
    """Worker 2 waits for worker 1, who waits for worker 0, who fails before it knows of a group."""

    async def step(rank: int) -> Any:
        i = me().replica_id_in_sync_group
        if rank == 0:
            raise ValueError("bad batch")
        return await me().group([i - 2, i]).all_reduce("sum", i)

    made = strategies(3, 2)
    results = await outcomes(made, [lambda s: caught(s, step, rank_of(s))] * 3)

    assert isinstance(results[0], (ValueError, ExceptionGroup))
    assert [type(each) for each in results[1:]] == [WorkerLostError] * 2
    assert [each.ranks for each in results[1:]] == [(0,)] * 2


async def test_who_does_not_wait_for_the_worker_that_failed_is_left_alone() -> None:
    """Workers 1 and 2 finish among themselves; the next thing of all tells them."""
    has_failed = asyncio.Event()
    said: list[str] = []

    async def step(rank: int) -> Any:
        i = me().replica_id_in_sync_group
        if rank == 0:
            raise ValueError("bad batch")
        await has_failed.wait()
        said.append(f"{await me().group(range(2, 6)).all_reduce('sum', i)}")
        return await me().all_reduce("sum", i)

    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)
        try:
            await strategy.run(step, (rank,))
        except Exception as error:
            if not rank:
                has_failed.set()
            return error

    results = await outcomes(strategies(3, 2), [program] * 3)
    assert said == ["14"] * 4
    assert [type(each) for each in results[1:]] == [WorkerLostError] * 2


async def test_different_collectives_in_a_group_are_a_mismatch_of_its_workers() -> None:
    async def step(rank: int) -> Any:
        i = me().replica_id_in_sync_group
        if rank == 0:
            return await me().barrier()
        group = me().group(range(2, 6))
        return await (group.all_reduce("sum", i) if rank == 1 else group.all_reduce("max", i))

    made = strategies(3, 2)
    results = await outcomes(made, [lambda s: caught(s, step, rank_of(s))] * 3)

    assert isinstance(results[0], WorkerLostError)
    assert "MergeMismatchError" in str(results[0])
    for error in results[1:]:
        assert isinstance(error, MergeMismatchError)
        assert "Worker 1 is in all_reduce #1 (SUM) in group (2, 3, 4, 5) but worker 2" in str(error)


async def test_a_cancelled_step_ends_it_for_those_who_wait_in_a_group() -> None:
    async def step(rank: int) -> Any:
        await good()
        if rank == 0:
            await asyncio.Event().wait()
        return await column().all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)
        run = asyncio.ensure_future(strategy.run(step, (rank,)))
        if rank == 0:
            await idle()
            run.cancel()
        with pytest.raises((asyncio.CancelledError, WorkerLostError)) as raised:
            await run
        assert strategy.local_results(await strategy.run(good)) == good_results(strategy)
        return raised.type

    assert await on_workers(2, 2, program) == [asyncio.CancelledError, WorkerLostError]


async def test_a_member_that_never_comes_is_a_stall_at_the_deadline() -> None:
    has_ended = asyncio.Event()

    async def step(rank: int) -> Any:
        return await column().all_reduce("sum", 1) if rank else None

    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)
        try:
            await strategy.run(step, (rank,))
            await has_ended.wait()
        finally:
            if rank:
                has_ended.set()

    results = await outcomes(strategies(2, 2, timeout=0.2), [program] * 2)
    assert isinstance(results[1], StallError)
    assert results[1].ranks == (0,)
    assert "the first meeting of group (0, 2) of Multi" in str(results[1])


async def test_a_member_that_closes_is_told_of_to_those_who_wait_for_it() -> None:
    async def step(rank: int, times: int) -> Any:
        for _ in range(times):
            await column().all_reduce("sum", 1)

    async def program(strategy: Strategy) -> Any:
        rank = rank_of(strategy)
        await strategy.run(step, (rank, 2 if rank else 1))

    results = await outcomes(strategies(2, 2), [program] * 2)
    assert results[0] is None
    assert isinstance(results[1], WorkerLostError)
    assert results[1].ranks == (0,)


async def test_a_circle_of_groups_is_a_stall_that_says_who_waits_where() -> None:
    async def step(rank: int) -> Any:
        for ids in [(0, 1), (0, 2), (1, 2)]:  # makes what is made once
            if rank in ids:
                await me().group(ids).barrier()
        order = [([0, 2], [0, 1]), ([0, 1], [1, 2]), ([1, 2], [0, 2])][rank]
        for ids in order:
            await me().group(ids).all_reduce("sum", 1)

    results = await outcomes(
        strategies(3, 1, timeout=0.2), [lambda s: s.run(step, (rank_of(s),))] * 3
    )
    for error in results:
        assert isinstance(error, StallError)
        assert len(error.ranks) == 2  # who waits there and who waits elsewhere
        assert "Worker 0 has waited 0.2 s in all_reduce #2 (SUM) in group (0, 2)" in str(error)
        assert "worker 2 waits in all_reduce #2 (SUM) in group (1, 2)" in str(error)


# ---- in any order ------------------------------------------------------------------------------


@pytest.mark.explore(schedules=12)
@pytest.mark.parametrize("failing", FAILING)
async def test_a_failure_leaves_groups_of_use_whatever_comes_first(failing: Step) -> None:
    async def step() -> Any:
        i = me().replica_id_in_sync_group
        if i % 2:
            await me().run_on_device(int)
        await good()
        return await failing(i)

    made = strategies(3, 2)
    results = await outcomes(made, [lambda strategy: caught(strategy, step)] * 3)
    assert [type(each) for each in results] == [ValueError, WorkerLostError, WorkerLostError]


@pytest.mark.explore(schedules=60, faults=art.Faults().lose_worker("worker:1"))
async def test_a_lost_worker_is_an_error_for_those_who_wait_in_groups() -> None:
    async def program(strategy: Strategy) -> Any:
        return [strategy.local_results(await strategy.run(good)) for _ in range(3)]

    results = await outcomes(strategies(3, 2), [program] * 3)
    for result in results:
        assert isinstance(result, (WorkerLostError, list))


@pytest.mark.explore(schedules=15, faults=art.Faults().lose_worker("worker:1"))
async def test_groups_are_made_anew_when_the_number_of_workers_has_changed() -> None:
    async def program(strategy: Strategy) -> Any:
        num_done = 0
        while num_done < 4:
            try:
                results = strategy.local_results(await strategy.run(good))
                assert results == good_results(strategy)
                num_done += 1
            except WorkerLostError:
                await strategy.shrink()
        return strategy.num_replicas_in_sync

    results = await outcomes(strategies(3, 2), [program] * 3)
    for result in results:
        assert result in (4, 6) or isinstance(result, (WorkerLostError, ContextError))


async def test_groups_are_made_anew_when_workers_are_added() -> None:
    async def step() -> Any:
        i, n = me().replica_id_in_sync_group, me().num_replicas_in_sync
        return await me().group([0, n - 1]).all_reduce("sum", i) if i in (0, n - 1) else -1

    async def program(strategy: Strategy) -> Any:
        _, kept = kept_of(strategy)
        found = []
        if strategy.num_replicas_in_sync == 3:
            found.append(strategy.local_results(await strategy.run(step))[0])
        await strategy.grow(4, kept)
        return [*found, strategy.local_results(await strategy.run(step))[0]]

    assert await outcomes_of_all(3, program) == [[2, 3], [-1, -1], [2, -1], [3]]


@pytest.mark.explore(schedules=20, faults=art.Faults().cancel_task("worker"))
async def test_a_cancelled_worker_leaves_nobody_waiting_in_a_group() -> None:
    async def worker(strategy: Strategy) -> Any:
        async with strategy:
            for _ in range(3):
                results = strategy.local_results(await strategy.run(good))
                assert results == good_results(strategy)

    tasks = [asyncio.create_task(worker(each)) for each in strategies(3, 2, timeout=60)]
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(
            result, (asyncio.CancelledError, WorkerLostError, StallError)
        )


Plan = list[list[tuple[str, tuple[int, ...]]]]
TABLES = [(0, 2, 4), (1, 3, 5), (0, 1, 2, 3), (2, 4), (3, 5), (1, 5), (2, 3, 4, 5), (0, 1), (4, 5)]


def random_plan(seed: int) -> tuple[Plan, dict[int, tuple[int, int]]]:
    """Return the calls of some steps, and who fails in which step, before which of its calls."""
    rng = random.Random(seed)
    ids = [tuple(range(18, 19)), *TABLES]
    plan = [
        [
            (rng.choice(("wait", "start", "merge")), rng.choice(ids))
            for _ in range(rng.randint(2, 8))
        ]
        for _ in range(4)
    ]
    chosen = rng.sample(range(4), 2)
    return plan, {n: (rng.randrange(6), rng.randrange(len(plan[n]))) for n in chosen}


async def do(calls: list[tuple[str, tuple[int, ...]]], fails: tuple[int, int] | None) -> Any:
    """Make the calls of which this replica is a member; return what each gave."""
    ctx = me()
    i = ctx.replica_id_in_sync_group
    found, handles = [], []
    for number, (how, ids) in enumerate(calls):
        if fails == (i, number):
            raise ValueError("bad batch")
        if i not in ids:
            continue
        group = ctx.group(ids)
        if how == "start":
            handles.append(group.start_all_reduce("sum", np.full(50, i * number)))
        elif how == "wait":
            found.append(int((await group.all_reduce("sum", np.full(50, i + number)))[-1]))
        else:
            found.append(await group.merge_call(total_of, (i,)))
    await ctx.barrier()
    return [i, *found, *[int((await handle)[-1]) for handle in handles]]


async def total_of(view: Any, value: Any) -> Any:
    return await view.reduce("sum", value)


def expected_of(calls: list[tuple[str, tuple[int, ...]]], i: int) -> list[int]:
    mine = [(number, how, ids) for number, (how, ids) in enumerate(calls) if i in ids]
    waited = [
        sum(ids) + (number * len(ids) if how == "wait" else 0)
        for number, how, ids in mine
        if how != "start"
    ]
    return [i, *waited, *[number * sum(ids) for number, how, ids in mine if how == "start"]]


@pytest.mark.slow
@pytest.mark.explore(schedules=5)
@pytest.mark.parametrize("seed", range(15, 20))
async def test_random_steps_of_which_some_fail_give_what_they_should(seed: int) -> None:
    plan, failures = random_plan(seed)

    async def program(strategy: Strategy) -> Any:
        first = 2 * rank_of(strategy)
        for number, calls in enumerate(plan):
            fails = failures.get(number)
            if fails is not None:
                is_own = fails[0] // 2 == rank_of(strategy)
                with pytest.raises(ValueError if is_own else WorkerLostError):
                    await strategy.run(do, (calls, fails))
                continue
            results = strategy.local_results(await strategy.run(do, (calls, None)))
            assert list(results) == [expected_of(calls, i) for i in (first, first + 1)]
        return "done"

    assert await outcomes(strategies(3, 2), [program] * 3) == ["done"] * 3
