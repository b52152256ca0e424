"""Pauses of a save in the background: how many, and that whoever waits for it ends them."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import FsspecStorage, LocalStorage, _lane, _writing
from aioreplica.checkpoint._format import EntryRecord
from aioreplica.checkpoint._lane import PAUSE_S, SHARE, Pace, Stop
from aioreplica.checkpoint._state import Cut
from aioreplica.checkpoint._writing import StepWriter
from aioreplica.devices import lane_table
from aioreplica.errors import CheckpointUncertainError

from .signals import FirstSync

STATE = {"model": [np.arange(4.0)]}
FOR_EVER_S = 1e6


class Clock(threading.Event):
    """Time that passes by work, by waiting for the disk, and by the pauses of a pace."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.used_s = 7.0
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        self.now_s += timeout
        return False

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.used_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_lane, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(_lane, "thread_time", lambda: clock.used_s)
    monkeypatch.setattr(_lane, "num_cores", lambda: 2)
    return clock


def pace_on(clock: Clock) -> Pace:
    pace = Pace()
    pace._is_hurried = clock
    return pace


@pytest.mark.parametrize("item_s", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("num_cores", [1, 2, 64])
def test_a_save_takes_its_share_of_the_cores(
    item_s: float, num_cores: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lane, "num_cores", lambda: num_cores)
    pace, begin_s, used_s = pace_on(clock), clock.now_s, clock.used_s

    for _ in pace.paced(range(20_000)):
        clock.work(item_s)

    share = (clock.used_s - used_s) / (clock.now_s - begin_s)
    assert share <= SHARE * num_cores * 1.05  # the last pause is not made
    assert share >= min(1.0, SHARE * num_cores) * 0.8
    assert min(clock.pauses) >= PAUSE_S


def test_a_save_begins_with_a_pause(clock: Clock) -> None:
    pace = pace_on(clock)

    next(pace.paced([1]))

    assert clock.pauses == [pytest.approx(2 * PAUSE_S)]


def test_waiting_for_the_disk_is_a_pause(clock: Clock) -> None:
    pace = pace_on(clock)

    for _ in pace.paced(range(1000)):
        clock.work(1e-3)
        clock.now_s += 2.1e-3

    assert len(clock.pauses) == 1  # the first one


def test_all_tensors_of_a_save_have_one_share(clock: Clock) -> None:
    pace, begin_s, used_s = pace_on(clock), clock.now_s, clock.used_s

    for _ in range(1000):
        for _ in pace.paced([1]):
            clock.work(1e-3)

    share = (clock.used_s - used_s) / (clock.now_s - begin_s)
    assert share == pytest.approx(2 * SHARE, rel=0.05)


def test_python_that_makes_the_items_counts(clock: Clock) -> None:
    pace, begin_s, used_s = pace_on(clock), clock.now_s, clock.used_s

    def made() -> Iterator[int]:
        for number in range(1000):
            clock.work(1e-3)
            yield number

    for _ in pace.paced(made(), each=10):
        pass

    share = (clock.used_s - used_s) / (clock.now_s - begin_s)
    assert share == pytest.approx(2 * SHARE, rel=0.05)


def test_all_pieces_of_a_state_of_small_tensors_are_paced(clock: Clock, tmp_path: Path) -> None:
    """Each name of a tensor takes a millisecond here, and each entry of the manifest."""
    cut = Cut((), {}, {f"{number}": [np.zeros(())] for number in range(1000)}, {})
    pace = pace_on(clock)
    writer = StepWriter(LocalStorage(tmp_path), 1, cut, Stop.__new__(Stop), pace)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("label_of", "dtype_name"):
            patch.setattr(_writing, name, lambda *_, name=name: clock.work(1e-3) or "float64")
        patch.setattr(Stop, "check", lambda _: None)
        patch.setattr(Cut, "record_of", lambda *_: clock.work(1e-3) or EntryRecord("array"))
        writer.begin(0)
        begin_s, used_s = clock.now_s, clock.used_s
        writer.commit([file() for file in writer.files()])

    share = (clock.used_s - used_s) / (clock.now_s - begin_s)
    assert clock.used_s - used_s == pytest.approx(3.0)
    assert share == pytest.approx(2 * SHARE, rel=0.1)


# --- whoever waits ----------------------------------------------------------------------------


@pytest.fixture
def _pauses_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lane, "PAUSE_S", FOR_EVER_S)


