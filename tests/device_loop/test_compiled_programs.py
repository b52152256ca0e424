"""Compiled programs: when a step is compiled, how its chunks run, and when it is let go."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from aioreplica.device_loop._compiled import _program  # noqa: E402
from aioreplica.device_loop._compiled._program import StepProgram  # noqa: E402
from tests.device_loop.compiled_steps import adam, elements, model, vectors  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


async def test_a_new_shape_compiles_anew_and_an_old_one_does_not(pair: ar.Strategy) -> None:
    _, _, step = model(pair, adam)
    counts = []
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


async def test_a_step_is_recorded_no_more_once_it_is_compiled(pair: ar.Strategy) -> None:
    calls = []

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        calls.append(x.shape)

    for _ in range(3):
        await pair.run_steps(step, iter(vectors(pair, 2)), 2, compile="jax")
    recorded = len(calls)
    for _ in range(6):
        await pair.run_steps(step, iter(vectors(pair, 2)), 2, compile="jax")

    assert recorded <= 3  # shapes, and what jax traces of a loop
    assert len(calls) == recorded


ANSWERS = {
    "thawed": ((1, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 0)),
    "lowered": ((1, 0, 0), (0.5, 0.25, 0.25), (0.1, 0, 0), (0.5, 0.5, 0.5), (0, 1, 1)),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_multipliers_and_masks_may_change_between_calls(pair: ar.Strategy, name: str) -> None:
    async def trained(**options: Any) -> list[list[float]]:
        with pair.scope():
            variables = [ar.Variable(np.ones(2, np.float32)) for _ in range(6)]
            current: dict[ar.Variable, float] = {}
            own = [
                ar.optimizers.Adam(0.1, learning_rate_multipliers=lambda v: current[v]),
                ar.optimizers.AdamW(0.1, weight_decay=0.5, weight_decay_mask=lambda v: current[v]),
            ]

        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            for optimizer, part in zip(own, (variables[:3], variables[3:]), strict=True):
                optimizer.blocking.apply_gradients([(x, v) for v in part])

        found = []
        for answers in ANSWERS[name]:
            current.update(zip(variables, answers * 2, strict=True))
            batches = [(ar.PerReplica([np.float32([1, -0.5])] * 2),)] * 3
            await pair.run_steps(step, iter(batches), 3, **options)
            found.append([float(n) for v in variables for n in v.value])
        return found

    eager, compiled = await trained(), await trained(compile="jax")

    np.testing.assert_allclose(compiled, eager, rtol=1e-5)


async def test_a_step_is_compiled_anew_only_for_other_groups_of_variables(
    pair: ar.Strategy,
) -> None:
    with pair.scope():
        variables = [ar.Variable(np.ones(2, np.float32)) for _ in range(2)]
        current = dict.fromkeys(variables, 1.0)
        optimizer = ar.optimizers.SGD(0.1, learning_rate_multipliers=lambda v: current[v])

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        optimizer.blocking.apply_gradients([(x, v) for v in variables])

    counts = []
    for answers in ((1, 1), (0.5, 0.5), (1, 0), (0.5, 0.1), (0, 0)):
        current.update(zip(variables, answers, strict=True))
        batches = [(ar.PerReplica([np.ones(2, np.float32)] * 2),)] * 2
        await pair.run_steps(step, iter(batches), 2, compile="jax")
        counts.append(pair.statistics().num_compiled)

    assert counts == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("how", ["scan", "step"])
async def test_programs_of_groups_of_variables_go_in_the_end(pair: ar.Strategy, how: str) -> None:
    with pair.scope():
        variables = [ar.Variable(np.ones(2, np.float32)) for _ in range(3)]
        current = dict.fromkeys(variables, 1.0)
        optimizer = ar.optimizers.SGD(0.1, learning_rate_multipliers=lambda v: current[v])

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        optimizer.blocking.apply_gradients([(x, v) for v in variables])

    groups = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 0, 0)]
    counts = []
    with (
        mock.patch.object(_program, "MAX_PARTINGS", 3),
    ):
        for answers in groups:
            current.update(zip(variables, answers, strict=True))
            batches = [(ar.PerReplica([np.ones(2, np.float32)] * 2),)] * 2
            await pair.run_steps(step, iter(batches), 2, compile="jax")
            counts.append(pair.statistics().num_compiled)

    assert counts == [1, 2, 3, 4, 5, 6]
    moved = [sum(own) for own in zip(*groups, strict=True)]
    np.testing.assert_allclose([v.value[0] for v in variables], [1 - 0.4 * n for n in moved], 1e-5)


@pytest.mark.parametrize("weight", [4, 4.0, np.float32(4)])
async def test_a_weight_that_is_a_number_is_summed_when_the_step_is_compiled(
    pair: ar.Strategy, weight: Any
) -> None:
    """Its sum is a constant: it takes no collective, nor a pass over the gradients to divide."""
    texts: list[str] = []
    compiled = StepProgram.compiled

    def noted(program: StepProgram, *args: Any, **options: Any) -> Any:
        found = compiled(program, *args, **options)
        texts.append(found.as_text())
        return found

    values = []
    for given in (weight, None):
        w, made, _ = model(pair, adam)

        def step(
            ctx: ar.MultiStepContext, x: Any, y: Any,
            w: Any = w, made: Any = made, given: Any = given,
        ) -> None:  # fmt: skip
            def loss() -> ar.Weighted:
                of_all = jnp.sum(jnp.ones_like(y)) if given is None else given
                return ar.Weighted(jnp.sum((x @ w.value - y) ** 2), of_all)

            made.blocking.minimize(loss, backend="jax")

        with mock.patch.object(StepProgram, "compiled", noted):
            await pair.run_steps(step, iter(elements(pair, 2)), 2, compile="jax")
        values.append(w.value.copy())

    assert [text.count(" all-reduce(") for text in texts[:1]] == [1]  # that of the gradient
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


# --- step functions that are not plain functions --------------------------------------------------


@dataclass
class Training:
    """A step that compares by its value, and so has no hash."""

    w: ar.Variable
    optimizer: ar.optimizers.Optimizer
    factor: float = 1.0

    def __call__(self, ctx: ar.MultiStepContext, x: Any) -> None:
        self.optimizer.blocking.apply_gradients([(x * self.factor, self.w)])

    def method(self, ctx: ar.MultiStepContext, x: Any) -> None:
        self(ctx, x)


def applied(training: Training, ctx: ar.MultiStepContext, x: Any) -> None:
    training(ctx, x)


STEPS: dict[str, Callable[[Training], Any]] = {
    "object": lambda training: training,
    "partial": lambda training: partial(applied, training),
    "method": lambda training: training.method,
}


def training_of(strategy: ar.Strategy, factor: float = 1.0) -> Training:
    with strategy.scope():
        return Training(ar.Variable(np.ones(4, np.float32)), ar.optimizers.SGD(0.1), factor)


@pytest.mark.parametrize("kind", STEPS)
async def test_steps_that_are_objects(pair: ar.Strategy, kind: str) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        for factor in (1.0, 2.0):  # two objects, two programs
            training = training_of(pair, factor)
            step = STEPS[kind](training)
            for _ in range(2):
                await pair.run_steps(step, iter(vectors(pair, 2)), 2, **options)
            found.append(training.w.value.copy())

    np.testing.assert_allclose(found[2:], found[:2], rtol=1e-6)
    assert not np.array_equal(found[2], found[3])


@pytest.mark.parametrize("kind", ["object", "partial"])
async def test_programs_go_with_steps_that_are_objects(pair: ar.Strategy, kind: str) -> None:
    training = training_of(pair)
    await pair.run_steps(STEPS[kind](training), iter(vectors(pair, 2)), 2, compile="jax")
    num_compiled = pair.statistics().num_compiled
    gone = weakref.ref(training.w)
    del training
    gc.collect()

    assert gone() is None
    assert pair.statistics().num_compiled == num_compiled


@pytest.mark.parametrize(("kind", "name"), [
    ("object", "Training.__call__"), ("partial", "applied"), ("method", "Training.method"),
])  # fmt: skip
async def test_many_steps_that_are_objects_are_warned_of(
    pair: ar.Strategy, kind: str, name: str
) -> None:
    async def run() -> None:
        step = STEPS[kind](training_of(pair))
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")

    for _ in range(5):
        await run()
    with pytest.warns(RuntimeWarning, match=f"{name} was compiled 6 times: for a new function"):
        await run()


# --- sizes of chunks ------------------------------------------------------------------------------


async def test_few_sizes_of_chunks_are_compiled(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    counts, sizes = [], (5, 8, 6, 7, 1, 3, 4, 2, 12, 16, 64, 33, 100)
    for size in sizes:
        await pair.run_steps(step, iter(elements(pair, size)), size, compile="jax")
        counts.append(pair.statistics().num_compiled)

    assert counts == [1, 1, 1, 1, 2, 3, 3, 4, 5, 5, 6, 6, 6]  # of 8, 1, 4, 2, 16 and 64 steps
    assert w.version == sum(sizes)


async def test_functions_of_the_step_are_asked_for_no_step_beyond_the_last(
    pair: ar.Strategy,
) -> None:
    rates = [0.1, 0.2, 0.3, 0.1, 0.2]
    found = []
    for options in ({}, {"compile": "jax"}):
        w, _, step = model(pair, lambda: ar.optimizers.SGD(lambda number: rates[number]))
        await pair.run_steps(step, iter(elements(pair, 5)), 5, **options)
        found.append(w.value)

    np.testing.assert_allclose(*found, rtol=1e-5)


async def test_programs_elsewhere_know_how_long_a_whole_chunk_is(pair: ar.Strategy) -> None:
    """XLA would ask the host behind each step otherwise, of a GPU say."""
    made = []
    lowered = StepProgram._lowered

    def note(self: StepProgram, size: int, is_whole: bool, looks: bool) -> Any:
        made.append((size, is_whole))
        return lowered(self, size, is_whole, looks)

    values = []
    for platform in ("cpu", "elsewhere"):
        w, _, step = model(pair, adam)
        iterator = iter(elements(pair, 11))
        with (
            mock.patch.object(_program, "CPU", platform),
            mock.patch.object(StepProgram, "_lowered", note),
        ):
            await pair.run_steps(step, iterator, 11, compile="jax", every=4)
        values.append(w.value)

    assert made == [(4, False), (4, True), (4, False)]
    np.testing.assert_allclose(*values, rtol=1e-5)
