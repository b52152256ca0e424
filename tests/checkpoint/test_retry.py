"""Failed calls of a store are made again, for as long as was asked for, and that is told."""

import asyncio
import errno
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import _retry
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError

from .simulated_files import SIMPLE, FaultyStorage, SimulatedFiles, SimulatedStorage

pytestmark = pytest.mark.asyncio


class Clock:
    """Time that only pauses move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.in_pause: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.in_pause()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(_retry, "monotonic", made.monotonic)
    monkeypatch.setattr(_retry, "sleep", made.sleep)
    monkeypatch.setattr(_retry, "TICK_S", 1000.0)
    return made


def timed_out() -> OSError:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


class Flaky(FaultyStorage):
    """A storage of which every call fails at first, with or without having its effect."""

    def __init__(self, files: SimulatedFiles, error: Callable[[], Exception], count: int) -> None:
        self._failures: dict[tuple[Any, ...], int] = {}
        self._count = count
        self._make = error
        self.is_late = False
        super().__init__(SimulatedStorage(files), error, None)

    def forget(self) -> None:
        """Let every call fail at first again."""
        self._failures.clear()

    def _faulty(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.calls.append(name)
            if name == "close":
                return call(*args)
            key = (name, *(each for each in args if isinstance(each, (str, int))))
            self._failures[key] = self._failures.get(key, 0) + 1
            fails = self._failures[key] <= self._count
            result = None if fails and not self.is_late else call(*args)
            if fails:
                raise self._make()
            return result

        return called


def new_state(value: float) -> dict[str, Any]:
    return {"w": ar.Variable(np.full(30, value)), "value": value}


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "behind"])
async def test_every_call_that_fails_twice_is_made_until_it_succeeds(
    is_late: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.checkpoint._writing.FILE_BYTES", 100)
    files = SimulatedFiles()
    storage = Flaky(files, timed_out, 2)
    storage.is_late = is_late
    manager = ar.CheckpointManager(storage, max_to_keep=5, retry=1e6)
    state = new_state(1.0) | {"more": [ar.Variable(np.full(30, float(i))) for i in range(3)]}
    with pytest.warns(RuntimeWarning, match=r"failed calls of .* were made again in a save"):
        await manager.save(1, state)
    read = new_state(0.0) | {"more": [ar.Variable(np.zeros(30)) for _ in range(3)]}
    with pytest.warns(RuntimeWarning, match=r"in a restore\. The last error: .*imed out"):
        await manager.restore(read)
    assert {*read["w"].value} == {1.0}
    assert [v.value[0] for v in read["more"]] == [0.0, 1.0, 2.0]
    storage.forget()
    with pytest.warns(RuntimeWarning, match="in a read"):
        await manager.verify(1)
    storage.forget()
    with pytest.warns(RuntimeWarning, match="in a read"):
        assert (await manager.read(1, "w", 2)).item() == 1.0
    with pytest.warns(RuntimeWarning, match="in a change of pins"):
        await manager.pin(1)
    assert manager.statistics().num_retried == len(clock.pauses)
    assert {*SIMPLE} - {"remove_folder"} <= {*storage.calls}


async def test_pauses_double_up_to_the_longest_and_are_shortened_by_chance(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retry, "FIRST_S", 1.0)
    monkeypatch.setattr(_retry, "LONGEST_S", 20.0)
    files = SimulatedFiles()
    storage = Flaky(files, timed_out, 9)
    manager = ar.CheckpointManager(storage, retry=1e9)
    with pytest.warns(RuntimeWarning):
        await manager.save(1, {"x": 1})
    first = clock.pauses[:9]
    for pause, full in zip(first, [1, 2, 4, 8, 16, 20, 20, 20, 20], strict=True):
        assert full / 2 <= pause <= full
    assert len({pause / full for pause, full in zip(first, (1, 2, 4, 8), strict=False)}) > 1


async def test_a_call_that_fails_for_too_long_ends_the_save(clock: Clock) -> None:
    storage = Flaky(SimulatedFiles(), timed_out, 10**9)
    manager = ar.CheckpointManager(storage, retry=60.0)
    with pytest.raises(CheckpointNotCommittedError, match="imed out") as caught:
        await manager.save(1, {"x": 1})
    assert 30.0 < clock.now <= 60.0
    assert "times in" in str(getattr(caught.value.__cause__, "__notes__", ""))
    assert manager.statistics().num_saved == 0


ANSWERS = ("ENOENT", "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EINVAL", "ENAMETOOLONG")


@pytest.mark.parametrize("name", [*ANSWERS, "memory", "in use"])
async def test_answers_are_not_asked_for_again(name: str, clock: Clock) -> None:
    number = getattr(errno, name, 0)
    error: Any = lambda: OSError(number, os.strerror(number))  # noqa: E731
    error = {"memory": MemoryError, "in use": lambda: CheckpointError("It is in use.")}.get(
        name, error
    )
    manager = ar.CheckpointManager(Flaky(SimulatedFiles(), error, 10**9), retry=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointNotCommittedError):
            await manager.save(1, {"x": 1})
    assert clock.pauses == []


async def test_a_function_decides_how_long_and_for_which_errors(clock: Clock) -> None:
    told: list[tuple[str, int, float]] = []

    def retry(error: OSError, num_tries: int, seconds: float) -> float | None:
        told.append((str(error), num_tries, seconds))
        return None if num_tries == 3 else 5.0

    storage = Flaky(SimulatedFiles(), lambda: PermissionError("token expired"), 10**9)
    manager = ar.CheckpointManager(storage, retry=retry)
    with pytest.raises(CheckpointNotCommittedError, match="expired"):
        await manager.save(1, {"x": 1})
    assert told == [
        ("token expired", 1, 0.0),
        ("token expired", 2, 5.0),
        ("token expired", 3, 10.0),
    ]


async def test_a_pause_that_is_no_number_is_an_error(clock: Clock) -> None:
    manager = ar.CheckpointManager(
        Flaky(SimulatedFiles(), timed_out, 1),
        retry=lambda *_: True,
    )
    with pytest.raises(TypeError, match="retry must return a number of seconds or None, got True"):
        await manager.save(1, {"x": 1})


async def test_a_pause_ends_when_its_save_is_cancelled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retry, "TICK_S", 0.05)
    files = SimulatedFiles()
    loop = asyncio.get_running_loop()
    manager = ar.CheckpointManager(Flaky(files, timed_out, 10**9), retry=lambda *_: 1e6)
    saving = asyncio.create_task(manager.save(1, {"x": 1}))
    is_cancelled = asyncio.Event()

    def cancel() -> None:
        saving.cancel()
        loop.call_soon(is_cancelled.set)

    def in_pause() -> None:
        if len(clock.pauses) == 3:
            loop.call_soon_threadsafe(cancel)
            asyncio.run_coroutine_threadsafe(is_cancelled.wait(), loop).result(30)

    clock.in_pause = in_pause
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert len(clock.pauses) < 10


async def test_without_retry_nothing_is_made_again(clock: Clock) -> None:
    manager = ar.CheckpointManager(Flaky(SimulatedFiles(), timed_out, 1))
    with pytest.raises(CheckpointNotCommittedError, match="imed out"):
        await manager.save(1, {"x": 1})
    assert clock.pauses == []


@pytest.mark.parametrize(
    ("retry", "error"),
    [(0, ValueError), (float("nan"), ValueError), ("3", TypeError), (True, TypeError)],
)
async def test_a_wrong_retry(retry: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="retry must be a number of seconds"):
        ar.CheckpointManager("somewhere", retry=retry)
