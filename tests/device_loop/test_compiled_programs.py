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

from aioreplica.device_loop._compiled import _loop, _program, _programs  # noqa: E402
from aioreplica.device_loop._compiled._program import StepProgram, Trial  # noqa: E402
from tests.device_loop.compiled_steps import adam, elements, model, vectors  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


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


async def test_a_way_that_is_nearly_as_fast_is_tried_again() -> None:
    takes = {"scan": 9.0, "step": 7.0}  # beside other work

    def chunks(count: int) -> list[str]:
        ways = []
        for _ in range(count):
            ways.append("scan" if trial.prefers_scan() else "step")
            trial.add(ways[-1], takes[ways[-1]])
        return ways

    trial = Trial()
    assert chunks(6) == ["scan", "step"] * 3
    takes["scan"] = 1.0
    assert chunks(17) == ["step"] * 16 + ["scan"]
    assert chunks(3) == ["step", "scan", "scan"]
    assert set(chunks(1000)) == {"scan"}  # the other takes seven times as long


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
        await pair.run_steps(step, iter(vectors(pair, 2)), 2, compile="jax")
    recorded = len(calls)
    for _ in range(6):
        await pair.run_steps(step, iter(vectors(pair, 2)), 2, compile="jax")

    assert recorded <= 3  # shapes, scan, single calls
    assert len(calls) == recorded


ANSWERS = {
    "thawed": ((1, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 0)),
    "lowered": ((1, 0, 0), (0.5, 0.25, 0.25), (0.1, 0, 0), (0.5, 0.5, 0.5), (0, 1, 1)),
}


@pytest.mark.parametrize("scans", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
async def test_multipliers_and_masks_may_change_between_calls(
    pair: ar.Strategy, name: str, scans: bool
) -> None:
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

    with mock.patch.object(Trial, "prefers_scan", return_value=scans):
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
    with mock.patch.object(Trial, "prefers_scan", return_value=True):
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
        mock.patch.object(Trial, "prefers_scan", return_value=how == "scan"),
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


async def test_many_sizes_of_chunks_are_warned_of_and_go_in_the_end(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)
    counts = []

    async def run(size: int) -> None:
        await pair.run_steps(step, iter(elements(pair, size)), size, compile="jax")
        counts.append(pair.statistics().num_compiled)

    with (
        mock.patch.object(_programs, "MAX_SIZES", 6),
        mock.patch.object(Trial, "prefers_scan", return_value=True),
    ):
        for size in (2, 3, 4, 5, 6, 2):
            await run(size)
        with pytest.warns(RuntimeWarning, match="step was compiled for chunks of 6 sizes, which"):
            await run(7)
        for size in (8, 2, 3):
            await run(size)

    assert counts == [1, 2, 3, 4, 5, 5, 6, 7, 7, 8]  # that for 3 was not used for longest
    assert w.version == sum((2, 3, 4, 5, 6, 2, 7, 8, 2, 3))
