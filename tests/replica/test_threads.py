"""Collectives from threads: `start_all_reduce` while an op of the replica runs, nothing else.

What a thread starts is numbered on the event loop, in the order of the calls, before that op is
done. Meanwhile the replica's collectives on the loop are refused.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.replica.gated import GatedOp, me, my_id, spawn
from tests.replica.simulated import simulate
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")

WAIT_S = 10


def in_bare_thread(fn: Callable[[], Any]) -> Any:
    """Call a function on a thread without any context variable, as torch's hooks are."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(fn())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


# ---- while an op runs --------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("where", ["device thread", "bare thread"])
async def test_reductions_overlap_with_the_op_that_starts_them(
    gang: ar.MirroredStrategy, where: str, debug: bool
) -> None:
    """As a backward pass does: a layer's gradient is on its way while the next is computed."""
    asyncio.get_running_loop().set_debug(debug)
    size = gang.num_replicas_in_sync

    def backward(ctx: ar.ReplicaContext) -> list[ar.Handle]:
        def start(layer: int) -> ar.Handle:
            value = np.full(3, 10.0**layer * (ctx.replica_id_in_sync_group + 1))
            return ctx.start_all_reduce("sum", value)

        if where == "bare thread":
            return [in_bare_thread(lambda layer=layer: start(layer)) for layer in range(4)]
        return [start(layer) for layer in range(4)]

    async def step() -> list[float]:
        ctx = me()
        before = await ctx.all_reduce("sum", 1)
        handles = await ctx.run_on_device(backward, ctx)
        sums = [float((await handle)[0]) for handle in reversed(handles)]
        return [before, *sums, await ctx.all_reduce("max", 7)]

    results = gang.local_results(await gang.run(step))

    one = sum(range(1, size + 1))
    assert results == ([size, *(10.0**layer * one for layer in (3, 2, 1, 0)), 7],) * size


@pytest.mark.asyncio
async def test_a_reduction_ends_while_the_op_that_started_it_runs(
    pair: ar.MirroredStrategy,
) -> None:
    """Both replicas' ops are held until both reductions have ended."""
    ended = threading.Barrier(3)
    loop = asyncio.get_running_loop()
    started: asyncio.Queue[ar.Handle] = asyncio.Queue()

    def backward(ctx: ar.ReplicaContext) -> None:
        handle = ctx.start_all_reduce("sum", 1)
        loop.call_soon_threadsafe(started.put_nowait, handle)
        ended.wait(WAIT_S)

    async def watch() -> None:
        handles = [await started.get() for _ in range(2)]
        await asyncio.wait(handles)
        assert [handle.result() for handle in handles] == [2, 2]
        await asyncio.to_thread(ended.wait, WAIT_S)

    async def step() -> None:
        await me().run_on_device(backward, me())

    watching = spawn(watch())
    await pair.run(step)
    await watching


@pytest.mark.asyncio
async def test_the_order_is_that_of_the_calls_on_every_replica(gang: ar.MirroredStrategy) -> None:
    """Threads take turns, and each turn is one number, so the different ops would clash if not."""
    ops = ["sum", "max", "min", "sum", "max"]

    def backward(ctx: ar.ReplicaContext) -> list[ar.Handle]:
        return [
            in_bare_thread(lambda op=op: ctx.start_all_reduce(op, ctx.replica_id_in_sync_group))
            if i % 2
            else ctx.start_all_reduce(op, ctx.replica_id_in_sync_group)
            for i, op in enumerate(ops)
        ]

    async def step() -> list[Any]:
        ctx = me()
        if my_id() % 2:  # on the loop, in the same order
            handles = [ctx.start_all_reduce(op, my_id()) for op in ops]
        else:
            handles = await ctx.run_on_device(backward, ctx)
        return [await handle for handle in handles]

    top = gang.num_replicas_in_sync - 1
    total = sum(range(top + 1))
    results = gang.local_results(await gang.run(step))
    assert results == ([total, top, 0, total, top],) * (top + 1)


