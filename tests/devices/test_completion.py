"""The completion queue: few wake-ups, bounded batches, closed and second loops."""

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from aioreplica.devices import CompletionQueue, Lane, Op
from aioreplica.values import CAN_COUNT_REFERENCES

LIMIT_S = 60
NUM_OPS = 1000


class CountingLoop(asyncio.SelectorEventLoop):
    """A stock loop that counts how often another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wake_ups = 0

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.num_wake_ups += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def put_many(lane: Lane, num_ops: int) -> list[Op]:
    """Put ops, and block the loop until all of them have run."""
    port = CompletionQueue.of_running_loop()
    ops = [Op(port, int, (i,), {}) for i in range(num_ops)]
    for op in ops:
        lane.put(op)
    block_until_done(lane, num_ops)
    return ops


def block_until_done(lane: Lane, num_ops: int) -> None:
    never = threading.Event()
    while lane.statistics().done < num_ops:
        never.wait(0.001)


def test_ops_that_end_together_wake_the_loop_once(lane: Lane) -> None:
    async def main() -> list[int]:
        return [await op for op in put_many(lane, NUM_OPS)]

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)

        assert runner.run(main()) == list(range(NUM_OPS))
        assert 1 <= loop.num_wake_ups <= 3


@pytest.mark.asyncio
async def test_one_loop_cycle_resolves_a_bounded_number(lane: Lane) -> None:
    ops = put_many(lane, NUM_OPS)
    resolved = [0]
    while resolved[-1] < NUM_OPS:
        await asyncio.sleep(0)
        resolved.append(sum(op.is_done for op in ops))

    per_cycle = [after - before for before, after in pairwise(resolved)]
    assert max(per_cycle) <= 128
    assert [await op for op in ops] == list(range(NUM_OPS))


@pytest.mark.asyncio
async def test_other_callbacks_run_between_batches(lane: Lane) -> None:
    ops, seen = put_many(lane, NUM_OPS), []
    asyncio.get_running_loop().call_soon(lambda: seen.append(sum(op.is_done for op in ops)))

    await ops[-1]

    assert seen[0] < NUM_OPS


@pytest.mark.asyncio
async def test_completions_are_delivered_in_the_order_ops_ended(lane: Lane) -> None:
    order: list[int] = []
    ops = put_many(lane, 300)
    for i, op in enumerate(ops):
        op.add_done_callback(lambda _future, i=i: order.append(i))

    for op in ops:
        await op
    await asyncio.sleep(0)

    assert order == list(range(300))


@pytest.mark.asyncio
async def test_ops_of_many_lanes_share_the_queue_of_the_loop() -> None:
    lanes = [Lane(f"test:{i}") for i in range(4)]
    port = CompletionQueue.of_running_loop()
    ops = []
    for i in range(200):
        op = Op(port, int, (i,), {})
        ops.append(op)
        lanes[i % 4].put(op)

    assert [await op for op in ops] == list(range(200))
    assert CompletionQueue.of_running_loop() is port
    for lane in lanes:
        lane.stop()


def test_a_queue_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError):
        CompletionQueue.of_running_loop()


def test_a_second_loop_gets_its_own_queue_and_uses_the_same_lane(lane: Lane) -> None:
    async def main() -> tuple[CompletionQueue, threading.Thread]:
        op = Op(CompletionQueue.of_running_loop(), threading.current_thread, (), {})
        lane.put(op)
        return CompletionQueue.of_running_loop(), await op

    first, second = asyncio.run(main()), asyncio.run(main())

    assert first[0] is not second[0]
    assert first[1] is second[1]


def test_two_loops_at_once_share_a_lane(lane: Lane) -> None:
    results: dict[str, list[int]] = {}

    async def main(name: str) -> None:
        port = CompletionQueue.of_running_loop()
        ops = [Op(port, int, (i,), {}) for i in range(200)]
        for op in ops:
            lane.put(op)
        results[name] = [await op for op in ops]

    threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n))) for n in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert results == {"a": list(range(200)), "b": list(range(200))}


def test_a_loop_that_closes_under_a_running_op_does_no_harm(
    lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    started, gate = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert gate.wait(LIMIT_S)

    async def begin() -> None:
        lane.put(Op(CompletionQueue.of_running_loop(), block, (), {}))

    async def again() -> int:
        op = Op(CompletionQueue.of_running_loop(), int, (3,), {})
        lane.put(op)
        return await op

    asyncio.run(begin())
    assert started.wait(LIMIT_S)
    gate.set()

    assert asyncio.run(again()) == 3
    assert caplog.records == []


def test_a_closed_loop_is_not_kept_alive(lane: Lane) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        op = Op(CompletionQueue.of_running_loop(), int, (), {})
        lane.put(op)
        await op
        return weakref.ref(asyncio.get_running_loop())

    old_loop = asyncio.run(main())
    asyncio.run(main())  # the lane's thread lets go of its last op
    gc.collect()

    assert old_loop() is None


@pytest.mark.asyncio
async def test_an_op_that_nobody_awaits_is_not_reported(
    lane: Lane, new_gated_op: Callable[[], Any]
) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    op = Op(CompletionQueue.of_running_loop(), int, (1,), {})
    lane.put(op)
    del op
    last = Op(CompletionQueue.of_running_loop(), int, (2,), {})
    lane.put(last)

    assert await last == 2
    gc.collect()
    assert reports == []


# --- calls from threads -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("is_armed", [True, False], ids=["a wake-up on its way", "none"])
async def test_a_call_made_during_an_op_comes_before_its_completion(
    lane: Lane, is_armed: bool
) -> None:
    """Also when a wake-up for another op was on its way before the call was made."""
    queue, events = CompletionQueue.of_running_loop(), []
    if is_armed:
        queue.wake()

    def work() -> None:
        for i in range(3):
            queue.call_soon(lambda i=i: events.append((i, op.is_done)))

    op = Op(queue, work, (), {})
    lane.put(op)
    block_until_done(lane, 1)

    await op

    assert events == [(0, False), (1, False), (2, False)]


@pytest.mark.asyncio
async def test_calls_run_on_the_loop_with_the_context_of_the_caller() -> None:
    colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")
    queue, called = CompletionQueue.of_running_loop(), asyncio.Event()
    seen: list[object] = []

    def note() -> None:
        seen.extend([colour.get(), threading.current_thread()])
        called.set()

    def other_thread() -> None:
        colour.set("red")
        queue.call_soon(note)

    colour.set("blue")
    queue.wake()  # so that it is this wake-up that makes the call
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(LIMIT_S)
    await called.wait()

    assert seen == ["red", threading.current_thread()]


@pytest.mark.asyncio
async def test_a_call_that_fails_is_reported_and_holds_nothing_up(lane: Lane) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    queue = CompletionQueue.of_running_loop()
    error = ValueError("broken")

    def fail() -> None:
        raise error

    queue.call_soon(fail)
    op = Op(queue, int, (3,), {})
    lane.put(op)

    assert await op == 3
    assert [report["exception"] for report in reports] == [error]


@pytest.mark.asyncio
async def test_everything_queued_can_be_delivered_at_once() -> None:
    queue, seen = CompletionQueue.of_running_loop(), []
    op = Op(queue, int, (3,), {})
    assert op.claim()
    queue.call_soon(lambda: seen.append(op.is_done))
    op.run_claimed()
    queue.add(op)

    queue.deliver()

    assert (seen, op.is_done, await op) == ([False], True, 3)


@pytest.mark.asyncio
async def test_a_thread_lets_go_of_an_op_before_it_wakes_the_loop(
    lane: Lane, gated_op: Any
) -> None:
    """Otherwise the loop goes on while the op's result still counts as in use."""

    class Watch:
        """A completion queue that looks whether its op is gone when it is to wake the loop."""

        is_armed = False

        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()
            self.was_gone: asyncio.Future[bool] = self.loop.create_future()

        def add(self, op: Op) -> None:
            self.op = weakref.ref(op)

        def wake(self) -> None:
            self.loop.call_soon_threadsafe(self.was_gone.set_result, self.op() is None)

    watch: Any = Watch()
    lane.put(Op(watch, gated_op, (), {}))
    gated_op.release()

    was_gone = await watch.was_gone
    if not CAN_COUNT_REFERENCES:  # there the op is freed by the thread that made it, soon
        gc.collect()
        was_gone = watch.op() is None
    assert was_gone
