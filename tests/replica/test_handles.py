"""start_all_reduce: reductions in flight, matched by when they start, whenever they are awaited."""

import asyncio
import weakref
from collections.abc import Callable
from itertools import permutations
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.replica.gated import GatedOp, here, me, my_id, spawn
from tests.sequencer import Sequencer, idle

pytestmark = pytest.mark.usefixtures("no_task_left")

LARGE = 1200 * 1024  # float64 elements: reduced off the event loop
SIZES = pytest.mark.parametrize("size", [3, LARGE], ids=["inline", "off the loop"])


async def mismatch(strategy: ar.Strategy, step: Callable[[], Any]) -> MergeMismatchError:
    with pytest.raises(MergeMismatchError) as caught:
        await strategy.run(step)
    return caught.value


def total(strategy: ar.Strategy, value_of: Callable[[int], Any]) -> Any:
    return sum(value_of(i) for i in range(strategy.num_replicas_in_sync))


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "size", [3, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["inline", "off the loop"]
)
async def test_the_result_is_that_of_all_reduce(strategy: ar.Strategy, size: int) -> None:
    for op in ("sum", "mean", "min", "max"):

        async def step(op: str = op) -> Any:
            mine = np.random.default_rng(my_id()).normal(size=size)
            handle = me().start_all_reduce(op, {"deep": [mine, my_id()]})
            started = await handle
            plain = await me().all_reduce(op, {"deep": [mine, my_id()]})
            np.testing.assert_array_equal(started["deep"][0], plain["deep"][0])
            assert started["deep"][1] == plain["deep"][1]
            assert not started["deep"][0].flags.writeable
            return [started["deep"][0]]

        results = strategy.local_results(await strategy.run(step))
        assert all(array is results[0][0] for [array] in results)


@pytest.mark.asyncio
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
async def test_handles_are_awaited_in_any_order(
    strategy: ar.Strategy, order: tuple[int, ...]
) -> None:
    """Replica 0 and the others even differ in it."""

    async def step() -> list[Any]:
        handles = [me().start_all_reduce("sum", 10**k) for k in range(3)]
        results = {k: await handles[k] for k in (order if my_id() else (0, 1, 2))}
        return [results[k] for k in range(3)]

    count = strategy.num_replicas_in_sync
    for results in strategy.local_results(await strategy.run(step)):
        assert results == [count, 10 * count, 100 * count]


@pytest.mark.asyncio
async def test_calls_match_by_start_not_by_await(gang: ar.MirroredStrategy) -> None:
    """Started in different orders they differ, though awaited alike."""

    async def step() -> None:
        first, second = ("min", "max") if my_id() == 1 else ("max", "min")
        handles = {op: me().start_all_reduce(op, 1) for op in (first, second)}
        await handles["min"]
        await handles["max"]

    error = await mismatch(gang, step)

    assert "MAX and MIN differ" in error.reason
    assert "start_all_reduce #1" in error.reason


@pytest.mark.asyncio
@SIZES
async def test_many_in_flight(gang: ar.MirroredStrategy, size: int) -> None:
    num = 50 if size < LARGE else 4

    async def step() -> list[float]:
        handles = [me().start_all_reduce("sum", np.full(size, float(k))) for k in range(num)]
        await me().barrier()
        return [float((await handle)[-1]) for handle in reversed(handles)]

    count = gang.num_replicas_in_sync
    for results in gang.local_results(await gang.run(step)):
        assert results == [float(k * count) for k in reversed(range(num))]


@pytest.mark.asyncio
@SIZES
async def test_a_handle_can_be_awaited_again(strategy: ar.Strategy, size: int) -> None:
    async def step() -> None:
        handle = me().start_all_reduce("sum", np.ones(size))
        first = await handle
        assert handle.done()
        assert await handle is first
        assert "done" in repr(handle)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_two_tasks_may_await_one_handle(strategy: ar.Strategy) -> None:
    async def wait_for(handle: Any) -> Any:
        return await handle

    async def step() -> Any:
        handle = me().start_all_reduce("sum", 1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait_for(handle)) for _ in range(3)]
        return [task.result() for task in tasks]

    count = strategy.num_replicas_in_sync
    for results in strategy.local_results(await strategy.run(step)):
        assert results == [count] * 3


