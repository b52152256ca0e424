"""Compiled steps: the same function gives the same numbers, and publishes whole steps only."""

import asyncio
from collections.abc import AsyncIterator, Callable
from threading import Lock
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.context import REGISTRY
from aioreplica.errors import ContextError, NonFiniteError
from tests.conftest import mirrored

jax = pytest.importorskip("jax")

from aioreplica.device_loop._compiled import CompiledSteps, _loop  # noqa: E402
from aioreplica.device_loop._compiled._program import StepProgram  # noqa: E402
from tests.device_loop.compiled_steps import adam, elements, ended, model  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


class Bounded(ar.optimizers.Optimizer):
    """Adds what it is given to a value, and bounds the sum."""

    def __init__(self) -> None:
        super().__init__(1.0, ())

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        raise AssertionError

    def prepare(self, learning_rate: float, iteration: int) -> float:
        return learning_rate

    def update(self, prepared: float, value: Any, gradient: Any, slots: Any) -> Any:
        return np.clip(value + prepared * gradient, -1, 1), {}

    def finish(self, prepared: float) -> dict[ar.Variable, Any]:
        return {}


async def test_it_trains_like_the_eager_step(strategy: ar.Strategy) -> None:
    eager, compiled = await ended(strategy, 7), await ended(strategy, 7, compile="jax")

    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-5)
    np.testing.assert_allclose(compiled[1], eager[1], rtol=1e-5)
    assert compiled[2:] == eager[2:] == (7, 7)  # the version counts the steps


@pytest.mark.parametrize("count", [1, 2, 64, 70])
async def test_one_call_and_single_steps_have_the_same_bits(pair: ar.Strategy, count: int) -> None:
    found = [await ended(pair, count, compile="jax", every=every) for every in (None, 1, 3, None)]

    for other in found[1:]:
        np.testing.assert_array_equal(other[0], found[0][0])
        assert other[1:] == found[0][1:]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    [
        adam,
        lambda: ar.optimizers.Adam(0.05, on_non_finite="skip"),
        lambda: ar.optimizers.Adam(0.05, on_non_finite="skip", global_clipnorm=1.0),
        lambda: ar.optimizers.SGD(0.05, momentum=0.9, on_non_finite="skip"),
    ],
    ids=["adam", "skip", "clip and skip", "momentum and skip"],
)
async def test_any_split_into_calls_has_the_same_bits(
    num_replicas: int, optimizer: Callable[[], ar.optimizers.Optimizer]
) -> None:
    found = set()
    async with mirrored(num_replicas) as strategy:
        for counts in ([32], [5, 1, 26]):
            w, made, step = model(strategy, optimizer)
            iterator = iter(elements(strategy, 32))
            for count in counts:
                await strategy.run_steps(step, iterator, count, compile="jax")
            found.add(w.value.tobytes())
            assert (w.version, int(made.iterations.value)) == (32, 32)

    assert len(found) == 1


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


async def test_a_slot_that_overflows_ends_the_run_though_values_are_finite(
    pair: ar.Strategy,
) -> None:
    w, optimizer, step = model(pair, adam)
    batches = elements(pair, 5)
    batches[3][0].values[1][:] *= np.float32(1e18)  # the gradient is 1e36, and finite

    with (
        pytest.raises(NonFiniteError, match=r"An update.* is not finite in step 3"),
    ):
        await pair.run_steps(step, iter(batches), 5, compile="jax")

    assert np.isfinite(w.value).all()
    assert (w.version, int(optimizer.iterations.value)) == (3, 3)


def clipped(w: Any) -> Any:
    return np.clip(w, -1, 1)


@pytest.mark.parametrize("bound", ["constraint", "assign", "other optimizer"])
async def test_what_is_not_finite_ends_the_run_though_the_step_bounds_it(
    pair: ar.Strategy, bound: str
) -> None:
    async def left(**options: Any) -> tuple[Any, ...]:
        with pair.scope():
            constraint = clipped if bound == "constraint" else None
            w = ar.Variable(
                np.zeros(2, np.float32), aggregation="only_first_replica", constraint=constraint
            )
            first, second = ar.optimizers.SGD(0.1), Bounded()

        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            first.blocking.apply_gradients([(x, w)])
            if bound == "assign":
                w.blocking.assign(jax.numpy.clip(w.value, -1, 1))
            elif bound == "other optimizer":
                second.blocking.apply_gradients([(np.ones(2, np.float32), w)])

        values = [np.float32([np.inf if i == 2 else 0.1, 0.1]) for i in range(5)]
        batches = [(ar.PerReplica([x] * 2),) for x in values]
        with (
            pytest.raises(NonFiniteError, match="The gradient of"),
        ):
            await pair.run_steps(step, iter(batches), 5, **options)
        return w.value.copy(), w.version, int(first.iterations.value)

    eager, compiled = await left(), await left(compile="jax")

    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-6)
    assert compiled[1:] == eager[1:]
    assert eager[2] == 2


