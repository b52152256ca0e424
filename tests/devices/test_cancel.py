"""Cancelling an awaited op: queued ones are taken back, started ones drained without spinning."""

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from aioreplica.devices import (
    CompletionQueue,
    Lane,
    Op,
    is_interrupted,
    run_on_host,
    run_on_lane,
)
from tests.sequencer import idle

RunOn = Callable[..., Coroutine[Any, Any, Any]]


def is_draining(task: asyncio.Task[Any], op: Any) -> bool:
    return not task.done() and not op.has_ended


@pytest.mark.asyncio
async def test_a_queued_op_is_taken_back_at_once_and_never_runs(
    lane: Lane, run_on: RunOn, gated_op: Any
) -> None:
    calls: list[str] = []
    first = asyncio.create_task(run_on(lane, gated_op))
    second = asyncio.create_task(run_on(lane, calls.append, "second"))
    third = asyncio.create_task(run_on(lane, calls.append, "third"))
    await gated_op.started.wait()

    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not gated_op.has_ended  # nobody waited for the op in front

    gated_op.release()
    await first
    await third
    assert calls == ["third"]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_cancels", [1, 2, 5])
async def test_a_started_op_is_waited_for(
    lane: Lane, run_on: RunOn, gated_op: Any, num_cancels: int
) -> None:
    task = asyncio.create_task(run_on(lane, gated_op))
    await gated_op.started.wait()

    for _ in range(num_cancels):
        task.cancel()
        await idle()
        assert is_draining(task, gated_op)

    gated_op.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gated_op.has_ended


@pytest.mark.asyncio
async def test_two_cancels_in_one_cycle_are_one(lane: Lane, run_on: RunOn, gated_op: Any) -> None:
    task = asyncio.create_task(run_on(lane, gated_op))
    await gated_op.started.wait()

    task.cancel()
    task.cancel()
    await idle()
    assert is_draining(task, gated_op)

    gated_op.release()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_the_cancel_message_is_kept(lane: Lane, run_on: RunOn, gated_op: Any) -> None:
    task = asyncio.create_task(run_on(lane, gated_op))
    await gated_op.started.wait()
    task.cancel("the reason")
    await idle()
    gated_op.release()

    with pytest.raises(asyncio.CancelledError, match="the reason"):
        await task


@pytest.mark.asyncio
async def test_an_error_of_an_op_that_is_drained_is_dropped_quietly(
    lane: Lane, run_on: RunOn, gated_op: Any
) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    gated_op.error = ValueError("late")
    task = asyncio.create_task(run_on(lane, gated_op))
    await gated_op.started.wait()
    task.cancel()
    await idle()
    gated_op.release()

    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert reports == []


