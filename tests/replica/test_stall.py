"""The stall watch: a run without progress ends with a table and every replica's stack."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import StallError
from aioreplica.replica._stall import StallWatch
from tests.conftest import STRATEGIES

pytestmark = pytest.mark.usefixtures("no_task_left")


class FakeLoop:
    """A clock and timers that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, object, bool]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, fn: object) -> "FakeLoop.Timer":
        return self.add(FakeLoop.Timer(self.now + delay, fn))

    def call_at(self, when: float, fn: object) -> "FakeLoop.Timer":
        return self.add(FakeLoop.Timer(when, fn))

    def add(self, timer: "FakeLoop.Timer") -> "FakeLoop.Timer":
        self.timers.append(timer)
        return timer

    def move_to(self, when: float) -> None:
        for _ in range(1000):
            due = [t for t in self.timers if t.when <= when]
            if not due:
                break
            timer = min(due, key=lambda t: t.when)
            self.timers.remove(timer)
            self.now = timer.when
            if not timer.cancelled:
                timer.fn()
        else:
            raise AssertionError(f"There is always one more timer at {self.now}.")
        self.now = when

    class Timer:
        def __init__(self, when: float, fn: object) -> None:
            self.when, self.fn, self.cancelled = when, fn, False

        def cancel(self) -> None:
            self.cancelled = True


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


# ---- the watch ----------------------------------------------------------------------------------


def test_it_reports_once_after_the_timeout() -> None:
    loop, stalls = FakeLoop(), []
    StallWatch(loop, 8.0, lambda: 0, lambda _timeout_s: stalls.append(loop.now))

    loop.move_to(7.9)
    assert stalls == []
    loop.move_to(100.0)

    assert stalls == [8.0]
    assert loop.timers == []


def test_progress_starts_the_clock_again() -> None:
    loop, stalls, progress = FakeLoop(), [], [0]
    StallWatch(loop, 8.0, lambda: progress[0], lambda _timeout_s: stalls.append(loop.now))

    for step in range(1, 10):
        loop.move_to(5.0 * step)
        progress[0] += 1
    assert stalls == []
    loop.move_to(100.0)

    assert len(stalls) == 1
    assert 45.0 + 8.0 <= stalls[0] <= 45.0 + 9.0


def test_a_time_that_a_float_cannot_hold_is_noticed_at_once() -> None:
    loop, stalls = FakeLoop(), []
    loop.now = next(now for now in (10.1, 100.0, 1e7) if (now + 0.02) - now < 0.02)
    began = loop.now
    StallWatch(loop, 0.02, lambda: 0, lambda _timeout_s: stalls.append(loop.now))

    loop.move_to(began + 0.02)

    assert stalls == [began + 0.02]


def test_a_stopped_watch_is_silent() -> None:
    loop, stalls = FakeLoop(), []
    watch = StallWatch(loop, 8.0, lambda: 0, lambda _timeout_s: stalls.append(loop.now))
    watch.stop()
    watch.stop()

    loop.move_to(100.0)

    assert stalls == []


# ---- in a run -----------------------------------------------------------------------------------

SHORT = ar.RunOptions(stall_timeout=0.02)


def run_once(kind: str, step: Callable[[], Any]) -> tuple[Any, ...]:
    """Run a step in simulated time, where a stall takes as long as it says."""

    async def main() -> tuple[Any, ...]:
        async with STRATEGIES[kind]() as strategy:
            return strategy.local_results(await strategy.run(step, options=SHORT))

    results: tuple[Any, ...] = art.run(main)
    return results


async def forgotten_event() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_a_stalled_run_shows_table_and_stacks(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 1:
            await forgotten_event()
        await me().all_reduce("sum", 1.0)

    with pytest.raises(StallError) as caught:
        await gang.run(step, options=SHORT)

    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.step, error.timeout_s) == (0, 0.02)
    others = ["waiting"] * (gang.num_replicas_in_sync - 2)
    assert [row.state for row in error.rows] == ["waiting", "running", *others]
    assert error.rows[0].collective == "all_reduce #1 (SUM)"
    assert error.rows[0].site.startswith(f"{__file__}:")
    assert len(error.stacks) == gang.num_replicas_in_sync
    assert "in step" in error.stacks[0]
    assert "in forgotten_event: await asyncio.Event().wait()" in error.stacks[1]
    for stack in error.stacks:
        assert stack in str(error)


def work_until_aborted(ctx: ar.ReplicaContext) -> None:
    """Hold the device thread until the run was ended, however late that is noticed."""
    with suppress(asyncio.CancelledError):
        while True:
            ctx._own.check_running()
            threading.Event().wait(0.001)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_stall_drains_started_ops(kind: str) -> None:
    started: list[int] = []
    ended: list[int] = []

    def op(ctx: ar.ReplicaContext) -> None:
        started.append(1)
        work_until_aborted(ctx)
        ended.append(1)

    async def step() -> None:
        await me().run_on_device(op, me())

    with pytest.raises(StallError):
        run_once(kind, step)
    assert started  # ops that wait for their thread all this time are withdrawn
    assert ended == started


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_plain_step_that_stalls(kind: str) -> None:
    with pytest.raises(StallError, match="device thread"):
        run_once(kind, lambda: work_until_aborted(me()))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_progress_prevents_a_stall(kind: str) -> None:
    """Merges and ops for several timeouts in all, none of them longer than one."""

    def op() -> None:
        threading.Event().wait(0.015)  # in simulated time

    async def step() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(6):
            assert await me().any(True)
            await me().run_on_device(op)
        return loop.time() - began

    assert min(run_once(kind, step)) > 4 * 0.02


@pytest.mark.asyncio
async def test_a_quick_run_leaves_no_timer(strategy: ar.Strategy) -> None:
    async def step() -> None:
        await me().barrier()

    await strategy.run(step, options=ar.RunOptions(stall_timeout=1000))
    await strategy.aclose()  # an open one has a timer for all its runs
    scheduled = getattr(asyncio.get_running_loop(), "_scheduled", [])
    assert [timer for timer in scheduled if not timer.cancelled()] == []
