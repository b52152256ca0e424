"""Executors of a program: who waits for their calls, in which order, and which is the default."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import aioreplica.testing as art
from aioreplica.errors import DeviceError

Main = Callable[[], Coroutine[Any, Any, Any]]
FIDELITIES = ["asyncio", "reorder"]


def pause() -> Callable[[float], None]:
    """Return what stands for the blocking sleep inside a run."""
    return vars(time)["sleep"]  # type: ignore[no-any-return]


# --- the default executor ---------------------------------------------------------------------


def appends_three(workers: int) -> Main:
    async def main() -> None:
        loop, log = asyncio.get_running_loop(), list[int]()
        loop.set_default_executor(ThreadPoolExecutor(workers))
        await asyncio.gather(*[loop.run_in_executor(None, log.append, i) for i in range(3)])
        assert log == [0, 1, 2]

    return main


def in_a_thread(inner: Main) -> Main:
    async def main() -> None:
        await asyncio.to_thread(lambda: asyncio.run(inner()))

    return main


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_default_executor_has_the_workers_that_it_was_given(fidelity: str) -> None:
    art.explore(appends_three(1), schedules=200, fidelity=fidelity).check()
    art.explore(in_a_thread(appends_three(1)), schedules=50, fidelity=fidelity).check()
    assert art.explore(appends_three(2), fidelity=fidelity).failed
    assert art.explore(in_a_thread(appends_three(2)), fidelity=fidelity).failed


def test_many_calls_meet_on_a_large_default_executor() -> None:
    async def main() -> None:
        loop, barrier = asyncio.get_running_loop(), threading.Barrier(10)
        loop.set_default_executor(ThreadPoolExecutor(10))
        await asyncio.gather(*[loop.run_in_executor(None, barrier.wait) for _ in range(10)])

    art.explore(main, schedules=10).check()


def test_faults_know_the_default_executor_by_its_name() -> None:
    faults = art.Faults().fail_op("default pool", at=2)
    failure = art.explore(appends_three(1), faults=faults).failure

    assert failure is not None
    assert isinstance(failure.error, DeviceError)


def test_a_default_executor_that_was_shut_down_takes_no_calls() -> None:
    async def main() -> None:
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        await asyncio.to_thread(int)
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            await asyncio.to_thread(int)

    art.explore(main, schedules=10).check()