@pytest.mark.asyncio
async def test_a_group_may_be_started_too(triple: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        if my_id() == 1:
            return None
        ctx = me().group([0, 2])
        handle = await me().run_on_device(lambda: ctx.start_all_reduce("sum", my_id() + 1))
        return await handle

    assert triple.local_results(await triple.run(step)) == (4, None, 4)


def test_two_that_disagree_are_a_mismatch_with_the_lines() -> None:
    async def step() -> None:
        ctx = me()
        op = "sum" if my_id() else "max"
        await (await ctx.run_on_device(lambda: ctx.start_all_reduce(op, 1)))

    with pytest.raises(MergeMismatchError, match="MAX and SUM differ") as caught:
        simulate(2, step)
    assert str(caught.value).count("test_threads.py") >= 2


def test_a_bad_argument_is_refused_in_the_thread() -> None:
    async def step() -> str:
        ctx = me()

        def backward() -> str:
            with pytest.raises(ValueError, match="average") as caught:
                ctx.start_all_reduce("average", 1)
            return str(caught.value)

        return str(await ctx.run_on_device(backward))

    assert len(set(simulate(2, step))) == 1


def test_a_handle_started_in_a_thread_and_never_awaited_is_a_warning() -> None:
    async def step() -> None:
        ctx = me()
        await ctx.run_on_device(lambda: ctx.start_all_reduce("sum", 1))

    with pytest.warns(RuntimeWarning, match=r"replicas 0, 1, was never awaited") as caught:
        simulate(2, step)
    assert caught[0].filename == __file__


@pytest.mark.asyncio
async def test_a_handle_that_the_loop_does_not_know_yet_is_awaited_after_its_op(
    solo: ar.Strategy,
) -> None:
    """It said "await the handle" to code that did just that."""
    handles: list[ar.Handle] = []
    started, seen = threading.Event(), threading.Event()

    def backward(ctx: ar.ReplicaContext) -> None:
        handles.append(ctx.start_all_reduce("sum", 1))
        started.set()
        assert seen.wait(WAIT_S)

    async def step() -> int:
        op = asyncio.create_task(me().run_on_device(backward, me()))
        await asyncio.sleep(0)
        assert started.wait(WAIT_S)  # the event loop stands still, and learns of nothing
        with pytest.raises(ContextError, match=r"before the op .* has ended. Await the op, then"):
            await handles[0]
        seen.set()
        await op
        return int(await handles[0])

    assert (await solo.run(step)).values == (1,)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_callback_is_not_added_on_the_thread(
    pair: ar.MirroredStrategy, has_begun: bool
) -> None:
    """Whether the event loop knows of the handle by then is chance, and makes no difference."""

    async def step() -> int:
        ctx, loop = me(), asyncio.get_running_loop()

        def backward() -> ar.Handle:
            handle = ctx.start_all_reduce("sum", 1)
            if has_begun:  # it was queued before this
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(WAIT_S)
            with pytest.raises(ContextError, match="on the event loop"):
                handle.add_done_callback(print)
            return handle

        return int(await (await ctx.run_on_device(backward)))

    assert pair.local_results(await pair.run(step)) == (2, 2)


# ---- on the loop meanwhile ---------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["all_reduce", "start_all_reduce", "barrier"])
async def test_a_collective_on_the_loop_meanwhile_is_refused(
    pair: ar.MirroredStrategy, call: str
) -> None:
    """After the op it is allowed again, and has the next number."""
    gates = [GatedOp(), GatedOp()]

    def backward(ctx: ar.ReplicaContext, gate: GatedOp) -> ar.Handle:
        handle = ctx.start_all_reduce("sum", 1)
        gate()
        return handle

    async def step() -> list[int]:
        ctx, gate = me(), gates[my_id()]
        op = spawn(wait_for(ctx.run_on_device(backward, ctx, gate)))
        await asyncio.to_thread(gate.started.wait, WAIT_S)
        with pytest.raises(ContextError, match=r"backward, an op of the same replica"):
            await (ctx.barrier() if call == "barrier" else getattr(ctx, call)("sum", 1))
        gate.gate.set()
        handle = await op
        again = await ctx.all_reduce("sum", 10)
        later = await ctx.start_all_reduce("sum", 100)
        return [again, later, await handle]

    assert pair.local_results(await pair.run(step)) == ([20, 200, 2],) * 2


async def wait_for(op: Any) -> Any:
    return await op


@pytest.mark.asyncio
async def test_an_op_that_starts_nothing_holds_nothing_up(pair: ar.MirroredStrategy) -> None:
    gates = [GatedOp(), GatedOp()]

    async def step() -> int:
        gate = gates[my_id()]
        op = spawn(wait_for(me().run_on_device(gate)))
        await asyncio.to_thread(gate.started.wait, WAIT_S)
        found = await me().all_reduce("sum", 1)
        gate.gate.set()
        await op
        return int(found)

    assert pair.local_results(await pair.run(step)) == (2, 2)


# ---- everything else off the loop's thread -----------------------------------------------------

CALLS: dict[str, Callable[[ar.ReplicaContext], Any]] = {
    "start_all_reduce": lambda ctx: ctx.start_all_reduce("sum", 1),
    "all_reduce": lambda ctx: ctx.all_reduce("sum", 1),
    "barrier": lambda ctx: ctx.barrier(),
    "merge_call": lambda ctx: ctx.merge_call(print),
    "all_gather": lambda ctx: ctx.all_gather(np.ones(1), 0),
    "broadcast": lambda ctx: ctx.broadcast(1),
    "any": lambda ctx: ctx.any(True),
    "group": lambda ctx: ctx.group([0, 1]),
}
AWAITED = [name for name in CALLS if name != "start_all_reduce"]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_with_no_op_running_every_call_is_refused(
    pair: ar.MirroredStrategy, name: str
) -> None:
    async def step() -> int:
        ctx = me()
        with pytest.raises(ContextError, match="thread"):
            await asyncio.to_thread(CALLS[name], ctx)
        with pytest.raises(ContextError, match="thread"):
            await asyncio.to_thread(in_bare_thread, lambda: CALLS[name](ctx))
        return int(await ctx.all_reduce("sum", 1))  # which is the first

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", AWAITED)
async def test_awaitable_collectives_are_refused_in_an_op(
    pair: ar.MirroredStrategy, name: str
) -> None:
    async def step() -> int:
        ctx = me()

        def calls() -> None:
            with pytest.raises(ContextError, match="thread"):
                CALLS[name](ctx)
            with pytest.raises(ContextError, match="thread"):
                in_bare_thread(lambda: CALLS[name](ctx))

        await ctx.run_on_device(calls)
        return int(await ctx.all_reduce("sum", 1))

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
async def test_an_op_of_another_replica_gives_no_leave(pair: ar.MirroredStrategy) -> None:
    gate = GatedOp()
    contexts: dict[int, ar.ReplicaContext] = {}

    async def step() -> int:
        contexts[my_id()] = me()
        await me().barrier()
        if my_id() == 0:
            op = spawn(wait_for(me().run_on_device(gate)))
            await asyncio.to_thread(gate.started.wait, WAIT_S)
            with pytest.raises(ContextError, match="no op of the replica runs"):
                await asyncio.to_thread(
                    in_bare_thread, lambda: contexts[1].start_all_reduce("sum", 1)
                )
            gate.gate.set()
            await op
        return int(await me().all_reduce("sum", 1))

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
async def test_after_the_run_a_thread_is_refused(pair: ar.MirroredStrategy) -> None:
    async def step() -> ar.ReplicaContext:
        return me()

    for ctx in pair.local_results(await pair.run(step)):
        with pytest.raises(ContextError, match="after its run"):
            await asyncio.to_thread(in_bare_thread, lambda ctx=ctx: ctx.start_all_reduce("sum", 1))


# ---- a thread that outlives its op -------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("has_started", [False, True])
async def test_a_thread_that_outlives_its_op_is_refused(
    pair: ar.MirroredStrategy, has_started: bool
) -> None:
    """Whether it had started something in time or not; what it started in time is complete."""

    async def step() -> list[int]:
        ctx = me()
        late = threading.Event()
        outcome: list[Any] = []

        def outlives() -> None:
            if has_started:
                outcome.append(ctx.start_all_reduce("sum", 1))
            started.set()
            assert late.wait(WAIT_S)
            try:
                outcome.append(ctx.start_all_reduce("sum", 5))
            except ContextError as error:
                outcome.append(error)

        started = threading.Event()
        thread = threading.Thread(target=outlives)

        def backward() -> None:
            thread.start()
            assert started.wait(WAIT_S)

        await ctx.run_on_device(backward)
        late.set()
        await asyncio.to_thread(thread.join, WAIT_S)
        assert isinstance(outcome.pop(), ContextError)
        sums = [await handle for handle in outcome]
        return [*sums, await ctx.all_reduce("sum", 10)]

    expected = [2, 20] if has_started else [20]
    assert pair.local_results(await pair.run(step)) == (expected, expected)


# ---- the end of the run ------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_replica_that_fails_while_a_thread_starts(pair: ar.MirroredStrategy) -> None:
    """The op is drained; what it starts after the abort is cancelled, not lost in silence."""
    gate = GatedOp()
    handles: list[ar.Handle] = []

    def backward(ctx: ar.ReplicaContext) -> None:
        gate()
        handles.append(ctx.start_all_reduce("sum", 1))

    async def step() -> None:
        if my_id() == 0:
            await me().run_on_device(backward, me())
        await asyncio.to_thread(gate.started.wait, WAIT_S)
        asyncio.get_running_loop().call_soon(gate.gate.set)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await pair.run(step)
    await idle()
    assert [handle.cancelled() for handle in handles] == [True]
    assert [handle.done() for handle in handles] == [True]
    called: list[ar.Handle] = []
    handles[0].add_done_callback(called.append)
    assert called == []
    await idle()
    assert called == handles
