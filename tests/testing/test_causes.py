"""Verdicts: no alarm without a bug, and reports that name the cause and not its shadow."""

import asyncio
import itertools
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import aioreplica.testing as art
from aioreplica.testing import _watchdog
from tests.testing import programs
from tests.testing.programs import step

# --- generators -------------------------------------------------------------------------------


def test_a_generator_that_has_ended_is_not_a_leak() -> None:
    kept: list[AsyncIterator[int]] = []

    async def numbers() -> AsyncIterator[int]:
        yield 1

    async def main() -> None:
        kept.append(numbers())
        async for _ in kept[-1]:
            await asyncio.sleep(0)

    art.explore(main, schedules=20).check()


def test_a_generator_in_the_cycle_of_an_exception_is_not_a_leak() -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1
        raise KeyError

    async def consume() -> int:
        source, errors = numbers(), list[BaseException]()
        try:
            async for _ in source:
                await asyncio.sleep(0)
        except KeyError as error:
            errors.append(error)  # its traceback holds this frame, and the frame the generator
        return len(errors)

    async def main() -> None:
        assert await consume() == 1

    art.explore(main, schedules=20).check()


def test_open_generators_are_named_in_the_order_of_their_making() -> None:
    kept: list[AsyncIterator[int]] = []

    async def main() -> None:
        for make in (first, second, third):
            kept.append(make())
            await anext(kept[-1])

    async def first() -> AsyncIterator[int]:
        yield 1

    async def second() -> AsyncIterator[int]:
        yield 1

    async def third() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(art.LeakError) as caught:
        art.run(main)

    names = [name.rpartition(".")[2] for name in caught.value.generators]
    assert names == ["first", "second", "third"]


# --- numbers ----------------------------------------------------------------------------------


def test_living_scopes_never_share_a_number() -> None:
    async def main() -> None:
        scopes = [anyio.CancelScope() for _ in range(4)]
        for _ in range(20):  # what is freed gives its address to the next one
            del scopes[0]
            scopes += [anyio.CancelScope(), anyio.CancelScope()]
        assert len({hash(scope) for scope in scopes}) == len(scopes)

    art.explore(main, schedules=3).check()


# --- timers -----------------------------------------------------------------------------------


async def waits_for_ever_beside_a_timer() -> None:
    loop = asyncio.get_running_loop()

    def tick() -> None:
        loop.call_later(1, tick)

    tick()
    await asyncio.Event().wait()


@pytest.mark.xslow
def test_a_deadlock_beside_a_timer_is_a_deadlock() -> None:
    failure = art.explore(waits_for_ever_beside_a_timer, max_steps=800).failure

    assert failure is not None
    assert isinstance(failure.error, art.DeadlockError)
    assert [wait.who for wait in failure.error.waits] == ["main"]
    assert "tick" in str(failure.error), "the timer that goes on is named, as no cause"
    with pytest.raises(art.DeadlockError):
        art.replay(waits_for_ever_beside_a_timer, failure.token)


@pytest.mark.xslow
def test_a_timer_that_reschedules_itself_takes_memory_in_proportion() -> None:
    tracemalloc.start()
    try:
        assert art.explore(waits_for_ever_beside_a_timer, max_steps=5000).failed
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 25e6, f"{peak / 1e6:.0f} MB"


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["asyncio", "reorder"])
def test_names_from_a_counter_do_not_hide_the_failure(fidelity: str) -> None:
    numbers = itertools.count()

    async def main() -> None:
        order: list[int] = []

        async def worker(i: int) -> None:
            await asyncio.to_thread(int)
            order.append(i)

        names = [f"worker-{next(numbers)}" for _ in range(2)]
        tasks = [asyncio.create_task(worker(i), name=name) for i, name in enumerate(names)]
        await asyncio.gather(*tasks)
        assert order == [0, 1]

    failure = art.explore(main, fidelity=fidelity).failure

    assert failure is not None
    assert isinstance(failure.error, AssertionError)
    assert len(failure.constraints) == 1


# --- exceptions that died ---------------------------------------------------------------------


def test_a_deadlock_names_the_exception_that_killed_a_task() -> None:
    async def main() -> None:
        ready = asyncio.Event()

        async def worker() -> None:
            await step()
            ready.set() if {}["missing"] else None

        worker_task = asyncio.create_task(worker(), name="worker")
        await ready.wait()
        await worker_task

    failure = art.explore(main).failure

    assert failure is not None
    assert isinstance(failure.error, art.DeadlockError)
    [died] = failure.error.exceptions
    assert "task 'worker'" in died
    assert "KeyError('missing')" in died
    assert "test_causes.py:" in died
    assert died in str(failure.error)


def test_a_deadlock_names_the_exception_that_died_in_a_callback() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future, other = loop.create_future(), loop.create_future()

        def finish() -> None:
            future.set_result(None)
            future.set_result(None)
            other.set_result(None)

        loop.call_soon(finish)
        await other

    with pytest.raises(art.DeadlockError, match=r"InvalidStateError.*test_causes\.py:"):
        art.run(main)


