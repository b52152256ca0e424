"""Ctrl-C, and errors, while something is saved: it is saved first, and no error is lost."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import EXIT_CODE, CheckpointManager, LocalStorage
from aioreplica.devices import lane_table
from aioreplica.errors import (
    CheckpointError,
    CheckpointNotCommittedError,
    CheckpointUncertainError,
    ContextError,
    LoopMismatchError,
)

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


@pytest.fixture
def sigterms() -> Any:
    """A signal that came too late would end the test run."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    yield told
    signal.signal(signal.SIGTERM, before)


@needs_signals
@pytest.mark.usefixtures("sigterms")
def test_a_sigterm_in_the_last_cycle_of_the_work_is_not_swallowed(tmp_path: Path) -> None:
    async def train() -> None:
        signal.raise_signal(signal.SIGTERM)

    async def main() -> None:
        manager = CheckpointManager(tmp_path)
        await manager.save_on_cancel(train(), {"x": 1}, lambda: 7, exit_on_sigterm=True)

    with pytest.raises(SystemExit) as stopped:
        asyncio.run(main())

    assert stopped.value.code == EXIT_CODE
    assert CheckpointManager(tmp_path).steps() == (7,)


@needs_signals
def test_a_second_save_that_ends_the_program_on_sigterm_is_refused(
    tmp_path: Path, sigterms: list[int]
) -> None:
    """SIGTERM reached the second alone, and the exit cut the first one's work off, unsaved."""

    async def main() -> None:
        manager, ended = CheckpointManager(tmp_path), asyncio.Event()
        options: Any = {"state": {"x": 1}, "step": lambda: 7, "exit_on_sigterm": True}
        first = asyncio.create_task(manager.save_on_cancel(ended.wait(), **options))
        await asyncio.sleep(0)
        with pytest.raises(ContextError, match="waited for already"):
            await manager.save_on_cancel(ended.wait(), **options)
        ended.set()
        assert await first
        assert await manager.save_on_cancel(ended.wait(), **options)

    asyncio.run(main())

    signal.raise_signal(signal.SIGTERM)
    assert sigterms == [signal.SIGTERM]  # the handler of before is back


@needs_signals
@pytest.mark.xslow
def test_programs_that_are_told_to_stop_save_and_end_as_documented() -> None:
    command = [sys.executable, "-m", signals.__name__, "--repeat", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_a_save_in_the_background_that_nobody_waits_for_is_warned_of_if_it_fails(
    tmp_path: Path,
) -> None:
    """The end of `asyncio.run` cancels it."""

    async def save_and_cancel() -> None:
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            on_loop(loop, lambda: saving.cancel())
            on_loop(loop)  # it knows by now

        calls = FirstSync(cancel)
        await CheckpointManager(LocalStorage(tmp_path, calls=calls)).save(1, {"x": 1}, wait=False)
        [saving] = [t for t in asyncio.all_tasks() if t.get_name() == "checkpoint 1"]
        await asyncio.wait([saving])

    async def main() -> None:
        await asyncio.create_task(save_and_cancel())
        gc.collect()

    with pytest.warns(RuntimeWarning, match="Step 1 was not saved .* leave `async with manager`"):
        asyncio.run(main())
    assert CheckpointManager(tmp_path).steps() == ()


def test_an_exit_right_behind_a_save_in_the_background_is_warned_of(tmp_path: Path) -> None:
    """Its task is cancelled before it has begun, so it could not say so itself."""

    async def main() -> None:
        await CheckpointManager(tmp_path).save(1, {"x": 1}, wait=False)
        sys.exit(EXIT_CODE)

    def run() -> None:
        with pytest.raises(SystemExit):
            asyncio.run(main())
        gc.collect()

    with pytest.warns(RuntimeWarning, match="Step 1 was not saved .* leave `async with manager`"):
        run()
    assert CheckpointManager(tmp_path).steps() == ()


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["wait", "save", "restore", "aclose"])
async def test_a_save_that_is_cancelled_before_it_has_begun_is_an_error_once(
    call: str, tmp_path: Path
) -> None:
    manager = CheckpointManager(tmp_path)
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "save": lambda: manager.save(2, {"x": 2}),
        "restore": lambda: manager.restore({"x": 2}),
    }
    await manager.save(1, {"x": 1}, wait=False)
    [saving] = [each for each in asyncio.all_tasks() if each.get_name() == "checkpoint 1"]
    saving.cancel()
    with pytest.raises(CheckpointNotCommittedError, match=r"Step 1 was not saved .* cancelled"):
        await calls.get(call, getattr(manager, call))()
    assert not manager.statistics().is_saving
    await manager.save(3, {"x": 3}, wait=False)
    await manager.aclose()
    assert manager.steps() == (3,)


