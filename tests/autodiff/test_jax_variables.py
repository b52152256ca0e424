"""jax_variables: pytrees of jax whose arrays are variables."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, jax_variables
from aioreplica.errors import ContextError
from tests.replica.gated import me

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.slow  # jax compiles each operation


def tree() -> Any:
    return {
        "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)},
        "steps": 4,
        "act": jnp.tanh,
    }


def forward(params: Any, x: Any) -> Any:
    return params["act"](x @ params["dense"]["kernel"] + params["dense"]["bias"])


def test_arrays_become_variables_and_the_rest_stays() -> None:
    params = jax_variables(tree())

    assert [v.name for v in params.variables] == ["params/dense/bias", "params/dense/kernel"]
    assert params.value["steps"] == 4
    assert params.value["act"] is jnp.tanh
    assert isinstance(params.value["dense"]["kernel"], jax.Array)


def test_modules_that_are_pytrees_keep_their_class() -> None:
    @jax.tree_util.register_dataclass
    @dataclass
    class Linear:
        weight: Any
        name: str

    params = jax_variables(Linear(jnp.ones(2), "layer"), name="net")

    assert [v.name for v in params.variables] == ["net/weight"]
    assert (type(params.value), params.value.name) == (Linear, "layer")


def test_gradients_are_those_of_jax() -> None:
    params, x = jax_variables(tree()), np.ones((4, 2), np.float32)
    compiled = jax.jit(lambda dense, x: jnp.sum(forward({"dense": dense, "act": jnp.tanh}, x) ** 2))

    _, pairs = differentiate_variables(lambda: compiled(params.value["dense"], x), params.variables)

    expected = jax.grad(compiled)(tree()["dense"], x)
    np.testing.assert_array_equal(pairs[0][0], expected["bias"])
    np.testing.assert_array_equal(pairs[1][0], expected["kernel"])


def test_values_are_not_read_in_compiled_functions() -> None:
    params = jax_variables(tree())

    with pytest.raises(TypeError, match="pass it as an argument"):
        jax.jit(lambda: params.value["dense"]["bias"])()


def test_values_can_be_set_as_one_write() -> None:
    params = jax_variables(tree())
    before = params.variables[0].store.version

    params.set_value(jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, jax.Array) else leaf,
                                  params.value))  # fmt: skip

    assert float(params.value["dense"]["bias"][0]) == 1.0
    assert params.variables[0].store.version == before + 1
    with pytest.raises(ValueError, match="has the structure"):
        params.set_value({"dense": 3})


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        ({"n": jnp.arange(3)}, ValueError, "No leaf of 'params' is a floating-point array"),
        ({"h": jnp.ones(2, jnp.bfloat16)}, TypeError, r"\['h'\] has dtype bfloat16"),
    ],
)
def test_trees_that_cannot_be_variables_are_refused(made: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        jax_variables(made)


@pytest.mark.asyncio
async def test_state_is_each_replicas_own_and_read_as_the_mean(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        params = jax_variables({"w": jnp.ones(2)})
        state = jax_variables({"mean": jnp.zeros(2), "count": 0 * jnp.arange(1)}, trainable=False,
                              name="state")  # fmt: skip

    async def step(x: Any) -> Any:
        def fn() -> Any:
            seen = {"mean": state.value["mean"] + jnp.mean(x, 0), "count": state.value["count"] + 1}
            return jnp.sum(params.value["w"] * jnp.sum(x, 0)), seen

        ctx = me()
        (_, seen), pairs = await ctx.run_on_device(
            differentiate_variables, fn, params.variables, has_aux=True
        )
        state.set_value(seen)
        return pairs[0][0], state.value["mean"]

    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    gradients, means = await pair.run(step, args=(ar.PerReplica([x[:1], x[1:]]),))

    np.testing.assert_array_equal(gradients[1], x[1:].sum(0))
    np.testing.assert_array_equal(means[0], x[0])
    np.testing.assert_array_equal(means[1], x[1:].mean(0))
    np.testing.assert_array_equal(state.value["mean"], (x[0] + x[1:].mean(0)) / 2)
    assert state.value["count"].tolist() == [1]


@pytest.mark.asyncio
async def test_parameters_are_not_set_in_a_replica(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        params = jax_variables(tree())

    with pytest.raises(ContextError, match="set_value of 'params', which is trainable"):
        await pair.run(lambda: params.set_value(params.value))


@pytest.mark.asyncio
async def test_minimize_takes_the_variables_and_their_library(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        params, sgd = jax_variables(tree()), ar.optimizers.SGD(0.5)

    async def step(x: Any) -> Any:
        def loss() -> Any:
            return ar.Weighted(jnp.sum(forward(params.value, x) ** 2), len(x))

        return await sgd.minimize(loss, params.variables)

    x = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    await gang.run(step, args=(ar.PerReplica(np.array_split(x, gang.num_replicas_in_sync)),))

    def whole(dense: Any) -> Any:
        return jnp.sum(forward({"dense": dense, "act": jnp.tanh}, x) ** 2) / 9

    slope = jax.grad(whole)(tree()["dense"])
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, tree()["dense"], slope)
    for name, array in expected.items():
        np.testing.assert_allclose(params.value["dense"][name], array, atol=1e-6)


@pytest.mark.asyncio
async def test_keys_for_a_purpose(pair: ar.MirroredStrategy) -> None:
    def step() -> Any:
        return [jax.random.uniform(ar.autodiff.jax_key(name)).item() for name in ("a", "a", "b")]

    first, second = pair.local_results(await pair.run(step))

    assert first[0] == first[1] != first[2]
    assert first[0] != second[0]
    with pytest.raises(ContextError, match="Call it in a step"):
        ar.autodiff.jax_key("a")
