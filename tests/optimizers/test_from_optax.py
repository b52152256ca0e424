"""from_optax: what optax does on one process, in slots."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import from_optax
from tests.replica.gated import my_id

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

pytestmark = pytest.mark.slow  # jax compiles every first op

RULES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
    "clipped rmsprop": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.01)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("rule", RULES)
async def test_twenty_steps_are_those_of_optax(pair: ar.MirroredStrategy, rule: str) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=1).astype(np.float32)]
    gradients = [[rng.normal(size=s.shape).astype(np.float32) for s in starts] for _ in range(20)]
    transformation = RULES[rule]()
    expected = [jax.numpy.asarray(start) for start in starts]
    state = transformation.init(expected)
    with pair.scope():
        variables = [ar.Variable(start) for start in starts]
        optimizer = from_optax(transformation)

    async def step(own: Any) -> None:
        mine = [gradient if my_id() == 0 else np.zeros_like(gradient) for gradient in own]
        await optimizer.apply_gradients(zip(mine, variables, strict=True))

    for own in gradients:
        updates, state = transformation.update(list(map(jax.numpy.asarray, own)), state, expected)
        expected = optax.apply_updates(expected, updates)
        await pair.run(step, args=(own,))

    for variable, array in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.value, np.asarray(array), rtol=1e-6)  # jax fuses
    assert optimizer.iterations.value == 20
    await pair.check_in_sync(variables)


def test_the_state_is_in_slots() -> None:
    assert from_optax(optax.adam(0.1)).slot_names == ("0/count", "0/mu", "0/nu")


def test_what_looks_at_all_variables_at_once_is_refused() -> None:
    with pytest.raises(ValueError, match="several variables at once"):
        from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))


@pytest.mark.asyncio
async def test_64_bits_are_not_dropped_silently() -> None:
    w = ar.Variable(np.float64(1.0))

    with pytest.raises(TypeError, match="jax computes with 32 bits"):
        await from_optax(optax.sgd(0.1)).apply_gradients([(np.float64(1.0), w)])


@pytest.mark.parametrize("wrong", [None, 0.1, "adam"])
def test_it_takes_a_transformation(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a gradient transformation"):
        from_optax(wrong)