# --- other loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "wait", "restore", "aclose", "save_on_cancel"])
def test_a_save_in_the_background_whose_loop_was_closed_is_an_error_once(
    call: str, tmp_path: Path
) -> None:
    """Nothing ends it any more, so that the next save waited for ever."""

    async def start() -> None:
        await manager.save(1, {"x": np.ones(3)}, wait=False)
        assert await asyncio.to_thread(is_writing.wait, 30)
        [task] = asyncio.all_tasks() - {asyncio.current_task()}
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asked for here

    async def on_another() -> None:
        async def work() -> None:
            task.cancel()
            is_closed.set()  # its save waits for the thread of the one that is gone
            await asyncio.Event().wait()

        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "save": lambda: manager.save(2, {"x": 2}),
            "restore": lambda: manager.restore({"x": 2}),
            "save_on_cancel": lambda: manager.save_on_cancel(work(), {"x": 2}, lambda: 2),
        }
        task = asyncio.create_task(calls.get(call, getattr(manager, call))())
        with pytest.raises((CheckpointUncertainError, asyncio.CancelledError)) as caught:
            await task
        if call == "save_on_cancel":
            assert manager.steps() == (2,)
            with pytest.raises(CheckpointUncertainError) as caught:
                await manager.wait()
        assert "the event loop of its save was closed" in str(caught.value)
        is_closed.set()
        await manager.save(3, {"x": 3})
        while any(lane.running for lane in lane_table().statistics().values()):
            await asyncio.sleep(0)
        await manager.aclose()

    def hold() -> None:
        is_writing.set()
        assert is_closed.wait(30)

    is_writing, is_closed = threading.Event(), threading.Event()
    manager = CheckpointManager(LocalStorage(tmp_path, calls=FirstSync(hold)))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.run(on_another())
    assert manager.latest() == 3
    assert 1 not in manager.steps()  # its thread was told to stop
    assert not any(name.startswith("checkpoint-behind") for name in lane_table().statistics())


@pytest.mark.asyncio
async def test_a_save_from_another_loop_than_that_of_the_one_in_the_background_is_refused(
    tmp_path: Path,
) -> None:
    def save_elsewhere() -> None:
        with pytest.raises(LoopMismatchError):
            asyncio.run(manager.save(2, {"x": 2}))

    async with CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"x": 1}, wait=False)
        thread = threading.Thread(target=save_elsewhere)
        thread.start()
        thread.join()  # the loop stands still, and the save with it
    assert manager.steps() == (1,)


