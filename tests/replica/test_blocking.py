"""Collectives of plain step functions: device threads that meet without the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import Float16
from aioreplica.errors import ContextError, MergeMismatchError, StallError
from aioreplica.optimizers import Adam
from aioreplica.replica import BlockingContext
from tests.conftest import mirrored
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def blocking() -> BlockingContext:
    return me().blocking


# --- results --------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda c, x: c.all_reduce("sum", x),
    "mean of a tree": lambda c, x: c.all_reduce("mean", {"a": x, "b": [x[:2], x.sum()]}),
    "all_gather": lambda c, x: c.all_gather(x, 0),
    "reduce_scatter": lambda c, x: c.reduce_scatter("max", x),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "broadcast": lambda c, x: c.broadcast(x),
    "barrier": lambda c, x: c.barrier(),
    "any": lambda c, x: c.any(x[0] > 2),
    "all": lambda c, x: c.all(x[0] > 2),
    "agree": lambda c, x: c.agree("same"),
    "merge_call": lambda c, x: c.merge_call(total_of, args=(x,)),
    "group": lambda c, x: c.group([c.replica_id_in_sync_group]).all_reduce("sum", x),
}


def total_of(strategy: ar.Strategy, x: Any) -> Any:
    parts = strategy.local_results(x)
    return ar.PerReplica([np.sum(parts)] * len(parts)) if len(parts) > 1 else np.sum(parts)


def data(i: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(i).normal(size=size)


@pytest.mark.parametrize("name", CALLS)
async def test_the_result_is_that_of_the_awaitable_twin(strategy: ar.Strategy, name: str) -> None:
    call = CALLS[name]

    def plain() -> Any:
        return call(blocking(), data(my_id()))

    async def awaiting() -> Any:
        return await call(me(), data(my_id()))

    ours, theirs = await strategy.run(plain), await strategy.run(awaiting)

    for a, b in zip(strategy.local_results(ours), strategy.local_results(theirs), strict=True):
        assert str(a) == str(b)
        np.testing.assert_equal(a, b)


@pytest.mark.parametrize("size", [1, 2**15, 2**19], ids=["scalar", "pack", "4 MiB"])
async def test_large_and_small_sums_are_bitwise_equal(gang: ar.Strategy, size: int) -> None:
    def plain() -> Any:
        return blocking().all_reduce("sum", [data(my_id(), size), data(my_id() + 9, 3)])

    async def awaiting() -> Any:
        return await me().all_reduce("sum", [data(my_id(), size), data(my_id() + 9, 3)])

    ours, theirs = await gang.run(plain), await gang.run(awaiting)

    for a, b in zip(ours, theirs, strict=True):
        assert a[0].tobytes() == b[0].tobytes()
        assert not a[0].flags.writeable


async def test_compression_keeps_its_feedback(pair: ar.MirroredStrategy) -> None:
    def run_of(options: ar.CommunicationOptions) -> Callable[[], Any]:
        def plain() -> Any:
            return [blocking().all_reduce("sum", data(my_id()), options) for _ in range(3)]

        return plain

    def options() -> ar.CommunicationOptions:
        return ar.CommunicationOptions(compression=ar.collectives.TopK(0.3))

    async def awaiting(chosen: ar.CommunicationOptions) -> Any:
        return [await me().all_reduce("sum", data(my_id()), chosen) for _ in range(3)]

    ours = await pair.run(run_of(options()))
    theirs = await pair.run(awaiting, args=(options(),))

    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


async def test_many_in_a_row_never_lose_a_thread(strategy: ar.Strategy) -> None:
    def step() -> float:
        total = 0.0
        for k in range(200):
            total += blocking().all_reduce("sum", float(k + my_id()))
        return total

    n = strategy.num_replicas_in_sync
    results = strategy.local_results(await strategy.run(step))

    assert set(results) == {sum(n * k + n * (n - 1) / 2 for k in range(200))}


async def test_an_async_merge_function_is_awaited_on_the_loop(strategy: ar.Strategy) -> None:
    threads: list[int] = []

    async def merge(_strategy: ar.Strategy) -> str:
        await asyncio.sleep(0)
        threads.append(threading.get_ident())
        return "merged"

    results = await strategy.run(lambda: blocking().merge_call(merge))

    assert set(strategy.local_results(results)) == {"merged"}
    assert threads == [threading.get_ident()]


async def test_a_merge_function_runs_once_with_the_first_replicas_variables(
    gang: ar.MirroredStrategy,
) -> None:
    places: list[Any] = []

    def merge(strategy: ar.Strategy) -> None:
        places.append((strategy, ar.in_cross_replica_context()))

    await gang.run(lambda: blocking().merge_call(merge))

    assert places == [(gang, True)]


async def test_groups_meet_on_their_own(strategy: ar.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    half = max(1, n // 2)

    def step() -> Any:
        mine = range(half) if my_id() < half else range(half, n)
        group = blocking().group(mine)
        sums = [group.all_reduce("sum", my_id()) for _ in range(3)]
        return sums, group.members, group.num_replicas_in_sync

    for i, (sums, members, size) in enumerate(
        strategy.local_results(await strategy.run(lambda: _opaque(step())))
    ):
        expected = tuple(range(half)) if i < half else tuple(range(half, n))
        assert (sums, members, size) == ([sum(expected)] * 3, expected, len(expected))


class Opaque(list[Any]):
    """Kept whole by regrouping."""


def _opaque(value: Any) -> Any:
    return Opaque(value)


async def test_merges_are_recorded_with_their_sites(gang: ar.MirroredStrategy) -> None:
    def step() -> None:
        blocking().all_reduce("mean", np.ones(4))

    await gang.run(step)

    [record] = gang.recorder.records()
    assert (record.collective, record.op, record.num_bytes) == ("all_reduce", "MEAN", (32,))
    assert record.file == __file__


# --- variables and optimizers ---------------------------------------------------------------------


async def test_variables_are_written(strategy: ar.Strategy) -> None:
    with strategy.scope():
        v = ar.Variable(np.zeros(2), aggregation="sum")
    n = strategy.num_replicas_in_sync

    def step() -> Any:
        v.blocking.assign_add([1.0, 2.0])
        v.blocking.assign_sub([0.5, 0.0])
        seen = v.value
        v.blocking.assign(seen * 2 / n)
        return seen

    seen = strategy.local_results(await strategy.run(step))

    for value in seen:
        np.testing.assert_array_equal(value, [0.5 * n, 2.0 * n])
    np.testing.assert_array_equal(v.value, [1.0 * n, 4.0 * n])


async def test_a_large_variable_is_written(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        v = ar.Variable(np.zeros(2**20), aggregation="mean")

    await pair.run(lambda: v.blocking.assign(np.full(2**20, float(my_id()))))

    assert v.value[0] == v.value[-1] == 0.5


async def test_variables_are_made_and_updated(strategy: ar.Strategy) -> None:
    def step() -> Any:
        v = blocking().variable(1.0, name="made")
        blocking().update(v, lambda own, x: own.assign_add(x), args=(2.0,))
        return v

    v = await strategy.run(step)

    assert isinstance(v, ar.Variable)
    assert v.value == 3.0


async def test_gradients_are_applied_bitwise_alike(strategy: ar.Strategy) -> None:
    with strategy.scope():
        ours, theirs = ar.Variable(np.ones(3)), ar.Variable(np.ones(3))
        adams = Adam(0.1), Adam(0.1)

    def plain() -> None:
        for k in range(3):
            adams[0].blocking.apply_gradients([(data(my_id() + k, 3), ours)])

    async def awaiting() -> None:
        for k in range(3):
            await adams[1].apply_gradients([(data(my_id() + k, 3), theirs)])

    await strategy.run(plain)
    await strategy.run(awaiting)

    assert ours.value.tobytes() == theirs.value.tobytes()
    assert int(adams[0].iterations.value) == 3


@pytest.mark.parametrize("compression", [None, Float16()])
async def test_large_gradients_are_applied_without_the_loop(compression: Any) -> None:
    size = 2**20
    options = ar.CommunicationOptions(compression=compression)
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as pair:
        with pair.scope():
            v, adam = ar.Variable(np.zeros(size)), Adam(0.1)
        applied = threading.Event()

        def step() -> None:
            adam.blocking.apply_gradients([(np.ones(size), v)])
            applied.set()

        run = spawn(pair.run(step))
        await idle()
        assert applied.wait(10)  # the event loop does nothing meanwhile
        await run

    assert adam.iterations.value == 1
    assert (v.value < 0).all()


async def test_minimize_differentiates_here(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        v, adam = ar.Variable(3.0), Adam(0.1)

    losses = await pair.run(lambda: adam.blocking.minimize(lambda: v.value**2))

    assert losses.values == (9.0, 9.0)
    assert v.value < 3.0


# --- in the ops of an `async def` step ------------------------------------------------------------


async def test_ops_of_an_async_step_meet_whatever_the_others_call(
    strategy: ar.Strategy,
) -> None:
    def total() -> int:
        result: int = blocking().all_reduce("sum", my_id() + 1)
        return result

    async def step() -> tuple[int, int]:
        reduced = await me().run_on_device(total)
        if my_id() == 0:
            mixed = await me().run_on_device(total)
        else:
            mixed = await me().all_reduce("sum", my_id() + 1)
        return reduced, mixed

    results = strategy.local_results(await strategy.run(step))

    size = strategy.num_replicas_in_sync
    assert results == ((size * (size + 1) // 2,) * 2,) * size


async def test_ops_of_an_async_step_write_variables_and_meet_in_groups(
    strategy: ar.Strategy,
) -> None:
    with strategy.scope():
        v = ar.Variable(1.0, aggregation="sum")

    def op() -> Any:
        v.blocking.assign_add(my_id() + 1.0)
        alone = blocking().group([my_id()])
        return alone.all_reduce("sum", my_id()), blocking().merge_call(lambda _, x: x, (my_id(),))

    async def step() -> Any:
        return await me().run_on_device(op)

    results = strategy.local_results(await strategy.run(step))

    size = strategy.num_replicas_in_sync
    assert float(v.value) == 1 + size * (size + 1) / 2
    assert [alone for alone, _ in results] == list(range(size))


async def test_an_op_that_nobody_can_meet_ends_the_run(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if my_id() == 0:
            await me().run_on_device(lambda: blocking().barrier())

    with pytest.raises(MergeMismatchError, match="barrier"):
        await pair.run(step)


async def test_optimizers_are_not_driven_from_ops(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        v, adam = ar.Variable(1.0, aggregation="mean"), Adam(0.1)

    async def step() -> None:
        await me().run_on_device(lambda: adam.blocking.apply_gradients([(1.0, v)]))

    with pytest.raises(ContextError, match=r"await optimizer\.apply_gradients"):
        await pair.run(step)


async def test_a_host_thread_is_not_a_device_thread(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        await ar.run_on_host(lambda: blocking().barrier())

    with pytest.raises(ContextError, match="device threads"):
        await pair.run(step)


# --- misuse ---------------------------------------------------------------------------------------


async def test_an_awaitable_collective_names_its_twin(strategy: ar.Strategy) -> None:
    with strategy.scope():
        v, adam = ar.Variable(1.0, aggregation="mean"), Adam(0.1)

    def step() -> None:
        with pytest.raises(ContextError, match=r"Use ctx\.blocking\.all_reduce\(\.\.\.\)"):
            me().all_reduce("sum", 1)
        with pytest.raises(ContextError, match=r"ctx\.blocking\.all_reduce"):
            me().start_all_reduce("sum", 1)
        with pytest.raises(ContextError, match=r"variable\.blocking\.assign_add"):
            v.assign_add(1.0)
        with pytest.raises(ContextError, match=r"optimizer\.blocking\.apply_gradients"):
            adam.apply_gradients([(1.0, v)])
        with pytest.raises(ContextError, match="directly"):
            me().run_on_device(len, [])
        with pytest.raises(ContextError, match=r"ctx\.blocking\.group"):
            me().group([my_id()])

    await strategy.run(step)


async def test_a_blocking_call_on_the_event_loop_is_refused(strategy: ar.Strategy) -> None:
    with strategy.scope():
        v, adam = ar.Variable(1.0, aggregation="mean"), Adam(0.1)

    async def step() -> None:
        with pytest.raises(ContextError, match=r"await ctx\.all_reduce"):
            blocking().all_reduce("sum", 1)
        with pytest.raises(ContextError, match=r"await variable\.assign"):
            v.blocking.assign(2.0)
        with pytest.raises(ContextError, match=r"await optimizer\.apply_gradients"):
            adam.blocking.apply_gradients([(1.0, v)])

    await strategy.run(step)
    with pytest.raises(ContextError, match=r"await ctx\.barrier"):
        blocking().barrier()
    with pytest.raises(ContextError, match=r"await variable\.assign"):
        v.blocking.assign(2.0)
    with pytest.raises(ContextError, match=r"await optimizer\.apply_gradients"):
        adam.blocking.apply_gradients([(1.0, v)])


async def test_a_foreign_thread_is_refused(strategy: ar.Strategy) -> None:
    texts: list[str] = []

    def step() -> None:
        import contextvars

        def call() -> None:
            with pytest.raises(ContextError) as caught:
                blocking().barrier()
            texts.append(str(caught.value))

        thread = threading.Thread(target=contextvars.copy_context().run, args=(call,))
        thread.start()
        thread.join()

    await strategy.run(step)

    assert len(texts) == strategy.num_replicas_in_sync
    assert all("another thread" in text for text in texts)


async def test_after_the_run_and_in_a_merge_function_it_is_refused(
    pair: ar.MirroredStrategy,
) -> None:
    kept: list[BlockingContext] = []

    def step() -> None:
        own = blocking()
        kept.append(own)

        def merge(_strategy: ar.Strategy) -> None:
            with pytest.raises(ContextError, match="a merge function"):
                own.barrier()

        own.merge_call(merge)

    await pair.run(step)

    with pytest.raises(ContextError, match="after the step"):
        kept[0].barrier()


async def test_handles_have_no_twin(solo: ar.OneDeviceStrategy) -> None:
    def step() -> None:
        with pytest.raises(ContextError, match=r"ctx\.blocking\.all_reduce"):
            blocking().start_all_reduce("sum", 1)

    await solo.run(step)


# --- mismatches and failures ----------------------------------------------------------------------


async def test_different_collectives_are_a_mismatch_at_once(gang: ar.MirroredStrategy) -> None:
    def step() -> None:
        if my_id() == 1:
            blocking().barrier()
        else:
            blocking().all_reduce("sum", 1)

    with pytest.raises(MergeMismatchError, match=r"in barrier #1|in all_reduce #1") as caught:
        await gang.run(step)

    rows = caught.value.rows
    assert [row.replica_id for row in rows] == list(range(gang.num_replicas_in_sync))
    assert all(__file__ in row.site or row.site == "-" for row in rows)


async def test_different_shapes_are_a_mismatch(pair: ar.MirroredStrategy) -> None:
    with pytest.raises(MergeMismatchError, match=r"shapes \(1,\) and \(2,\) differ"):
        await pair.run(lambda: blocking().all_reduce("sum", np.ones(my_id() + 1)))


async def test_a_replica_that_returns_is_a_mismatch(gang: ar.MirroredStrategy) -> None:
    def step() -> None:
        if my_id() != 1:
            blocking().barrier()

    with pytest.raises(MergeMismatchError, match="Replica 1 returned while") as caught:
        await gang.run(step)

    states = [row.state for row in caught.value.rows]
    assert states.pop(1) == "returned"
    assert "waiting" in states  # one is enough, and the others may come later


async def test_groups_that_wait_for_each_other_are_a_mismatch(
    triple: ar.MirroredStrategy,
) -> None:
    def step() -> None:
        i = my_id()
        blocking().group(sorted({i, (i + 1) % 3})).barrier()

    with pytest.raises(MergeMismatchError, match="in group"):
        await triple.run(step)


async def test_a_failing_replica_wakes_the_others(gang: ar.MirroredStrategy) -> None:
    woken: list[int] = []
    others_wait = threading.Barrier(gang.num_replicas_in_sync)

    def step() -> None:
        others_wait.wait(10)
        if my_id() == 0:
            raise ValueError("mine")
        try:
            blocking().barrier()
        except asyncio.CancelledError:
            woken.append(my_id())
            with pytest.raises(asyncio.CancelledError):  # of an aborted run nothing goes on
                blocking().barrier()
            raise

    with pytest.raises(ValueError, match="mine") as caught:
        await gang.run(step)

    assert sorted(woken) == list(range(1, gang.num_replicas_in_sync))
    assert "replica 0 (cpu:0)" in caught.value.__notes__[0]


async def test_an_error_of_a_merge_is_raised_in_every_replica(gang: ar.MirroredStrategy) -> None:
    seen: list[BaseException] = []

    def merge(_strategy: ar.Strategy) -> None:
        raise KeyError("merge")

    def step() -> None:
        try:
            blocking().merge_call(merge)
        except KeyError as error:
            seen.append(error)
        blocking().barrier()  # all go on together

    await gang.run(step)

    assert len(seen) == gang.num_replicas_in_sync
    assert len(set(map(id, seen))) == 1
    assert "Raised by the merge of merge_call #1" in seen[0].__notes__[0]


async def test_an_error_of_an_async_merge_is_raised_too(gang: ar.MirroredStrategy) -> None:
    async def merge(_strategy: ar.Strategy) -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        await gang.run(lambda: blocking().merge_call(merge))


async def test_cancelling_wakes_parked_threads(gang: ar.MirroredStrategy) -> None:
    started, gate = threading.Barrier(gang.num_replicas_in_sync + 1, timeout=60), threading.Event()
    woken: list[int] = []

    def step() -> None:
        started.wait()
        if my_id() == 0:
            assert gate.wait(60)
            return
        try:
            blocking().barrier()
        except asyncio.CancelledError:
            woken.append(my_id())
            if len(woken) == gang.num_replicas_in_sync - 1:
                gate.set()
            raise

    task = spawn(gang.run(step))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sorted(woken) == list(range(1, gang.num_replicas_in_sync))
    assert await gang.run(lambda: blocking().agree(1)) is not None  # the lanes are free again


async def test_cancelling_ends_an_async_merge(pair: ar.MirroredStrategy) -> None:
    began = asyncio.Event()
    ended: list[str] = []

    async def merge(_strategy: ar.Strategy) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("merge")

    task = spawn(pair.run(lambda: blocking().merge_call(merge)))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert ended == ["merge"]


async def test_closing_the_strategy_ends_the_run() -> None:
    parked = threading.Event()

    def step() -> None:
        if my_id() == 0:
            parked.set()
        blocking().group([my_id()]).barrier()
        blocking().merge_call(never)

    async def never(_strategy: ar.Strategy) -> None:
        await asyncio.Event().wait()

    strategy = mirrored(2)
    task = spawn(strategy.run(step))
    await asyncio.to_thread(parked.wait, 10)
    await strategy.aclose()

    with pytest.raises(ContextError, match="was closed"):
        await task


# --- stalls and gangs -----------------------------------------------------------------------------


async def test_a_collective_has_a_timeout(pair: ar.MirroredStrategy) -> None:
    gate = threading.Event()

    def step() -> None:
        try:
            if my_id() == 0:
                assert gate.wait(10)
            blocking().all_reduce("sum", 1, ar.CommunicationOptions(timeout_seconds=0.02))
        finally:
            gate.set()  # by the one that has waited, when its run was ended

    with pytest.raises(StallError, match=r"all_reduce #1 .* found no partners for 0\.02 s"):
        await pair.run(step)


async def test_gangs_at_once_do_not_block_each_other(gang: ar.MirroredStrategy) -> None:
    other = mirrored(gang.num_replicas_in_sync)  # the same devices

    def step(x: int) -> Any:
        return [blocking().all_reduce("sum", x + k) for k in range(5)]

    runs = [strategy.run(step, args=(x,)) for x in range(4) for strategy in (gang, other)]
    results = await asyncio.gather(*runs)
    await other.aclose()

    n = gang.num_replicas_in_sync
    assert [r[0][0] for r in results] == [n * x for x in range(4) for _ in range(2)]


async def test_an_async_run_goes_on_beside_a_blocking_one(gang: ar.MirroredStrategy) -> None:
    gate = threading.Event()

    def plain() -> Any:
        if my_id() == 0:
            assert gate.wait(10)
        return blocking().all_reduce("sum", 1)

    async def awaiting() -> Any:
        return await me().all_reduce("sum", np.ones(2**20))

    held = spawn(gang.run(plain))
    await idle()
    beside = await gang.run(awaiting)  # reductions do not queue behind the held threads
    gate.set()

    n = gang.num_replicas_in_sync
    assert beside[0][0] == n
    assert (await held).values == (n,) * n


async def test_a_queued_gang_can_be_cancelled(pair: ar.MirroredStrategy) -> None:
    gate, started = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        assert gate.wait(10)

    held = spawn(pair.run(first))
    await asyncio.to_thread(started.wait, 10)
    queued = spawn(pair.run(lambda: blocking().barrier()))
    await idle()
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.set()
    await held


async def test_lanes_with_ops_queued_behind_are_served(pair: ar.MirroredStrategy) -> None:
    async def awaiting() -> int:
        return await me().run_on_device(my_id)

    first = spawn(pair.run(lambda: blocking().agree("a")))
    second = spawn(pair.run(awaiting))

    assert (await first).values == ("a", "a")
    assert (await second).values == (0, 1)
