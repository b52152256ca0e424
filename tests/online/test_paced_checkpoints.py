"""Checkpoints in the background leave the cores to steps, until somebody waits for one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aioreplica.checkpoint import _lane
from tests.sequencer import idle

from .program import Counting, example

FOR_EVER_S = 1e6
LIMIT_S = 60.0


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Is released by each pause of a save, which then ends for nobody who does not wait."""
    begun = threading.Semaphore(0)
    pause = threading.Event.wait

    def tell_and_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > FOR_EVER_S / 2:
            begun.release()
        return pause(event, timeout)

    monkeypatch.setattr(_lane, "PAUSE_S", FOR_EVER_S)
    monkeypatch.setattr(threading.Event, "wait", tell_and_wait)
    return begun


async def checkpoint(program: Counting) -> None:
    assert await program.learner.checkpoint() == 3
    assert program.learner.statistics().num_checkpoints == 4  # the one under way, and its own


async def roll_back(program: Counting) -> None:
    await program.learner.rollback(to=1)


async def stop(program: Counting) -> None:
    await program.learner.aclose()
    assert program.manager is not None
    assert program.manager.steps()[-1] == 3


async def until_it_pauses(pausing: threading.Semaphore) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not pausing.acquire(blocking=False):
            await asyncio.sleep(0)
    await idle()  # whoever waits for the save does so now


@pytest.mark.parametrize("way", [checkpoint, roll_back, stop], ids=lambda way: way.__name__)
@pytest.mark.asyncio
async def test_one_that_nobody_waits_for_keeps_its_pauses(
    way: Callable[[Counting], Awaitable[None]], folder: Path, pausing: threading.Semaphore
) -> None:
    async with Counting(folder, checkpoint_every_s=0.0) as program, asyncio.timeout(LIMIT_S):
        learner = program.learner
        await (await learner.submit(example(0)))
        await until_it_pauses(pausing)
        assert learner.statistics().num_checkpoints == 0
        assert await learner.checkpoint() == 1  # of its own, which makes none
        assert not pausing.acquire(blocking=False)
        await (await learner.submit(example(1)))
        await until_it_pauses(pausing)
        await (await learner.submit(example(2)))  # is learned beside it
        await idle()
        assert learner.statistics().num_checkpoints == 2
        assert learner.statistics().checkpoint_number == 1

        await way(program)
