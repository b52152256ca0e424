"""Faults: decisions of the schedule, replayed with it."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import DeviceError, WorkerLostError
from aioreplica.testing import _trace
from tests.testing.programs import step


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


# --- cancellation -----------------------------------------------------------------------------


async def forgets_to_give_back() -> None:
    """A request that is cancelled while it holds a connection keeps it."""
    free = ["connection"]

    async def request() -> None:
        await step()
        connection = free.pop()
        await step()
        free.append(connection)

    for number in range(2):
        task = asyncio.create_task(request(), name=f"request-{number}")
        await asyncio.wait([task])
        task.cancelled() or task.result()


async def gives_back() -> None:
    """The same, with a `finally`; what is cancelled cancels who awaits it."""
    free = ["connection"]

    async def request() -> None:
        connection = free.pop()
        try:
            await step()
        finally:
            free.append(connection)

    for number in range(2):
        await asyncio.create_task(request(), name=f"request-{number}")
    assert free


async def forgets_what_it_holds() -> None:
    """A worker that is cancelled late, at its fourth await, keeps what it holds."""
    held: list[int] = []

    async def worker() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
        held.append(1)
        await asyncio.sleep(1)
        held.pop()

    async def tick() -> None:
        for _ in range(100):
            await asyncio.sleep(0.05)

    await asyncio.wait([asyncio.create_task(worker(), name="worker"), asyncio.create_task(tick())])
    assert not held


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_a_cancellation_at_a_late_await_is_found_at_every_fidelity(fidelity: str) -> None:
    faults = art.Faults().cancel_task("worker")
    report = art.explore(forgets_what_it_holds, fidelity=fidelity, faults=faults)

    assert report.failed
    assert report.confirmed is True
    with pytest.raises(AssertionError):
        art.replay(forgets_what_it_holds, report.confirmed_token)


@pytest.mark.parametrize("pattern", ["request-*", "request", None])
def test_cancelling_a_task_finds_missing_cleanup(pattern: str | None) -> None:
    faults = art.Faults().cancel_task(pattern)
    for seed in range(3):
        failure = art.explore(forgets_to_give_back, seed=seed, faults=faults).failure

        assert failure is not None
        assert isinstance(failure.error, IndexError)
        assert "cancels task 'request-0'" in failure.story
        with pytest.raises(IndexError):
            art.replay(forgets_to_give_back, failure.token, faults=faults)
    art.explore(forgets_to_give_back, schedules=50).check()


def test_a_cancellation_that_comes_through_to_the_main_task_has_passed() -> None:
    faults = art.Faults().cancel_task("request-*", times=2)

    art.explore(gives_back, schedules=300, faults=faults).check()


@pytest.mark.parametrize("fidelity", ["reorder", "asyncio"])
def test_a_cancelled_task_strikes_at_each_of_its_awaits_and_within_its_budget(
    fidelity: str,
) -> None:
    places: set[int] = set()
    most = 0

    async def main() -> None:
        nonlocal most
        reached = [0] * 4

        async def walk(number: int) -> None:
            for place in range(4):
                reached[number] = place
                await step()
            reached[number] = 4

        tasks = [asyncio.create_task(walk(number)) for number in range(4)]
        await asyncio.wait(tasks)
        struck = [number for number, task in enumerate(tasks) if task.cancelled()]
        places.update(reached[number] for number in struck)
        most = max(most, len(struck))

    faults = art.Faults().cancel_task(times=2)
    art.explore(main, schedules=300, fidelity=fidelity, faults=faults).check()

    assert places == {0, 1, 2, 3}
    assert most == 2


def test_only_the_task_that_was_named_by_its_number_is_cancelled() -> None:
    struck: set[str] = set()

    async def main() -> None:
        tasks = [asyncio.create_task(step(4), name=f"worker-{number}") for number in range(4)]
        await asyncio.wait(tasks)
        struck.update(task.get_name() for task in tasks if task.cancelled())

    art.explore(main, schedules=200, faults=art.Faults().cancel_task("worker-*", at=1)).check()
    assert struck == {"worker-1"}
    two = art.Faults().cancel_task("worker-*", at=1, times=2)
    art.explore(main, schedules=200, faults=two).check()
    assert struck == {"worker-1", "worker-2"}


@pytest.mark.parametrize("orders", [1, 3])
def test_any_task_is_cancelled_everywhere(orders: int) -> None:
    report = art.cancel_everywhere(forgets_to_give_back, task="request-*", orders=orders)

    failure = report.failure
    assert failure is not None
    assert failure.constraints[0].startswith("task 'request-0' is cancelled at ")
    with pytest.raises(IndexError):
        art.replay(forgets_to_give_back, failure.token)
    assert art.cancel_everywhere(gives_back, task="*", orders=orders).complete


@pytest.mark.parametrize("is_early", [False, True])
def test_a_task_that_is_made_after_many_steps_is_cancelled_too(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trace, "MAX_TRACE_STEPS", 20)

    async def main() -> None:
        if is_early:
            await asyncio.wait([asyncio.create_task(step(), name="request-early")])
        await step(30)
        await forgets_to_give_back()

    failure = art.cancel_everywhere(main, task="request-*").failure

    assert failure is not None
    assert isinstance(failure.error, IndexError)
    [constraint] = failure.constraints
    assert constraint.startswith("task 'request-0' is cancelled after step ")
    with pytest.raises(IndexError):
        art.replay(main, failure.token)


def test_cancelling_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"No task .* is called 'reqest'.*request-0, request"):
        art.cancel_everywhere(gives_back, task="reqest")


async def passes_on_a_permit() -> None:
    """One that was given the permit, and is cancelled before it goes on, passes nothing on."""
    waiters: list[asyncio.Future[None]] = []

    async def wait() -> None:
        mine = asyncio.get_running_loop().create_future()
        waiters.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine in waiters:
                waiters.remove(mine)
            raise
        pass_on()

    def pass_on() -> None:
        for waiter in waiters:
            if not waiter.done():
                waiters.remove(waiter)
                waiter.set_result(None)
                break

    tasks = [asyncio.create_task(wait(), name=f"waiter-{number}") for number in range(2)]
    while len(waiters) + sum(task.done() for task in tasks) < 2:
        await step()
    pass_on()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("by_fault", [True, False])
def test_a_wake_up_that_a_cancellation_loses_is_named(by_fault: bool) -> None:
    if by_fault:
        faults = art.Faults().cancel_task("waiter-0")
        failure = art.explore(passes_on_a_permit, faults=faults).failure
    else:
        failure = art.cancel_everywhere(passes_on_a_permit, task="waiter-0").failure

    assert failure is not None
    assert isinstance(failure.error, art.DeadlockError)
    [cause] = failure.causes
    assert "main woke task 'waiter-0' in step" in cause
    assert "was cancelled in step" in cause
    assert cause in failure.story


# --- points -----------------------------------------------------------------------------------


async def commits_twice() -> None:
    written: list[int] = []
    for _ in range(2):
        try:
            written.append(1)
            await step()
            art.fault_point("after commit")
            break
        except OSError:
            continue
    assert len(written) == 1


def test_a_fault_point_fails_where_the_schedule_chooses() -> None:
    faults = art.Faults().fail_point("after commit")
    failure = art.explore(commits_twice, faults=faults).failure

    assert failure is not None
    assert isinstance(failure.error, AssertionError)
    with pytest.raises(AssertionError):
        art.replay(commits_twice, failure.token)
    art.explore(commits_twice, schedules=50).check()
    art.explore(commits_twice, schedules=50, faults=art.Faults().fail_point("other")).check()
    asyncio.run(commits_twice())


def test_a_fault_point_raises_the_given_error() -> None:
    wanted = art.Faults().fail_point("after commit", at=0, error=TimeoutError("too late"))

    async def main() -> None:
        with pytest.raises(TimeoutError, match="too late"):
            art.fault_point("after commit")

    art.explore(main, schedules=5, faults=wanted).check()


@pytest.mark.parametrize(
    "make",
    [
        lambda faults: faults.cancel_task(times=0),
        lambda faults: faults.cancel_task("x", at=-1),
        lambda faults: faults.fail_point(""),
        lambda faults: faults.fail_point("x", error=3),
    ],
)
def test_faults_of_tasks_and_points_are_checked(make: Callable[[art.Faults], object]) -> None:
    faults = art.Faults()
    with pytest.raises((TypeError, ValueError)):
        make(faults)
    assert not faults.entries


async def one_of_each() -> None:
    """A task, an op and a point."""
    child = asyncio.create_task(asyncio.sleep(0.1), name="user-1")
    await asyncio.gather(child, asyncio.to_thread(int), return_exceptions=True)
    with suppress(OSError):
        art.fault_point("save")


@pytest.mark.parametrize(
    ("make", "call", "seen"),
    [
        (lambda f: f.cancel_task("user_*"), r"cancel_task\('user_\*'\)", "user-1, sleep"),
        (lambda f: f.fail_point("safe"), r"fail_point\('safe'\)", "save"),
        (lambda f: f.fail_op("cpu:9", fn="int"), r"fail_op\('cpu:9', fn='int'\)", "int on default"),
        (lambda f: f.lose_worker(3), r"lose_worker\('cpu:3'\)", "int on default"),
        (lambda f: f.hang_op(fn="in"), r"hang_op\(fn='in'\)", "int on default"),
        (lambda f: f.slow_device("gpu"), r"slow_device\('gpu'\)", "int on default"),
        (lambda f: f.reset_connection(80), r"reset_connection\(':80'\)", "nothing"),
        (lambda f: f.split_data(), r"split_data\(\)", "nothing"),
    ],
)
def test_a_fault_that_finds_nothing_to_strike_is_told(
    make: Callable[[art.Faults], art.Faults], call: str, seen: str
) -> None:
    """As a renamed task leaves a test that tests nothing."""
    told = f"{call} found nothing to strike in any of 20 schedules.* What came by: .*{seen}"
    faults = make(art.Faults().fail_point("save").cancel_task("user-*").slow_device())
    [warning] = art.explore(one_of_each, faults=faults, schedules=20).warnings
    assert re.match(told, warning)
    assert art.explore(one_of_each, schedules=20).warnings == ()
