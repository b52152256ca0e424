"""Gradients carry the loss scale they were computed with."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD, DynamicLossScale, LossScale, ScaledGradient
from tests.optimizers.rules import made

VALUES = np.array([8.0, -16.0])


def scaled() -> ScaledGradient:
    return ScaledGradient(VALUES, 8.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda g: g * 2, [2.0, -4.0]),
        (lambda g: np.float32(2) * g, [2.0, -4.0]),
        (lambda g: g * np.array([1.0, 3.0]), [1.0, -6.0]),
        (lambda g: g / 2, [0.5, -1.0]),
        (lambda g: -g, [-1.0, 2.0]),
        (lambda g: g + g, [2.0, -4.0]),
        (lambda g: g - ScaledGradient(VALUES, 16.0), [0.5, -1.0]),
        (lambda g: g[1:], [-2.0]),
    ],
)
def test_linear_arithmetic_keeps_the_scale(make: Any, expected: Any) -> None:
    result = make(scaled())

    assert isinstance(result, ScaledGradient)
    assert result.scale == 8.0
    assert np.asarray(result).tolist() == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (np.asarray, [1.0, -2.0]),
        (np.abs, [1.0, 2.0]),
        (lambda g: np.clip(g, -1, 1), [1.0, -1.0]),
        (lambda g: g + 1.0, [2.0, -1.0]),
        (lambda g: g * g, [1.0, 4.0]),
        (lambda g: 2.0 / g, [2.0, -1.0]),
        (np.sum, -1.0),
        (lambda g: np.add.reduce(g), -1.0),
        (np.linalg.norm, np.sqrt(5.0)),
    ],
)
def test_everything_else_sees_the_unscaled_values(make: Any, expected: Any) -> None:
    result = make(scaled())

    assert not isinstance(result, ScaledGradient)
    np.testing.assert_array_equal(result, expected)


def test_sparse_ones_stay_sparse() -> None:
    rows = ar.IndexedSlices(np.array([[8.0]]), [1], (3, 1))
    gradient = ScaledGradient(rows, 8.0) * 3

    assert gradient.shape == (3, 1)
    assert isinstance(gradient.values, ar.IndexedSlices)
    assert gradient.unscaled().to_dense()[:, 0].tolist() == [0.0, 3.0, 0.0]


@pytest.mark.asyncio
async def test_a_reduction_keeps_the_scale(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        return (await ctx.all_reduce("sum", scaled())).unscaled()

    [first, *_] = await pair.run(step)

    assert first.tolist() == [2.0, -4.0]


@pytest.mark.asyncio
async def test_gradients_are_divided_by_the_scale_they_were_computed_with() -> None:
    w, scaling = ar.Variable(np.zeros(1)), DynamicLossScale(8.0)
    one, two = SGD(1.0, loss_scale=scaling), SGD(1.0, loss_scale=scaling)
    pairs = [await each.compute_gradients(lambda: w.value[0] * 1.0) for each in (one, two)]
    clipped = [(2 * gradient, variable) for gradient, variable in pairs[1]]

    await scaling.variables[0].assign(2.0)  # as another run may
    await one.apply_gradients(pairs[0])
    await two.apply_gradients(clipped)

    assert w.value == -3.0


@pytest.mark.asyncio
async def test_an_accumulator_adds_gradients_of_different_scales() -> None:
    w, scaling = ar.Variable(np.zeros(1)), DynamicLossScale(8.0)
    sgd = SGD(1.0, loss_scale=scaling)
    window = ar.GradientAccumulator(sgd)
    for scale in (8.0, 4.0, 16.0):
        await scaling.variables[0].assign(scale)
        await window.add(await sgd.compute_gradients(lambda: w.value[0] * 1.0))

    await window.add([(np.array([1.0]), w)])  # not scaled
    await window.apply()

    assert w.value == -4.0


@pytest.mark.asyncio
async def test_gradients_that_a_run_returned_keep_their_scale(pair: ar.MirroredStrategy) -> None:
    w = made(pair, [0.0])
    with pair.scope():
        sgd = SGD(1.0, loss_scale=4.0)

    async def step() -> Any:
        return (await sgd.compute_gradients(lambda: w.value[0] * 1.0, [w]))[0][0]

    gradient = await pair.run(step)
    await sgd.distributed_apply([(gradient, w)])
    await sgd.distributed_apply([(ar.Weighted(gradient, ar.PerReplica([1, 1])), w)])

    assert w.value == -3.0


@pytest.mark.asyncio
async def test_a_step_of_two_optimizers_counts_once_for_their_scale() -> None:
    w, scaling = ar.Variable(np.zeros(1)), DynamicLossScale(8.0, growth_interval=3)
    one, two = SGD(0.0, loss_scale=scaling), SGD(0.0, loss_scale=scaling)
    scales = []
    for _ in range(3):
        for each in (one, two):
            await each.minimize(lambda: w.value[0] * 1.0)
            scales.append(scaling.scale)

    assert scales == [8.0, 8.0, 8.0, 8.0, 16.0, 16.0]


@pytest.mark.asyncio
async def test_a_scale_is_lowered_once_for_gradients_computed_with_it() -> None:
    w, scaling = ar.Variable(np.zeros(1)), DynamicLossScale(8.0)
    one, two = SGD(1.0, loss_scale=scaling), SGD(1.0, loss_scale=scaling)
    overflowed = ScaledGradient(np.array([np.inf]), scaling.scale)

    await one.apply_gradients([(overflowed, w)])
    await two.apply_gradients([(overflowed, w)])

    assert scaling.scale == 4.0
    assert (one.skipped_steps.value, two.skipped_steps.value) == (1, 1)


def test_a_fixed_scale_counts_every_update() -> None:
    scaling, one, two = LossScale(2.0), SGD(), SGD()

    scaling.applied_by(one)
    assert (scaling.is_next_step_of(one), scaling.is_next_step_of(two)) == (True, False)
    scaling.applied_by(two)
    assert scaling.is_next_step_of(two)