@pytest.mark.asyncio
async def test_gather_wait_for_and_anyio(strategy: ar.Strategy) -> None:
    async def step() -> list[Any]:
        a, b, c, d, e = (me().start_all_reduce("sum", 10**k) for k in range(5))
        results = list(await asyncio.gather(a, b))
        results.append(await asyncio.wait_for(c, 60))
        with anyio.fail_after(60):
            results.append(await d)

        async def keep() -> None:
            results.append(await e)

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
        return results

    count = strategy.num_replicas_in_sync
    for results in strategy.local_results(await strategy.run(step)):
        assert results == [count * 10**k for k in range(5)]


@pytest.mark.asyncio
async def test_a_handle_says_whether_it_is_done(pair: ar.MirroredStrategy) -> None:
    sequencer = Sequencer(["0 starts", "1 starts", "0 looks"])

    async def step() -> None:
        await sequencer.turn(f"{my_id()} starts")
        handle = me().start_all_reduce("sum", 1)
        assert handle.done() is (my_id() == 1)
        assert ("in flight" in repr(handle)) is (my_id() == 0)
        assert "start_all_reduce #1 (SUM)" in repr(handle)
        if my_id() == 0:
            await sequencer.turn("0 looks")
            assert handle.done()
            assert "done" in repr(handle)
        await handle

    await pair.run(step)


@pytest.mark.asyncio
async def test_starting_does_not_wait_for_anybody(pair: ar.MirroredStrategy) -> None:
    """Replica 0 starts and goes on for long before replica 1 starts."""
    story: list[str] = []
    is_further = asyncio.Event()

    async def step() -> int:
        if my_id():
            await is_further.wait()
        handle = me().start_all_reduce("sum", 1)
        story.append(f"{my_id()} went on")
        if not my_id():
            await idle()
            story.append("0 is further")
            assert not handle.done()
            is_further.set()
        return await handle

    assert pair.local_results(await pair.run(step)) == (2, 2)
    assert story == ["0 went on", "0 is further", "1 went on"]


# ---- beside other work -------------------------------------------------------------------------


@pytest.mark.asyncio
@SIZES
async def test_other_collectives_meanwhile(strategy: ar.Strategy, size: int) -> None:
    count = strategy.num_replicas_in_sync

    async def merge(_strategy: ar.Strategy, value: Any) -> int:
        await asyncio.sleep(0)
        return 7

    async def step() -> None:
        first = me().start_all_reduce("sum", np.ones(size))
        await me().barrier()
        second = me().start_all_reduce("sum", np.full(size, 2.0))
        assert await me().all_reduce("sum", 1) == count
        assert await me().merge_call(merge, (my_id(),)) == 7
        assert (await me().all_gather(np.array([my_id()]), 0)).tolist() == list(range(count))
        assert (await second)[-1] == 2 * count
        assert await me().any(my_id() == 0)
        assert (await first)[-1] == count

    await strategy.run(step)


@pytest.mark.asyncio
async def test_a_plain_collective_overtakes_one_in_flight(pair: ar.MirroredStrategy) -> None:
    """Numbers say who meets whom: #2 merges while #1 still lacks a replica's await, not start."""
    sequencer = Sequencer([0, 1])

    async def step() -> int:
        handle = me().start_all_reduce("sum", 1)
        await sequencer.turn(my_id())
        await me().barrier()
        return await handle

    assert pair.local_results(await pair.run(step)) == (2, 2)
    assert [r.collective for r in pair.recorder.records()] == ["start_all_reduce", "barrier"]