@pytest.mark.asyncio
@pytest.mark.parametrize("cancel_first", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_an_outcome_in_the_cycle_of_a_cancel(cancel_first: bool, fails: bool) -> None:
    """The op ends and its task is cancelled before the task runs again."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    ops: list[Op] = []

    class Shelf:
        """A lane whose ops run when the test says so."""

        def put(self, op: Op) -> None:
            ops.append(op)

    shelf: Any = Shelf()
    args = (1, 0) if fails else (1, 1)
    task = asyncio.create_task(
        run_on_lane(shelf, CompletionQueue.of_running_loop(), divmod, args, {})
    )
    await idle()

    assert ops[0].claim()
    ops[0].run_claimed()
    if cancel_first:
        task.cancel()
    ops[0].resolve()
    if not cancel_first:
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    ops.clear()
    del task
    gc.collect()
    assert reports == []


@pytest.mark.asyncio
async def test_a_task_cancelled_before_its_first_step_puts_nothing(
    lane: Lane, run_on: RunOn
) -> None:
    calls: list[int] = []
    task = asyncio.create_task(run_on(lane, calls.append, 1))
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await run_on(lane, int)
    assert calls == []


@pytest.mark.asyncio
async def test_a_task_that_cancels_itself_before_the_op(
    lane: Lane, run_on: RunOn, gated_op: Any
) -> None:
    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await run_on(lane, gated_op)

    task = asyncio.create_task(body())
    gated_op.release()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_asyncio_timeout_waits_for_the_op(lane: Lane, run_on: RunOn, gated_op: Any) -> None:
    deadline = asyncio.timeout(None)

    async def body() -> None:
        async with deadline:
            await run_on(lane, gated_op)

    task = asyncio.create_task(body())
    await gated_op.started.wait()
    deadline.reschedule(asyncio.get_running_loop().time())
    await idle()
    assert is_draining(task, gated_op)

    gated_op.release()
    with pytest.raises(TimeoutError):
        await task
    assert gated_op.has_ended


@pytest.mark.asyncio
async def test_after_a_drain_the_task_goes_on_if_it_catches_the_cancellation(
    lane: Lane, run_on: RunOn, gated_op: Any
) -> None:
    async def body() -> int:
        try:
            await run_on(lane, gated_op)
        except asyncio.CancelledError:
            return int(await run_on(lane, lambda: 11))
        return 0

    task = asyncio.create_task(body())
    await gated_op.started.wait()
    task.cancel()
    await idle()
    gated_op.release()

    assert await task == 11


@pytest.mark.asyncio
async def test_run_on_host_is_drained_too(gated_op: Any) -> None:
    task = asyncio.create_task(run_on_host(gated_op))
    await gated_op.started.wait()
    task.cancel()
    await idle()
    assert is_draining(task, gated_op)

    gated_op.release()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- without spinning -------------------------------------------------------------------------


async def native(work: Coroutine[Any, Any, Any], op: Any) -> None:
    task = asyncio.create_task(work)
    await op.started.wait()
    task.cancel()
    await idle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_scope(work: Coroutine[Any, Any, Any], op: Any) -> None:
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await op.started.wait()
            scope.cancel()

        canceller = loop.create_task(cancel())
        await work
    assert scope.cancelled_caught
    await canceller


async def nested_scopes(work: Coroutine[Any, Any, Any], op: Any) -> None:
    with anyio.CancelScope() as outer:
        with anyio.CancelScope():
            await cancel_scope_inside(work, op, outer)
    assert outer.cancelled_caught


async def cancel_scope_inside(
    work: Coroutine[Any, Any, Any], op: Any, outer: anyio.CancelScope
) -> None:
    async def cancel() -> None:
        await op.started.wait()
        outer.cancel()

    canceller = asyncio.create_task(cancel())
    try:
        await work
    finally:
        assert canceller.done()


async def task_group(work: Coroutine[Any, Any, Any], op: Any) -> None:
    async def child() -> None:
        await work

    async with anyio.create_task_group() as group:
        group.start_soon(child)
        await op.started.wait()
        group.cancel_scope.cancel()


async def scope_then_native(work: Coroutine[Any, Any, Any], op: Any) -> None:
    async def body() -> None:
        await cancel_scope(work, op)

    task = asyncio.create_task(body())
    await op.started.wait()
    await idle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "cancelled", [native, cancel_scope, nested_scopes, task_group, scope_then_native]
)
def test_draining_does_not_spin(
    lane: Lane,
    run_on: RunOn,
    new_gated_op: Callable[[], Any],
    cancelled: Callable[[Coroutine[Any, Any, Any], Any], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        op = new_gated_op()

        async def release() -> None:
            try:
                await op.started.wait()
                await idle()  # which it never is while a wait spins
            finally:
                op.release()

        releasing = asyncio.create_task(release())
        await cancelled(run_on(lane, op), op)

        assert op.has_ended
        await releasing

    asyncio.run(main())


def test_nothing_is_interrupted_in_ordinary_code() -> None:
    async def main() -> bool:
        return is_interrupted()

    assert not is_interrupted()
    assert not asyncio.run(main())
    assert not anyio.run(main)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("writes_files", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_an_interrupt_leaves_an_op_alone_unless_it_writes_files(
    lane: Lane, writes_files: bool, is_gathered: bool
) -> None:
    def on_loop(fn: Callable[[], object]) -> None:
        done = threading.Event()
        loop.call_soon_threadsafe(fn)
        loop.call_soon_threadsafe(done.set)
        assert done.wait(30)

    def work() -> None:
        loop.call_soon_threadsafe(signal.raise_signal, signal.SIGINT)
        if writes_files:
            on_loop(lambda: None)
            on_loop(lambda: None)  # the task that awaits the op has seen its cancellation
        else:
            assert left.wait(30)
        ended.set()

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        op = run_on_lane(lane, CompletionQueue.of_running_loop(), work, (), {})
        op.writes_files = writes_files
        try:
            await (asyncio.gather(op) if is_gathered else op)
        finally:
            found.append(ended.is_set())
            left.set()

    loop: asyncio.AbstractEventLoop
    found: list[bool] = []
    left, ended = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [writes_files]
    assert ended.wait(30)
