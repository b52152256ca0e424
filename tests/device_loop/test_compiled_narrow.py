"""Integers of 64 bits in compiled steps, which jax computes in 32: exact, or refused."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.replica.gated import me

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from aioreplica.device_loop._compiled._narrow import require_32_bits  # noqa: E402
from aioreplica.device_loop._compiled._untraceable import only_recorded  # noqa: E402
from tests.device_loop.compiled_steps import line_of, vectors  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


@pytest.mark.parametrize("number", [2**40 + 123, 2**31, -(2**31) - 1, 2**63])
@pytest.mark.parametrize("at", [0, 3])
async def test_elements_of_64_bits_are_not_cut(pair: ar.Strategy, number: int, at: int) -> None:
    """Nothing of their chunk is computed; what is at the limits is."""
    dtype = np.uint64 if number == 2**63 else np.int64
    with pair.scope():
        seen = ar.Variable(np.zeros(2, dtype), trainable=False, aggregation="only_first_replica")

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        seen.blocking.assign(x)

    limits = np.array([0, 2**32 - 1] if dtype is np.uint64 else [-(2**31), 2**31 - 1], dtype)
    parts = [limits] * at + [np.array([1, number], dtype)]
    iterator = iter([ar.PerReplica([part] * 2) for part in parts])
    with pytest.raises(OverflowError, match=f"An element holds {number}, which u?int32 does not"):
        await pair.run_steps(step, iterator, at + 1, compile="jax")
    assert seen.version == 0  # and all elements went back
    if at:
        await pair.run_steps(step, iterator, at, compile="jax")
    with pytest.raises(OverflowError, match=f"An element holds {number}, which u?int32 does not"):
        await pair.run_steps(step, iterator, 1, compile="jax")
    np.testing.assert_array_equal(seen.value, limits if at else [0, 0])
    assert seen.version == at


WIDE = np.int64(2**40)


def adds(v: ar.Variable, x: Any) -> None:
    v.blocking.assign_add(x + WIDE)  # here


def multiplies(v: ar.Variable, x: Any) -> None:
    v.blocking.assign(WIDE * x)  # here


def chooses(v: ar.Variable, x: Any) -> None:
    v.blocking.assign(jnp.where(x > 3, WIDE, x))  # here


def assigns(v: ar.Variable, x: Any) -> None:
    v.blocking.assign(np.array([1, WIDE]))  # here


@pytest.mark.parametrize("change", [adds, multiplies, chooses, assigns])
async def test_integers_of_a_closure_are_not_cut(pair: ar.Strategy, change: Any) -> None:
    with pair.scope():
        v = ar.Variable(np.zeros(2, np.int64), trainable=False, aggregation="only_first_replica")

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        assert np.log2(np.array([WIDE]))[0] == 40  # NumPy's own affair
        change(v, x)

    batches = iter([ar.PerReplica([np.array([3, 4])] * 2)])
    with pytest.raises(OverflowError, match="The step holds 1099511627776, which int32") as caught:
        await pair.run_steps(step, batches, 1, compile="jax")

    assert any(line_of(change) in note for note in caught.value.__notes__)
    assert v.version == 0


PAIR = np.array([WIDE, 1])
CUT: dict[str, Any] = {
    "operator": lambda x: x / PAIR,
    "method": lambda x: x.at[0].set(WIDE),
    "function": lambda x: jnp.maximum(x, WIDE),
    "no dtype": lambda x: x + jnp.asarray(PAIR),
    "no room": lambda x: jnp.array(PAIR, jnp.int64),
    "converted later": lambda x: jnp.astype(PAIR, jnp.float32),
    "in a list": lambda x: jnp.stack([x, PAIR]),
    "transformed": lambda x: jax.jit(jnp.add)(x, WIDE),
    "closed over": lambda x: jax.lax.fori_loop(0, 2, lambda i, y: y + WIDE, x),
    "returned": lambda x: jax.lax.cond(x[0] > 0, lambda: WIDE, lambda: np.int64(1)),
    "mapped": lambda x: jax.vmap(lambda y: WIDE)(x),
    "filled": lambda x: jnp.full((2,), WIDE),
}
RIGHT: dict[str, tuple[Any, Any]] = {
    "asarray": (lambda x: x + jnp.asarray(PAIR, jnp.float32), [2.0**40, 5]),
    "array": (lambda x: x + jnp.array(PAIR, dtype="float32"), [2.0**40, 5]),
    "wider": (lambda x: x + jnp.asarray(WIDE, float), 2.0**40),
    "scalar": (lambda x: x * jnp.float32(WIDE), [3 * 2.0**40, 4 * 2.0**40]),
    "arranged": (lambda x: x + float(jax.tree.map(lambda a: a, {"a": WIDE})["a"]), 2.0**40),
    "truth": (lambda x: x + jnp.asarray(PAIR, bool), [4, 5]),
    "wrapped as asked": (lambda x: x + jnp.asarray(PAIR, np.uint32), [3, 5]),
}


def only_looked_at(fn: Any) -> Any:
    """Return a function that is recorded as a step is."""

    def recorded(x: Any) -> Any:
        with only_recorded():
            return fn(x)

    return recorded


@pytest.mark.parametrize("fn", CUT.values(), ids=CUT)
async def test_numbers_that_jax_would_cut_are_refused(fn: Any) -> None:
    for _ in range(2):  # jax may know the functions then
        with pytest.raises(OverflowError, match="The step holds 1099511627776, which int32"):
            jax.eval_shape(only_looked_at(fn), np.float32([3, 4]))


@pytest.mark.parametrize(("fn", "expected"), RIGHT.values(), ids=RIGHT)
async def test_numbers_that_are_converted_first_are_not_refused(fn: Any, expected: Any) -> None:
    found = jax.jit(only_looked_at(fn))(np.float32([3, 4]))
    np.testing.assert_allclose(found, np.broadcast_to(expected, 2), rtol=1e-6)


async def test_a_filled_array_is_right_or_refused() -> None:
    """jax 0.7 cuts the number before it converts it, later ones do not."""

    def fills(x: Any) -> Any:
        return x + jnp.full((2,), WIDE, float) + jnp.full_like(x, WIDE)

    is_right = float(jnp.full((), WIDE, float)) == 2.0**40
    try:
        found = jax.jit(only_looked_at(fills))(np.zeros(2, np.float32))
    except OverflowError:
        assert not is_right
    else:
        np.testing.assert_array_equal(found, 2.0**41)


@jax.tree_util.register_pytree_node_class
class Scaled:
    """An array, and a number that jax only compares."""

    def __init__(self, array: Any, limit: Any) -> None:
        self.array, self.limit = array, limit

    def tree_flatten(self) -> Any:
        return (self.array,), self.limit

    @classmethod
    def tree_unflatten(cls, limit: Any, children: Any) -> Any:
        return cls(*children, limit)


async def test_large_integers_that_jax_computes_nothing_with(pair: ar.Strategy) -> None:
    """They are given out beside a loss, or compared as a part of a structure."""
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        def loss() -> Any:
            return jnp.sum(w.value * x), {"tokens": WIDE}

        _, aux = sgd.blocking.minimize(loss, backend="jax", has_aux=True)
        ctx.set_last_step_output("tokens", float(aux["tokens"]))
        fn = jax.jit(lambda each: Scaled(each.array * 2, each.limit))
        found = jax.vmap(fn)(Scaled(jnp.asarray(x), WIDE))
        found = jax.lax.cond(x[0] > 0, lambda: found, lambda: Scaled(x * 2, WIDE))
        ctx.set_last_step_output("x", found.array)

    [(x,)] = vectors(pair, 1)
    result = await pair.run_steps(step, iter([(x,)]), 1, compile="jax")
    assert result.last_step_outputs["tokens"].values == (2.0**40, 2.0**40)
    np.testing.assert_allclose(result.last_step_outputs["x"].values, 2 * np.stack(x.values))

    with pytest.raises(OverflowError, match="The step holds 1099511627776"):  # with this it does
        jax.eval_shape(only_looked_at(lambda y: jax.jit(lambda z: z.array + y)(Scaled(WIDE, 0))), 1)


async def test_a_list_that_holds_itself_is_looked_at_once() -> None:
    own: list[Any] = [np.int64(1)]
    own.append(own)
    require_32_bits([own], "It")
    own.append({"deep": (WIDE,)})
    with pytest.raises(OverflowError, match="It holds 1099511627776"):
        require_32_bits([own], "It")


async def test_large_integers_that_become_floats(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with pair.scope():
            w = ar.Variable(np.ones(4, np.float32))
            sgd = ar.optimizers.SGD(0.1)

        def step(ctx: ar.MultiStepContext, x: Any, w: Any = w, sgd: Any = sgd) -> None:
            ctx.record("seen", WIDE)

            def loss() -> ar.Weighted:
                return ar.Weighted(jnp.sum(w.value * x) * 2.0**32, np.int64(2**32))

            sgd.blocking.minimize(loss, backend="jax")

        await pair.run_steps(step, iter(vectors(pair, 1)), 1, **options)
        [*_, event] = [each for each in pair.events.events("scalar") if each.name == "seen"]
        found.append((w.value, event.value))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    assert found[0][0][0] != 1
    assert found[0][1] == found[1][1] == 2.0**40


def combines(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    me().blocking.all_reduce("sum", ar.Weighted(x, WIDE))  # here


def sets(ctx: ar.MultiStepContext, v: ar.Variable, x: Any) -> None:
    ctx.set_last_step_output("o", {"count": WIDE})  # here


@pytest.mark.parametrize("step", [combines, sets])
async def test_numbers_given_to_the_library_are_not_cut(pair: ar.Strategy, step: Any) -> None:
    with pair.scope():
        v = ar.Variable(np.zeros(4, np.float32))
    with pytest.raises(OverflowError, match="holds 1099511627776, which int32") as caught:
        await pair.run_steps(
            lambda ctx, x: step(ctx, v, x), iter(vectors(pair, 1)), 1, compile="jax"
        )
    assert any(line_of(step) in note for note in caught.value.__notes__)


async def test_numbers_of_a_constraint_are_not_cut(pair: ar.Strategy) -> None:
    def far(value: Any) -> Any:
        return value + np.int64(2**33)  # here

    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32), constraint=far)
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        sgd.blocking.minimize(lambda: jnp.sum(w.value * x), backend="jax")

    with pytest.raises(OverflowError, match="holds 8589934592, which int32") as caught:
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")
    assert any(line_of(far) in note for note in caught.value.__notes__)
    assert w.version == 0


LARGEST = 2**31 - 1


@pytest.mark.parametrize("number", [2**40, np.int64(-(2**31) - 1), np.uint64(2**32)])
async def test_outputs_to_begin_with_are_not_cut(pair: ar.Strategy, number: Any) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("n", ctx.last_step_outputs["n"] + 1)

    batches = iter(vectors(pair, 1))
    options = {"initial_loop_values": {"n": number}, "compile": "jax"}
    with pytest.raises(OverflowError, match=f"An output to begin with holds {number}, which u?int"):
        await pair.run_steps(step, batches, 1, **options)
    options["initial_loop_values"] = {"n": LARGEST - 1}
    result = await pair.run_steps(step, batches, 1, **options)  # its element went back
    assert result.last_step_outputs["n"].values == (LARGEST, LARGEST)


async def test_a_sum_of_outputs_beyond_32_bits(pair: ar.Strategy) -> None:
    """Summed on the host, where 32 bits would turn around; what fits keeps its dtype."""

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("n", {"large": ctx.last_step_outputs["n"]["large"] + 1}, "sum")
        ctx.set_last_step_output("few", ctx.last_step_outputs["few"] + 1, "sum")

    options = {
        "initial_loop_values": {"n": {"large": np.array([LARGEST - 1, 1])}, "few": 1},
        "compile": "jax",
    }
    result = await pair.run_steps(step, iter(vectors(pair, 1)), 1, **options)
    assert result.last_step_outputs["n"]["large"].tolist() == [2 * LARGEST, 4]
    assert result.last_step_outputs["few"] == 4
    assert result.last_step_outputs["few"].dtype == np.int32


@pytest.mark.parametrize("compiled", [None, "jax"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint64"])
async def test_sums_of_outputs_have_the_dtype_that_they_have_without_compiling(
    pair: ar.Strategy, dtype: str, compiled: str | None
) -> None:
    """Only what jax has made smaller is widened."""
    largest = np.array(min(np.iinfo(dtype).max, 2**32 - 1), dtype)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("n", ctx.last_step_outputs["n"], "sum")

    options: dict[str, Any] = {} if compiled is None else {"compile": compiled}
    options["initial_loop_values"] = {"n": largest}
    result = await pair.run_steps(step, iter(vectors(pair, 1)), 1, **options)
    found = result.last_step_outputs["n"]
    assert found.dtype == dtype
    assert found == (largest.reshape(1) + largest.reshape(1))[0]


async def test_an_output_to_begin_with_that_becomes_a_float(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("n", ctx.last_step_outputs["n"] * 0.5)

    options = {"initial_loop_values": {"n": 2**40}, "compile": "jax"}
    result = await pair.run_steps(step, iter(vectors(pair, 1)), 1, **options)
    assert result.last_step_outputs["n"].values == (2.0**39, 2.0**39)


@pytest.mark.parametrize(
    ("dtype", "begin", "change", "options", "at"),
    [
        (np.int64, LARGEST - 3, lambda v, x: v.blocking.assign_add(x), {}, 3),
        (np.int64, -LARGEST, lambda v, x: v.blocking.assign_sub(x), {}, 1),
        (np.uint64, 3, lambda v, x: v.blocking.assign_sub(x), {}, 3),
        (np.int64, 0, lambda v, x: v.blocking.assign(x.astype(jnp.uint32) << 31), {}, 0),
        (np.int64, 0, lambda v, x: v.blocking.assign_add(x.astype(jnp.uint32) << 31), {}, 0),
        (np.int64, 0, lambda v, x: v.blocking.assign_add(x * 2**30), {"aggregation": "sum"}, 0),
        (
            np.int64,
            LARGEST - 3,
            lambda v, x: v.blocking.assign_add(jnp.where(me().replica_id_in_sync_group, x, 0)),
            {"aggregation": "sum", "synchronization": "on_read"},
            3,
        ),
    ],
    ids=[
        "added",
        "subtracted",
        "below 0",
        "assigned",
        "unsigned added",
        "sum over replicas",
        "of one replica",
    ],
)
async def test_integers_that_pass_32_bits_end_the_run_before(
    pair: ar.Strategy, dtype: Any, begin: int, change: Any, options: Any, at: int
) -> None:
    how = {"trainable": False, "aggregation": "only_first_replica"}
    with pair.scope():
        v = ar.Variable(np.array([5, begin], dtype), **{**how, **options, "name": "v"})
        free = ar.Variable(np.zeros((), np.uint64), **how)

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        change(v, x)
        free.blocking.assign(y)

    ones = ar.PerReplica([np.array([0, 1], dtype)] * 2)
    limits = [ar.PerReplica([np.uint64(2**32 - 1) * (i % 2)] * 2) for i in range(6)]
    batches = [(ones, limit) for limit in limits]  # a jump by itself is none of its business
    with pytest.raises(OverflowError, match=f"Variable 'v' has u?int64, .* in step {at}: "):
        await pair.run_steps(step, iter(batches), 6, compile="jax")
    each = 1 if v.is_mirrored else 2  # writes of a step
    assert (v.version, free.version) == (at * each, at)

    jax.config.update("jax_enable_x64", True)
    try:
        await pair.run_steps(step, iter(batches), 6, compile="jax")
    finally:
        jax.config.update("jax_enable_x64", False)
    assert v.version == (at + 6) * each


@pytest.mark.parametrize(
    ("dtype", "begin", "change", "aggregation", "after"),
    [
        (np.int64, -(2**31), lambda v, x: v.blocking.assign(jnp.maximum(v.value, x)), "mean", 1),
        (np.uint64, 2**32 - 1, lambda v, x: v.blocking.assign(v.value * x), "mean", 2**32 - 1),
        (np.int64, -(2**31), lambda v, x: v.blocking.assign_add(x * 2**30), "sum", 0),
        (np.int64, -(2**31), lambda v, x: v.blocking.assign_sub(-x * LARGEST), "mean", -1),
        (np.int64, 0, lambda v, x: v.blocking.assign_add(x * 2**30 - 1), "sum", 2**31 - 2),
        (np.uint64, 1, lambda v, x: v.blocking.assign_add((x << 31) - 1), "sum", 2**32 - 1),
    ],
)
async def test_integers_within_32_bits_are_not_refused(
    pair: ar.Strategy, dtype: Any, begin: int, change: Any, aggregation: Any, after: int
) -> None:
    with pair.scope():
        v = ar.Variable(np.array(begin, dtype), trainable=False, aggregation=aggregation)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        change(v, x)

    await pair.run_steps(step, iter([ar.PerReplica([dtype(1)] * 2)]), 1, compile="jax")
    assert v.value == after


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.float32])
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
async def test_scalars_are_summed_and_stay_arrays(
    pair: ar.Strategy, dtype: Any, synchronization: Any
) -> None:
    with pair.scope():
        v = ar.Variable(
            np.zeros((), dtype),
            trainable=False,
            aggregation="sum",
            synchronization=synchronization,
        )

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        v.blocking.assign_add(x)

    batches = [ar.PerReplica([dtype(1), dtype(2)])] * 3
    await pair.run_steps(step, iter(batches), 3, compile="jax")
    assert v.value == 9
    for part in v.components:
        assert type(part) is np.ndarray
        assert part.dtype == dtype


async def test_counts_of_steps_that_32_bits_do_not_hold(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        sgd.blocking.minimize(lambda: jnp.sum(w.value * x), backend="jax")

    await sgd.iterations.assign(2**31 - 2**20)
    await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")
    with pytest.raises(OverflowError, match=r"have made \[2146435073\] updates"):
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, compile="jax")
    assert w.version == 1


@pytest.mark.parametrize(("dtype", "value"), [("int8", 300), ("uint16", -1), ("int32", 2**40)])
@pytest.mark.parametrize("options", [{}, {"compile": "jax"}], ids=["plain", "compiled"])
async def test_an_int_that_a_variable_does_not_hold_is_refused(
    pair: ar.Strategy, dtype: str, value: int, options: Any
) -> None:
    with pair.scope():
        v = ar.Variable(np.zeros((), dtype), trainable=False, aggregation="sum")

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        v.blocking.assign(value)

    with pytest.raises(ValueError, match=f"holds .*, cannot assign {value}"):
        await pair.run_steps(step, iter(vectors(pair, 1)), 1, **options)
    assert v.version == 0
