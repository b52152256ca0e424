"""from_optax: what optax does on one process, in slots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import NonFiniteError
from aioreplica.optimizers import from_optax
from tests.optimizers.resumed import assert_fresh_one_goes_on
from tests.replica.gated import my_id

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

pytestmark = pytest.mark.slow  # jax compiles every first op

RULES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
    "clipped rmsprop": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.01)),
    "clipped by the global norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.adam(0.01)
    ),
    "lion with warm-up": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.lion(optax.linear_schedule(0.0, 0.1, 5))
    ),
    "every third step": lambda: optax.MultiSteps(optax.adamw(0.01), 3),
    "factored": lambda: optax.adafactor(0.01),
    "noisy": lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    "masked": lambda: optax.chain(
        optax.adam(0.01),
        optax.masked(optax.add_decayed_weights(0.1), lambda tree: dict.fromkeys(tree, True)),
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("rule", RULES)
async def test_twenty_steps_are_those_of_optax(pair: ar.MirroredStrategy, rule: str) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=1).astype(np.float32)]
    gradients = [[rng.normal(size=s.shape).astype(np.float32) for s in starts] for _ in range(20)]
    transformation = RULES[rule]()
    with pair.scope():
        variables = [ar.Variable(start) for start in starts]
        optimizer = from_optax(transformation)
    names = [variable.name for variable in variables]
    expected = dict(zip(names, map(jax.numpy.asarray, starts), strict=True))
    state = transformation.init(expected)

    async def step(own: Any) -> None:
        mine = [gradient if my_id() == 0 else np.zeros_like(gradient) for gradient in own]
        await optimizer.apply_gradients(zip(mine, variables, strict=True))

    for own in gradients:
        tree = dict(zip(names, map(jax.numpy.asarray, own), strict=True))
        updates, state = transformation.update(tree, state, expected)
        expected = optax.apply_updates(expected, updates)
        await pair.run(step, args=(own,))

    for variable in variables:  # jax fuses what is jitted
        np.testing.assert_allclose(variable.value, expected[variable.name], rtol=2e-5, atol=1e-7)
    assert optimizer.iterations.value == 20
    await pair.check_in_sync(variables)


@pytest.mark.asyncio
async def test_per_variable_state_is_in_slots_and_the_rest_in_variables() -> None:
    w, adam = ar.Variable(np.float32([1.0, 2.0])), from_optax(optax.adam(0.1))
    assert adam.slot_names == ("0/mu", "0/nu")

    await adam.apply_gradients([(np.float32([1.0, 1.0]), w)])

    slot = adam.get_slot(w, "0/mu")
    assert slot is not None
    np.testing.assert_allclose(slot.value, [0.1, 0.1], rtol=1e-6)
    assert {variable.name for variable in adam.variables} >= {"0/count", slot.name}


@pytest.mark.asyncio
async def test_its_options_come_before_the_transformation(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        a, b = ar.Variable(np.float32([0.0])), ar.Variable(np.float32([0.0]))
        sgd = from_optax(
            optax.sgd(1.0),
            global_clipnorm=5.0,
            loss_scale=4.0,
            on_non_finite="skip",
            learning_rate_multipliers={b: 0.5},
        )

    async def step(x: Any) -> None:
        await sgd.minimize(lambda: 3.0 * x * a.value[0] + 4.0 * x * b.value[0], [a, b])

    await pair.run(step, args=(5.0,))  # the norm is 5 * 5 * 2
    np.testing.assert_allclose([*a.value, *b.value], [-3.0, -2.0], rtol=1e-6)
    await pair.run(step, args=(np.nan,))
    assert (a.version, sgd.skipped_steps.value, sgd.iterations.value) == (1, 1, 1)


@pytest.mark.asyncio
async def test_a_failed_step_leaves_the_state_as_it_was() -> None:
    w, adam = ar.Variable(np.float32([1.0])), from_optax(optax.adam(0.1))
    await adam.apply_gradients([(np.float32([1.0]), w)])
    before = [(variable, variable.version) for variable in (w, *adam.variables)]

    with pytest.raises(NonFiniteError):
        await adam.apply_gradients([(np.float32([np.nan]), w)])

    assert before == [(variable, variable.version) for variable in (w, *adam.variables)]


@pytest.mark.asyncio
async def test_the_tree_stays_that_of_the_first_step() -> None:
    a, b = ar.Variable(np.float32(1.0), name="a"), ar.Variable(np.float32(1.0), name="b")
    sgd = from_optax(optax.sgd(0.1))
    await sgd.apply_gradients([(np.float32(1.0), a)])

    with pytest.raises(ValueError, match=r"gradients for a, b, but its state is that of a\."):
        await sgd.apply_gradients([(np.float32(1.0), a), (np.float32(1.0), b)])


@pytest.mark.asyncio
async def test_64_bits_are_not_dropped_silently() -> None:
    w = ar.Variable(np.float64(1.0))

    with pytest.raises(TypeError, match="jax computes with 32 bits"):
        await from_optax(optax.sgd(0.1)).apply_gradients([(np.float64(1.0), w)])


@pytest.mark.parametrize("wrong", [None, 0.1, "adam"])
def test_it_takes_a_transformation(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a gradient transformation"):
        from_optax(wrong)


@pytest.mark.asyncio
@pytest.mark.parametrize("rule", ["momentum", "adamw with a schedule", "every third step"])
async def test_a_fresh_one_goes_on_where_a_checkpoint_was(
    rule: str, pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    """Its slots, and the state that it keeps once, are not made yet when it is restored."""
    await assert_fresh_one_goes_on(pair, tmp_path, lambda: from_optax(RULES[rule]()))
