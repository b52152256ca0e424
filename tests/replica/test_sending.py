"""`ctx.send` and `ctx.receive`: values from one replica to another, in tasks, threads and ops."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import ContextError, MergeMismatchError, StallError
from aioreplica.telemetry import MemorySink, ObservedCall, Observer
from aioreplica.telemetry._trace import TraceRecorder
from tests.replica.gated import me, my_id, spawn
from tests.replica.simulated import program, simulate
from tests.sequencer import idle
from tests.strategies.workers import on_workers

pytestmark = pytest.mark.usefixtures("no_task_left")


async def mismatch(strategy: ar.Strategy, step: Callable[[], Any]) -> MergeMismatchError:
    with pytest.raises(MergeMismatchError) as caught:
        await strategy.run(step)
    return caught.value


def right(size: int) -> int:
    return (my_id() + 1) % size


def left(size: int) -> int:
    return (my_id() - 1) % size


# ---- values ------------------------------------------------------------------------------------


async def async_ring() -> list[Any]:
    size = me().num_replicas_in_sync
    for number in range(2):
        await me().send((my_id(), number), to=right(size))
    return [await me().receive(from_=left(size)) for _ in range(2)]


def plain_ring() -> list[Any]:
    size, blocking = me().num_replicas_in_sync, me().blocking
    for number in range(2):
        blocking.send((my_id(), number), to=right(size))
    return [blocking.receive(from_=left(size)) for _ in range(2)]


async def ring_in_ops() -> list[Any]:
    found: list[Any] = await me().run_on_device(plain_ring)
    return found


RINGS = pytest.mark.parametrize("ring", [async_ring, plain_ring, ring_in_ops])


@pytest.mark.asyncio
@RINGS
async def test_values_go_round_a_ring(gang: ar.MirroredStrategy, ring: Callable[[], Any]) -> None:
    size = gang.num_replicas_in_sync

    results = gang.local_results(await gang.run(ring))

    assert results == tuple([((i - 1) % size, 0), ((i - 1) % size, 1)] for i in range(size))


@RINGS
def test_in_every_order_that_is_tried(ring: Callable[[], Any]) -> None:
    report = art.explore(program(3, ring), schedules=150)

    report.check()


@RINGS
def test_cancelled_at_every_await(ring: Callable[[], Any]) -> None:
    report = art.cancel_everywhere(program(3, ring))  # type: ignore[arg-type]

    report.check()


@pytest.mark.asyncio
async def test_arrays_are_handed_over_and_read_only(pair: ar.MirroredStrategy) -> None:
    sent = {"a": [np.arange(3.0)], "n": 4}

    async def step() -> Any:
        if my_id() == 0:
            await me().send(sent, to=1)
            return None
        return await me().receive(from_=0)

    got = pair.local_results(await pair.run(step))[1]

    assert np.shares_memory(got["a"][0], sent["a"][0])
    assert not got["a"][0].flags.writeable
    assert sent["a"][0].flags.writeable  # the sender's own view of it is left alone
    assert (got["n"], got["a"][0].tolist()) == (4, [0.0, 1.0, 2.0])


@pytest.mark.asyncio
async def test_variables_are_read_at_the_call(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        count = ar.Variable(1.0, synchronization="on_read", aggregation="sum")

    async def step() -> Any:
        await count.assign(10.0 + my_id())
        if my_id() == 0:
            await me().send(count, to=1)
            return None
        return float(await me().receive(from_=0))

    assert pair.local_results(await pair.run(step)) == (None, 10.0)


@pytest.mark.asyncio
async def test_a_send_waits_only_while_two_values_were_not_received(
    pair: ar.MirroredStrategy,
) -> None:
    story: list[str] = []

    async def step() -> None:
        if my_id() == 0:
            for number in range(3):
                assert await me().send(number, to=1) is None  # type: ignore[func-returns-value]
                story.append(f"sent {number}")
            return
        await idle()
        story.append("now")
        for _ in range(3):
            await me().receive(from_=0)

    await pair.run(step)
    assert story == ["sent 0", "sent 1", "now", "sent 2"]

    story.clear()
    await pair.run(step, options=ar.RunOptions(send_bound=3))
    assert story == ["sent 0", "sent 1", "sent 2", "now"]


@pytest.mark.asyncio
async def test_collectives_keep_their_numbers(pair: ar.MirroredStrategy) -> None:
    """Only one replica sends, so a number among the collectives would not agree."""

    async def step() -> int:
        if my_id() == 0:
            await me().send("a", to=1)
        total = await me().all_reduce("sum", 1)
        if my_id() == 1:
            assert await me().receive(from_=0) == "a"
        return int(await me().all_reduce("sum", total))

    assert pair.local_results(await pair.run(step)) == (4, 4)


@pytest.mark.asyncio
async def test_both_ways_at_once_in_child_tasks(gang: ar.MirroredStrategy) -> None:
    size = gang.num_replicas_in_sync

    async def step() -> Any:
        sends = asyncio.gather(*(me().send(n, to=right(size)) for n in range(5)))
        received = [await me().receive(from_=left(size)) for _ in range(5)]
        await sends
        return received

    assert gang.local_results(await gang.run(step)) == ([0, 1, 2, 3, 4],) * size


@pytest.mark.asyncio
async def test_a_child_task_that_sends_later_is_no_circle(gang: ar.MirroredStrategy) -> None:
    """All replicas wait in a receive of their own task; their child tasks have yet to send."""
    size = gang.num_replicas_in_sync

    async def step() -> Any:
        async def send_later() -> None:
            await idle()
            await me().run_on_device(int)
            await me().send(my_id(), to=right(size))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_later())
            return await me().receive(from_=left(size))

    assert gang.local_results(await gang.run(step)) == tuple((i - 1) % size for i in range(size))


@pytest.mark.asyncio
async def test_an_op_that_sends_later_is_no_circle(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        own = me()
        op = asyncio.gather(own.run_on_device(lambda: own.blocking.send(my_id(), to=1 - my_id())))
        found = await me().receive(from_=1 - my_id())
        await op
        return found

    assert pair.local_results(await pair.run(step)) == (1, 0)


# ---- giving up ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_receive_that_is_given_up_takes_nothing(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        if my_id() == 0:
            await me().barrier()
            await me().send("a", to=1)
            return None
        waiting = spawn(me().receive(from_=0))
        await idle()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await me().barrier()
        return await me().receive(from_=0)

    assert pair.local_results(await pair.run(step)) == (None, "a")


def test_a_cancelled_receive_loses_no_value_in_any_order() -> None:
    async def step() -> Any:
        if my_id() == 0:
            for number in range(3):
                await asyncio.sleep(0.1)
                await me().send(number, to=1)
            return None
        found: list[int] = []
        while len(found) < 3:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    found.append(await me().receive(from_=0))
        return found

    report = art.explore(program(2, step), schedules=300)

    report.check()
    assert simulate(2, step) == (None, [0, 1, 2])


@pytest.mark.asyncio
async def test_a_cancelled_run_wakes_threads_and_tasks(gang: ar.MirroredStrategy) -> None:
    def plain() -> None:
        if my_id():
            me().blocking.receive(from_=0)
        me().blocking.receive(from_=1)

    async def child() -> None:
        if my_id() == 0:
            await asyncio.sleep(60)
        await asyncio.gather(me().receive(from_=0))

    async def op() -> None:
        if my_id() == 0:
            await asyncio.sleep(60)
        await me().run_on_device(lambda: me().blocking.receive(from_=0))

    for step in (child, op):
        run = spawn(gang.run(step))
        await idle()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    with pytest.raises(MergeMismatchError, match="but replica 1 is in receive #1"):
        await gang.run(plain)


@pytest.mark.asyncio
async def test_a_failure_is_what_the_run_raises(gang: ar.MirroredStrategy) -> None:
    for blocking in (False, True):

        async def step() -> None:
            if my_id() == 0:
                raise KeyError("mine")
            await me().receive(from_=0)

        def plain() -> None:
            if my_id() == 0:
                raise KeyError("mine")
            me().blocking.receive(from_=0)

        with pytest.raises(KeyError, match="mine"):
            await gang.run(plain if blocking else step)


# ---- never received ----------------------------------------------------------------------------


async def both_receive() -> None:
    await me().receive(from_=1 - my_id())


async def receive_or_barrier() -> None:
    await (me().receive(from_=1) if my_id() == 0 else me().barrier())


async def never_sent() -> None:
    if my_id() == 1:
        await me().receive(from_=0, tag="a")


async def never_received() -> None:
    if my_id() == 1:
        await me().send(1, to=0, tag="a")


async def sent_to_one_that_has_gone() -> None:
    if my_id() == 1:
        await idle()
        await me().send(1, to=0, tag="a")


def plain_receives() -> None:
    me().blocking.receive(from_=1 - my_id())


def plain_never_received() -> None:
    if my_id() == 1:
        me().blocking.send(1, to=0, tag="a")


async def receives_in_ops() -> None:
    await me().run_on_device(plain_receives)


CIRCLE = "Replica 0 is in receive #1 from replica 1 but replica 1 is in receive #1 from replica 0"
LOST = r"Replica 0 returned without receiving what replica 1 sent it: send #1 to replica 0 \(tag "
ENDS = {
    both_receive: CIRCLE,
    plain_receives: CIRCLE,
    receives_in_ops: CIRCLE,
    receive_or_barrier: "Replica 0 is in receive #1 from replica 1 but replica 1 is in barrier #1",
    never_sent: r"Replica 0 returned while replica 1 waits in receive #1 from replica 0 \(tag 'a'",
    never_received: LOST,
    plain_never_received: LOST,
    sent_to_one_that_has_gone: LOST,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ENDS)
async def test_it_is_an_error_at_once(pair: ar.MirroredStrategy, step: Callable[[], Any]) -> None:
    with pytest.raises(MergeMismatchError, match=ENDS[step]) as caught:
        await pair.run(step)

    assert "Every send needs a receive" in str(caught.value)
    assert len(caught.value.rows) == 2
    assert "test_sending.py:" in "".join(row.site for row in caught.value.rows) + str(caught.value)


@pytest.mark.parametrize("step", ENDS)
def test_it_is_the_same_error_in_every_order(step: Callable[[], Any]) -> None:
    async def main() -> None:
        with pytest.raises(MergeMismatchError, match=ENDS[step]):
            await program(2, step)()

    report = art.explore(main, schedules=60)

    report.check()


@pytest.mark.asyncio
async def test_one_that_is_never_awaited_is_named(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 1:
            me().send(1, to=0)

    with pytest.raises(ContextError, match=r"replica 1: send to replica 0 at .*test_sending\.py"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_the_strategys_timeout_ends_a_receive() -> None:
    options = ar.CommunicationOptions(timeout_seconds=0.01)

    async def step() -> None:
        await (me().receive(from_=0) if my_id() else asyncio.sleep(60))

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as strategy:
        with pytest.raises(StallError, match="receive #1 from replica 0 of step 0"):
            await strategy.run(step)


def test_threads_that_wait_for_each_other_need_no_timeout() -> None:
    def plain() -> None:
        me().blocking.receive(from_=1 - my_id())

    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with pytest.raises(MergeMismatchError):
                await strategy.run(plain)

    asyncio.run(main())


def test_messages_are_progress() -> None:
    """The stall watch sees that something happens, though nothing else does."""

    async def step() -> int:
        for number in range(20):
            if my_id() == 0:
                await asyncio.sleep(0.4)
                await me().send(number, to=1)
            else:
                assert await me().receive(from_=0) == number
        return my_id()

    assert simulate(2, step, stall_timeout=1.0) == (0, 1)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda ctx: ctx.send(1, to=2), ValueError, "to=2, but replicas are 0 to 1"),
        (lambda ctx: ctx.send(1, to=-1), ValueError, "to=-1, but replicas are 0 to 1"),
        (lambda ctx: ctx.receive(from_=my_id()), ValueError, "the replica that calls it"),
        (lambda ctx: ctx.receive(from_="a"), TypeError, "needs a replica id as from_, got 'a'"),
        (lambda ctx: ctx.send(1, 1 - my_id(), tag=[]), TypeError, "a tag that can be hashed"),
        (lambda ctx: ctx.blocking.send(1, 1 - my_id()), ContextError, r"await ctx\.send\(\.\.\.\)"),
        (lambda ctx: ctx.blocking.receive(1 - my_id()), ContextError, r"ctx\.receive\(\.\.\.\)"),
    ],
)
async def test_what_cannot_be_sent_is_refused(
    pair: ar.MirroredStrategy, call: Any, error: type[Exception], text: str
) -> None:
    async def step() -> None:
        with pytest.raises(error, match=text):
            call(me())

    await pair.run(step)


@pytest.mark.asyncio
async def test_a_context_sends_in_its_own_replica_only(pair: ar.MirroredStrategy) -> None:
    kept: list[ar.ReplicaContext] = []

    async def step() -> None:
        kept.append(me())

        def merge(_strategy: ar.Strategy) -> None:
            with pytest.raises(ContextError, match="receive was called on the context of replica"):
                kept[0].receive(from_=1)

        await me().merge_call(merge)

    await pair.run(step)
    with pytest.raises(ContextError, match="after its run"):
        kept[0].send(1, to=1)

    def plain() -> None:
        with pytest.raises(ContextError, match=r"Use ctx\.blocking\.send"):
            me().send(1, to=1 - my_id())

    await pair.run(plain)


@pytest.mark.asyncio
async def test_one_replica_has_nobody_to_send_to(solo: ar.Strategy) -> None:
    async def step() -> None:
        with pytest.raises(ValueError, match="the replica that calls it"):
            me().send(1, to=0)

    await solo.run(step)


def test_send_bound_is_checked() -> None:
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="send_bound must be an int >= 1"):
            ar.RunOptions(send_bound=wrong)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_messages_stay_on_one_worker() -> None:
    async def main(strategy: ar.Strategy) -> Any:
        async def step() -> Any:
            mine = my_id()
            neighbour = mine ^ 1
            with pytest.raises(ValueError, match="a replica of another worker: this one has"):
                me().send(1, to=(mine + 2) % 4)
            await me().send(mine, to=neighbour)
            return await me().receive(from_=neighbour)

        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, main) == [(1, 0), (3, 2)]


# ---- in device loops, and told -----------------------------------------------------------------


@pytest.mark.asyncio
async def test_device_loops_send_from_step_to_step(pair: ar.MirroredStrategy) -> None:
    """Replica 0 may be a step ahead, and two values."""

    def step(loop: ar.MultiStepContext, number: int) -> None:
        blocking = me().blocking
        if my_id() == 0:
            blocking.send(number, to=1)
        else:
            loop.set_last_step_output("sum", blocking.receive(from_=0) + number)
            return
        loop.set_last_step_output("sum", number)

    found = await pair.run_steps(step, iter(range(5)), 5)

    assert found.last_step_outputs["sum"].values == (4, 8)


@pytest.mark.asyncio
async def test_observers_are_told(pair: ar.MirroredStrategy) -> None:
    lines: list[str] = []
    pair.observers.add(
        Observer(
            call_made=lambda call: lines.append(f"{call.replica_id}: {call.describe()}"),
            wait_began=lambda wait: lines.append(f"waits for {wait.missing_members()}"),
            wait_ended=lambda wait: lines.append(f"waited in {wait.describe()}"),
            value_received=lambda message: lines.append(f"{message.members} had it"),
        )
    )

    async def step() -> None:
        if my_id() == 0:
            await me().receive(from_=1, tag="t")
        else:
            await me().send(1, to=0, tag="t")

    await pair.run(step)

    assert lines == [
        "0: receive #1 from replica 1 (tag 't')",
        "waits for (1,)",
        "1: send #1 to replica 0 (tag 't')",
        "(1, 0) had it",
        "waited in receive #1 from replica 1 (tag 't')",
    ]


@pytest.mark.asyncio
async def test_a_value_that_comes_before_its_thread_waits(pair: ar.MirroredStrategy) -> None:
    has_come, has_begun = threading.Event(), threading.Event()
    waits: list[str] = []

    def hold_the_receiver(call: ObservedCall) -> None:
        if call.describe().startswith("receive"):  # its gate is parked, and it does not wait so far
            has_begun.set()
            assert has_come.wait(60)

    pair.observers.add(
        Observer(
            call_made=hold_the_receiver,
            value_received=lambda _: has_come.set(),
            wait_began=lambda wait: waits.append(wait.describe()),
        )
    )

    def step() -> float:
        if my_id() == 0:
            assert me().blocking.receive(from_=1) == "value"
        else:
            assert has_begun.wait(60)
            me().blocking.send("value", to=0)
        total: float = me().blocking.all_reduce("sum", 1.0)
        return total

    assert (await pair.run(step)).values == (2.0, 2.0)
    assert "receive #1 from replica 1" in waits  # left out, the next wait would not wait


@pytest.mark.asyncio
@RINGS
async def test_a_trace_and_sinks_have_messages(
    pair: ar.MirroredStrategy, ring: Callable[[], Any]
) -> None:
    sink, trace = MemorySink(kinds=["value_received"]), TraceRecorder(["cpu:0", "cpu:1"])
    for observer in (sink.observer, trace.observer):
        pair.observers.add(observer)

    await pair.run(ring)

    events = [(event.kind, event.name, event.replica_id) for event in sink.events()]
    assert sorted(events) == [
        ("message", f"receive #{number} from replica {1 - who}", who)
        for number, who in ((1, 1), (1, 0), (2, 1), (2, 0))
    ]
    slices = [each for each in trace.timeline().slices if each.category == "message"]
    assert sorted(each.name for each in slices) == ["receive"] * 4 + ["send"] * 4
    assert all("test_sending.py" in str(each.args["where"]) for each in slices)


@pytest.mark.asyncio
async def test_waiting_says_who_receives_from_whom(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await idle()
            [wait] = pair.telemetry.waiting()
            assert (wait.replica_id, wait.waits_for) == (1, (0,))
            assert wait.what == "receive #1 from replica 0"
            await me().send(1, to=1)
        else:
            await me().receive(from_=0)

    await pair.run(step)
