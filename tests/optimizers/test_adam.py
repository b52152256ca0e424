"""Adam: the rule of the paper, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import Adam


class NaiveAdam:
    """Algorithm 1 of the paper, one number at a time."""

    def __init__(self, rate: float, beta_1: float, beta_2: float, epsilon: float) -> None:
        self.rate, self.beta_1, self.beta_2, self.epsilon = rate, beta_1, beta_2, epsilon
        self.m = self.v = 0.0
        self.t = 0

    def move(self, value: float, gradient: float) -> float:
        self.t += 1
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * gradient
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * gradient**2
        m_hat = self.m / (1 - self.beta_1**self.t)
        v_hat = self.v / (1 - self.beta_2**self.t)
        return value - self.rate * m_hat / (math.sqrt(v_hat) + self.epsilon)


@pytest.mark.asyncio
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2)])
@pytest.mark.parametrize("numbers", [(0.001, 0.9, 0.999, 1e-8), (0.5, 0.0, 0.5, 0.1)])
async def test_it_follows_the_algorithm_of_the_paper(shape: Any, numbers: Any) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=shape)
    w = ar.Variable(start)
    adam = Adam(*numbers)
    naive = [NaiveAdam(*numbers) for _ in range(start.size)]
    expected = start.ravel().tolist()

    for _ in range(5):
        gradient = rng.normal(size=shape)
        await adam.apply_gradients([(gradient, w)])
        flat = np.ravel(gradient).tolist()
        expected = [rule.move(*pair) for rule, *pair in zip(naive, expected, flat, strict=True)]

    np.testing.assert_allclose(w.value.ravel(), expected, rtol=1e-12)
    np.testing.assert_allclose(adam.get_slot(w, "m").value.ravel(), [n.m for n in naive], 1e-13)
    np.testing.assert_allclose(adam.get_slot(w, "v").value.ravel(), [n.v for n in naive], 1e-13)


@pytest.mark.asyncio
async def test_replicas_take_the_step_of_the_summed_gradient(gang: ar.MirroredStrategy) -> None:
    alone = ar.Variable([1.0, -1.0])
    with gang.scope():
        w, adam = ar.Variable([1.0, -1.0]), Adam(0.1)
    gradients = np.random.default_rng(0).normal(size=(gang.num_replicas_in_sync, 2))

    async def step(gradient: Any) -> Any:
        await adam.apply_gradients([(gradient, w)])

    for _ in range(3):
        await gang.run(step, args=(ar.PerReplica(gradients),))
    other = Adam(0.1)
    for _ in range(3):
        await other.apply_gradients([(gradients.sum(axis=0), alone)])

    np.testing.assert_allclose(w.value, alone.value, rtol=1e-13)


@pytest.mark.asyncio
async def test_a_gradient_of_zero_does_not_divide_by_zero() -> None:
    w = ar.Variable(2.0)

    await Adam().apply_gradients([(0.0, w)])

    assert w.value == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("beta_1", 1.0),
        ("beta_1", -0.1),
        ("beta_2", 1.5),
        ("beta_2", math.nan),
        ("epsilon", 0.0),
        ("epsilon", -1e-8),
    ],
)
def test_hyperparameters_out_of_range_are_named_with_their_value(name: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value!r}"):
        Adam(**{name: value})


def test_slots_are_the_two_means() -> None:
    assert Adam().slot_names == ("m", "v")