@pytest.mark.asyncio
@SIZES
async def test_reductions_go_on_while_every_device_is_busy(
    strategy: ar.Strategy, size: int
) -> None:
    """The ops end only after the reduction has: it needs no device, and no awaiting replica."""
    count = strategy.num_replicas_in_sync
    ops = [GatedOp() for _ in range(count)]

    async def step() -> Any:
        op = ops[my_id()]
        running = me().run_on_device(op)
        handle = me().start_all_reduce("sum", np.ones(size))
        result = await handle
        assert op.ended == 0
        op.gate.set()
        assert await running == "done"
        return float(result[-1])

    assert strategy.local_results(await strategy.run(step)) == (count,) * count


@pytest.mark.asyncio
async def test_an_op_may_run_before_the_handle_is_awaited(strategy: ar.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    async def step() -> Any:
        handle = me().start_all_reduce("sum", np.ones(LARGE))
        square = await me().run_on_device(np.square, np.float64(3))
        return float((await handle)[0]) + float(square)

    assert strategy.local_results(await strategy.run(step)) == (count + 9.0,) * count


@pytest.mark.asyncio
async def test_a_loop_of_started_calls_lets_others_run(strategy: ar.Strategy) -> None:
    """With one replica too, where a handle is always done when it is awaited."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def step() -> None:
        for _ in range(50):
            await me().start_all_reduce("sum", 1)

    ticking = spawn(tick())
    await strategy.run(step)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)

    assert ticks >= 50


@pytest.mark.asyncio
async def test_child_tasks_may_start(strategy: ar.Strategy) -> None:
    async def child() -> Any:
        return await me().start_all_reduce("sum", 1)

    async def step() -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child()) for _ in range(4)]
        return [task.result() for task in tasks]

    count = strategy.num_replicas_in_sync
    for results in strategy.local_results(await strategy.run(step)):
        assert results == [count] * 4


@pytest.mark.asyncio
async def test_in_replica_order_whatever_the_order_of_starts(triple: ar.MirroredStrategy) -> None:
    parts = [1e16, 1.0, -1e16]
    for order in permutations(range(3)):
        sequencer = Sequencer(order)

        async def step(sequencer: Sequencer = sequencer) -> Any:
            await sequencer.turn(my_id())
            handle = me().start_all_reduce("sum", np.array([parts[my_id()]]))
            return float((await handle)[0])

        results = triple.local_results(await triple.run(step))
        assert results == ((1e16 + 1.0) + -1e16,) * 3


# ---- differences -------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Callable[[bool], tuple[str, Any]], str]] = {
    "op": (lambda odd: ("min" if odd else "max", 1), "MAX and MIN"),
    "shape": (lambda odd: ("sum", np.ones(2 + odd)), r"(2,) and (3,)"),
    "dtype": (lambda odd: ("sum", np.ones(2, "f4" if odd else "f8")), "float64 and float32"),
    "structure": (lambda odd: ("sum", {"b" if odd else "a": 1}), "structure"),
    "number of leaves": (lambda odd: ("sum", [1] * (2 + odd)), "structure"),
    "array and number": (lambda odd: ("sum", np.ones(()) if odd else 1.0), "types"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", DIFFERENT)
async def test_differences_name_both_sites(gang: ar.MirroredStrategy, kind: str) -> None:
    make, text = DIFFERENT[kind]
    sites: dict[int, str] = {}

    async def step() -> None:
        op, value = make(my_id() == 1)
        if my_id() == 1:
            sites[1] = here(1)
            handle = me().start_all_reduce(op, value)
        else:
            sites[my_id()] = here(1)
            handle = me().start_all_reduce(op, value)
        await handle

    error = await mismatch(gang, step)

    assert text in error.reason
    assert "start_all_reduce #1" in error.reason
    for row in error.rows[:2]:
        assert row.site == sites[row.replica_id]
        assert row.site in str(error)
        assert "start_all_reduce #1" in row.collective
    assert sites[0] != sites[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("starter", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
async def test_plain_against_started(pair: ar.MirroredStrategy, starter: int, first: int) -> None:
    sequencer = Sequencer([first, 1 - first])
    sites: dict[int, str] = {}

    async def step() -> None:
        await sequencer.turn(my_id())
        if my_id() == starter:
            sites[my_id()] = here(1)
            await me().start_all_reduce("sum", 1)
        else:
            sites[my_id()] = here(1)
            await me().all_reduce("sum", 1)

    error = await mismatch(pair, step)

    names = ["start_all_reduce" if i == starter else "all_reduce" for i in range(2)]
    assert error.reason == (
        f"Replica 0 is in {names[0]} #1 (SUM) but replica 1 is in {names[1]} #1 (SUM)"
    )
    assert [row.site for row in error.rows] == [sites[0], sites[1]]


@pytest.mark.asyncio
@pytest.mark.parametrize("awaited", [True, False], ids=["awaited", "not awaited"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["starts first", "returns first"])
async def test_a_replica_that_returns_without_starting(
    pair: ar.MirroredStrategy, order: tuple[int, int], awaited: bool
) -> None:
    sequencer = Sequencer(order)
    sites: list[str] = []

    async def step() -> None:
        await sequencer.turn(my_id())
        if my_id() == 1:
            return
        sites.append(here(1))
        handle = me().start_all_reduce("sum", 1)
        if awaited:
            await handle

    error = await mismatch(pair, step)

    assert error.reason.startswith("Replica 1 returned while replica 0")
    assert "start_all_reduce #1 (SUM)" in error.reason
    assert [row.state for row in error.rows][1] == "returned"
    assert error.rows[0].site == sites[0]


@pytest.mark.asyncio
async def test_one_started_call_too_many(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        for _ in range(3 if my_id() == 1 else 2):
            await me().start_all_reduce("sum", 1)

    error = await mismatch(gang, step)

    assert "returned while replica 1" in error.reason
    assert "start_all_reduce #3" in error.reason


@pytest.mark.asyncio
async def test_a_call_made_before_and_awaited_after_a_handle(pair: ar.MirroredStrategy) -> None:
    """Replica 0 waits for #2 with #1 not awaited so far; replica 1 waits in #1."""

    async def step() -> None:
        if my_id() == 0:
            later = me().barrier()
            await me().start_all_reduce("sum", 1)
            await later
        else:
            await me().barrier()
            await me().start_all_reduce("sum", 1)

    error = await mismatch(pair, step)

    assert "start_all_reduce #2 (SUM)" in error.reason
    assert "barrier #1" in error.reason
    assert "Not awaited so far" in str(error)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("op", "value", "options", "error", "text"),
    [
        ("median", 1.0, None, ValueError, "SUM, MEAN, MIN, MAX"),
        ("sum", "text", None, TypeError, "start_all_reduce"),
        ("sum", np.array([object()]), None, TypeError, "start_all_reduce"),
        ("sum", np.array(["a"]), None, TypeError, "start_all_reduce"),
        ("max", ar.IndexedSlices([1.0], [0], (2,)), None, ValueError, "start_all_reduce"),
        ("sum", 1.0, {"bytes_per_pack": 1}, TypeError, "start_all_reduce"),
    ],
    ids=["op", "string", "objects", "strings", "slices", "options"],
)
async def test_bad_arguments_start_nothing(
    either: ar.Strategy, op: str, value: Any, options: Any, error: type[Exception], text: str
) -> None:
    async def step() -> int:
        with pytest.raises(error, match=text):
            me().start_all_reduce(op, value, options)
        return await me().start_all_reduce("sum", 1)

    count = either.num_replicas_in_sync
    assert either.local_results(await either.run(step)) == (count,) * count


