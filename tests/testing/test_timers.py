"""Timers of a simulated loop: in the order of their times, whatever moves the clock."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest

import aioreplica.testing as art
from aioreplica.testing._participants import JITTER_S

FIDELITIES = ["asyncio", "reorder"]


def virtual_sleep() -> Callable[[float], None]:
    """Return `time.sleep` as it is while a program runs: it takes no real time."""
    return vars(time)["sleep"]  # type: ignore[no-any-return]


def block_the_loop() -> None:
    virtual_sleep()(0.5)


def block_on_a_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(virtual_sleep(), 0.5).result()


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("block", [block_the_loop, block_on_a_pool])
def test_timers_that_a_blocked_loop_has_missed_keep_their_order(
    block: Callable[[], None], fidelity: str
) -> None:
    async def main() -> None:
        loop, out = asyncio.get_running_loop(), list[float]()
        for delay in (0.3, 0.1, 0.2):
            loop.call_later(delay, out.append, delay)
        block()
        await asyncio.sleep(1)
        assert out == [0.1, 0.2, 0.3]

    art.explore(main, schedules=100, fidelity=fidelity).check()


def test_a_missed_timer_that_is_cancelled_lets_the_next_one_go() -> None:
    async def main() -> list[int]:
        loop, out = asyncio.get_running_loop(), list[int]()
        first = loop.call_later(0.1, out.append, 1)
        loop.call_later(0.2, out.append, 2)
        loop.call_soon(first.cancel)
        block_the_loop()
        loop.call_later(0, out.append, 3)
        await asyncio.sleep(1)
        return out

    assert art.run(main) == [2, 3]
    assert [art.run(main, seed=seed)[-2:] for seed in range(20)] == [[2, 3]] * 20


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_timer_without_delay_fires_while_tasks_go_on(fidelity: str) -> None:
    async def main() -> None:
        fired = asyncio.Event()
        asyncio.get_running_loop().call_later(0, fired.set)
        while not fired.is_set():
            await asyncio.sleep(0)

    report = art.explore(main, schedules=60, fidelity=fidelity).check()

    assert report.schedules_run == 60


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_timer_without_delay_does_not_overtake_a_callback(fidelity: str) -> None:
    async def main() -> None:
        loop, out = asyncio.get_running_loop(), list[int]()
        loop.call_soon(out.append, 1)
        loop.call_later(0, out.append, 2)
        await asyncio.sleep(0.1)
        assert out == [1, 2]

    art.explore(main, schedules=60, fidelity=fidelity).check()


def test_timers_of_one_instant_are_told_apart() -> None:
    async def main() -> None:
        loop, out = asyncio.get_running_loop(), list[int]()
        for number in range(2):
            loop.call_later(1, out.append, number)
        await asyncio.sleep(2)
        assert out == [0, 1]

    for seed in range(10):
        failure = art.explore(main, seed=seed).failure
        assert failure is not None
        assert "timer" in failure.constraints[0]


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for delay in (0.0001, 0.0004, 0.0009):
            loop.call_later(delay, int).cancel()
        start = time.monotonic()
        await asyncio.to_thread(int)
        return round(time.monotonic() - start, 6)

    assert {art.run(main, seed=seed) for seed in range(30)} == {0.001}


def test_a_program_that_spins_does_not_reach_a_cancelled_timer() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1000, int).cancel()
        start = loop.time()
        while loop.time() == start:
            await asyncio.sleep(0)
        return loop.time() - start

    assert art.run(main) == 1


# --- infinity ---------------------------------------------------------------------------------


async def sleeps_for_ever() -> None:
    await asyncio.sleep(math.inf)


async def is_given_for_ever() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(math.inf):
            await asyncio.get_running_loop().create_future()


async def waits_beside_a_sleeper() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)


async def sleeps_for_ever_in_a_thread() -> None:
    await asyncio.to_thread(lambda: asyncio.run(anyio.sleep_forever()))


@pytest.mark.parametrize(
    "main",
    [sleeps_for_ever, is_given_for_ever, waits_beside_a_sleeper, sleeps_for_ever_in_a_thread],
)
def test_a_timer_at_infinity_never_fires(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    failure = art.explore(main, schedules=20).failure

    assert failure is not None
    assert isinstance(failure.error, art.DeadlockError)
    assert "main awaits" in str(failure.error)


def test_a_timer_at_infinity_can_be_cancelled() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        sleeper = asyncio.create_task(asyncio.sleep(math.inf))
        for _ in range(10_001):  # time moves on, but not to the end of all times
            await asyncio.sleep(0)
        async with asyncio.timeout(math.inf):
            await asyncio.sleep(1)
        sleeper.cancel()
        await asyncio.wait([sleeper])
        return loop.time() - start

    assert art.run(main) < 10


def test_a_thread_that_waits_for_ever_is_refused_as_a_real_one() -> None:
    async def main() -> None:
        waits: list[Callable[[float], object]] = [virtual_sleep(), threading.Event().wait]
        for wait in waits:
            with pytest.raises(OverflowError):
                wait(math.inf)
            with pytest.raises(OverflowError):
                await asyncio.to_thread(wait, math.inf)

    art.explore(main, schedules=20).check()


# --- times that nearly meet -------------------------------------------------------------------


async def two_writers(unit_s: float) -> None:
    """Lose an update if the second writer wakes before the first has written."""
    written = 0

    async def write(delay_s: float) -> None:
        nonlocal written
        await asyncio.sleep(delay_s)
        seen = written
        await asyncio.sleep(0)
        written = seen + 1

    await asyncio.gather(write(unit_s), write(2 * unit_s))
    assert written == 2


async def sleep_as_order(unit_s: float) -> None:
    """Count on a sleep being longer than a few steps of another task."""
    ready: list[bool] = []

    async def prepare() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        ready.append(True)

    async def use() -> None:
        await asyncio.sleep(unit_s)
        assert ready

    await asyncio.gather(prepare(), use())


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("main", [two_writers, sleep_as_order])
def test_times_a_millisecond_apart_may_collide(
    main: Callable[[float], Coroutine[Any, Any, None]], fidelity: str
) -> None:
    for seed in range(5):
        program = partial(main, 0.001)
        failure = art.explore(program, schedules=50, seed=seed, fidelity=fidelity).failure
        assert failure is not None
        assert 1 <= len(failure.constraints) <= 2
        with pytest.raises(AssertionError):
            art.replay(program, failure.token)


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("main", [two_writers, sleep_as_order])
def test_times_well_apart_do_not_collide(
    main: Callable[[float], Coroutine[Any, Any, None]], fidelity: str
) -> None:
    art.explore(partial(main, 0.02), schedules=200, fidelity=fidelity).check()


def test_an_early_timer_counts_as_a_preemption() -> None:
    main = partial(sleep_as_order, 0.001)

    assert art.exhaustive(main, max_preemptions=1).failed
    assert art.exhaustive(partial(sleep_as_order, 0.02), max_preemptions=1).complete


def test_steps_take_no_more_than_a_moment_in_all() -> None:
    """Timers that make each other cannot take time from a task that is ready all along."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.call_later(0.004, tick)

        tick()
        start = loop.time()
        for _ in range(40):
            await asyncio.sleep(0)
        assert loop.time() - start <= 0.01

    art.explore(main, schedules=100).check()


