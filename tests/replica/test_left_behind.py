"""A replica that returns while a child task of it is in the middle of a call of the library.

Whatever it is, an op or a collective, that is an error that names it; an op that has started is
waited for, nothing is started behind the back of the run.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.replica.gated import GatedOp, cycles, me, my_id, spawn
from tests.replica.simulated import simulate
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


class StepError(Exception):
    """What steps raise."""


async def run_op(op: Any) -> Any:
    return await me().run_on_device(op)


def named(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine, name="prefetch")


# ---- ops ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1])
async def test_a_started_op_is_named_and_waited_for(pair: ar.MirroredStrategy, who: int) -> None:
    op, children = GatedOp(), []
    returns = asyncio.Event()

    async def step() -> None:
        if my_id() == who:
            children.append(named(run_op(op)))
            await asyncio.to_thread(op.started.wait, 10)
            returns.set()

    run = spawn(pair.run(step))
    await returns.wait()
    await idle()
    assert not run.done()
    op.gate.set()
    with pytest.raises(ContextError, match="unfinished") as caught:
        await run

    assert op.ended == 1
    text = str(caught.value)
    assert f"Replica {who} returned at step 0 while" in text
    assert f"GatedOp on cpu:{who}, awaited by task 'prefetch' at test_left_behind.py" in text
    await asyncio.wait(children)


@pytest.mark.asyncio
async def test_a_queued_op_never_starts(gang: ar.MirroredStrategy) -> None:
    """The first op of each replica is held, the second is behind it."""
    held: list[GatedOp] = []
    queued: list[GatedOp] = []
    children: list[asyncio.Task[Any]] = []
    returns = asyncio.Event()

    async def step() -> None:
        first, second = GatedOp(), GatedOp()
        held.append(first)
        queued.append(second)
        children.append(spawn(run_op(first)))
        children.append(spawn(run_op(second)))
        await asyncio.to_thread(first.started.wait, 10)
        await me().barrier()
        returns.set()

    run = spawn(gang.run(step))
    await returns.wait()
    await idle()
    for op in held:
        op.gate.set()
    with pytest.raises(ContextError, match=r"GatedOp on cpu:\d.* and 1 more is unfinished"):
        await run

    assert [op.ended for op in held] == [1] * len(held)
    assert not any(op.started.is_set() for op in queued)
    await asyncio.wait(children)


@pytest.mark.asyncio
async def test_a_child_issues_nothing_more(pair: ar.MirroredStrategy) -> None:
    """A loop of ops in a child that keeps its context ends after the one that was in flight."""
    ops: list[int] = []
    children: list[asyncio.Task[None]] = []
    gate, returns = GatedOp(), asyncio.Event()

    async def loop_of_ops() -> None:
        ctx = me()
        await ctx.run_on_device(gate)
        for i in range(10):
            await ctx.run_on_device(ops.append, i)

    async def step() -> None:
        if my_id():
            children.append(spawn(loop_of_ops()))
            await asyncio.to_thread(gate.started.wait, 10)
            returns.set()

    run = spawn(pair.run(step))
    await returns.wait()
    await idle()
    gate.gate.set()
    with pytest.raises(ContextError, match="unfinished"):
        await run
    await asyncio.wait(children)
    assert ops == []
    assert children[0].cancelled() or isinstance(children[0].exception(), ContextError)


def test_an_op_that_has_ended_in_time_is_not_an_error() -> None:
    async def step() -> int:
        child = asyncio.ensure_future(run_op(int))
        await asyncio.sleep(1)
        return 1 + child.result()

    assert simulate(2, step) == (1, 1)


@pytest.mark.asyncio
async def test_the_op_of_another_replica_is_its_own_affair(pair: ar.MirroredStrategy) -> None:
    op, returns = GatedOp(), asyncio.Event()

    async def step() -> str:
        if my_id():
            return str(await run_op(op))
        await asyncio.to_thread(op.started.wait, 10)
        returns.set()
        return "returned"

    run = spawn(pair.run(step))
    await returns.wait()
    await idle()
    op.gate.set()
    assert pair.local_results(await run) == ("returned", "done")


@pytest.mark.asyncio
async def test_the_strategy_goes_on_afterwards(pair: ar.MirroredStrategy) -> None:
    op, children = GatedOp(), []

    async def leaves() -> None:
        if my_id():
            children.append(spawn(run_op(op)))
            await asyncio.to_thread(op.started.wait, 10)
            op.gate.set()

    async def good() -> int:
        return int(await me().all_reduce("sum", await run_op(int) + 1))

    with pytest.raises(ContextError):
        await pair.run(leaves)
    assert pair.local_results(await pair.run(good)) == (2, 2)
    await asyncio.wait(children)


# ---- collectives -------------------------------------------------------------------------------


@pytest.mark.parametrize("meeting", ["barrier", "handle", "group"])
def test_a_child_in_a_collective_is_a_mismatch_that_names_it(meeting: str) -> None:
    async def child() -> None:
        if meeting == "barrier":
            await me().barrier()
        elif meeting == "handle":
            await me().start_all_reduce("sum", 1)
        else:
            await me().group([0, 1]).barrier()

    children: list[asyncio.Task[None]] = []

    async def step() -> None:
        if my_id() == 0:
            children.append(asyncio.ensure_future(child()))
            await cycles(3)
        else:
            await asyncio.sleep(1)

    name = "start_all_reduce" if meeting == "handle" else "barrier"
    with pytest.raises(MergeMismatchError, match=name) as caught:
        simulate(2, step)
    assert "returned" in str(caught.value)
    assert all(one.done() for one in children)


def test_a_child_whose_collective_is_complete_does_no_harm() -> None:
    """The others have met it, and only its task has not woken yet."""

    async def child() -> None:
        await me().barrier()

    async def step() -> None:
        waits = asyncio.ensure_future(child())
        await cycles(3)
        if my_id():
            await waits

    simulate(2, step)


# ---- a failure wins ----------------------------------------------------------------------------


@pytest.mark.parametrize(("returns", "raises"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("what", ["op", "never awaited", "given up"])
def test_a_failure_in_the_same_cycle_is_raised(what: str, returns: int, raises: int) -> None:
    """What a replica left behind follows from its return, which a failure explains better."""
    error = StepError("mine")
    kept: list[Any] = []

    async def step() -> None:
        if my_id() == returns:
            call = run_op(int) if what == "op" else me().barrier()
            if what == "given up":
                call.close()
            kept.append(asyncio.ensure_future(call) if what == "op" else call)
        await cycles(2)
        if my_id() == raises:
            raise error

    with pytest.raises(StepError) as caught:
        simulate(2, step)
    assert caught.value is error
