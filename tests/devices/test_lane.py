"""Lanes: order, threads, priority, statistics, stopping."""

import asyncio
import contextvars
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import CompletionQueue, Lane, LaneStatistics, Op, OpTracker
from aioreplica.telemetry import Observer, Observers

RunOn = Callable[..., Any]
LIMIT_S = 60

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Surprise(BaseException):
    """An error that `except Exception` does not catch."""


def put(lane: Lane, fn: Callable[..., Any], *args: Any) -> Op:
    op = Op(CompletionQueue.of_running_loop(), fn, args, {})
    lane.put(op)
    return op


@pytest.mark.asyncio
async def test_ops_of_a_lane_run_in_the_order_they_were_put(lane: Lane, gated_op: Any) -> None:
    seen: list[int] = []
    ops = [put(lane, gated_op), *(put(lane, seen.append, i) for i in range(100))]

    gated_op.release()
    for op in reversed(ops):
        await op

    assert seen == list(range(100))


@pytest.mark.asyncio
async def test_ops_of_a_lane_never_overlap(lane: Lane) -> None:
    inside: list[int] = []

    def alone(i: int) -> int:
        inside.append(i)
        assert inside == [i]
        inside.remove(i)
        return i

    ops = [put(lane, alone, i) for i in range(200)]

    assert [await op for op in ops] == list(range(200))


@pytest.mark.asyncio
async def test_arguments_and_result_are_passed_through(lane: Lane) -> None:
    value = object()
    op = Op(CompletionQueue.of_running_loop(), lambda *a, **k: (a, k), (value,), {"key": 2})
    lane.put(op)

    args, kwargs = await op

    assert args[0] is value
    assert kwargs == {"key": 2}


@pytest.mark.asyncio
async def test_an_op_sees_the_callers_context_and_keeps_its_own_changes(
    lane: Lane, run_on: RunOn
) -> None:
    def change() -> str:
        before = colour.get()
        colour.set("green")
        return before

    colour.set("red")

    assert await run_on(lane, change) == "red"
    assert colour.get() == "red"
    assert await run_on(lane, colour.get) == "red"


@pytest.mark.asyncio
async def test_the_context_is_that_of_the_call_not_of_the_start(lane: Lane, gated_op: Any) -> None:
    put(lane, gated_op)
    colour.set("blue")
    op = put(lane, colour.get)
    colour.set("late")
    gated_op.release()

    assert await op == "blue"


@pytest.mark.asyncio
async def test_one_named_daemon_thread_serves_all_ops(lane: Lane, run_on: RunOn) -> None:
    threads = {await run_on(lane, threading.current_thread) for _ in range(20)}

    [thread] = threads
    assert thread.daemon
    assert "test:0" in thread.name
    assert thread is not threading.current_thread()


def test_a_lane_without_ops_has_no_thread() -> None:
    before = threading.active_count()

    Lane("test:idle")

    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="policies are per thread on Linux only")
@pytest.mark.asyncio
@pytest.mark.parametrize("background", [False, True])
async def test_a_lane_in_the_background_takes_idle_cores_only(
    background: bool, run_on: RunOn
) -> None:
    def policy() -> int:
        return os.sched_getscheduler(0)

    lane, mine = Lane("test:background", background=background), policy()

    assert await run_on(lane, policy) == (os.SCHED_IDLE if background else mine)
    assert policy() == mine


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is per thread on Linux only")
@pytest.mark.asyncio
@pytest.mark.parametrize("nice", [0, 3, 5])
async def test_threads_are_nicer_than_the_loop(nice: int, run_on: RunOn) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    lane, mine = Lane("test:nice", nice=nice), niceness()

    assert await run_on(lane, niceness) == min(19, mine + nice)
    assert niceness() == mine
    lane.stop()


@pytest.mark.asyncio
async def test_a_system_that_refuses_the_priority_is_ignored(
    monkeypatch: pytest.MonkeyPatch, lane: Lane, run_on: RunOn
) -> None:
    def refuse(*_args: int) -> None:
        raise PermissionError("not today")

    monkeypatch.setattr(os, "setpriority", refuse)

    assert await run_on(lane, lambda: 7) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is per thread on Linux only")