def test_a_program_that_spins_names_the_exception_that_died() -> None:
    async def main() -> None:
        done: list[bool] = []

        async def worker() -> None:
            await step()
            done.append({}["missing"])

        task = asyncio.create_task(worker())
        while not done:
            await asyncio.sleep(0)
        await task

    failure = art.explore(main, max_steps=600).failure

    assert failure is not None
    assert isinstance(failure.error, art.StarvationError)
    assert "KeyError('missing')" in failure.error.exceptions[0]


# --- steps that do not end --------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog look often, and lose patience soon."""
    monkeypatch.setattr(_watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(_watchdog, "STUCK_S", 0.1)


async def spins_in_one_step() -> None:
    done: list[int] = []

    async def first() -> None:
        await step()
        done.append(1)

    async def second() -> None:
        while not done:
            pass

    await asyncio.gather(first(), step(2))
    await second()
    done.clear()
    await asyncio.create_task(second(), name="spinner")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_a_step_that_spins_is_interrupted_and_named(fidelity: str) -> None:
    failure = art.explore(spins_in_one_step, fidelity=fidelity).failure

    assert failure is not None
    assert isinstance(failure.error, art.StarvationError)
    assert "spinner" in str(failure.error)
    assert "test_causes.py:" in str(failure.error)
    assert "in second" in str(failure.error)
    with pytest.raises(art.StarvationError):
        art.replay(spins_in_one_step, failure.token)


@pytest.mark.usefixtures("impatient")
def test_an_op_that_spins_is_interrupted() -> None:
    async def main() -> None:
        def spin() -> None:
            threading.Event().wait(1)  # from here on ops have threads
            while True:
                pass

        await asyncio.to_thread(spin)

    with pytest.raises(art.StarvationError, match="in spin"):
        art.run(main)


@pytest.mark.xslow
@pytest.mark.usefixtures("impatient")
def test_many_short_steps_are_not_interrupted() -> None:
    async def main() -> None:
        for _ in range(20_000):
            await asyncio.sleep(0)

    art.explore(main, schedules=5).check()


# --- reports ----------------------------------------------------------------------------------


async def fails_twice() -> None:
    async def fail(number: int) -> None:
        await step()
        raise ValueError(number)

    async with asyncio.TaskGroup() as group:
        group.create_task(fail(1))
        group.create_task(fail(2))


def test_a_report_lists_the_errors_of_a_group() -> None:
    failure = art.explore(fails_twice).failure

    assert failure is not None
    head = failure.story.splitlines()[:3]
    assert head[0].startswith("ExceptionGroup: ")
    assert head[1:] == ["  ValueError: 1", "  ValueError: 2"]


def test_a_report_says_that_no_interleaving_is_needed() -> None:
    failure = art.explore(fails_twice).failure
    other = art.explore(programs.lost_update).failure

    assert failure is not None
    assert other is not None
    assert "It fails in asyncio's own order" in failure.story
    assert "own order" not in other.story


def test_state_between_runs_does_not_hide_the_failure() -> None:
    runs: list[int] = []

    async def main() -> None:
        runs.append(1)
        await step(len(runs) % 2)
        raise ValueError("the true failure")

    failure = art.explore(main).failure

    assert failure is not None
    assert isinstance(failure.error, art.NondeterminismError)
    assert "ValueError('the true failure')" in str(failure.error)


def test_two_outcomes_of_the_same_steps_are_both_reported() -> None:
    runs: list[int] = []
    kept: list[AsyncIterator[int]] = []

    async def count() -> AsyncIterator[int]:
        yield 1

    async def main() -> None:
        runs.append(1)
        if len(runs) % 2:
            kept.append(count())
            await anext(kept[-1])

    with pytest.raises(art.NondeterminismError, match="ended otherwise: leaked and passed"):
        art.run(main)


# --- leaks that are meant ---------------------------------------------------------------------


async def keep_alive() -> None:
    while True:
        await asyncio.sleep(30)


async def leaves_a_task() -> None:
    asyncio.create_task(keep_alive(), name="pool-keeper-7")  # noqa: RUF006 - that is the point


@pytest.mark.parametrize(
    "ignored", ["ignore", "keep_alive", "pool-*", keep_alive, ["other", keep_alive]]
)
@pytest.mark.parametrize("call", [art.run, art.explore, art.exhaustive, art.cancel_everywhere])
def test_ignored_tasks_are_not_leaks(call: Any, ignored: Any) -> None:
    result = call(leaves_a_task, leaks=ignored)

    assert result is None or not result.failed


def test_other_leaks_are_still_found() -> None:
    async def main() -> None:
        await leaves_a_task()
        asyncio.create_task(asyncio.sleep(9), name="left")  # noqa: RUF006 - that is the point

    failure = art.explore(main, leaks=keep_alive).failure

    assert failure is not None
    assert isinstance(failure.error, art.LeakError)
    assert failure.error.tasks == ("left (sleep)",)
    with pytest.raises(art.LeakError):
        art.replay(main, failure.token, leaks=keep_alive)


def test_an_invalid_leaks_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="leaks must be 'ignore'"):
        art.explore(leaves_a_task, leaks=3)  # type: ignore[arg-type]


