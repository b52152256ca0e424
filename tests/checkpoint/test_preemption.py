"""Work that does not end when it is told to stop: an op that hangs, a cancellation swallowed."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.checkpoint import _preemption
from aioreplica.errors import CheckpointNotCommittedError, ContextError

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs here does so for good: no time would be enough."""
    monkeypatch.setattr(_preemption, "UNWIND_S", 0.0)


class Hang:
    """An op that does not end until the test does."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, *_: object) -> None:
        self.started.set()
        self.may_end.wait()


@pytest.fixture
def hang() -> Iterator[Hang]:
    found = Hang()
    yield found
    found.may_end.set()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[ar.MirroredStrategy]:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


async def stopped(manager: ar.CheckpointManager, work: Any, state: Any, hang: Hang) -> str:
    """Cancel a save on cancel when the op hangs; return what it raises."""
    task = asyncio.create_task(manager.save_on_cancel(work, state, lambda: 7, grace_s=0.0))
    await asyncio.to_thread(hang.started.wait)
    task.cancel()
    with pytest.raises(CheckpointNotCommittedError) as caught:
        await task
    return str(caught.value)


async def test_an_op_that_hangs_is_named_and_left_behind(
    pair: ar.MirroredStrategy, hang: Hang, tmp_path: Path
) -> None:
    with pair.scope():
        v = ar.Variable(1.0)

    async def step() -> None:
        ctx = ar.get_replica_context()
        if ctx.replica_id_in_sync_group == 1:
            await ctx.run_on_device(hang)
        await ctx.all_reduce("sum", 1.0)

    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(6, {"v": v})
        text = await stopped(manager, pair.run(step), {"v": v}, hang)

    assert "did not end within 0.0 s" in text
    assert "replica 1: Hang on cpu:1, awaited by task" in text
    assert "test_preemption.py" in text
    assert manager.steps() == (6,)
    with pytest.raises(ContextError, match="is closed"):
        await pair.run(step)


async def test_a_plain_step_that_hangs_is_named_and_left_behind(
    pair: ar.MirroredStrategy, hang: Hang, tmp_path: Path
) -> None:
    with pair.scope():
        v = ar.Variable(1.0)

    def step() -> None:
        if ar.get_replica_context().replica_id_in_sync_group == 0:
            hang()

    async with ar.CheckpointManager(tmp_path) as manager:
        text = await stopped(manager, pair.run(step), {"v": v}, hang)

    assert "replica 0: " in text
    assert "step on cpu:0" in text


async def test_other_strategies_get_another_thread_of_the_device(
    pair: ar.MirroredStrategy, hang: Hang, tmp_path: Path
) -> None:
    with pair.scope():
        v = ar.Variable(1.0)

    async def step() -> None:
        await ar.get_replica_context().run_on_device(hang)

    async def double(x: Any) -> Any:
        return await ar.get_replica_context().run_on_device(np.add, x, x)

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        before = (await other.run(double, args=(np.ones(2),))).values
        async with ar.CheckpointManager(tmp_path) as manager:
            await stopped(manager, pair.run(step), {"v": v}, hang)
        after = (await other.run(double, args=(np.ones(2),))).values

    assert not hang.may_end.is_set()
    np.testing.assert_array_equal(after, before)


async def test_work_that_swallows_its_cancellation_is_left_and_the_state_is_saved(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    with pair.scope():
        v = ar.Variable(5.0)
    is_waiting, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        while not may_end.is_set():
            is_waiting.set()
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with ar.CheckpointManager(tmp_path) as manager:
        saving = manager.save_on_cancel(work(), {"v": v}, lambda: 7, grace_s=0.0)
        task = asyncio.create_task(saving)
        await is_waiting.wait()
        task.cancel()
        with (
            pytest.warns(RuntimeWarning, match=r"goes on at .*test_preemption\.py:\d+") as warned,
            pytest.raises(asyncio.CancelledError),
        ):
            await task
        assert manager.latest() == 7
        may_end.set()
    assert len(warned) == 1


async def test_work_that_swallows_one_cancellation_ends_with_the_second(tmp_path: Path) -> None:
    seen = []
    is_waiting = asyncio.Event()

    async def work() -> None:
        for _ in range(2):
            is_waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                seen.append(error)
        raise seen[-1]

    async with ar.CheckpointManager(tmp_path) as manager:
        saving = manager.save_on_cancel(work(), {"x": 1}, lambda: 7, grace_s=0.0)
        task = asyncio.create_task(saving)
        await is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert manager.latest() == 7
    assert len(seen) == 2


PROGRAM = """
import asyncio, os, signal, sys, threading
import aioreplica as ar

def hang():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

async def step():
    await ar.get_replica_context().run_on_device(hang)

async def main():
    async with ar.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            v = ar.Variable(1.0)
        async with ar.CheckpointManager(sys.argv[1]) as manager:
            await manager.save(6, {"v": v})
            await manager.save_on_cancel(
                strategy.run(step), {"v": v}, lambda: 7, grace_s=0, exit_on_sigterm=True
            )

asyncio.run(main())
"""


@pytest.mark.xslow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
async def test_a_program_whose_op_hangs_ends_at_sigterm(tmp_path: Path) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "CheckpointNotCommittedError: Nothing was saved" in last
    assert "hang on cpu:0" in last
    assert ar.CheckpointManager(tmp_path).latest() == 6