@pytest.mark.asyncio
async def test_where_the_background_is_refused_threads_are_nice_all_the_same(
    monkeypatch: pytest.MonkeyPatch, run_on: RunOn
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.delattr(os, "sched_setscheduler")  # as on macOS
    lane, mine = Lane("test:refused", nice=3, background=True), niceness()

    assert await run_on(lane, niceness) == min(19, mine + 3)
    lane.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, Surprise, MemoryError]
)
async def test_whatever_an_op_raises_reaches_its_caller_and_the_thread_lives(
    lane: Lane, run_on: RunOn, kind: type[BaseException]
) -> None:
    error = kind("broken")

    def fail() -> None:
        raise error

    with pytest.raises(kind) as caught:
        await run_on(lane, fail)
    assert caught.value is error
    assert await run_on(lane, lambda: "next") == "next"


@pytest.mark.asyncio
async def test_stop_iteration_becomes_a_runtime_error(lane: Lane, run_on: RunOn) -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await run_on(lane, next, iter(()))

    assert isinstance(caught.value.__cause__, StopIteration)
    assert await run_on(lane, lambda: "next") == "next"


@pytest.mark.asyncio
async def test_a_cancelled_error_of_the_op_itself_reaches_the_caller(
    lane: Lane, run_on: RunOn
) -> None:
    def fail() -> None:
        raise asyncio.CancelledError("from the op")

    with pytest.raises(asyncio.CancelledError, match="from the op"):
        await run_on(lane, fail)
    assert await run_on(lane, lambda: "next") == "next"


@pytest.mark.asyncio
async def test_statistics_count_queued_running_and_done(lane: Lane, gated_op: Any) -> None:
    assert lane.statistics() == LaneStatistics(queued=0, running=0, done=0, busy_s=0.0)
    ops = [put(lane, gated_op), put(lane, int), put(lane, int)]
    await gated_op.started.wait()

    held = lane.statistics()
    assert (held.queued, held.running, held.done) == (2, 1, 0)
    assert repr(lane) == "<Lane test:0 | 1 running, 2 queued, 0 done>"

    gated_op.release()
    for op in ops:
        await op
    after = lane.statistics()
    assert (after.queued, after.running, after.done) == (0, 0, 3)
    assert after.busy_s > 0.0


@pytest.mark.asyncio
async def test_statistics_do_not_count_withdrawn_ops_as_done(lane: Lane, gated_op: Any) -> None:
    first, second, third = put(lane, gated_op), put(lane, int), put(lane, int)

    assert second.withdraw()
    gated_op.release()
    await first
    await third

    assert lane.statistics().done == 2


@pytest.mark.asyncio
async def test_a_withdrawn_op_lets_go_of_its_arguments(lane: Lane, gated_op: Any) -> None:
    """The lane still holds the op, and counts it, until a thread takes it."""
    put(lane, gated_op)
    await gated_op.started.wait()
    argument = {1}
    held = weakref.ref(argument)
    op = put(lane, len, argument)
    del argument

    assert op.withdraw()

    assert held() is None
    assert lane.statistics().queued == 1


@pytest.mark.asyncio
async def test_a_failed_op_counts_as_done(lane: Lane, run_on: RunOn) -> None:
    with pytest.raises(ZeroDivisionError):
        await run_on(lane, divmod, 1, 0)

    assert lane.statistics().done == 1


