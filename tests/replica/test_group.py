"""The replica group: a mismatch ends the run at once, with a table that names everybody."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.sequencer import Sequencer, idle

pytestmark = pytest.mark.usefixtures("no_task_left")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


def here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


def states(error: MergeMismatchError) -> list[str]:
    return [row.state for row in error.rows]


async def mismatch(strategy: ar.Strategy, step: Callable[[], Awaitable[Any]]) -> MergeMismatchError:
    with pytest.raises(MergeMismatchError) as caught:
        await strategy.run(step)
    return caught.value


# ---- early return -------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["waits first", "returns first"])
async def test_an_early_return_is_a_mismatch(
    pair: ar.MirroredStrategy, order: tuple[int, int]
) -> None:
    sequencer = Sequencer(order)
    sites: list[str] = []

    async def step() -> None:
        await sequencer.turn(my_id())
        if my_id() == 1:
            return
        sites.append(here(1))
        await me().all_reduce("sum", 1.0)

    error = await mismatch(pair, step)

    assert error.reason == "Replica 1 returned while replica 0 waits in all_reduce #1 (SUM)"
    assert states(error) == ["waiting", "returned"]
    assert error.rows[0].site == sites[0]
    assert error.rows[1].collective == "before any"
    assert "step 0" in str(error)
    assert "ctx.any" in str(error)


@pytest.mark.asyncio
async def test_a_loop_left_early_names_the_collective(triple: ar.MirroredStrategy) -> None:
    async def step() -> None:
        for _ in range(2 if my_id() == 2 else 3):
            await me().barrier()

    error = await mismatch(triple, step)

    assert error.reason == "Replica 2 returned while replicas 0 and 1 wait in barrier #3"
    assert [row.collective for row in error.rows] == ["barrier #3"] * 2 + ["after barrier #2"]


@pytest.mark.asyncio
async def test_different_collectives_are_a_mismatch(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        await me().barrier()
        if my_id():
            await me().any(True)
        else:
            await me().all(True)

    error = await mismatch(pair, step)

    assert error.reason == "Replica 0 is in all #2 but replica 1 is in any #2"


@pytest.mark.asyncio
async def test_an_assign_against_a_collective_is_a_mismatch(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        variable = ar.Variable(0.0, aggregation="sum")

    async def step() -> None:
        await (variable.assign(1.0) if my_id() else me().barrier())

    error = await mismatch(pair, step)

    assert "barrier #1" in error.reason
    assert "assign #1" in error.reason
    assert variable.value == 0.0


@pytest.mark.asyncio
async def test_the_number_counts_calls_not_awaits(pair: ar.MirroredStrategy) -> None:
    """Awaited in the other order than called, on one replica only: the numbers differ."""

    async def step() -> None:
        first, second = me().barrier(), me().barrier()
        for one in (second, first) if my_id() else (first, second):
            await one

    error = await mismatch(pair, step)

    assert error.reason == "Replica 0 is in barrier #1 but replica 1 is in barrier #2"


@pytest.mark.asyncio
async def test_calls_swapped_alike_on_all_replicas_match(pair: ar.MirroredStrategy) -> None:
    async def step() -> list[Any]:
        first, second = me().all_reduce("sum", 1), me().all_reduce("sum", 10)
        return [await second, await first]

    assert pair.local_results(await pair.run(step)) == ([20, 2], [20, 2])


@pytest.mark.asyncio
async def test_the_strategy_goes_on_after_a_mismatch(gang: ar.MirroredStrategy) -> None:
    async def bad() -> None:
        if my_id():
            await me().barrier()

    async def good() -> int:
        return await me().all_reduce("sum", 1)

    count = gang.num_replicas_in_sync
    for step in range(3):
        assert (await mismatch(gang, bad)).step == 2 * step
        assert gang.local_results(await gang.run(good)) == (count,) * count


# ---- withdrawing --------------------------------------------------------------------------------


async def with_timeout(awaitable: Awaitable[Any]) -> None:
    async with asyncio.timeout(0):
        await awaitable


async def with_wait_for(awaitable: Awaitable[Any]) -> None:
    await asyncio.wait_for(awaitable, 1e-9)


async def with_child_task(awaitable: Awaitable[Any]) -> None:
    async def child() -> None:
        await awaitable

    task = asyncio.get_running_loop().create_task(child())
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, task.cancel)
    await task


@pytest.mark.asyncio
@pytest.mark.parametrize("give_up", [with_timeout, with_wait_for, with_child_task])
@pytest.mark.parametrize("who", [0, 1])
async def test_giving_up_is_a_mismatch(
    pair: ar.MirroredStrategy, give_up: Callable[[Awaitable[Any]], Awaitable[None]], who: int
) -> None:
    swallowed: list[BaseException] = []

    async def step() -> None:
        await me().barrier()
        if my_id() != who:
            await asyncio.Event().wait()
        try:
            await give_up(me().all_reduce("sum", 1.0))
        except (TimeoutError, asyncio.CancelledError) as error:
            swallowed.append(error)
        await me().barrier()

    error = await mismatch(pair, step)

    assert error.reason.startswith(f"Replica {who} withdrew from all_reduce #2 (SUM)")
    assert "while its merge was running" not in error.reason
    expected = ["running", "running"]
    expected[who] = "withdrew"
    assert states(error) == expected
    assert swallowed != []


@pytest.mark.asyncio
async def test_giving_up_while_others_wait_names_the_replica(triple: ar.MirroredStrategy) -> None:
    """The waiting ones wake up too; they must not be blamed."""

    async def step() -> None:
        if my_id() == 2:
            await asyncio.Event().wait()
        elif my_id() == 1:
            with suppress(TimeoutError):
                await with_timeout(me().barrier())
        else:
            await me().barrier()

    error = await mismatch(triple, step)

    assert error.reason.startswith("Replica 1 withdrew from barrier #1")
    assert states(error) == ["waiting", "withdrew", "running"]


@pytest.mark.asyncio
async def test_giving_up_in_the_cycle_in_which_the_last_one_arrives(
    pair: ar.MirroredStrategy,
) -> None:
    """Replica 0 is cancelled, and before it can wake up replica 1 completes the generation."""
    waiting: list[asyncio.Task[Any]] = []

    async def step() -> None:
        if my_id() == 0:

            async def child() -> None:
                await me().barrier()

            waiting.append(asyncio.get_running_loop().create_task(child()))
            await asyncio.gather(*waiting, return_exceptions=True)
            return
        await idle()
        waiting[0].cancel()
        await me().barrier()

    error = await mismatch(pair, step)

    assert error.reason.startswith("Replica 0 withdrew from barrier #1")
    assert "while its merge was running" not in error.reason


@pytest.mark.asyncio
async def test_giving_up_during_an_async_merge_is_a_mismatch(gang: ar.MirroredStrategy) -> None:
    ended: list[str] = []

    async def merge(_strategy: ar.Strategy) -> None:
        limit.reschedule(0.0)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("merge")

    limit = asyncio.timeout(None)

    async def step() -> None:
        if my_id() == 1:
            with suppress(TimeoutError):
                async with limit:
                    await me().merge_call(merge)
            return
        await me().merge_call(merge)

    error = await mismatch(gang, step)

    assert error.reason.startswith("Replica 1 withdrew from merge_call #1")
    assert "while its merge was running" in error.reason
    assert states(error) == ["merging", "withdrew", *["merging"] * (len(error.rows) - 2)]
    assert ended == ["merge"]


@pytest.mark.asyncio
async def test_giving_up_after_the_merge_is_not_a_withdrawal(pair: ar.MirroredStrategy) -> None:
    """The merge is done and replica 0 not yet awake when its own timeout hits it."""
    tasks: dict[int, asyncio.Task[Any]] = {}

    async def step() -> list[str]:
        tasks[my_id()] = asyncio.current_task()
        story = []
        if my_id() == 0:
            try:
                await me().barrier()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
                story.append("gave up")
        else:
            await asyncio.sleep(0)
            await me().barrier()
            tasks[0].cancel()
        story.append(await me().all_reduce("sum", 1))
        return story

    assert pair.local_results(await pair.run(step)) == (["gave up", 2], [2])


# ---- child tasks --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_child_task_may_await_a_collective(strategy: ar.Strategy) -> None:
    async def step() -> int:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(me().all_reduce("sum", 1))
        return await asyncio.wait_for(me().all_reduce("sum", task.result()), 60)

    count = strategy.num_replicas_in_sync
    assert strategy.local_results(await strategy.run(step)) == (count * count,) * count


@pytest.mark.asyncio
@pytest.mark.parametrize("others_too", [True, False], ids=["all", "one"])
async def test_two_at_once_in_one_replica_are_refused(
    gang: ar.MirroredStrategy, others_too: bool
) -> None:
    async def step() -> None:
        if others_too or my_id() == 0:
            await asyncio.gather(me().all_reduce("sum", 1), me().barrier())
        else:
            await asyncio.Event().wait()

    with pytest.raises(ContextError, match=r"start_all_reduce|one after the other") as caught:
        await gang.run(step)

    assert "barrier #2" in str(caught.value)
    assert "all_reduce #1 (SUM)" in str(caught.value)
    assert __file__ in str(caught.value)


@pytest.mark.asyncio
async def test_two_at_once_are_refused_during_an_async_merge(strategy: ar.Strategy) -> None:
    async def merge(_strategy: ar.Strategy) -> None:
        await ar.run_on_host(int)

    async def step() -> None:
        await asyncio.gather(me().merge_call(merge), me().merge_call(merge))

    with pytest.raises(ContextError, match="one after the other"):
        await strategy.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync merge", "async merge"])
@pytest.mark.parametrize("alone", [True, False], ids=["replica 0", "all"])
async def test_returning_while_a_child_task_waits_ends_the_run(
    pair: ar.MirroredStrategy, asynchronous: bool, alone: bool
) -> None:
    """A run that ends must not leave the child waiting for ever, nor hang itself."""
    children: list[asyncio.Task[Any]] = []

    async def merge(_strategy: ar.Strategy) -> None:
        await ar.run_on_host(int)

    async def step() -> None:
        call = me().merge_call(merge) if asynchronous else me().barrier()
        if my_id() and alone:
            await call
            return
        children.append(asyncio.get_running_loop().create_task(call))
        await idle()

    try:
        async with asyncio.timeout(60):
            await pair.run(step)
    except MergeMismatchError:
        pass
    await idle()
    assert [child.done() for child in children] == [True] * len(children)
