"""Device loops: what steps get, what they leave behind, and how they end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from aioreplica.replica import BlockingContext
from tests.conftest import mirrored
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def blocking() -> BlockingContext:
    return me().blocking


def nothing(ctx: ar.MultiStepContext, *inputs: Any) -> None:
    """A step that does nothing."""


def parts(strategy: ar.Strategy, step: int, size: int = 3) -> Any:
    """One array per replica; plain under the default strategy."""
    n = strategy.num_replicas_in_sync
    values = [np.random.default_rng(100 * step + i).normal(size=size) for i in range(n)]
    return values[0] if isinstance(strategy, ar.DefaultStrategy) else ar.PerReplica(values)


def stream(strategy: ar.Strategy, count: int) -> Iterator[Any]:
    return (parts(strategy, step) for step in range(count))


async def async_stream(strategy: ar.Strategy, count: int) -> AsyncIterator[Any]:
    for step in range(count):
        yield parts(strategy, step)


# --- inputs ---------------------------------------------------------------------------------------


async def test_every_step_gets_the_next_element(strategy: ar.Strategy) -> None:
    seen: list[list[Any]] = [[] for _ in range(strategy.num_replicas_in_sync)]

    result = await strategy.run_steps(
        lambda ctx, x: seen[my_id()].append(x), stream(strategy, 9), 5
    )

    assert result.steps_run == 5
    for i, own in enumerate(seen):
        expected = [strategy.local_results(parts(strategy, step))[i] for step in range(5)]
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("source", [stream, async_stream], ids=["sync", "async"])
async def test_the_next_call_goes_on_with_the_iterator(pair: ar.Strategy, source: Any) -> None:
    iterator = source(pair, 7)
    seen: list[Any] = []

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        if my_id() == 0:
            seen.append(x)

    runs = [(await pair.run_steps(step, iterator, 3)).steps_run for _ in range(4)]

    assert runs == [3, 3, 1, 0]  # ends after the last complete step, and says how many ran
    np.testing.assert_array_equal(seen, [parts(pair, k)[0] for k in range(7)])


async def test_a_tuple_is_spread_and_anything_else_is_one_input(strategy: ar.Strategy) -> None:
    shapes: list[Any] = []

    def step(ctx: ar.MultiStepContext, *inputs: Any) -> None:
        if my_id() == 0:
            shapes.append(inputs)

    await strategy.run_steps(step, iter([(1, {"a": 2})]))
    await strategy.run_steps(step, iter([[1, 2]]))
    await strategy.run_steps(step, iter([()]))

    assert shapes == [(1, {"a": 2}), ([1, 2],), ()]


async def test_a_distributed_dataset_feeds_it(gang: ar.MirroredStrategy) -> None:
    data = np.arange(48.0).reshape(24, 2)

    async with gang.distribute_dataset(ar.ArrayDataset(data, batch_size=8)) as batches:
        iterator = aiter(batches)

        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            total = ctx.last_step_outputs["total"] + blocking().all_reduce("sum", x.sum())
            ctx.set_last_step_output("total", total, "mean")

        first = await gang.run_steps(step, iterator, 2, {"total": 0.0})
        rest = await gang.run_steps(step, iterator, 9, first.last_step_outputs)

    assert (first.steps_run, rest.steps_run) == (2, 1)
    assert rest.last_step_outputs["total"] == data.sum()


async def test_a_dataset_itself_is_read_from_the_start(pair: ar.MirroredStrategy) -> None:
    async with pair.distribute_dataset(ar.ArrayDataset(np.ones((8, 1)), batch_size=4)) as batches:
        runs = [(await pair.run_steps(nothing, batches, 9)).steps_run for _ in range(2)]

    assert runs == [2, 2]


async def test_no_more_elements_are_taken_than_steps_are_run(pair: ar.MirroredStrategy) -> None:
    iterator = iter(range(10))

    await pair.run_steps(nothing, iterator, 4)

    assert next(iterator) == 4


async def test_the_infeed_reads_ahead_within_bounds(pair: ar.MirroredStrategy) -> None:
    """The iterator runs ahead of a step that waits, and stops when the queues are full."""
    full, gate = threading.Event(), threading.Event()
    pulled: list[int] = []
    large = np.zeros(2**20)  # 8 MiB: two of them fill the infeed

    def source() -> Iterator[Any]:
        for k in range(6):
            pulled.append(k)
            if k == 2:
                full.set()
            yield large

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        if ctx.steps_run == 0 and my_id() == 0:
            assert gate.wait(10)

    running = spawn(pair.run_steps(step, source(), 6))
    await asyncio.to_thread(full.wait, 10)
    await idle()
    ahead = len(pulled)
    gate.set()
    result = await running

    assert 3 <= ahead <= 4  # two queued, one taken by the step, one in hand
    assert (result.steps_run, pulled) == (6, list(range(6)))


# --- outputs --------------------------------------------------------------------------------------


async def test_outputs_are_reduced_or_kept_apart(gang: ar.MirroredStrategy) -> None:
    n = gang.num_replicas_in_sync

    def step(ctx: ar.MultiStepContext, x: float) -> None:
        ctx.set_last_step_output("sum", {"a": np.full(2, x + my_id())}, "sum")
        ctx.set_last_step_output("mean", float(my_id()), ar.ReduceOp.MEAN)
        ctx.set_last_step_output("apart", my_id())
        ctx.set_non_tensor_output("name", [f"replica {my_id()}"])

    result = await gang.run_steps(step, iter([1.0, 2.0]), 2)

    outputs = result.last_step_outputs
    np.testing.assert_array_equal(outputs["sum"]["a"], [n * 2.0 + n * (n - 1) / 2] * 2)
    assert outputs["mean"] == (n - 1) / 2
    assert outputs["apart"].values == tuple(range(n))
    assert result.non_tensor_outputs["name"].values == tuple([f"replica {i}"] for i in range(n))
    assert isinstance(result, ar.MultiStepContext)


async def test_the_default_strategy_keeps_plain_values() -> None:
    def step(ctx: ar.MultiStepContext, x: float) -> None:
        ctx.set_last_step_output("x", x)
        ctx.set_last_step_output("sum", x, "sum")
        ctx.set_non_tensor_output("who", "me")

    result = await ar.get_strategy().run_steps(step, [3.0])

    assert result.last_step_outputs == {"x": 3.0, "sum": 3.0}
    assert result.non_tensor_outputs == {"who": "me"}


async def test_loop_values_are_carried_from_step_to_step(strategy: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.set_last_step_output("count", ctx.last_step_outputs["count"] + x, "max")

    once = await strategy.run_steps(step, iter([1] * 9), 9, {"count": 0, "kept": 5})

    assert once.last_step_outputs["count"] == 9
    assert set(strategy.local_results(once.last_step_outputs["kept"])) == {5}


@pytest.mark.parametrize("hop", [1, 10, 100])
async def test_any_split_into_hops_gives_the_same_bits(strategy: ar.Strategy, hop: int) -> None:
    with strategy.scope():
        v = ar.Variable(np.zeros(3), aggregation="mean")

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        noise = me().rng("noise").normal(size=3) + me().shared_rng("all").normal(size=3)
        v.blocking.assign_add(0.1 * np.sin(v.value + x) + noise)

    iterator = stream(strategy, 100)
    for _ in range(100 // hop):
        await strategy.run_steps(step, iterator, hop, options=ar.RunOptions(seed=7))

    assert v.value.tobytes() == await reference_bits(strategy)


async def reference_bits(strategy: ar.Strategy) -> bytes:
    """The same hundred steps, with run and awaited writes."""
    n = strategy.num_replicas_in_sync
    default = isinstance(strategy, ar.DefaultStrategy)
    other = ar.DefaultStrategy() if default else mirrored(n)
    with other.scope():
        v = ar.Variable(np.zeros(3), aggregation="mean")

    async def step(x: Any) -> None:
        noise = me().rng("noise").normal(size=3) + me().shared_rng("all").normal(size=3)
        await v.assign_add(0.1 * np.sin(v.value + x) + noise)

    for k in range(100):
        await other.run(step, args=(parts(strategy, k),), options=ar.RunOptions(seed=7))
    await other.aclose()
    return v.value.tobytes()


async def test_events_are_recorded_by_the_first_replica(gang: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.record("x", np.float32(x))
        ctx.record("note", "a line")

    await gang.run_steps(step, iter([5, 6]), 9)

    scalars = [(e.name, e.step, e.replica_id, e.value) for e in gang.events.events("scalar")]
    assert scalars == [
        ("x", 0, 0, 5.0),
        ("note", 0, 0, "a line"),
        ("x", 1, 0, 6.0),
        ("note", 1, 0, "a line"),
    ]
    assert [e.name for e in gang.events.events("loop")] == ["begin", "end"]
    assert [e.value for e in gang.events.events("infeed")] == [2]


async def test_events_count_steps_over_all_loops(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.record("x", x)
        ar.outside_compilation(str)

    for _ in range(2):
        await pair.run_steps(step, iter(range(3)), 3)

    assert [e.step for e in pair.events.events("scalar")] == list(range(6))
    outside = [e.step for e in pair.events.events("outside") if e.replica_id == 1]
    assert outside == list(range(6))
    assert [e.step for e in pair.events.events("loop")] == [0, 0, 3, 3]


async def test_a_loop_that_fails_has_an_end_too(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        blocking().barrier()
        if x == 2:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, iter(range(9)), 9)

    assert [(e.name, e.value) for e in pair.events.events("loop")] == [("begin", 9), ("end", 2)]


# --- bad arguments --------------------------------------------------------------------------------


async def test_an_async_step_is_refused(strategy: ar.Strategy) -> None:
    async def step(ctx: ar.MultiStepContext) -> None: ...

    with pytest.raises(TypeError, match=r"`async def`.*outside_compilation"):
        await strategy.run_steps(step, iter([1]))
    with pytest.raises(TypeError, match="returned a coroutine"):
        await strategy.run_steps(lambda ctx, x: step(ctx), iter([1]))
    with pytest.raises(TypeError, match="needs a step function"):
        await strategy.run_steps(3, iter([1]))  # type: ignore[arg-type]


async def test_a_step_of_which_nothing_would_run_is_refused(pair: ar.MirroredStrategy) -> None:
    """Calling a generator function runs none of it; that must not pass for a step."""

    def generator(ctx: ar.MultiStepContext, x: int) -> Iterator[None]:
        yield

    async def async_generator(ctx: ar.MultiStepContext, x: int) -> AsyncIterator[None]:
        yield

    taken = iter([1, 2])
    for fn in (generator, async_generator):
        with pytest.raises(TypeError, match=r"contains `yield`.*set_last_step_output"):
            await pair.run_steps(fn, taken)
    assert next(taken) == 1
    with pytest.raises(TypeError, match=r"returned a generator \(step 0 of 3"):
        await pair.run_steps(lambda ctx, x: generator(ctx, x), iter([1]), 3)
    with pytest.raises(TypeError, match="returned an async generator"):
        await pair.run_steps(lambda ctx, x: async_generator(ctx, x), iter([1]))


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2"])
async def test_iterations_are_checked(solo: ar.Strategy, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="iterations must be"):
        await solo.run_steps(nothing, iter([1]), bad)


@pytest.mark.parametrize("bad", [3, None, {"x": 1}, np.ones(3), ar.PerReplica([1]), "abc"])
async def test_an_argument_that_yields_no_elements_is_refused(solo: ar.Strategy, bad: Any) -> None:
    with pytest.raises(TypeError, match="run_steps takes an iterator"):
        await solo.run_steps(nothing, bad)


async def test_loop_values_and_options_are_checked(solo: ar.Strategy) -> None:
    with pytest.raises(TypeError, match="initial_loop_values"):
        await solo.run_steps(nothing, iter([1]), 1, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ar\.RunOptions"):
        await solo.run_steps(nothing, iter([1]), options=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="initial_loop_values has 3 values"):
        await solo.run_steps(nothing, iter([1]), 1, {"a": ar.PerReplica([1, 2, 3])})


async def test_outputs_are_checked(solo: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        with pytest.raises(TypeError, match="reduction of output 'name'"):
            ctx.set_last_step_output("name", "text", "sum")
        with pytest.raises(TypeError, match="must be a str"):
            ctx.set_last_step_output(3, 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="product"):
            ctx.set_last_step_output("name", 1, "product")
        with pytest.raises(TypeError, match="a number or a text"):
            ctx.record("name", np.ones(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a str"):
            ctx.record(3, 1.0)  # type: ignore[arg-type]

    result = await solo.run_steps(step, iter([1]))

    assert result.last_step_outputs == {}
    with pytest.raises(ContextError, match="in the step function"):
        result.set_last_step_output("late", 1)


async def test_a_loops_context_is_closed_after_the_loop(solo: ar.Strategy) -> None:
    kept: list[ar.MultiStepContext] = []

    await solo.run_steps(lambda ctx, x: kept.append(ctx), iter([1]))

    for late in (
        lambda: kept[0].set_last_step_output("late", 1),
        lambda: kept[0].set_non_tensor_output("late", 1),
        lambda: kept[0].record("late", 1),
    ):
        with pytest.raises(ContextError, match="on a loop's context, after the loop"):
            late()
    assert not solo.events.events("scalar")


async def test_the_outputs_may_be_written_as_a_dict(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.last_step_outputs["own"] = x + my_id()

    assert (await pair.run_steps(step, iter([1]))).last_step_outputs["own"].values == (1, 2)

    def odd(ctx: ar.MultiStepContext, x: int) -> None:
        if my_id() == 1:
            ctx.last_step_outputs["own"] = x

    with pytest.raises(MergeMismatchError, match="Output 'own'"):
        await pair.run_steps(odd, iter([1]))


async def test_an_output_of_some_replicas_only_is_a_mismatch(gang: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if my_id() == 1:
            ctx.set_last_step_output("odd", x)

    with pytest.raises(MergeMismatchError, match=r"Output 'odd' .* not set alike") as caught:
        await gang.run_steps(step, iter([1]))

    assert caught.value.rows[0].collective == "did not set it"
    assert __file__ in caught.value.rows[1].site


async def test_outputs_reduced_in_different_ways_are_a_mismatch(
    pair: ar.MirroredStrategy,
) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.set_last_step_output("loss", x, "sum" if my_id() else "mean")

    with pytest.raises(MergeMismatchError, match="to be reduced by SUM"):
        await pair.run_steps(step, iter([1]))


# --- sources that go wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (np.ones(2), r"leaf \[0\]\['x'\] is of shape \(2,\) and dtype float64, the first was"),
        (np.ones(3, np.float32), r"dtype float32, .* np\.asarray\(leaf, dtype\)"),
        (3.0, r"is of type float, .* np\.asarray\(leaf, dtype\)"),
    ],
    ids=["shape", "dtype", "type"],
)
async def test_a_shape_that_changes_names_leaf_and_step(
    gang: ar.MirroredStrategy, second: Any, text: str
) -> None:
    ran: list[int] = []
    elements = [{"x": np.ones(3)}, {"x": np.ones(3)}, {"x": second}]

    with pytest.raises(ValueError, match=f"step 2 differs.*replica 0:.*{text}") as caught:
        await gang.run_steps(lambda ctx, x: ran.append(ctx.steps_run), iter(elements), 9)

    assert sorted(ran) == sorted([0, 1] * gang.num_replicas_in_sync)
    assert "after 2 complete steps" in caught.value.__notes__[0]


async def test_a_structure_that_changes_is_refused(pair: ar.MirroredStrategy) -> None:
    with pytest.raises(ValueError, match=r"leaves \[0\]\['b'\], the first had \[0\]\['a'\]"):
        await pair.run_steps(nothing, iter([{"a": 1}, {"b": 1}]), 2)
    with pytest.raises(ValueError, match=r"structure is \(\(\*,\),\), the first was \(\[\*\],\)\."):
        await pair.run_steps(nothing, iter([([1],), ((1,),)]), 2)


async def test_a_leaf_with_a_shape_but_no_dtype_is_an_object(pair: ar.MirroredStrategy) -> None:
    class Sized:
        shape = (3,)

    assert (await pair.run_steps(nothing, iter([Sized(), Sized()]), 2)).steps_run == 2


async def test_uneven_parts_are_fine_as_long_as_they_stay(pair: ar.MirroredStrategy) -> None:
    uneven = ar.PerReplica([np.ones(3), np.ones(2)])

    assert (await pair.run_steps(nothing, iter([uneven] * 3), 9)).steps_run == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_an_error_of_the_iterator_comes_after_the_steps_before_it(
    gang: ar.MirroredStrategy, is_async: bool
) -> None:
    ran: list[int] = []
    mine = OSError("disk")

    def source() -> Iterator[int]:
        yield from (1, 2)
        raise mine

    async def async_source() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise mine

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        blocking().barrier()
        ran.append(x)

    with pytest.raises(OSError, match="disk") as caught:
        await gang.run_steps(step, async_source() if is_async else source(), 9)

    assert caught.value is mine
    assert sorted(ran) == sorted([1, 2] * gang.num_replicas_in_sync)
    assert "after 2 complete steps" in mine.__notes__[0]


# --- failures and cancellation --------------------------------------------------------------------


async def test_a_failing_step_is_named(gang: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        blocking().barrier()
        if x == 3 and my_id() == 1:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        await gang.run_steps(step, iter(range(9)), 9)

    notes = "\n".join(caught.value.__notes__)
    assert "step 3 of 9" in notes
    assert "replica 1 (cpu:1)" in notes


async def test_an_error_of_all_replicas_is_noted_once(gang: ar.MirroredStrategy) -> None:
    """What a merge function raises is one object, which every device thread raises."""

    def merge(strategy: ar.Strategy) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        await gang.run_steps(lambda ctx, x: blocking().merge_call(merge), iter([1]))

    assert len(set(caught.value.__notes__)) == len(caught.value.__notes__) == 3


async def test_cancelling_wakes_programs_that_wait_for_the_infeed(
    gang: ar.MirroredStrategy,
) -> None:
    waiting = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 1
        waiting.set()
        await asyncio.Event().wait()

    running = spawn(gang.run_steps(nothing, source(), 9))
    await waiting.wait()
    await idle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert (await gang.run_steps(nothing, iter([1]))).steps_run == 1


async def test_cancelling_ends_a_loop_without_collectives(pair: ar.MirroredStrategy) -> None:
    began = threading.Event()

    def forever() -> Iterator[int]:
        while True:
            yield 1

    running = spawn(pair.run_steps(lambda ctx, x: began.set(), forever(), 10**9))
    await asyncio.to_thread(began.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_mismatch_inside_the_loop_has_a_table(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if x < 2 or my_id() == 0:
            blocking().barrier()

    with pytest.raises(MergeMismatchError, match=r"Replica 1 returned|barrier #3"):
        await pair.run_steps(step, iter(range(3)), 9)


async def test_loops_at_once_do_not_block_each_other(gang: ar.MirroredStrategy) -> None:
    other = mirrored(gang.num_replicas_in_sync)

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        ctx.set_last_step_output("sum", blocking().all_reduce("sum", x), "max")

    loops = [s.run_steps(step, iter(range(5)), 5) for _ in range(3) for s in (gang, other)]
    results = await asyncio.gather(*loops)
    await other.aclose()

    assert {r.last_step_outputs["sum"] for r in results} == {4 * gang.num_replicas_in_sync}


async def test_it_is_a_cross_replica_method(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        with pytest.raises(ContextError, match="run_steps is a cross-replica method"):
            await pair.run_steps(nothing, iter([1]))

    await pair.run(step)


async def test_an_anyio_timeout_ends_the_loop(pair: ar.MirroredStrategy) -> None:
    import anyio

    async def source() -> AsyncIterator[int]:
        yield 1
        scope.deadline = 0.0
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        with anyio.fail_after(60) as scope:
            await pair.run_steps(nothing, source(), 9)