async def test_what_is_not_finite_of_a_second_optimizer_has_its_name(pair: ar.Strategy) -> None:
    with pair.scope():
        a, b, c = (ar.Variable(np.zeros(2, np.float32), name=name) for name in "abc")
        first, second = ar.optimizers.SGD(0.1), ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        first.blocking.apply_gradients([(jax.numpy.ones_like(x), a)])
        second.blocking.apply_gradients([(jax.numpy.ones_like(x), b), (x, c)])

    values = [np.float32([np.inf if i == 2 else 0.1, 0.1]) for i in range(5)]
    for options in ({}, {"compile": "jax"}):
        batches = [(ar.PerReplica([x] * 2),) for x in values]
        with pytest.raises(NonFiniteError, match="The gradient of 'c' is not finite") as caught:
            await pair.run_steps(step, iter(batches), 5, **options)
        assert caught.value.variable == "c"


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


async def test_versions_count_the_updates_of_which_some_are_skipped(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax", "every": 3}):
        with pair.scope():
            w = ar.Variable(np.zeros(2, np.float32), aggregation="only_first_replica")
            scale = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            optimizer = ar.optimizers.Adam(0.1, loss_scale=scale, measure_norm=True)

        def step(ctx: ar.MultiStepContext, x: Any, w: Any = w, optimizer: Any = optimizer) -> None:
            for sign in (1, -1):  # the second one is skipped in the third step
                gradient = jax.numpy.sqrt(sign * x)
                optimizer.blocking.apply_gradients([(gradient, w)])
            w.blocking.assign_add(x)

        values = [np.float32([1 if i == 2 else 0, 0]) for i in range(5)]
        batches = [(ar.PerReplica([x] * 2),) for x in values]
        await pair.run_steps(step, iter(batches), 5, **options)
        found.append([each.version for each in (w, *optimizer.settings.variables)])

    assert found[0] == found[1]
    assert found[0][:3] == [14, 9, 1]  # of the value, the iterations and the skipped steps


async def test_optimizers_that_share_a_loss_scale_count_a_step_once(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax", "every": 3}):
        with pair.scope():
            one, two = (ar.Variable(np.zeros(2, np.float32)) for _ in range(2))
            scale = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            first, second = (ar.optimizers.SGD(0.1, loss_scale=scale) for _ in range(2))

        def step(ctx: ar.MultiStepContext, x: Any, own: Any = (one, two, first, second)) -> None:
            one, two, first, second = own
            first.blocking.minimize(lambda: jax.numpy.sum(one.value * x[0]), backend="jax")
            second.blocking.minimize(lambda: jax.numpy.sum(two.value * x[1]), backend="jax")

        rows = [[1, 1], [1, 1], [np.inf, 1], [np.inf] * 2, [1, 1], [1, 1]]
        rows += [[1, np.inf], [np.inf, 1], [1, 1]]  # a step behind a skipped one counts
        batches = [(ar.PerReplica([np.float32(row)] * 2),) for row in rows]
        await pair.run_steps(step, iter(batches), 9, **options)
        state = (one, two, *scale.variables, first.iterations, second.iterations)
        found.append([(each.version, each.value.tolist()) for each in state])

    assert [version for version, _ in found[1]] == [version for version, _ in found[0]]
    np.testing.assert_allclose(*([np.ravel(v).tolist() for _, v in each][2:] for each in found))
    np.testing.assert_allclose(found[1][0][1], found[0][0][1], rtol=1e-6)


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


async def test_a_variable_that_steps_only_read_is_not_taken_for_its_old_value(
    pair: ar.Strategy,
) -> None:
    with pair.scope():
        total = ar.Variable(np.float32(0), trainable=False, aggregation="mean")
        rate = ar.Variable(np.float32(1), trainable=False, aggregation="mean", name="rate")

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        total.blocking.assign_add(rate.value * 2)

    def raise_rate(number: int) -> None:
        if total.version == 2:
            hundred = np.asarray(np.float32(100))
            rate.store.write({rate: (hundred, hundred)})

    iterator = iter(elements(pair, 12))
    remove = pair.observers.add(ar.telemetry.Observer(write_published=raise_rate))
    with pytest.raises(ContextError, match="Variable rate was written by something else"):
        await pair.run_steps(step, iterator, 12, compile="jax", every=2)
    remove()

    assert (float(total.value), total.version) == (4.0, 2)
    await pair.run_steps(step, iterator, 10, compile="jax", every=2)
    assert (float(total.value), total.version) == (2004.0, 12)


async def test_steps_are_published_though_the_next_ones_cannot_begin(pair: ar.Strategy) -> None:
    """They would be while those run; here the numbers of their updates are missing."""

    def optimizer() -> ar.optimizers.Optimizer:
        return ar.optimizers.Adam(lambda iteration: dict.fromkeys(range(4), 0.05)[iteration])

    expected_w, _, expected_step = model(pair, optimizer)
    await pair.run_steps(expected_step, iter(elements(pair, 4)), 4, compile="jax", every=2)
    w, made, step = model(pair, optimizer)
    iterator = iter(elements(pair, 8))

    with pytest.raises(KeyError):
        await pair.run_steps(step, iterator, 8, compile="jax", every=2)

    np.testing.assert_array_equal(w.value, expected_w.value)
    assert (w.version, int(made.iterations.value)) == (4, 4)
    left = await pair.run_steps(lambda ctx, x, y: None, iterator, 8)
    assert left.steps_run == 4


async def test_a_write_between_two_publications_ends_the_run(pair: ar.Strategy) -> None:
    """It is seen while the steps behind those that are to be published run."""
    w, made, step = model(pair, adam)
    iterator, seen = iter(elements(pair, 12)), []

    def interfere(number: int) -> None:
        seen.append(w.version)
        if len(seen) == 2:
            zeros = np.zeros(3, np.float32)
            w.store.write({w: (zeros, zeros)})

    remove = pair.observers.add(ar.telemetry.Observer(write_published=interfere))
    with pytest.raises(ContextError, match="was written by something else"):
        await pair.run_steps(step, iterator, 12, compile="jax", every=2)
    remove()

    np.testing.assert_array_equal(w.value, np.zeros(3))
    assert (seen, int(made.iterations.value)) == ([2, 4, 5], 4)
    left = await pair.run_steps(lambda ctx, x, y: None, iterator, 12)
    assert left.steps_run == 8


# --- publication of a chunk while the next one runs -----------------------------------------------


def lock_of_programs() -> Lock:
    """The one that a program holds while it runs."""
    return REGISTRY.once("compiled_execution", Lock)


async def run_noted(strategy: ar.Strategy, note: Callable[[str, ar.Variable], None]) -> None:
    """Run four chunks of two steps; note when each begins and is waited for."""
    w, _, step = model(strategy, adam)
    wait, compiled = jax.block_until_ready, StepProgram.compiled

    def find(*args: Any, **options: Any) -> Any:
        program = compiled(*args, **options)

        def call(*inputs: object) -> Any:
            note("begins", w)
            return program(*inputs)

        return call

    def waited(arrays: Any) -> Any:
        note("is waited for", w)
        return wait(arrays)

    with (
        mock.patch.object(StepProgram, "compiled", find),
        mock.patch.object(jax, "block_until_ready", waited),
    ):
        await strategy.run_steps(step, iter(elements(strategy, 8)), 8, compile="jax", every=2)
    assert w.version == 8


async def test_a_chunk_is_published_while_the_next_one_runs(pair: ar.Strategy) -> None:
    seen = []

    await run_noted(pair, lambda what, w: seen.append((what, w.version)))

    assert seen == [
        ("begins", 0), ("is waited for", 0), ("begins", 0), ("is waited for", 2),
        ("begins", 2), ("is waited for", 4), ("begins", 4), ("is waited for", 6),
    ]  # fmt: skip


async def test_a_chunk_is_published_before_the_next_waits_for_another_program(
    pair: ar.Strategy,
) -> None:
    w, _, step = model(pair, adam)
    lock, hold, turns, seen = lock_of_programs(), _loop.only_one, [], []

    def only_one(*args: Any) -> Any:
        turns.append(w.version)
        if len(turns) > 1:
            lock.acquire()  # the program of another strategy was faster
        return hold(*args)

    def waits(wait: Any) -> None:
        if wait.describe() == "another compiled program":
            seen.append(w.version)
            lock.release()

    remove = pair.observers.add(ar.telemetry.Observer(wait_began=waits))
    with (
        mock.patch.object(_loop, "only_one", only_one),
    ):
        await pair.run_steps(step, iter(elements(pair, 6)), 6, compile="jax", every=2)
    remove()

    assert (turns, seen, w.version) == ([0, 0, 2], [2, 4], 6)


@pytest.mark.parametrize("kind", ["write_published", "event_added"])
async def test_observers_of_chunks_are_told_while_no_program_runs(
    pair: ar.Strategy, kind: str
) -> None:
    """They may wait for another one."""
    _, optimizer, _ = model(pair, adam)
    with pair.scope():
        w = ar.Variable(np.zeros(3, np.float32))
    held = []

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        ctx.record("x", x[0, 0])
        optimizer.blocking.apply_gradients([(x[0], w)])

    remove = pair.observers.add(
        ar.telemetry.Observer(**{kind: lambda _: held.append(lock_of_programs().locked())})
    )
    await pair.run_steps(step, iter(elements(pair, 8)), 8, compile="jax", every=2)
    remove()

    assert len(held) >= 4  # of the chunks; the run has events, too
    assert not any(held)


async def test_an_observer_that_comes_while_a_program_runs_is_told_behind_it(
    pair: ar.Strategy,
) -> None:
    seen, removes = [], []

    def note(what: str, w: ar.Variable) -> None:
        if len(removes) == 0 and what == "is waited for":
            removes.append(lambda: None)  # the first chunk is over
        elif len(removes) == 1:
            observer = ar.telemetry.Observer(
                write_published=lambda _: seen.append((w.version, lock_of_programs().locked()))
            )
            removes.append(pair.observers.add(observer))

    await run_noted(pair, note)
    for remove in removes:
        remove()

    assert seen == [(2, False), (4, False), (6, False), (8, False)]


async def test_a_learning_rate_of_an_observer_counts_from_the_next_step() -> None:
    found = []
    async with mirrored(1) as strategy:
        for waits in (False, True):
            w, optimizer, step = model(strategy, lambda: ar.optimizers.SGD(0.1))

            def halve(_: int, optimizer: Any = optimizer) -> None:
                optimizer.learning_rate = optimizer.learning_rate * 0.5

            async def one_by_one(w: Any = w) -> AsyncIterator[Any]:
                for number, element in enumerate(elements(strategy, 8)):
                    await w.store.wait_for(w, number // 2 * 2)  # those before are published
                    yield element

            source = one_by_one() if waits else iter(elements(strategy, 8))
            remove = strategy.observers.add(ar.telemetry.Observer(write_published=halve))
            await strategy.run_steps(step, source, 8, compile="jax", every=2)
            remove()
            found.append(w.value)

    np.testing.assert_array_equal(*found)


class Limited(ar.optimizers.Adam):  # type: ignore[misc]  # a user's, though it is final
    """Has numbers for four updates."""

    def prepare(self, learning_rate: float, iteration: int) -> Any:
        return super().prepare(dict.fromkeys(range(4), learning_rate)[iteration], iteration)


@pytest.mark.parametrize("fails", ["prepare", "inputs"])
async def test_a_chunk_is_published_though_the_next_one_cannot_be_made_meanwhile(
    pair: ar.Strategy, fails: str
) -> None:
    w, _, step = model(pair, lambda: Limited(0.05) if fails == "prepare" else adam())
    iterator, make = iter(elements(pair, 8)), StepProgram.inputs

    def inputs(self: StepProgram, chunk: Any, first: int, seed: int) -> Any:
        if fails == "inputs" and first == 4:
            raise KeyError(first)
        return make(self, chunk, first, seed)

    with (
        mock.patch.object(StepProgram, "inputs", inputs),
        pytest.raises(KeyError),
    ):
        await pair.run_steps(step, iterator, 8, compile="jax", every=2)

    assert w.version == 4
    left = await pair.run_steps(lambda ctx, x, y: None, iterator, 8)
    assert left.steps_run == 4