@pytest.mark.asyncio
async def test_closing_on_another_loop_leaves_the_directory_to_the_save(tmp_path: Path) -> None:
    """Another manager could take it, and removed what looked like the rest of an ended save."""

    def close_elsewhere() -> None:
        with pytest.raises(LoopMismatchError):
            asyncio.run(manager.aclose())
        with pytest.raises(CheckpointError, match="is in use"):
            asyncio.run(CheckpointManager(tmp_path).save(2, {"x": 2}))

    def hold() -> None:
        is_writing.set()
        assert may_end.wait(30)

    is_writing, may_end = threading.Event(), threading.Event()
    async with CheckpointManager(LocalStorage(tmp_path, calls=FirstSync(hold))) as manager:
        await manager.save(1, {"x": 1}, wait=False)
        assert await asyncio.to_thread(is_writing.wait, 30)
        try:
            await asyncio.to_thread(close_elsewhere)
        finally:
            may_end.set()
    assert manager.steps() == (1,)


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
async def test_a_step_that_is_cancelled_with_every_task_is_not_saved(
    tmp_path: Path, pair: ar.Strategy
) -> None:
    """As at the end of `asyncio.run`, if the program has not waited for `save_on_cancel`."""
    with pair.scope():
        a, b = (ar.Variable(0.0, aggregation="sum") for _ in range(2))

    async def step() -> None:
        await a.assign_add(1.0)
        is_half_way.set()
        await for_ever()
        await b.assign_add(1.0)

    manager, is_half_way = CheckpointManager(tmp_path), asyncio.Event()
    saving = manager.save_on_cancel(pair.run(step), {"a": a, "b": b}, lambda: 3)
    task = asyncio.create_task(saving)
    await is_half_way.wait()
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    with pytest.raises(CheckpointNotCommittedError, match="cancelled in the middle of a step"):
        await task
    assert manager.steps() == ()


@pytest.mark.asyncio
async def test_cancelling_all_tasks_between_two_steps_saves(
    tmp_path: Path, pair: ar.Strategy
) -> None:
    with pair.scope():
        a = ar.Variable(0.0, aggregation="sum")

    async def train() -> None:
        await pair.run(lambda: None)
        has_ended.set()
        await for_ever()

    manager, has_ended = CheckpointManager(tmp_path), asyncio.Event()
    task = asyncio.create_task(manager.save_on_cancel(train(), {"a": a}, lambda: 3))
    await has_ended.wait()
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert manager.steps() == (3,)


@pytest.mark.asyncio
async def test_an_error_of_the_work_that_is_false_is_raised_too(tmp_path: Path) -> None:
    class FalseError(Exception):
        def __bool__(self) -> bool:
            return False

    async def train() -> None:
        try:
            began.set()
            await for_ever()
        finally:
            raise FalseError

    manager, began = CheckpointManager(tmp_path), asyncio.Event()
    task = asyncio.create_task(manager.save_on_cancel(train(), {"x": 1}, lambda: 3))
    await began.wait()
    task.cancel()
    with pytest.raises(FalseError):
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


@pytest.mark.asyncio
@pytest.mark.parametrize("grace_s", [None, "30", float("nan"), -1])
async def test_an_invalid_grace_is_refused_before_the_work_begins(
    grace_s: Any, tmp_path: Path
) -> None:
    """It was found out at the stop: nothing was saved then, and the work went on."""
    begun = []

    async def train() -> None:
        begun.append(True)

    with pytest.raises((TypeError, ValueError), match="grace_s must be"):
        await CheckpointManager(tmp_path).save_on_cancel(
            train(), {"x": 1}, lambda: 1, grace_s=grace_s
        )
    await asyncio.sleep(0)
    assert begun == []


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [1.5, None, "7", -1])
async def test_a_wrong_number_is_refused_before_the_work_begins(
    number: Any, tmp_path: Path, pair: ar.Strategy
) -> None:
    """It was found out at the stop, when nothing else could be saved."""
    manager = CheckpointManager(tmp_path)
    with pytest.raises((TypeError, ValueError), match="step must be"):
        await manager.save_on_cancel(for_ever(), {"x": 1}, lambda: number)

    async def step() -> None:
        await manager.save_on_cancel(for_ever(), {"x": 1}, lambda: 1)

    with pytest.raises(ContextError, match="would wait for itself"):
        await pair.run(step)
    gc.collect()  # work that was never awaited would be warned of


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