# ---- where a handle belongs --------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_handle_ends_with_its_run(strategy: ar.Strategy) -> None:
    kept: list[Any] = []

    async def step() -> None:
        handle = me().start_all_reduce("sum", 1)
        kept.append(handle)
        await handle

    await strategy.run(step)

    for handle in kept:
        with pytest.raises(ContextError, match=r"start_all_reduce #1 \(SUM\)") as caught:
            await handle
        assert __file__ in str(caught.value)


@pytest.mark.asyncio
async def test_a_task_that_outlives_its_run(strategy: ar.Strategy) -> None:
    """It is outside then; the handle and the context that it kept say so."""
    after = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def late(ctx: ar.ReplicaContext, handle: Any) -> None:
        await after.wait()
        with pytest.raises(ContextError, match=r"start_all_reduce #1"):
            await handle
        with pytest.raises(ContextError, match="start_all_reduce"):
            ctx.start_all_reduce("sum", 1)
        assert me() is not ctx

    async def step() -> None:
        handle = me().start_all_reduce("sum", 1)
        await handle
        tasks.append(spawn(late(me(), handle)))

    await strategy.run(step)
    after.set()
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_a_handle_of_another_run(strategy: ar.Strategy) -> None:
    kept: list[Any] = []

    async def first() -> None:
        kept.append(me().start_all_reduce("sum", 1))
        await kept[-1]

    async def second() -> None:
        with pytest.raises(ContextError, match="start_all_reduce"):
            await kept[my_id()]

    await strategy.run(first)
    await strategy.run(second)


