"""Cancelling a run: everything drains, nothing is left behind, the same cancellation goes on."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

import aioreplica as ar
from tests.replica.gated import GatedOp, cycles, me, my_id, spawn
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


# ---- at every point -----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("how_often", [1, 2])
async def test_cancelling_after_any_number_of_cycles(strategy: ar.Strategy, how_often: int) -> None:
    """Before, during and after sync merges, async merges, writes and device ops."""
    with strategy.scope():
        variable = ar.Variable(0.0, aggregation="sum")

    async def merge(_strategy: ar.Strategy, _value: Any) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def step() -> None:
        await variable.assign_add(1.0)
        await me().merge_call(merge, (1,))
        await me().run_on_device(int)
        await variable.assign_add(1.0)
        await me().all_reduce("sum", 1.0)

    finished = 0
    for point in range(60):
        task = spawn(strategy.run(step))
        await cycles(point)
        for _ in range(how_often):
            task.cancel("please")
        await asyncio.wait([task])
        if task.cancelled():
            with pytest.raises(asyncio.CancelledError, match="please"):
                await task
        else:
            finished += not task.exception()
        assert strategy.statistics().num_active == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len({float(part) for part in variable.components}) == 1
        assert variable.value == variable.version * strategy.num_replicas_in_sync
    assert finished < 60
    await strategy.run(step)


@pytest.mark.asyncio
async def test_cancelled_before_the_start(strategy: ar.Strategy) -> None:
    ran: list[int] = []

    async def step() -> None:
        ran.append(my_id())

    task = spawn(strategy.run(step))
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ran == []


@pytest.mark.asyncio
async def test_every_replica_unwinds(gang: ar.MirroredStrategy) -> None:
    unwound: list[int] = []

    async def step() -> None:
        try:
            await (me().barrier() if my_id() else asyncio.Event().wait())
        finally:
            unwound.append(my_id())

    task = spawn(gang.run(step))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(unwound) == list(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_the_merge_task_is_cancelled_too(gang: ar.MirroredStrategy) -> None:
    story: list[str] = []

    async def merge(_strategy: ar.Strategy) -> None:
        story.append("merging")
        try:
            await asyncio.Event().wait()
        finally:
            await idle()
            story.append("unwound")

    async def step() -> None:
        await me().merge_call(merge)

    task = spawn(gang.run(step))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["merging", "unwound"]


@pytest.mark.asyncio
async def test_a_merge_cancelled_before_its_first_step_leaves_no_warning(
    gang: ar.MirroredStrategy,
) -> None:
    """Closing the strategy in the very cycle in which the last replica arrives."""
    closing = asyncio.Event()

    async def merge(_strategy: ar.Strategy) -> None:
        await asyncio.Event().wait()

    async def step() -> None:
        if my_id() == gang.num_replicas_in_sync - 1:
            await idle()
            closing.set()
        await me().merge_call(merge)

    async def close() -> None:
        await closing.wait()
        await gang.aclose()

    closer = spawn(close())
    with pytest.raises(ar.errors.ContextError, match="closed"):
        await gang.run(step)
    await closer


# ---- by whom ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_asyncio_timeout_inside_a_task_group(strategy: ar.Strategy) -> None:
    async def step() -> None:
        loop.call_soon(limit.reschedule, loop.time())
        await asyncio.Event().wait()

    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

    async def child() -> str:
        try:
            async with limit:
                await strategy.run(step)
        except TimeoutError:
            return "timeout"
        return "no timeout"

    async with asyncio.TaskGroup() as group:
        task = group.create_task(child())
    assert task.result() == "timeout"


@pytest.mark.asyncio
async def test_anyio_move_on_after(strategy: ar.Strategy) -> None:
    async def step() -> None:
        asyncio.get_running_loop().call_soon(setattr, scope, "deadline", 0.0)
        await (me().barrier() if my_id() else asyncio.Event().wait())

    with anyio.move_on_after(math.inf) as scope:
        await strategy.run(step)

    assert scope.cancelled_caught


@pytest.mark.asyncio
@pytest.mark.parametrize("in_flight", [False, True], ids=["waiting", "op in flight"])
async def test_an_anyio_scope_that_is_cancelled(strategy: ar.Strategy, in_flight: bool) -> None:
    op = GatedOp()

    async def step() -> None:
        if in_flight and my_id() == 0:
            await me().run_on_device(op)
        await asyncio.Event().wait()

    async with anyio.create_task_group() as group:
        group.start_soon(strategy.run, step)
        if in_flight:
            assert await ar.run_on_host(op.started.wait, 10)
        else:
            await idle()
        group.cancel_scope.cancel()
        opener = spawn(idle())
        opener.add_done_callback(lambda _: op.gate.set())
    await opener

    assert op.ended == in_flight
    assert strategy.statistics().num_active == 0


@pytest.mark.asyncio
async def test_a_failing_neighbour_in_a_task_group(strategy: ar.Strategy) -> None:
    async def step() -> None:
        await asyncio.Event().wait()

    async def neighbour() -> None:
        await idle()
        raise ValueError("neighbour")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(strategy.run(step))
            group.create_task(neighbour())

    with pytest.raises(ExceptionGroup) as caught:
        await both()

    assert [str(error) for error in caught.value.exceptions] == ["neighbour"]


# ---- stubborn replicas --------------------------------------------------------------------------


def swallow_once(wait: Callable[[], Coroutine[Any, Any, Any]], story: list[str]) -> Any:
    async def step() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            story.append("swallowed")
        await wait()

    return step


@pytest.mark.asyncio
async def test_one_that_swallows_its_cancellation_is_stopped_by_the_next_await(
    strategy: ar.Strategy,
) -> None:
    story: list[str] = []
    task = spawn(strategy.run(swallow_once(lambda: me().barrier(), story)))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["swallowed"] * strategy.num_replicas_in_sync


@pytest.mark.asyncio
@pytest.mark.slow
async def test_one_that_swallows_its_cancellation_is_cancelled_again(
    strategy: ar.Strategy,
) -> None:
    story: list[str] = []
    task = spawn(strategy.run(swallow_once(asyncio.Event().wait, story)))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["swallowed"] * strategy.num_replicas_in_sync


@pytest.mark.asyncio
async def test_a_second_cancellation_reaches_it_at_once(strategy: ar.Strategy) -> None:
    story: list[str] = []
    task = spawn(strategy.run(swallow_once(asyncio.Event().wait, story)))
    await idle()
    task.cancel()
    await idle()
    assert not task.done()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_children_of_a_replica_wake_too(gang: ar.MirroredStrategy) -> None:
    """A child that waits in a collective, while its replica waits shielded for it."""
    story: list[str] = []

    async def child() -> None:
        try:
            await me().barrier()
        finally:
            story.append("child")

    async def step() -> None:
        if my_id() == 0:
            await asyncio.Event().wait()
        waiting = spawn(child())
        try:
            await asyncio.shield(waiting)
        finally:
            await asyncio.wait([waiting])

    task = spawn(gang.run(step))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["child"] * (gang.num_replicas_in_sync - 1)