@pytest.mark.asyncio
async def test_two_streams_run_two_ops_at_once() -> None:
    lane, both = Lane("test:streams", num_streams=2), threading.Barrier(2)
    ops = [put(lane, both.wait, LIMIT_S) for _ in range(2)]

    assert sorted([await op for op in ops]) == [0, 1]
    lane.stop()


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_an_allowed_stream_is_never_left_unused() -> None:
    """Two ops that need each other, again and again: one must not be queued behind the other."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    stuck = 0
    try:
        for _ in range(3000):
            lane, both = Lane("test:pair", num_streams=2), threading.Barrier(2)
            ops = [put(lane, both.wait, LIMIT_S) for _ in range(2)]
            outcomes = await asyncio.gather(*(op for op in ops), return_exceptions=True)
            stuck += any(isinstance(each, threading.BrokenBarrierError) for each in outcomes)
            lane.stop()
            if stuck:
                break
    finally:
        sys.setswitchinterval(interval)

    assert stuck == 0


@pytest.mark.asyncio
async def test_a_stopped_lane_ends_after_the_ops_it_has(lane: Lane, gated_op: Any) -> None:
    ops = [put(lane, gated_op), put(lane, threading.current_thread)]

    lane.stop()
    lane.stop()
    gated_op.release()

    assert await ops[0] == "result"
    thread = await ops[1]
    lane.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.asyncio
async def test_joining_a_busy_lane_gives_up_in_time(lane: Lane, gated_op: Any) -> None:
    put(lane, gated_op)
    await gated_op.started.wait()
    lane.stop()

    lane.join(0)  # the op is released after the test only

    assert lane.statistics().running == 1


@pytest.mark.asyncio
async def test_all_busy_threads_of_a_lane_are_joined_within_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane, may_end, both = Lane("test:busy", num_streams=2), threading.Event(), threading.Barrier(3)

    def busy() -> bool:
        both.wait(LIMIT_S)
        return may_end.wait(LIMIT_S)

    ops, now_s, waited = [put(lane, busy), put(lane, busy)], [0.0], []

    def join(_thread: threading.Thread, timeout: float) -> None:
        waited.append(timeout)
        now_s[0] += timeout

    both.wait(LIMIT_S)
    lane.stop()
    with monkeypatch.context() as patch:
        patch.setattr("aioreplica.devices._lane.monotonic", lambda: now_s[0])
        patch.setattr(threading.Thread, "join", join)
        lane.join(0.5)

    assert waited == [0.5, 0.0]
    may_end.set()
    assert [await op for op in ops] == [True, True]
    lane.join(LIMIT_S)


@pytest.mark.asyncio
async def test_an_idle_thread_keeps_nothing_of_the_last_op_alive(lane: Lane, run_on: RunOn) -> None:
    array = np.zeros(4)
    watched = weakref.ref(array)

    await run_on(lane, np.sum, array)
    del array

    deadline = monotonic() + LIMIT_S
    while watched() is not None and monotonic() < deadline:
        await asyncio.sleep(0)
        gc.collect()
    assert watched() is None


@pytest.mark.asyncio
async def test_a_thread_that_could_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane, calls = Lane("test:full"), []

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            put(lane, calls.append, "refused")

    assert await put(lane, lambda: 5) == 5
    assert calls == []  # who was refused must not find out later that it ran all the same
    lane.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("has_thread", [True, False])
async def test_an_op_put_while_the_lane_is_stopped_is_refused(has_thread: bool) -> None:
    """It would land behind the stop sentinels, where no thread finds it."""
    lane, observers, calls = Lane("test:stopping"), Observers(), []
    if has_thread:
        await put(lane, int)
    observers.add(Observer(op_queued=lambda *_: lane.stop()))  # between the check and the queue
    op = Op(CompletionQueue.of_running_loop(), calls.append, (1,), {}, lane, OpTracker(observers))

    with pytest.raises(ar.errors.DeviceError, match="given back"):
        await op
    lane.join(LIMIT_S)
    assert calls == []


@pytest.mark.asyncio
async def test_a_done_op_lets_go_of_its_arguments(lane: Lane) -> None:
    argument, keyword = {1}, {2}
    held = [weakref.ref(argument), weakref.ref(keyword)]
    op = Op(CompletionQueue.of_running_loop(), lambda a, k: 7, (argument,), {"k": keyword}, lane)

    assert await op == 7
    del argument, keyword

    assert [each() for each in held] == [None, None]
    assert op.result() == 7
