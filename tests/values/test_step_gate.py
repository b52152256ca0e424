"""The gate of steps: who waits goes on when it opens, and when the last step has ended."""

import asyncio

import pytest

from aioreplica.values import StepGate, between_steps


@pytest.mark.asyncio
async def test_waiting_steps_go_on_when_the_last_closer_opens() -> None:
    gate = StepGate()
    gate.close()
    gate.close()
    waiting = [asyncio.ensure_future(gate.opened()) for _ in range(2)]
    await asyncio.sleep(0)

    gate.open()
    assert gate.is_closed
    gate.open()

    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [None, None]


@pytest.mark.asyncio
async def test_a_block_between_steps_is_entered_when_the_last_step_has_ended() -> None:
    gate, order = StepGate(), list[str]()
    gate.running |= {"a", "b"}

    async def block() -> None:
        async with between_steps([gate]):
            order.append("block")

    task = asyncio.ensure_future(block())
    await asyncio.sleep(0)
    for step in ("a", "b"):
        order.append(step)
        gate.running.remove(step)
        gate.step_ended()
    await asyncio.wait_for(task, 60)

    assert order == ["a", "b", "block"]
    assert not gate.is_closed


class Running(set[str]):
    """Steps under way, the last of which ends on another thread right behind the first look."""

    gate: StepGate

    def __bool__(self) -> bool:
        if not len(self):
            return False
        self.clear()
        self.gate.step_ended()
        return True


@pytest.mark.asyncio
async def test_a_step_that_ends_between_a_look_and_the_wait_is_seen() -> None:
    gate = StepGate()
    gate.running = running = Running({"a"})
    running.gate = gate

    with pytest.raises(StopIteration):  # it has nothing to wait for
        gate.idle().send(None)


@pytest.mark.asyncio
async def test_a_cancelled_wait_for_idleness_opens_the_gate() -> None:
    gate = StepGate()
    gate.running.add("a")

    async def block() -> None:
        async with between_steps([gate]):
            raise AssertionError("a step is under way")

    task = asyncio.ensure_future(block())
    await asyncio.sleep(0)
    assert gate.is_closed
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not gate.is_closed
    await gate.opened()
