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


# --- threads that wait ------------------------------------------------------------------------


def by_result(pool: ThreadPoolExecutor, ready: threading.Event) -> object:
    return pool.submit(ready.wait).result()


def by_error(pool: ThreadPoolExecutor, ready: threading.Event) -> object:
    call = pool.submit(ready.wait)
    assert call.exception(timeout=5) is None
    return call.result()


def by_leaving(pool: ThreadPoolExecutor, ready: threading.Event) -> object:
    with pool:
        call = pool.submit(ready.wait)
    assert call.done()
    return call.result()


def waits_on_a_thread(
    wait: Callable[[ThreadPoolExecutor, threading.Event], object], *, is_set: bool = True
) -> Main:
    async def main() -> None:
        ready, inner = threading.Event(), ThreadPoolExecutor(1)
        async with asyncio.timeout(60 if is_set else None):
            call = asyncio.create_task(asyncio.to_thread(wait, inner, ready))
            await asyncio.sleep(0.5)
            assert not call.done()
            if is_set:
                ready.set()
            assert await call

    return main


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("wait", [by_result, by_error, by_leaving])
def test_a_thread_that_waits_for_an_executor_lets_others_go_on(wait: Any, fidelity: str) -> None:
    art.explore(waits_on_a_thread(wait), schedules=20, fidelity=fidelity).check()


def test_a_thread_that_leaves_an_executor_for_ever_is_named() -> None:
    with pytest.raises(
        art.DeadlockError, match=r"awaits concurrent\.futures\.Executor at test_executors"
    ):
        art.run(waits_on_a_thread(by_leaving, is_set=False))


def test_a_call_cannot_leave_its_own_executor() -> None:
    async def main() -> None:
        pool = ThreadPoolExecutor(2)
        with pytest.raises(RuntimeError, match="cannot join current thread"):
            await asyncio.get_running_loop().run_in_executor(pool, pool.shutdown)

    art.run(main)


# --- the loop that waits ----------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_result_is_waited_for_up_to_its_timeout(fidelity: str) -> None:
    async def main() -> None:
        start = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(pause(), 10)
            with pytest.raises(TimeoutError):
                call.result(timeout=1)
            assert time.monotonic() - start == pytest.approx(1)
            with pytest.raises(TimeoutError):
                call.exception(timeout=1)
            assert time.monotonic() - start == pytest.approx(2)
            assert call.result(timeout=30) is None
            assert 10 <= time.monotonic() - start < 11

    art.explore(main, schedules=50, fidelity=fidelity).check()


def test_a_result_that_never_comes_is_a_timeout_or_refused() -> None:
    async def main() -> None:
        pool = ThreadPoolExecutor(1)
        call = pool.submit(int)
        try:
            call.result(timeout=1)
        except TimeoutError:
            call.result()

    art.explore(main, schedules=20).check()
    failure = art.explore(main, faults=art.Faults().hang_op("pool 0", at=0)).failure

    assert failure is not None
    assert isinstance(failure.error, art.RealIOError)
    assert "pool that is stuck at " in str(failure.error)
    assert "test_executors.py:" in str(failure.error)


def calls_in_order(
    workers: int, wait: Callable[[ThreadPoolExecutor, list[Future[None]]], None]
) -> Main:
    async def main() -> None:
        log: list[str] = []
        pool = ThreadPoolExecutor(workers)
        wait(pool, [pool.submit(log.append, name) for name in "ab"])
        assert log == ["a", "b"]

    return main


def leave(pool: ThreadPoolExecutor, calls: list[Future[None]]) -> None:
    pool.shutdown()


def take_results(pool: ThreadPoolExecutor, calls: list[Future[None]]) -> None:
    for call in reversed(calls):
        call.result()


@pytest.mark.slow
@pytest.mark.parametrize("wait", [leave, take_results])
def test_calls_come_in_any_order_while_the_loop_waits(wait: Any) -> None:
    art.run(calls_in_order(2, wait))
    for report in (
        art.exhaustive(calls_in_order(2, wait)),
        art.exhaustive(calls_in_order(2, wait), fidelity="asyncio"),
        art.explore(calls_in_order(2, wait)),
    ):
        assert report.failure is not None
        with pytest.raises(AssertionError):
            art.replay(calls_in_order(2, wait), report.failure.token)
    assert art.exhaustive(calls_in_order(1, wait)).complete


@pytest.mark.slow
def test_the_loop_may_wait_for_a_lock_that_calls_take_in_any_order() -> None:
    orders = set[tuple[str, ...]]()

    async def main() -> None:
        log: list[str] = []
        both, pool = threading.Semaphore(0), ThreadPoolExecutor(2)

        def call(name: str) -> None:
            log.append(name)
            both.release()

        calls = [pool.submit(call, name) for name in "ab"]
        both.acquire()
        both.acquire()
        await asyncio.gather(*map(asyncio.wrap_future, calls))
        orders.add(tuple(log))

    assert art.exhaustive(main).complete
    assert orders == {("a", "b"), ("b", "a")}


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
