"""Compiled steps: the same function gives the same numbers, and publishes whole steps only."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, NonFiniteError
from tests.conftest import mirrored
from tests.replica.gated import me

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from aioreplica.device_loop._compiled import CompiledSteps, _loop  # noqa: E402
from aioreplica.device_loop._compiled._program import Trial  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]
Step = Callable[..., None]


def elements(strategy: ar.Strategy, count: int, size: int = 4, seed: int = 0) -> list[Any]:
    """Elements of a matrix and a vector for each replica; plain under the default strategy."""
    rng, n = np.random.default_rng(seed), strategy.num_replicas_in_sync
    found = []
    for _ in range(count):
        x = [rng.normal(size=(size, 3)).astype(np.float32) for _ in range(n)]
        y = [rng.normal(size=size).astype(np.float32) for _ in range(n)]
        plain = isinstance(strategy, ar.DefaultStrategy)
        found.append((x[0], y[0]) if plain else (ar.PerReplica(x), ar.PerReplica(y)))
    return found


def model(strategy: ar.Strategy, optimizer: Callable[[], ar.optimizers.Optimizer]) -> Any:
    """Return a variable, an optimizer and a step that fits a line."""
    with strategy.scope():
        w = ar.Variable(np.linspace(-1, 1, 3).astype(np.float32))
        made = optimizer()

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        def loss() -> ar.Weighted:
            return ar.Weighted(jnp.sum((x @ w.value - y) ** 2), len(x))

        value = made.blocking.minimize(loss, backend="jax")
        ctx.set_last_step_output("loss", value, "sum")

    return w, made, step


def adam() -> ar.optimizers.Optimizer:
    return ar.optimizers.Adam(0.05)


async def ended(strategy: ar.Strategy, count: int, **options: Any) -> tuple[Any, ...]:
    w, optimizer, step = model(strategy, adam)
    result = await strategy.run_steps(step, iter(elements(strategy, count)), count, **options)
    loss = result.last_step_outputs["loss"].mean()
    return w.value.copy(), float(loss), w.version, int(optimizer.iterations.value)


async def test_it_trains_like_the_eager_step(strategy: ar.Strategy) -> None:
    eager, compiled = await ended(strategy, 7), await ended(strategy, 7, compile="jax")

    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-5)
    np.testing.assert_allclose(compiled[1], eager[1], rtol=1e-5)
    assert compiled[2:] == eager[2:] == (7, 7)  # the version counts the steps


@pytest.mark.parametrize("count", [1, 2, 64, 70])
async def test_a_scan_and_single_calls_have_the_same_bits(pair: ar.Strategy, count: int) -> None:
    found = []
    for scans in (True, False, True):
        with mock.patch.object(Trial, "prefers_scan", return_value=scans):
            found.append(await ended(pair, count, compile="jax"))

    for other in found[1:]:
        np.testing.assert_array_equal(other[0], found[0][0])
        assert other[1:] == found[0][1:]


async def test_any_split_into_calls_has_the_same_bits(pair: ar.Strategy) -> None:
    whole = await ended(pair, 12, compile="jax")
    w, optimizer, step = model(pair, adam)
    iterator = iter(elements(pair, 12))

    for count in (5, 1, 6):
        await pair.run_steps(step, iterator, count, compile="jax")

    np.testing.assert_array_equal(w.value, whole[0])
    assert (w.version, int(optimizer.iterations.value)) == (12, 12)


async def test_eager_and_compiled_calls_mix(pair: ar.Strategy) -> None:
    eager = await ended(pair, 9)
    w, _, step = model(pair, adam)
    iterator = iter(elements(pair, 9))

    await pair.run_steps(step, iterator, 4, compile="jax")
    await pair.run_steps(step, iterator, 2)
    await pair.run_steps(step, iterator, 3, compile="jax")

    np.testing.assert_allclose(w.value, eager[0], rtol=1e-5)
    assert w.version == 9


async def test_values_are_published_every_so_many_steps(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    seen: list[tuple[int, int]] = []
    observer = ar.telemetry.Observer(write_published=lambda n: seen.append((n, w.version)))
    remove = pair.observers.add(observer)

    result = await pair.run_steps(step, iter(elements(pair, 10)), 10, compile="jax", every=4)

    remove()
    assert result.steps_run == 10
    versions = [version for _, version in seen]
    assert versions == [4, 8, 10]
    assert [number for number, _ in seen] == list(range(seen[0][0], seen[0][0] + 3))


async def test_readers_get_views_that_stay(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    iterator = iter(elements(pair, 40))
    held, copies = [], []

    for _ in range(8):
        await pair.run_steps(step, iterator, 5, compile="jax")
        held.append(w.value)
        copies.append(w.value.copy())

    assert all(type(value) is np.ndarray and not value.flags.writeable for value in held)
    np.testing.assert_array_equal(held, copies)
    assert all(component is w.components[0] for component in w.components)


async def test_steps_before_the_end_of_the_iterator_are_run(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)

    result = await pair.run_steps(step, iter(elements(pair, 5)), 64, compile="jax")

    assert (result.steps_run, w.version) == (5, 5)


async def test_an_iterator_that_fails_leaves_whole_steps(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)

    def failing() -> Iterator[Any]:
        yield from elements(pair, 3)
        raise ValueError("no more")

    iterator = failing()
    with pytest.raises(ValueError, match="no more") as caught:
        await pair.run_steps(step, iterator, 8, compile="jax")

    assert w.version == 3
    assert "after 3 complete steps" in caught.value.__notes__[0]


async def test_a_step_that_is_not_finite_ends_the_run_before_it(gang: ar.Strategy) -> None:
    w, optimizer, step = model(gang, adam)
    batches = elements(gang, 6)
    batches[4][0].values[1][0, 0] = np.nan
    expected_w, _, expected_step = model(gang, adam)
    await gang.run_steps(expected_step, iter(batches), 4, compile="jax")
    iterator = iter(batches)

    with pytest.raises(NonFiniteError, match=r"gradient of 'variable.*' is not finite in step"):
        await gang.run_steps(step, iterator, 6, compile="jax")

    np.testing.assert_array_equal(w.value, expected_w.value)
    assert (w.version, int(optimizer.iterations.value)) == (4, 4)
    left = await gang.run_steps(lambda ctx, x, y: None, iterator, 6)
    assert left.steps_run == 2  # the element of the failed step went back


async def test_steps_are_skipped_and_the_loss_scale_follows(pair: ar.Strategy) -> None:
    def optimizer() -> ar.optimizers.Optimizer:
        scale = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
        return ar.optimizers.Adam(0.05, loss_scale=scale)

    batches = elements(pair, 7)
    batches[3][0].values[0][0, 0] = np.inf
    found = []
    for options in ({}, {"compile": "jax"}):
        w, made, step = model(pair, optimizer)
        await pair.run_steps(step, iter(batches), 7, **options)
        assert made.skipped_steps is not None
        assert made.loss_scale is not None
        counts = (int(made.iterations.value), int(made.skipped_steps.value), made.loss_scale.scale)
        found.append((w.value.copy(), w.version, counts))

    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert found[0][1:] == found[1][1:] == (6, (6, 1, 16.0))


async def test_a_variable_written_meanwhile_is_not_overwritten(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    await pair.run_steps(step, iter(elements(pair, 1)), 1, compile="jax")

    loop, has_begun, load = asyncio.get_running_loop(), asyncio.Event(), CompiledSteps.load

    def loaded(*args: Any) -> Any:
        loop.call_soon_threadsafe(has_begun.set)
        return load(*args)

    async def stream() -> AsyncIterator[Any]:
        first, *others = elements(pair, 4)
        yield first
        await has_begun.wait()
        await w.assign(np.zeros(3, np.float32))
        for element in others:
            yield element

    with (
        mock.patch.object(CompiledSteps, "load", loaded),
        pytest.raises(ContextError, match="was written by something else"),
    ):
        await pair.run_steps(step, stream(), 4, compile="jax")

    np.testing.assert_array_equal(w.value, np.zeros(3))
    assert w.version == 2


async def test_a_cancelled_call_publishes_nothing_of_its_steps(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    before = w.value.copy()
    waits = asyncio.Event()

    class Source:
        def __init__(self) -> None:
            self.elements = iter(elements(pair, 3))

        def __aiter__(self) -> "Source":
            return self

        async def __anext__(self) -> Any:
            for element in self.elements:
                return element
            waits.set()
            return await asyncio.Future()

    source = Source()
    run = asyncio.create_task(pair.run_steps(step, source, 8, compile="jax"))
    await waits.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    np.testing.assert_array_equal(w.value, before)
    again = await pair.run_steps(step, source, 3, compile="jax")
    assert (again.steps_run, w.version) == (3, 3)  # its elements went back


async def test_chunks_are_stacked_into_memory_that_is_free(pair: ar.Strategy) -> None:
    with pair.scope():
        total = ar.Variable(0, trainable=False, aggregation="sum")
    kept = []

    def step(ctx: ar.MultiStepContext, x: Any, number: Any) -> None:
        total.blocking.assign_add(x[0] * number)
        ctx.set_last_step_output("x", x)

    def numbers(count: int) -> Iterator[Any]:  # whatever is an array or a number is stacked
        for i in range(count):
            yield ar.PerReplica([np.full(3, i, np.int32)] * 2), 2

    for scans in (True, False):
        with mock.patch.object(Trial, "prefers_scan", return_value=scans):
            result = await pair.run_steps(step, numbers(300), 300, compile="jax")
        kept.append(result.last_step_outputs["x"].values[0])

    assert total.value == 2 * 2 * 2 * sum(range(300))  # of two calls and two replicas
    np.testing.assert_array_equal(kept, np.full((2, 3), 299))


async def test_an_abort_while_elements_are_read_ahead_waits_for_the_program(
    pair: ar.Strategy,
) -> None:
    _, _, step = model(pair, adam)
    order: list[str] = []
    wait, hold = jax.block_until_ready, _loop.only_one

    @contextmanager
    def only_one(blocking: Any) -> Iterator[None]:
        with hold(blocking):
            try:
                yield
            finally:
                order.append("next")

    def waited(arrays: Any) -> Any:
        order.append("waited")
        return wait(arrays)

    with (
        mock.patch.object(_loop, "only_one", only_one),
        mock.patch.object(jax, "block_until_ready", waited),
        mock.patch.object(_loop.CompiledLoop, "_ahead", side_effect=RuntimeError("aborted")),
        pytest.raises(RuntimeError, match="aborted"),
    ):
        await pair.run_steps(step, iter(elements(pair, 4)), 4, compile="jax")

    assert order == ["waited", "next"]


async def test_chunks_are_progress_for_a_stall_timeout(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    published = w.value

    async def stream() -> AsyncIterator[Any]:
        for number, element in enumerate(elements(pair, 130)):
            if number == 128:
                [group] = pair._runtime.lifecycle.active_groups()
                async with asyncio.timeout(60):
                    while group.progress()[2] < 64:  # the steps of the first chunk
                        await asyncio.sleep(0)
                assert w.value is published
            yield element

    result = await pair.run_steps(step, stream(), 130, compile="jax")

    assert (result.steps_run, w.version) == (130, 130)


# --- collectives and the rest of the context ------------------------------------------------------


def everything(ctx: ar.MultiStepContext, x: Any) -> None:
    """A step that calls every collective."""
    replica = me().blocking
    ident, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    x = jnp.asarray(x) * (1 + ident)
    outputs = {
        "sum": replica.all_reduce("sum", x), "mean": replica.all_reduce("mean", x),
        "max": replica.all_reduce("max", x), "min": replica.all_reduce("min", x),
        "gather": replica.all_gather(x, 0), "scatter": replica.reduce_scatter("sum", x),
        "broadcast": replica.broadcast(x, count - 1), "id": jnp.asarray(ident),
        "swapped": replica.all_to_all(x), "first": ar.autodiff.broadcast(x, 0),
        "any": jnp.asarray(replica.any(False)), "all": jnp.asarray(replica.all(True)),
        "step": jnp.asarray(replica.step - replica.step),
        "weighted": replica.all_reduce("sum", ar.Weighted(jnp.sum(x), 2)).mean(),
    }  # fmt: skip
    replica.barrier()
    for name, value in outputs.items():
        ctx.set_last_step_output(name, value)


async def test_every_collective_gives_what_it_gives_eagerly(strategy: ar.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    parts = [np.arange(8, dtype=np.float32) + i for i in range(n)]
    plain = isinstance(strategy, ar.DefaultStrategy)
    element = parts[0] if plain else ar.PerReplica(parts)

    eager = await strategy.run_steps(everything, iter([element]), 1)
    compiled = await strategy.run_steps(everything, iter([element]), 1, compile="jax")

    assert compiled.last_step_outputs.keys() == eager.last_step_outputs.keys()
    for name, value in eager.last_step_outputs.items():
        pairs = zip(
            strategy.local_results(compiled.last_step_outputs[name]),
            strategy.local_results(value),
            strict=True,
        )
        for here, there in pairs:
            np.testing.assert_array_equal(here, there, err_msg=name)


@pytest.mark.parametrize("count", range(2, 9))
async def test_sums_are_in_the_order_of_the_replicas(count: int) -> None:
    rng = np.random.default_rng(count)
    parts = [(rng.normal(size=1000) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
             for _ in range(count)]  # fmt: skip

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("sum", me().blocking.all_reduce("sum", x))

    async with mirrored(count) as strategy:
        result = await strategy.run_steps(step, iter([ar.PerReplica(parts)]), 1, compile="jax")

    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    np.testing.assert_array_equal(result.last_step_outputs["sum"].values[0], expected)


async def test_variables_are_assigned_by_their_rules(gang: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with gang.scope():
            total = ar.Variable(np.float32(0), trainable=False, aggregation="sum")
            mean = ar.Variable(np.float32(1), trainable=False, aggregation="mean")
            first = ar.Variable(0, trainable=False, aggregation="only_first_replica")
            own = ar.Variable(
                np.zeros(2, np.float32), trainable=False, synchronization="on_read",
                aggregation="sum",
            )  # fmt: skip

        def step(
            ctx: ar.MultiStepContext, x: Any, variables: Any = (total, mean, first, own)
        ) -> None:
            total, mean, first, own = variables
            total.blocking.assign_add(jnp.sum(x))
            mean.blocking.assign(mean.value + jnp.max(x))
            first.blocking.assign_sub(1)
            own.blocking.assign_add(x[:2] * 1)

        await gang.run_steps(step, (x for (x,) in _vectors(gang, 5)), 5, **options)
        variables = (total, mean, first, own)
        values = [np.asarray(v.components) for v in variables]
        found.append((values, [v.version for v in variables]))
        del total, mean, first, own, variables

    for here, there in zip(found[1][0], found[0][0], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5)
    assert found[1][1][:3] == found[0][1][:3] == [5, 5, 5]


def _vectors(strategy: ar.Strategy, count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    n = strategy.num_replicas_in_sync
    return [
        (ar.PerReplica([rng.normal(size=4).astype(np.float32) for _ in range(n)]),)
        for _ in range(count)
    ]


async def test_keys_of_jax_are_those_of_the_eager_step(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        own = jax.random.uniform(ar.autodiff.jax_key("a"), (2,))
        same = jax.random.uniform(ar.autodiff.jax_key("a", shared=True))
        total = ctx.last_step_outputs["total"] + jnp.sum(own) + same
        ctx.set_last_step_output("total", total)

    start = {"total": np.float32(0)}
    seeded = ar.RunOptions(seed=5)
    found = []
    for options in ({}, {"compile": "jax"}):
        async with mirrored(2) as strategy:
            result = await strategy.run_steps(
                step, iter(_vectors(strategy, 4)), 4, start, seeded, **options
            )
        found.append(result.last_step_outputs["total"].values)

    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert found[1][0] != found[1][1]


async def test_recorded_numbers_reach_the_event_log(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.record("size", jnp.float32(2.5) + ctx.steps_run)

    await pair.run_steps(step, iter(_vectors(pair, 3)), 3, compile="jax")

    events = [event for event in pair.events.events("scalar") if event.name == "size"]
    assert [event.value for event in events] == [2.5, 3.5, 4.5]
    assert [event.step for event in events] == [0, 1, 2]


async def test_gradients_go_through_collectives(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with pair.scope():
            w = ar.Variable(np.ones(3, np.float32))
            sgd = ar.optimizers.SGD(0.1)

        def step(ctx: ar.MultiStepContext, x: Any, y: Any, w: Any = w, sgd: Any = sgd) -> None:
            def loss() -> Any:
                scores = x @ w.value
                mean = ar.autodiff.all_reduce("mean", scores)
                joined = ar.autodiff.all_gather(scores, 0)
                return jnp.sum((scores - mean - y) ** 2) + 0.1 * jnp.sum(joined**3)

            sgd.blocking.minimize(loss, backend="jax")

        await pair.run_steps(step, iter(elements(pair, 2)), 2, **options)
        found.append(w.value.copy())

    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


async def test_models_of_jax_and_their_state_are_compiled(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with pair.scope():
            params = ar.autodiff.jax_variables(
                {"w": jnp.ones(3), "b": jnp.zeros(())}, name=f"params {options}"
            )
            state = ar.autodiff.jax_variables(
                {"m": jnp.zeros(3)}, trainable=False, name=f"state {options}"
            )
            sgd = ar.optimizers.SGD(0.01)

        def step(
            ctx: ar.MultiStepContext, x: Any, y: Any,
            params: Any = params, state: Any = state, sgd: Any = sgd,
        ) -> None:  # fmt: skip
            def loss() -> Any:
                p = params.value
                return jnp.mean(((x - state.value["m"]) @ p["w"] + p["b"] - y) ** 2)

            sgd.blocking.minimize(loss, params.variables)
            state.set_value({"m": 0.5 * state.value["m"] + 0.5 * jnp.mean(x, axis=0)})

        await pair.run_steps(step, iter(elements(pair, 4)), 4, **options)
        found.append([np.asarray(v.components) for v in (*params.variables, *state.variables)])

    for here, there in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-7)


# --- programs -------------------------------------------------------------------------------------


async def test_a_new_shape_compiles_anew_and_an_old_one_does_not(pair: ar.Strategy) -> None:
    _, _, step = model(pair, adam)
    counts = []
    with mock.patch.object(Trial, "prefers_scan", return_value=True):
        for size in (4, 4, 5, 4):
            await pair.run_steps(step, iter(elements(pair, 2, size)), 2, compile="jax")
            counts.append(pair.statistics().num_compiled)

    assert counts == [1, 1, 2, 2]


async def test_many_shapes_are_warned_of(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("sum", jnp.sum(x))

    async def run(size: int) -> None:
        element = ar.PerReplica([np.zeros(size, np.float32)] * 2)
        await pair.run_steps(step, iter([element]), 1, compile="jax")

    for size in range(1, 6):
        await run(size)
    with pytest.warns(RuntimeWarning, match="step was compiled 6 times: for a new function"):
        await run(6)


async def test_programs_go_with_their_step_function(pair: ar.Strategy) -> None:
    w, optimizer, step = model(pair, adam)
    await pair.run_steps(step, iter(elements(pair, 2)), 2, compile="jax")
    gone = weakref.ref(w)
    del w, optimizer, step
    gc.collect()

    assert gone() is None


async def test_the_faster_way_is_kept(pair: ar.Strategy) -> None:
    trial = Trial()
    assert trial.prefers_scan()
    for seconds in (9.0, 1.0, 9.0):  # two of them beside other work
        trial.add("scan", seconds)
        assert trial.prefers_scan() is (len(trial._seconds["scan"]) <= len(trial._seconds["step"]))
        trial.add("step", 2.0)

    assert trial.prefers_scan()
    trial.add("step", 0.1)  # known by now
    assert trial.prefers_scan()


@pytest.mark.parametrize("how", ["scan", "step"])
async def test_reading_ahead_counts_in_the_time_of_both_ways(pair: ar.Strategy, how: str) -> None:
    clock, took = [0.0], []

    def ahead(*_: object) -> None:
        clock[0] += 1.0

    with (
        mock.patch.object(_loop, "perf_counter", side_effect=lambda: clock[0]),
        mock.patch.object(_loop.CompiledLoop, "_ahead", side_effect=ahead),
        mock.patch.object(Trial, "prefers_scan", return_value=how == "scan"),
        mock.patch.object(Trial, "add", side_effect=lambda *args: took.append(args)),
    ):
        await pair.run_steps(model(pair, adam)[2], iter(elements(pair, 2)), 2, compile="jax")

    assert took == [(how, 1.0)]


async def test_a_step_is_recorded_no_more_once_it_is_compiled(pair: ar.Strategy) -> None:
    calls = []

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        calls.append(x.shape)

    for _ in range(3):
        await pair.run_steps(step, iter(_vectors(pair, 2)), 2, compile="jax")
    recorded = len(calls)
    for _ in range(6):
        await pair.run_steps(step, iter(_vectors(pair, 2)), 2, compile="jax")

    assert recorded <= 3  # shapes, scan, single calls
    assert len(calls) == recorded
