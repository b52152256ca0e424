"""Ctrl-C, and errors, while something is saved: it is saved first, and no error is lost."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.checkpoint import CheckpointManager, LocalStorage
from aioreplica.errors import CheckpointNotCommittedError

from . import signals
from .signals import FirstSync

ROOT = Path(__file__).resolve().parents[2]

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")


@pytest.fixture
def _interruptible() -> Any:
    """A shell may have turned SIGINT off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def for_ever() -> None:
    await asyncio.Event().wait()


def on_loop(loop: asyncio.AbstractEventLoop, *fns: Callable[[], object]) -> None:
    """Call functions on the event loop, and wait until that is done, in another thread."""
    done = threading.Event()
    for fn in fns:
        loop.call_soon_threadsafe(fn)
    loop.call_soon_threadsafe(done.set)
    assert done.wait(30)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


# --- interrupts -------------------------------------------------------------------------------


async def save_on_cancel(manager: CheckpointManager, state: Any) -> None:
    asyncio.get_running_loop().call_soon(interrupt)
    await manager.save_on_cancel(for_ever(), state, lambda: 7)


async def save_in_finally(manager: CheckpointManager, state: Any) -> None:
    asyncio.get_running_loop().call_soon(interrupt)
    try:
        await for_ever()
    finally:
        await manager.save(7, state)


async def save_behind(manager: CheckpointManager, state: Any) -> None:
    async with manager:
        await manager.save(7, state, wait=False)
        interrupt()
        await for_ever()


async def save_behind_and_close(manager: CheckpointManager, state: Any) -> None:
    await manager.save(7, state, wait=False)
    asyncio.get_running_loop().call_soon(interrupt)
    await manager.aclose()


WAYS = [save_on_cancel, save_in_finally, save_behind, save_behind_and_close]


@needs_signals
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_saves_and_then_raises_keyboard_interrupt(way: Any, tmp_path: Path) -> None:
    """The first sync lets the loop see the interrupt first, if it did not cause the save."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        storage = LocalStorage(tmp_path, calls=FirstSync(lambda: on_loop(loop)))
        await way(CheckpointManager(storage), {"v": ar.Variable(3.0)})

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())

    assert CheckpointManager(tmp_path).steps() == (7,)


@needs_signals
@pytest.mark.usefixtures("_interruptible")
def test_a_second_ctrl_c_gives_the_save_up_and_leaves_the_step_before(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await CheckpointManager(tmp_path).save(6, {"x": 1})

        def wait_for_the_second() -> None:
            loop.call_soon_threadsafe(interrupt)
            assert is_closing.wait(30)

        manager = CheckpointManager(LocalStorage(tmp_path, calls=FirstSync(wait_for_the_second)))
        loop.call_soon(interrupt)
        try:
            await manager.save_on_cancel(for_ever(), {"x": 2}, lambda: 7)
        finally:
            await manager.aclose()

    async def close() -> None:
        try:
            await for_ever()
        finally:
            is_closing.set()

    async def with_closing() -> None:
        closing = asyncio.create_task(close())  # cancelled when the loop is closed
        await main()
        await closing

    is_closing = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(with_closing())

    assert CheckpointManager(tmp_path).steps() == (6,)


@needs_signals
@pytest.mark.xslow
def test_programs_that_are_told_to_stop_save_and_end_as_documented() -> None:
    command = [sys.executable, "-m", signals.__name__, "--repeat", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("is_first", [True, False], ids=["before-the-stop", "after-the-stop"])
async def test_a_step_that_fails_half_way_while_it_is_stopped_is_not_saved(
    is_first: bool, tmp_path: Path, pair: ar.Strategy
) -> None:
    """A cut is taken when the step has ended, and would hold `a` of the new step, `b` of before."""
    with pair.scope():
        a, b = (ar.Variable(0.0, aggregation="sum") for _ in range(2))

    async def step() -> None:
        await a.assign_add(1.0)
        task.cancel()
        if not is_first:
            await stopped.wait()
        raise ValueError("in the middle")

    async def train() -> None:
        await pair.run(step)

    class Pair:
        @property
        def variables(self) -> list[ar.Variable]:
            if task.cancelling():  # steps are held back next
                stopped.set()
            return [a, b]

    manager, stopped = CheckpointManager(tmp_path), asyncio.Event()
    task = asyncio.create_task(manager.save_on_cancel(train(), {"pair": Pair()}, lambda: 3))
    with pytest.raises(ValueError, match="in the middle"):
        await task
    assert manager.steps() == ()


@pytest.mark.asyncio
async def test_an_error_of_the_cleanup_of_the_work_is_raised_and_nothing_is_saved(
    tmp_path: Path,
) -> None:
    async def train() -> None:
        try:
            began.set()
            await for_ever()
        finally:
            raise ValueError("while it ends")

    manager, began = CheckpointManager(tmp_path), asyncio.Event()
    task = asyncio.create_task(manager.save_on_cancel(train(), {"x": 1}, lambda: 3))
    await began.wait()
    task.cancel()
    with pytest.raises(ValueError, match="while it ends"):
        await task
    assert manager.steps() == ()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError])
async def test_an_error_of_the_number_ends_the_work_and_is_raised(
    error: type[Exception], tmp_path: Path
) -> None:
    ended = []

    async def train() -> None:
        try:
            began.set()
            await for_ever()
        finally:
            ended.append(True)

    def number() -> int:
        raise error("of the number")

    manager, began = CheckpointManager(tmp_path), asyncio.Event()
    task = asyncio.create_task(manager.save_on_cancel(train(), {"x": 1}, number))
    await began.wait()
    task.cancel()
    with pytest.raises(error, match="of the number"):
        await task
    assert ended == [True]
    assert manager.steps() == ()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_behind", [False, True], ids=["on-cancel", "behind"])
async def test_a_save_that_fails_is_said_although_it_is_cancelled_meanwhile(
    is_behind: bool, tmp_path: Path
) -> None:
    def fail() -> None:
        on_loop(loop, task.cancel)
        raise OSError("full")

    async def train() -> None:
        began.set()
        await for_ever()

    async def save_and_close() -> None:
        await manager.save(3, {"x": 1}, wait=False)
        await manager.aclose()

    loop, began = asyncio.get_running_loop(), asyncio.Event()
    manager = CheckpointManager(LocalStorage(tmp_path, calls=FirstSync(fail)))
    if is_behind:
        task = asyncio.create_task(save_and_close())
    else:
        task = asyncio.create_task(manager.save_on_cancel(train(), {"x": 1}, lambda: 3))
        await began.wait()
        task.cancel()
    with pytest.raises(CheckpointNotCommittedError, match="full"):
        await task


@pytest.mark.skipif(sys.platform == "win32", reason="asks for a signal handler")
def test_sigterm_outside_the_main_thread_is_refused_before_the_work_begins(tmp_path: Path) -> None:
    begun, errors = [], []

    async def train() -> None:
        begun.append(True)

    async def main() -> None:
        manager = CheckpointManager(tmp_path)
        try:
            await manager.save_on_cancel(train(), {"x": 1}, lambda: 1, exit_on_sigterm=True)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(30)
    assert begun == []
    assert "main thread" in errors[0]
