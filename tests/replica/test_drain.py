"""Draining a cancelled run: started ops end, queued ones never start, the loop does not spin."""

import asyncio
import threading

import anyio
import pytest

import aioreplica as ar
from tests.replica.gated import GatedOp, me, my_id, spawn
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


# ---- draining -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["run_on_device", "run_on_host", "device_op", "plain step"])
async def test_a_started_op_runs_to_its_end(strategy: ar.Strategy, kind: str) -> None:
    op = GatedOp()
    others = threading.Event()

    async def step() -> None:
        match kind, my_id():
            case "run_on_device", 0:
                await me().run_on_device(op)
            case "run_on_host", 0:
                await ar.run_on_host(op)
            case "device_op", 0:
                await ar.device_op(op)()
            case _:
                await me().barrier()

    def plain() -> None:
        op() if my_id() == 0 else others.set()

    task = spawn(strategy.run(plain if kind == "plain step" else step))
    assert await ar.run_on_host(op.started.wait, 10)
    task.cancel()
    await idle()
    task.cancel()
    await idle()
    assert not task.done()
    op.gate.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert op.ended == 1


@pytest.mark.asyncio
async def test_a_queued_op_is_taken_back(strategy: ar.Strategy) -> None:
    ran: list[int] = []
    op = GatedOp()

    async def step() -> None:
        if my_id() == 0:
            async with asyncio.TaskGroup() as group:
                group.create_task(me().run_on_device(op))
                group.create_task(me().run_on_device(ran.append, 1))
        else:
            await me().barrier()

    if isinstance(strategy, ar.DefaultStrategy):
        return  # its ops go to the host's pool, which has more than one thread
    task = spawn(strategy.run(step))
    assert await ar.run_on_host(op.started.wait, 10)
    task.cancel()
    await idle()
    op.gate.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert (op.ended, ran) == (1, [])


@pytest.mark.asyncio
async def test_plain_steps_that_are_queued_never_start(pair: ar.MirroredStrategy) -> None:
    """The first run holds both devices; the second is cancelled in the queue, at once."""
    ops = [GatedOp(), GatedOp()]
    ran: list[int] = []

    first = spawn(pair.run(lambda: ops[my_id()]()))
    for op in ops:
        assert await ar.run_on_host(op.started.wait, 10)
    second = spawn(pair.run(lambda: ran.append(my_id())))
    await idle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    for op in ops:
        op.gate.set()

    assert pair.local_results(await first) == ("done", "done")
    assert ran == []


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["task", "scope", "twice"])
@pytest.mark.parametrize("plain", [False, True], ids=["async step", "plain step"])
async def test_draining_does_not_spin(pair: ar.MirroredStrategy, how: str, plain: bool) -> None:
    """While an op is waited for, the loop has nothing to do."""
    op = GatedOp()
    scope = anyio.CancelScope()

    async def step() -> None:
        await (me().barrier() if my_id() else me().run_on_device(op))

    def plain_step() -> None:
        return None if my_id() else op()

    async def run() -> None:
        with scope:
            await pair.run(plain_step if plain else step)

    task = spawn(run())
    assert await ar.run_on_host(op.started.wait, 10)
    if how in {"task", "twice"}:
        task.cancel()
    if how in {"scope", "twice"}:
        scope.cancel()
    await idle()  # which it never is while something spins
    op.gate.set()
    await asyncio.wait([task])

    assert task.cancelled() == (how != "scope")
    assert scope.cancelled_caught == (how == "scope")
    assert op.ended == 1