@pytest.mark.asyncio
async def test_a_handle_of_another_replica(pair: ar.MirroredStrategy) -> None:
    handles: dict[int, Any] = {}

    async def step() -> int:
        handles[my_id()] = me().start_all_reduce("sum", 1)
        await me().barrier()
        with pytest.raises(ContextError, match="replica that started it"):
            await handles[1 - my_id()]
        return await handles[my_id()]

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
async def test_starting_after_the_run(strategy: ar.Strategy) -> None:
    kept: list[ar.ReplicaContext] = []

    async def step() -> None:
        kept.append(me())

    await strategy.run(step)

    for context in kept:
        with pytest.raises(ContextError, match="start_all_reduce"):
            context.start_all_reduce("sum", 1)


@pytest.mark.asyncio
async def test_starting_in_another_replica(pair: ar.MirroredStrategy) -> None:
    contexts: dict[int, ar.ReplicaContext] = {}

    async def step() -> None:
        contexts[my_id()] = me()
        await me().barrier()
        with pytest.raises(ContextError, match="start_all_reduce"):
            contexts[1 - my_id()].start_all_reduce("sum", 1)

    await pair.run(step)


@pytest.mark.asyncio
async def test_in_a_merge_function_it_is_refused(strategy: ar.Strategy) -> None:
    async def step() -> None:
        context = me()

        def merge(_strategy: ar.Strategy) -> None:
            with pytest.raises(ContextError, match="start_all_reduce"):
                context.start_all_reduce("sum", 1)

        await context.merge_call(merge)

    await strategy.run(step)


@pytest.mark.asyncio
@SIZES
async def test_outside_every_scope(size: int) -> None:
    """There one replica meets itself."""
    context = me()
    handle = context.start_all_reduce("mean", np.full(size, 3.0))
    other = context.start_all_reduce("sum", 5)
    assert await other == 5
    assert (await handle)[-1] == 3.0
    assert (await handle)[-1] == 3.0
    assert await context.all_reduce("sum", 1) == 1


# ---- nothing is kept ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_arguments_are_let_go_after_the_run(strategy: ar.Strategy) -> None:

    alive: list[Any] = []

    async def step() -> None:
        mine = np.ones(1000)
        alive.append(weakref.ref(mine))
        await me().start_all_reduce("sum", mine)

    await strategy.run(step)
    await idle()

    assert [ref() for ref in alive] == [None] * len(alive)
