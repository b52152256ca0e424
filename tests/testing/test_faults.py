"""Faults: decisions of the schedule, replayed with it."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import DeviceError, WorkerLostError


async def three_calls() -> list[str]:
    return [await asyncio.to_thread(str, i) for i in range(3)]


def error_of(faults: art.Faults, main: Any = three_calls) -> tuple[BaseException, str]:
    report = art.explore(main, schedules=50, faults=faults)
    assert report.failure is not None
    return report.failure.error, report.failure.token


def test_an_op_fails_and_the_token_knows() -> None:
    error, token = error_of(art.Faults().fail_op())

    assert isinstance(error, DeviceError)
    with pytest.raises(DeviceError) as again:
        art.replay(three_calls, token)
    assert str(again.value) == str(error)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_op_can_be_chosen(at: int) -> None:
    started = []

    async def main() -> None:
        for i in range(3):
            started.append(i)
            await asyncio.to_thread(str, i)
            started.pop()

    error, token = error_of(art.Faults().fail_op("default pool", at=at, error=KeyError), main)

    assert isinstance(error, KeyError)
    started.clear()
    with pytest.raises(KeyError):
        art.replay(main, token)
    assert started[-1] == at


def test_a_fault_that_never_matches_strikes_nobody() -> None:
    art.explore(three_calls, schedules=30, faults=art.Faults().fail_op("cpu:7")).check()


def test_an_exception_object_is_found_again_in_this_process() -> None:
    error, token = error_of(art.Faults().fail_op(error=OSError("disk full")))

    assert str(error) == "disk full"
    with pytest.raises(OSError, match="disk full"):
        art.replay(three_calls, token)


def test_an_op_that_hangs_is_a_deadlock() -> None:
    error, _ = error_of(art.Faults().hang_op(at=1))

    assert isinstance(error, art.DeadlockError)
    assert "default pool" in str(error)


def test_a_lost_worker_fails_all_of_its_ops() -> None:
    async def main() -> int:
        results = await asyncio.gather(
            *[asyncio.to_thread(str, i) for i in range(3)], return_exceptions=True
        )
        return sum(isinstance(each, WorkerLostError) for each in results)

    async def checked() -> None:
        assert await main() != 3

    error, _ = error_of(art.Faults().lose_worker("default pool", at=0), checked)
    assert isinstance(error, AssertionError)


def test_a_slow_device_runs_into_a_timeout() -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.to_thread(int), 1)

    art.explore(main, schedules=60).check()
    error, token = error_of(art.Faults().slow_device(factor=2000), main)
    assert isinstance(error, TimeoutError)
    with pytest.raises(TimeoutError):
        art.replay(main, token)


def test_devices_of_the_library_have_faults_too() -> None:
    async def main() -> None:
        async def replica() -> int:
            ctx = ar.get_replica_context()
            assert ctx is not None
            return await ctx.run_on_device(int, "3")

        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            await strategy.run(replica)

    error, _ = error_of(art.Faults().fail_op("cpu:1", at=0), main)

    assert isinstance(error, DeviceError)
    assert error.device == "cpu:1"


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("slow_device", {"factor": 1}, "above 1, got 1"),
        ("fail_op", {"at": -1}, "at least 0, got -1"),
        ("hang_op", {"times": 0}, "at least 1, got 0"),
    ],
)
def test_impossible_faults_are_refused(method: str, arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        getattr(art.Faults(), method)(**arguments)


def test_an_error_must_be_an_exception() -> None:
    with pytest.raises(TypeError, match="must be an exception"):
        art.Faults().fail_op(error="boom")  # type: ignore[arg-type]