async def polls_until_timers_have_fired(num_timers: int) -> None:
    is_set = False

    async def set_it() -> None:
        nonlocal is_set
        for _ in range(num_timers):
            await asyncio.sleep(0.001)
        is_set = True

    task = asyncio.create_task(set_it())
    while not is_set:
        await asyncio.sleep(0)
    await task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fidelity", "num_timers"),
    [
        pytest.param("adversarial", 3, marks=pytest.mark.xslow),
        ("asyncio", 3),
        pytest.param("asyncio", 40, marks=pytest.mark.xslow),
        pytest.param("reorder", 40, marks=pytest.mark.xslow),
        pytest.param("reorder", 3, marks=pytest.mark.xslow),
        pytest.param("adversarial", 40, marks=pytest.mark.xslow),
    ],
)
def test_a_polled_condition_is_met_in_every_schedule(fidelity: str, num_timers: int) -> None:
    program = partial(polls_until_timers_have_fired, num_timers)

    art.explore(program, schedules=15, fidelity=fidelity).check()


def test_what_was_woken_is_held_no_longer_than_timers_may_be_early() -> None:
    longest = 0.0

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def wait(delays: list[float]) -> None:
            nonlocal longest
            for delay in delays:
                woken_at: asyncio.Future[float] = loop.create_future()
                loop.call_later(delay, lambda told=woken_at: told.set_result(loop.time()))
                woken = await woken_at
                longest = max(longest, loop.time() - woken)
                await asyncio.to_thread(int)

        await asyncio.gather(
            wait([0.001, 0.3]), wait([0.005, 0.02]), wait([0.1, 0.004]), asyncio.sleep(0.015)
        )

    art.explore(main, schedules=300).check()

    assert longest <= JITTER_S + 1e-9
