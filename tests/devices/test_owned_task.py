"""OwnedTask: ended by its owner, whatever happens to the owner meanwhile."""

import asyncio
from contextvars import ContextVar, copy_context
from typing import Any

import anyio
import pytest

from aioreplica.devices import OwnedTask
from aioreplica.errors import LoopMismatchError
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.mark.asyncio
async def test_it_gives_its_result() -> None:
    async def work() -> int:
        return 3

    task = OwnedTask(work(), "work")
    assert repr(task) == "<OwnedTask work | running>"
    assert await task == 3
    assert task.is_done
    assert repr(task) == "<OwnedTask work | done>"


@pytest.mark.asyncio
async def test_ended_waits_for_a_task_that_takes_its_time_to_end() -> None:
    gate, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await gate.wait()
            ended.append(True)

    task = OwnedTask(work(), "work")
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_soon(gate.set)

    assert await task.ended()
    assert ended == [True]


@pytest.mark.asyncio
async def test_a_cancelled_wait_goes_on_to_the_end_and_then_raises() -> None:
    gate = asyncio.Event()
    task = OwnedTask(gate.wait(), "work")
    waiting = asyncio.create_task(task.ended())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()

    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert task.is_done


@pytest.mark.asyncio
async def test_level_cancellation_does_not_spin() -> None:
    gate = asyncio.Event()
    task = OwnedTask(gate.wait(), "work")

    async def open_when_idle() -> None:
        try:
            await idle()  # which it never is while something spins
        finally:
            gate.set()

    opening = asyncio.create_task(open_when_idle())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await task.ended()
    await opening
    assert task.is_done


@pytest.mark.asyncio
async def test_waiting_until_it_is_done_leaves_it_alone() -> None:
    gate = asyncio.Event()
    task = OwnedTask(gate.wait(), "work")
    waiting = asyncio.create_task(task.done_or_cancelled())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.is_done

    gate.set()
    await task.done_or_cancelled()
    assert await task


@pytest.mark.asyncio
async def test_an_exception_is_told_once_and_not_reported_as_forgotten() -> None:
    told: list[Any] = []

    async def work() -> None:
        raise ValueError("no")

    task = OwnedTask(work(), "work")
    task.when_done(told.append)
    assert await task.ended()
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["no"]
    with pytest.raises(ValueError, match="no"):
        await task


@pytest.mark.asyncio
async def test_a_context_can_be_kept_over_several_tasks() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    context = copy_context()

    async def work() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    assert [await OwnedTask(work(), "work", context=context) for _ in range(3)] == [1, 2, 3]
    assert variable.get() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("wait", ["ended", "done_or_cancelled"])
async def test_another_loop_does_not_wait_for_it(wait: str) -> None:
    """Its end would wake nobody there."""
    gate = asyncio.Event()
    task = OwnedTask(gate.wait(), "work")

    with pytest.raises(LoopMismatchError, match=r"<OwnedTask work .*> was awaited on"):
        await asyncio.to_thread(lambda: asyncio.run(getattr(task, wait)()))

    gate.set()
    await task
