"""Functions that jax transforms in compiled steps: they read variables, and write none."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing
from jax import lax  # noqa: E402

from tests.device_loop.compiled_steps import line_of, vectors  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


def variable(strategy: ar.Strategy, name: str = "v") -> ar.Variable:
    with strategy.scope():
        return ar.Variable(np.ones(4, np.float32), trainable=False, aggregation="mean", name=name)


def in_a_branch(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def branch(y: Any) -> Any:
        v.blocking.assign(y)  # here
        return y

    lax.cond(x[0] > 100, branch, lambda y: y, x)


def in_a_branch_of_a_constant(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def branch() -> int:
        v.blocking.assign(np.zeros(4, np.float32))  # here
        return 1

    lax.cond(x[0] > 100, branch, lambda: 2)


def in_a_while_loop(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def body(y: Any) -> Any:
        v.blocking.assign_add(y)  # here
        return y * 2

    lax.while_loop(lambda y: y[0] < 100, body, x)


def in_a_scan(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def body(y: Any, each: Any) -> tuple[Any, Any]:
        v.blocking.assign_sub(y)  # here
        return y * each, each

    lax.scan(body, x, x)


def in_a_map(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def one(each: Any) -> Any:
        v.blocking.assign(jnp.full(4, each))  # here
        return each

    jax.vmap(one)(x)


def under_jit(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    @jax.jit
    def double(y: Any) -> Any:
        v.blocking.assign(y)  # here
        return y * 2

    double(x)


def in_a_gradient(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def loss(y: Any) -> Any:
        v.blocking.assign(y)  # here
        return jnp.sum(y)

    jax.grad(loss)(x)


ASSIGN = [
    in_a_branch, in_a_while_loop, in_a_scan, in_a_map, under_jit, in_a_gradient
]  # fmt: skip


def sets_in_a_branch(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def branch() -> int:
        ctx.set_last_step_output("x", x)  # here
        return 1

    lax.cond(x[0] > 100, branch, lambda: 2)


def records_in_a_branch(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    def branch() -> int:
        ctx.record("x", x[0])  # here
        return 1

    lax.cond(x[0] > 100, branch, lambda: 2)


@pytest.mark.parametrize(
    "step", [*ASSIGN, in_a_branch_of_a_constant, sets_in_a_branch, records_in_a_branch]
)
async def test_what_a_transformed_function_does_is_refused(pair: ar.Strategy, step: Any) -> None:
    v = variable(pair)
    with pytest.raises(ContextError, match="was called in a function that jax trans") as caught:
        await pair.run_steps(
            lambda ctx, x: step(ctx, v, x), iter(vectors(pair, 1)), 1, compile="jax"
        )
    assert any(line_of(step) in note for note in caught.value.__notes__)
    assert v.version == 0


async def test_updates_in_a_branch_are_refused(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        def applies() -> int:
            sgd.blocking.apply_gradients([(x, w)])
            return 1

        def minimizes() -> int:
            sgd.blocking.minimize(lambda: jnp.sum(w.value * x), backend="jax")
            return 1

        lax.cond(x[0] > 100, applies if is_first else minimizes, lambda: 2)

    for name in ("apply_gradients", "minimize"):
        is_first = name == "apply_gradients"
        with pytest.raises(ContextError, match=f"{name} was called in a function that jax trans"):
            await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")
    assert w.version == 0


@pytest.mark.parametrize("options", [{}, {"compile": "jax"}], ids=["eager", "compiled"])
async def test_a_loss_returns_what_is_assigned(pair: ar.Strategy, options: Any) -> None:
    v = variable(pair)
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any, returns: bool = True) -> None:
        def loss() -> Any:
            twice = 2 * w.value * x
            if not returns:
                v.blocking.assign(twice)
            return jnp.sum(twice), twice

        _, twice = sgd.blocking.minimize(loss, backend="jax", has_aux=True)
        v.blocking.assign(twice)

    with pytest.raises(ContextError, match="in a function that jax transforms"):
        await pair.run_steps(
            lambda ctx, x: step(ctx, x, False), iter(vectors(pair, 1)), 1, **options
        )
    assert v.version == 0
    [(x,)] = vectors(pair, 1)
    await pair.run_steps(step, iter([(x,)]), 1, **options)
    np.testing.assert_allclose(v.value, 2 * np.mean(x.values, axis=0), rtol=1e-6)


@pytest.mark.parametrize("step", ASSIGN)
async def test_eager_steps_assign_no_traced_value(step: Any) -> None:
    async with ar.MirroredStrategy(["cpu:0"]) as single:
        v = variable(single)
        with pytest.raises(ContextError, match="Variable 'v' is assigned in a function that jax"):
            await single.run_steps(lambda ctx, x: step(ctx, v, x), iter(vectors(single, 1)), 1)
        assert v.version == 0


async def test_transformed_functions_read_variables(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        v = variable(pair, f"v{len(found)}")

        def step(ctx: ar.MultiStepContext, x: Any, v: ar.Variable = v) -> None:
            x = jnp.asarray(x)
            values = [
                jax.jit(lambda y: y + v.value)(x),
                lax.cond(x[0] > 0, lambda: v.value, lambda: x),
                lax.scan(lambda y, each: (y + v.value * each, each), x, x)[0],
                lax.while_loop(lambda y: y[0] < 50, lambda y: y + jnp.abs(v.value) + 1, x),
                jax.vmap(lambda each: each * v.value)(x).sum(0),
                jax.grad(lambda y: jnp.sum(y * v.value))(x),
                jax.grad(jax.checkpoint(lambda y: jnp.sum(jnp.sin(y * v.value))))(x),
            ]
            ctx.set_last_step_output("values", jnp.stack(values))
            v.blocking.assign(x)

        result = await pair.run_steps(step, iter(vectors(pair, 3)), 3, **options)
        found.append((result.last_step_outputs["values"].values, v.value))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-6)


async def test_a_function_that_keeps_a_variable_is_refused(pair: ar.Strategy) -> None:
    v = variable(pair)

    @jax.jit
    def kept(y: Any) -> Any:
        return y + v.value  # here

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("x", kept(x))

    with pytest.raises(TypeError, match="keeps the variables that it reads") as caught:
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")
    path, number = line_of(kept.__wrapped__).rsplit(":", 1)
    assert f"{path}:{number}" in str(caught.value)
    with pytest.raises(TypeError, match="keeps the variables that it reads"):  # jax knows it now
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")


async def test_values_that_a_transformed_function_has_left_are_refused(pair: ar.Strategy) -> None:
    left = []

    def step(ctx: ar.MultiStepContext, x: Any, transform: Any) -> None:
        def loss(y: Any) -> Any:
            left.append(y * 2)
            return jnp.sum(y)

        transform(loss)(x)
        ctx.set_last_step_output("x", left[-1] + 1)

    for transform in (jax.jit, jax.grad):
        with pytest.raises(TypeError, match="cannot be compiled"):
            await pair.run_steps(
                lambda ctx, x: step(ctx, x, transform),  # noqa: B023 - run at once
                iter(vectors(pair, 1)), 1, compile="jax",
            )  # fmt: skip


def drawn(y: Any) -> Any:
    return y + jax.random.normal(ar.autodiff.jax_key("noise"), y.shape)


def drawn_twice(y: Any) -> Any:
    return 2 * drawn(y)


def drawn_in_turn(y: Any, each: Any) -> Any:
    return drawn(y), each


KEPT: dict[str, Any] = {
    "jit": jax.jit(lambda y: drawn(y)),
    "checkpoint": jax.checkpoint(lambda y: drawn(y)),
    "scan": lambda x: lax.scan(drawn_in_turn, x, x)[0],
    "cond": lambda x: lax.cond(x[0] > 0, drawn, drawn_twice, x),
}


@pytest.mark.parametrize("fn", KEPT.values(), ids=KEPT)
async def test_a_function_that_keeps_a_key_is_refused(pair: ar.Strategy, fn: Any) -> None:
    """Each step would draw the numbers of the first one."""
    v = variable(pair)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        v.blocking.assign(fn(jnp.asarray(x)))

    for _ in range(2):  # jax knows it then
        with pytest.raises(TypeError, match=r"keeps .*, and the keys of jax_key: pass"):
            await pair.run_steps(step, iter(vectors(pair, 3)), 3, compile="jax")
    assert v.version == 0


async def test_keys_in_transformed_functions_of_the_step() -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])  # a new one, as steps are counted
        v = variable(strategy)

        def step(ctx: ar.MultiStepContext, x: Any, v: ar.Variable = v) -> None:
            parts = [jax.jit(lambda y: drawn(y)), jax.checkpoint(lambda y: drawn(y))]
            v.blocking.assign(v.value + sum(each(jnp.asarray(x)) for each in parts))

        async with strategy:
            await strategy.run_steps(step, iter(vectors(strategy, 3)), 3, **options)
        found.append(v.value)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