async def wait(manager: ar.CheckpointManager) -> None:
    await manager.wait()


async def save_again(manager: ar.CheckpointManager) -> None:
    await manager.save(2, STATE)


async def save_again_behind(manager: ar.CheckpointManager) -> None:
    await manager.save(2, STATE, wait=False)


async def restore(manager: ar.CheckpointManager) -> None:
    assert await manager.restore({"model": [np.zeros(4)]}) == 1


async def pin(manager: ar.CheckpointManager) -> None:
    await manager.pin(1)


async def save_on_cancel(manager: ar.CheckpointManager) -> None:
    work = asyncio.create_task(manager.save_on_cancel(asyncio.Event().wait(), STATE, lambda: 2))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def close(manager: ar.CheckpointManager) -> None:
    await manager.aclose()


WAYS = [wait, save_again, save_again_behind, restore, pin, save_on_cancel, close]


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.asyncio
async def test_nothing_is_done_before_the_first_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Path]] = []
    pause = threading.Event.wait

    def look_and_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > FOR_EVER_S / 2:
            found.append([*tmp_path.iterdir()])
        return pause(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", look_and_wait)
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, STATE, wait=False)
        while not found:
            await asyncio.sleep(0)

    assert found == [[]]


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.parametrize("is_begun", [False, True], ids=["at-once", "in-a-pause"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.asyncio
async def test_whoever_waits_for_a_save_ends_its_pauses(
    way: Callable[[ar.CheckpointManager], Awaitable[None]], is_begun: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pausing = asyncio.Event()
    loop, pause = asyncio.get_running_loop(), threading.Event.wait

    def tell_and_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > FOR_EVER_S / 2:
            loop.call_soon_threadsafe(pausing.set)
        return pause(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", tell_and_wait)
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, STATE, wait=False)
        if is_begun:
            await pausing.wait()
            assert manager.statistics().num_saved == 0

        await way(manager)

        assert 1 in manager.steps()


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.asyncio
async def test_whoever_has_waited_since_before_a_save_begins_ends_its_pauses(
    tmp_path: Path,
) -> None:
    async with ar.CheckpointManager(tmp_path) as manager, asyncio.timeout(60):
        await asyncio.gather(
            manager.save(1, STATE, wait=False),
            manager.save(2, STATE, wait=False),  # begins when the last one waits already
            manager.save(3, STATE),
        )

        assert manager.steps() == (1, 2, 3)


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.asyncio
async def test_pauses_hold_up_no_other_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = threading.Semaphore(0)
    pause = threading.Event.wait

    def tell_and_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > FOR_EVER_S / 2:
            pausing.release()
        return pause(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", tell_and_wait)
    async with AsyncExitStack() as stack:
        for number in range(_lane.NUM_THREADS):
            other = ar.CheckpointManager(tmp_path / f"{number}")
            await stack.enter_async_context(other)
            await other.save(1, STATE, wait=False)
            await asyncio.to_thread(pausing.acquire)
        async with asyncio.timeout(60), ar.CheckpointManager(tmp_path / "own") as manager:
            await manager.save(1, STATE, wait=False)

        assert manager.steps() == (1,)
        assert other.steps() == ()


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.asyncio
async def test_saves_that_are_waited_for_make_no_pauses(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, STATE)

        assert manager.steps() == (1,)


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.asyncio
async def test_saves_into_other_storages_make_no_pauses() -> None:
    storage = FsspecStorage("memory://paces")
    async with ar.CheckpointManager(storage) as manager:
        await manager.save(1, STATE, wait=False)
        while manager.statistics().is_saving:
            await asyncio.sleep(0)

        assert manager.steps() == (1,)


# --- loops that are closed too early ------------------------------------------------------------


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a save makes a pause."""
    is_pausing, pause = threading.Event(), threading.Event.wait

    def tell_and_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > FOR_EVER_S / 2:
            is_pausing.set()
        return pause(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", tell_and_wait)
    return is_pausing


def run_and_close(work: Callable[[], Awaitable[object]]) -> None:
    """Run something on a loop of its own, which is closed with all tasks that are left."""

    async def main() -> None:
        await work()
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asked for here

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()


@pytest.mark.usefixtures("_pauses_for_ever")
@pytest.mark.parametrize("by", ["itself", "another"])
def test_saves_whose_loops_were_closed_leave_no_lane_and_no_thread(
    by: str, tmp_path: Path, pausing: threading.Event
) -> None:
    before = {*threading.enumerate()}

    async def use_again(manager: ar.CheckpointManager) -> None:
        with pytest.raises(CheckpointUncertainError, match="event loop of its save was closed"):
            await manager.aclose()

    async def save() -> None:
        async with ar.CheckpointManager(tmp_path / "another") as another:
            await another.save(1, STATE, wait=False)

    async def save_until_it_pauses(manager: ar.CheckpointManager) -> None:
        await manager.save(1, STATE, wait=False)
        while not pausing.is_set():
            await asyncio.sleep(0.001)  # its thread is a nicer one

    for number in range(3):
        manager = ar.CheckpointManager(tmp_path / f"{number}")
        run_and_close(partial(save_until_it_pauses, manager))
        pausing.clear()
        if by == "itself":
            asyncio.run(use_again(manager))
    if by == "another":
        asyncio.run(save())

    assert not [name for name in lane_table().statistics() if name.startswith(_lane.BEHIND)]
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert {*threading.enumerate()} <= before


@pytest.mark.usefixtures("_pauses_for_ever")
def test_calls_that_waited_on_a_closed_loop_hurry_no_later_save(
    tmp_path: Path, pausing: threading.Event
) -> None:
    async def wait_for_a_save() -> None:
        await manager.save(1, STATE, wait=False)
        tasks.append(asyncio.create_task(manager.save(2, STATE)))
        tasks.append(asyncio.create_task(manager.wait()))

    async def save() -> None:
        with pytest.raises(CheckpointUncertainError):
            await manager.wait()
        is_closed.set()
        tasks.clear()
        gc.collect()
        async with manager:
            await manager.save(3, STATE, wait=False)
            while manager.statistics().is_saving and not pausing.is_set():
                await asyncio.sleep(0)
            assert pausing.is_set()

    tasks: list[asyncio.Task[None]] = []
    is_closed = threading.Event()
    hold = FirstSync(lambda: is_closed.wait(60))
    manager = ar.CheckpointManager(LocalStorage(tmp_path, calls=hold))
    run_and_close(wait_for_a_save)
    pausing.clear()
    asyncio.run(save())
    assert 3 in manager.steps()


class TellingLock:
    """A lock that sets an event when somebody has to wait for it."""

    def __init__(self, lock: threading.Lock, told: threading.Event) -> None:
        self._lock = lock
        self._told = told

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._told.set()
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class HeldStorage(LocalStorage):
    """A folder whose first lock is held before it is given to the manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_locked, self.may_go_on = threading.Event(), threading.Event()

    def lock(self) -> Any:
        is_first = not self.is_locked.is_set()
        self.is_locked.set()
        try:
            lock = super().lock()
        finally:
            if not is_first:
                self.may_go_on.set()
        if is_first:
            assert self.may_go_on.wait(60)
        return lock


def test_a_save_waits_for_the_thread_of_one_whose_loop_was_closed_while_it_began(
    tmp_path: Path,
) -> None:
    async def begin_a_save() -> None:
        await manager.save(1, STATE, wait=False)
        tasks.append(asyncio.create_task(manager.wait()))  # no pauses
        while not storage.is_locked.is_set():
            await asyncio.sleep(0.001)

    async def save() -> None:
        async with manager:
            with pytest.raises(CheckpointUncertainError):
                await manager.wait()
            await manager.save(2, STATE)

    tasks: list[asyncio.Task[None]] = []
    storage = HeldStorage(tmp_path)
    manager = ar.CheckpointManager(storage)
    writer = manager._writer
    lock, process = writer._turn
    writer._turn = TellingLock(lock, storage.may_go_on), process  # type: ignore[assignment]
    run_and_close(begin_a_save)
    asyncio.run(save())
    assert manager.steps() == (2,)
