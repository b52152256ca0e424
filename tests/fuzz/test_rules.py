"""The rules of failures, withdrawals and handles, in the smallest programs that show each."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import ContextError, MergeMismatchError, StallError
from tests.fuzz.judge import try_program
from tests.fuzz.program import Plant, Program, Statement


class PlantedError(Exception):
    """What programs raise."""


class PlantedBaseError(BaseException):
    """What is no Exception."""


def me() -> ar.ReplicaContext:
    found = ar.get_replica_context()
    assert found is not None
    return found


def my_id() -> int:
    return me().replica_id_in_sync_group


def run(size: int, step: Callable[[], Any], options: ar.RunOptions | None = None) -> Any:
    """Run a step on simulated devices, where a hang is a DeadlockError."""

    async def main() -> Any:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            return strategy.local_results(await strategy.run(step, options=options))

    return art.run(main)


def check(*programs: Program) -> None:
    for program in programs:
        assert try_program(program) is None, program


# ---- what a replica fails of beside a collective -----------------------------------------------


def test_a_task_group_whose_other_child_fails() -> None:
    meeting = Statement(0, "all_reduce", (0, 1))

    check(Program(0, 2, (meeting,), (Plant(1, 0, "sibling raises", late=0),)))


def test_a_timeout_that_is_not_caught() -> None:
    meeting = Statement(0, "all_reduce", (0, 1, 2))

    check(Program(0, 3, (meeting,), (Plant(1, 0, "timeout strikes", late=0),)))


@pytest.mark.parametrize("kind", ["withdraw", "withdraw on", "cancel child"])
def test_a_timeout_that_is_caught_is_a_mismatch(kind: str) -> None:
    meetings = Statement(0, "all_reduce", (0, 1, 2)), Statement(1, "barrier", (0, 1, 2))

    check(Program(0, 3, meetings, (Plant(1, 0, kind, late=0),)))


# ---- frames of a merge -------------------------------------------------------------------------


def fails_in_merge(strategy: Any, *args: Any) -> None:
    raise PlantedError("in the merge")


async def fails_in_async_merge(strategy: Any, *args: Any) -> None:
    raise PlantedError("in the merge")


def frames_of(size: int, step: Callable[[], Awaitable[Any]]) -> list[str]:
    with pytest.raises(PlantedError) as caught:
        run(size, step)
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize(
    ("size", "merge"),
    [
        (2, fails_in_merge),
        (3, fails_in_merge),
        (2, fails_in_async_merge),
    ],
)
def test_an_error_of_a_merge_shows_its_frames(size: int, merge: Callable[..., Any]) -> None:
    async def step() -> None:
        await me().merge_call(merge)

    assert merge.__name__ in frames_of(size, step)


def test_an_error_in_an_update_shows_its_frames() -> None:
    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                v = ar.Variable(0.0)

            async def step() -> None:
                await me().update(v, fails_in_merge)

            await strategy.run(step)

    with pytest.raises(PlantedError) as caught:
        art.run(main)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "fails_in_merge" in [frame.name for frame in frames]


# ---- races -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "raises"),
    [
        (1, 2),
        (2, 1),
    ],
)
def test_a_failure_beats_a_return_in_the_same_cycle(returns: int, raises: int) -> None:
    async def step() -> None:
        if my_id() == returns:
            return
        if my_id() == raises:
            raise PlantedError
        await me().barrier()

    with pytest.raises(PlantedError):
        run(3, step)


# ---- odd exceptions ----------------------------------------------------------------------------


def test_a_merge_that_raises_a_base_exception() -> None:
    def merge(strategy: Any) -> None:
        raise PlantedBaseError

    async def step() -> None:
        try:
            await me().merge_call(merge)
        except PlantedBaseError:
            return

    run(3, step)


@pytest.mark.parametrize("size", [1, 2])
def test_an_exception_that_refuses_notes(size: int) -> None:
    meeting = Statement(0, "all_reduce", tuple(range(size)))

    check(Program(0, size, (meeting,), (Plant(0, 0, "raise hostile"),)))


# ---- cancellations that nobody sent ------------------------------------------------------------


def test_a_replica_that_awaits_a_cancelled_call() -> None:
    meeting = Statement(0, "all_reduce", (0, 1))

    check(Program(0, 2, (meeting,), (Plant(1, 0, "bare cancel"),)))


# ---- threads -----------------------------------------------------------------------------------


def test_reductions_started_in_an_op() -> None:
    start = Statement(0, "start", (0, 1), ("op", "op"))
    finishes = [Statement(100 + i, "finish", (i,), handles=(0,)) for i in range(2)]

    check(Program(0, 2, (start, *finishes)))


def test_after_an_op_that_started_a_reduction_the_context_is_free_again() -> None:
    async def step() -> Any:
        ctx = me()
        handle = await ctx.run_on_device(ctx.start_all_reduce, "sum", 1)
        pair = ctx.group([0, 1]) if my_id() < 2 else ctx
        return await handle, pair.num_replicas_in_sync

    async def main() -> Any:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
            return strategy.local_results(await strategy.run(step))

    assert run(3, step) == ((3, 2), (3, 2), (3, 3))
    assert asyncio.run(main()) == ((3, 2), (3, 2), (3, 3))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_reduction_that_an_op_completes_on_a_real_thread() -> None:
    waits = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_debug(True)

    def backward(ctx: ar.ReplicaContext) -> ar.Handle:
        assert waits.wait(10)
        return ctx.start_all_reduce("sum", 1)

    async def step() -> int:
        if my_id() == 1:
            return int(await (await me().run_on_device(backward, me())))
        handle = me().start_all_reduce("sum", 1)
        loop.call_soon(waits.set)  # once this replica waits
        return int(await handle)

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, asyncio.timeout(60):
        assert strategy.local_results(await strategy.run(step)) == (2, 2)


def test_a_collective_on_a_foreign_thread_is_refused() -> None:
    """The threads are real: simulated ones are all the same."""

    async def step() -> None:
        ctx = me()
        await asyncio.to_thread(lambda: ctx.start_all_reduce("sum", 1))

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0"]) as strategy:
            await strategy.run(step)

    with pytest.raises(ContextError, match="thread"):
        asyncio.run(main())


# ---- circles of handles ------------------------------------------------------------------------


def crossed(wait: Callable[[ar.Handle], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
    """Make a step whose replicas wait for each other, in handles of two groups."""

    async def step() -> None:
        mine, other = my_id(), 1 - my_id()
        groups = [me().group([0, 1]), me().group([0, 1, 2])]
        await wait(groups[mine].start_all_reduce("sum", 1))
        await wait(groups[other].start_all_reduce("sum", 1))

    async def spectator() -> None:
        if my_id() == 2:
            await me().group([0, 1, 2]).start_all_reduce("sum", 1)
        else:
            await step()

    return spectator


async def in_task_group(handle: ar.Handle) -> Any:
    async def wait() -> Any:
        return await handle

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
    return task.result()


WAITS: dict[str, Callable[[ar.Handle], Awaitable[Any]]] = {
    "wait_for": lambda handle: asyncio.wait_for(handle, 1000),
    "shield": lambda handle: asyncio.shield(handle),
    "task group": in_task_group,
}


def test_crossed_handles_awaited_by_the_replicas_are_a_mismatch() -> None:
    with pytest.raises(MergeMismatchError):
        run(3, crossed(lambda handle: handle))


@pytest.mark.parametrize("wait", WAITS)
def test_crossed_handles_awaited_in_child_tasks_are_warned_of_and_stall(wait: str) -> None:
    if wait == "wait_for" and sys.version_info >= (3, 12):
        pytest.skip("wait_for awaits in the replica's own task")

    with pytest.warns(RuntimeWarning, match="start_all_reduce"), pytest.raises(StallError):
        run(3, crossed(WAITS[wait]), ar.RunOptions(stall_timeout=30))


# ---- groups ------------------------------------------------------------------------------------


def test_a_merge_in_a_group_reduces_the_groups_values() -> None:
    async def merge(strategy: Any, value: Any) -> Any:
        return await strategy.reduce("sum", value)

    async def step() -> Any:
        if my_id() == 1:
            return None
        return await me().group([0, 2]).merge_call(merge, (my_id() + 1,))

    assert run(3, step) == (4, None, 4)


# ---- handles as futures ------------------------------------------------------------------------


def test_a_handle_is_a_future() -> None:
    async def step() -> Any:
        handle: Any = me().start_all_reduce("sum", my_id())
        called: list[Any] = []
        handle.add_done_callback(called.append)
        done, _ = await asyncio.wait([handle])
        await asyncio.sleep(0)
        assert handle.done()
        assert handle.exception() is None
        assert called
        assert len(done) == 1
        return handle.result()

    assert run(2, step) == (1, 1)


# ---- blocking calls in ops ---------------------------------------------------------------------


def crossed_in_an_op(wait: Callable[[Awaitable[Any]], Awaitable[Any]]) -> Any:
    """Make a step in which an op of replica 0 waits for replica 1, which waits for replica 0."""

    async def step() -> None:
        if my_id() == 0:
            ctx = me()
            await wait(ctx.run_on_device(lambda: ctx.blocking.group([0, 1]).barrier()))
        await me().barrier()

    return step


def test_a_circle_through_a_blocking_call_in_an_op() -> None:
    with pytest.raises(MergeMismatchError, match="barrier #1 in group"):
        run(3, crossed_in_an_op(lambda op: op))


def test_a_circle_through_an_op_of_a_child_task_is_warned_of_and_stalls() -> None:
    """Whether the replica goes on while its child waits cannot be known."""
    with pytest.warns(RuntimeWarning, match="barrier #1 in group"), pytest.raises(StallError):
        run(3, crossed_in_an_op(asyncio.shield), ar.RunOptions(stall_timeout=30))


def test_an_op_in_a_collective_that_another_replica_gives_up() -> None:
    meeting = Statement(1, "all_gather", (0, 1, 3), ("await", "await", "op"))
    cleanups = ("", "", "swallow", "collective")
    plant = Plant(1, 1, "cancel child", late=0)

    check(Program(5508, 4, (meeting,), (plant,), schedule=1477, cleanups=cleanups))