# --- what a step does to others ---------------------------------------------------------------


async def tells_others() -> None:
    ready, seen = asyncio.Event(), anyio.Event()

    async def wait(event: Any) -> None:
        await event.wait()

    waiters = [
        asyncio.create_task(wait(each), name=f"waits-{i}") for i, each in enumerate((ready, seen))
    ]
    last = asyncio.create_task(asyncio.sleep(9), name="sleeper")
    await step()
    ready.set()
    seen.set()
    last.cancel()
    await asyncio.wait([*waiters, last])
    ready.clear()
    raise ValueError("to see the story")


def test_the_steps_of_a_failure_name_their_effects_on_others() -> None:
    failure = art.explore(tells_others).failure

    assert failure is not None
    [told] = [each for each in failure.steps if "sets 'ready'" in each.effects]
    assert told.who == "main"
    assert set(told.effects) == {
        "sets 'ready'", "sets 'seen'", "wakes task 'waits-0'", "wakes task 'waits-1'",
        "cancels task 'sleeper'",
    }  # fmt: skip
    assert "clears 'ready'" in failure.steps[-1].effects
    assert "; sets 'ready'; sets 'seen'; wakes" in failure.timeline


def test_the_await_that_came_too_late_is_named() -> None:
    failure = art.explore(programs.lost_wakeup).failure

    assert failure is not None
    [cause] = failure.causes
    assert cause.startswith("consumer (Task-1) has waited at Event at programs.py:")
    assert "producer (Task-2) set 'event' at programs.py:" in cause
    assert "consumer (Task-1) cleared it at programs.py:" in cause
    assert cause in failure.story


@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_an_unheard_notification_is_named(fidelity: str) -> None:
    async def main() -> None:
        condition = asyncio.Condition()

        async def notify() -> None:
            async with condition:
                condition.notify()

        task = asyncio.create_task(notify())
        await step()
        async with condition:
            await condition.wait()
        await task

    failure = art.explore(main, fidelity=fidelity).failure

    assert failure is not None
    assert "too late: notify (Task-1) notified 'condition' at test_causes.py:" in failure.causes[0]


@pytest.mark.parametrize("find", [art.explore, art.exhaustive, art.cancel_everywhere])
def test_a_primitive_that_is_watched_takes_its_arguments_by_name(find: Any) -> None:
    async def main() -> None:
        condition = asyncio.Condition()
        async with condition:
            condition.notify(n=2)

    find(main).check()


# --- memory -----------------------------------------------------------------------------------


async def starts_many(count: int) -> None:
    for _ in range(count):
        await asyncio.create_task(step())
        await asyncio.to_thread(bytes, 1000)


@pytest.mark.slow
def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    peaks: list[int] = []
    for count in (1_500, 6_000):
        tracemalloc.start()
        try:
            art.run(partial(starts_many, count))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    per_step = (peaks[1] - peaks[0]) / (4_500 * 8)
    assert per_step < 40, f"{per_step:.0f} bytes for each step"


# --- pictures ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    failure = art.explore(tells_others).failure
    assert failure is not None

    page = failure.save_html(tmp_path / "t.html").read_text(encoding="utf-8")
    assert "wakes task &#x27;waits-0&#x27;" in page
    pytest.importorskip("matplotlib")
    picture = failure.save_png(tmp_path / "t.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = art.explore(tells_others).failure
    assert failure is not None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"pip install aioreplica\[examples\]"):
        failure.save_png(tmp_path / "t.png")
    assert not list(tmp_path.iterdir())


# --- where things are, in few lines -----------------------------------------------------------


def test_a_line_of_a_library_comes_behind_the_line_that_led_there(tmp_path: Path) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    source = home / "parked.py"
    source.write_text(
        "import asyncio\n\nasync def park():\n"
        "    await asyncio.get_running_loop().create_future()\n"
    )
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)

    async def main() -> None:
        await names["park"]()

    line = main.__code__.co_firstlineno + 1
    error = art.explore(main, schedules=1).failure
    assert error is not None
    assert f"{Path(__file__).name}:{line} > parked.py:4" in str(error.error)


def test_a_callback_that_comes_again_and_again_is_one_line() -> None:
    async def main() -> None:
        loop, left = asyncio.get_running_loop(), [7]

        def again() -> None:
            left[0] -= 1
            if left[0]:
                loop.call_soon(again)
            else:
                raise_later.set_exception(KeyError("after seven callbacks"))

        raise_later = loop.create_future()
        loop.call_soon(again)
        await raise_later

    report = art.explore(main, schedules=1)
    assert report.failure is not None
    lines = [line for line in report.failure.timeline.splitlines() if "times)" in line]
    assert len(lines) == 1
    assert "again" in lines[0]


def test_a_task_that_spins_has_one_line_in_the_timeline() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    failure = art.explore(main, schedules=1, max_steps=300).failure
    assert failure is not None
    assert failure.timeline.count("->") < 6
    assert "times)" in failure.timeline
