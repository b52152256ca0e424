"""Context of compiled steps: collectives, keys, records and assignments, as in eager ones."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.conftest import mirrored
from tests.replica.gated import me

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from tests.device_loop.compiled_steps import elements, vectors  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


def everything(ctx: ar.MultiStepContext, x: Any) -> None:
    """A step that calls every collective."""
    replica = me().blocking
    ident, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    x = jnp.asarray(x) * (1 + ident)
    outputs = {
        "sum": replica.all_reduce("sum", x), "mean": replica.all_reduce("mean", x),
        "max": replica.all_reduce("max", x), "min": replica.all_reduce("min", x),
        "gather": replica.all_gather(x, 0), "scatter": replica.reduce_scatter("sum", x),
        "broadcast": replica.broadcast(x, count - 1), "id": jnp.asarray(ident),
        "swapped": replica.all_to_all(x), "first": ar.autodiff.broadcast(x, 0),
        "any": jnp.asarray(replica.any(False)), "all": jnp.asarray(replica.all(True)),
        "step": jnp.asarray(replica.step - replica.step),
        "weighted": replica.all_reduce("sum", ar.Weighted(jnp.sum(x), 2)).mean(),
    }  # fmt: skip
    replica.barrier()
    for name, value in outputs.items():
        ctx.set_last_step_output(name, value)


@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
async def test_integers_are_assigned_exactly(aggregation: Any) -> None:
    parts = np.array([
        [2**24 + 1, 2**31 - 1, -(2**31), 0, 1, -1, 2, 7],
        [2**24 + 1, 2**31 - 1, -(2**31), 1, 2, -2, 2, 8],
    ], np.int32)  # fmt: skip
    if aggregation == "sum":
        parts[:, 1:3] //= 2
    found = []
    for options in ({}, {"compile": "jax"}):
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                make = partial(ar.Variable, trainable=False, aggregation=aggregation)
                count = make(np.int32(2**24 if aggregation != "sum" else 1))
                value = make(np.zeros(8, np.int32))

            def step(ctx: ar.MultiStepContext, x: Any, count: Any = count, v: Any = value) -> None:
                count.blocking.assign(count.value + 1)
                v.blocking.assign(x)

            iterator = iter([ar.PerReplica(list(parts))] * 3)
            await strategy.run_steps(step, iterator, 3, **options)
            found.append([int(count.value), *map(int, value.value)])

    assert found[1] == found[0]
    assert aggregation == "sum" or found[1][0] == 2**24 + 3


@pytest.mark.parametrize(
    "number", [np.int8(100), np.uint8(200), np.int16(30_000), np.int32(2_000_000_000)]
)
async def test_a_mean_of_integers_does_not_wrap(number: Any) -> None:
    async with mirrored(3) as strategy:
        found = []
        for options in ({}, {"compile": "jax"}):
            with strategy.scope():
                v = ar.Variable(np.zeros(2, np.asarray(number).dtype), aggregation="mean")

            def step(ctx: ar.MultiStepContext, x: Any, v: ar.Variable = v) -> None:
                x = jnp.asarray(x)
                mean = me().blocking.all_reduce("mean", ar.Weighted(x, x[0]))
                ctx.set_last_step_output("total", mean.total)
                ctx.set_last_step_output("weight", mean.weight)
                ctx.set_last_step_output("part", me().blocking.reduce_scatter("mean", x))
                v.blocking.assign(x[:2])

            given = ar.PerReplica([np.full(3, number)] * 3)
            result = await strategy.run_steps(step, iter([(given,)]), 1, **options)
            found.append([v.value, *(o.values[0] for o in result.last_step_outputs.values())])
    for eager, compiled in zip(*found, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-6)
        np.testing.assert_allclose(eager, number, rtol=1e-6)


def assigning(verb: str, *variables: ar.Variable) -> Any:
    """Return a step that assigns a value to each variable, and sums the values."""

    def step(ctx: ar.MultiStepContext, *values: Any) -> None:
        for variable, value in zip(variables, values, strict=True):
            getattr(variable.blocking, verb)(value)
            total = me().blocking.all_reduce("sum", jnp.asarray(value))
            ctx.set_last_step_output(variable.name, total)

    return step


NUMBERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "float32"]


@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
async def test_booleans_and_small_integers_are_combined_as_eagerly(
    aggregation: Any, verb: str
) -> None:
    """Booleans are counted, and sums that are too large for 16 bits wrap."""
    columns, dtypes = [], []
    for dtype in NUMBERS:
        top = 1 if dtype == "float32" else np.iinfo(dtype).max
        numbers = np.array([top, top, top // 2 + 1, 1, 0]).astype(dtype)
        columns += [[numbers, np.roll(numbers, 1)], [numbers > 0, numbers > 1]]
        dtypes += [dtype] * 2
    element = tuple(ar.PerReplica(parts) for parts in columns)
    async with mirrored(2) as strategy:
        found = []
        for options in ({}, {"compile": "jax"}):
            with strategy.scope():
                make = partial(ar.Variable, trainable=False, aggregation=aggregation)
                made = [make(np.zeros(5, dtype)) for dtype in dtypes]
            step = assigning(verb, *made)
            result = await strategy.run_steps(step, iter([element] * 3), 3, **options)
            outputs = result.last_step_outputs.values()
            found.append([*(v.value for v in made), *(o.values[0] for o in outputs)])
        for dtype, eager, compiled in zip(2 * dtypes, *found, strict=True):
            np.testing.assert_array_equal(compiled, eager, err_msg=dtype)


@pytest.mark.parametrize("aggregation", ["mean", "sum", "only_first_replica"])
@pytest.mark.parametrize("options", [{}, {"compile": "jax"}], ids=["eager", "compiled"])
async def test_booleans_cannot_hold_their_sum_or_mean(options: Any, aggregation: Any) -> None:
    element = ar.PerReplica([np.array([True, False])] * 2)
    async with mirrored(2) as strategy:
        with strategy.scope():
            flags = ar.Variable(np.zeros(2, bool), trainable=False, aggregation=aggregation)
        for verb in ("assign", "assign_add"):
            step = assigning(verb, flags)
            if aggregation == "only_first_replica":
                await strategy.run_steps(step, iter([element]), 1, **options)
                np.testing.assert_array_equal(flags.value, [True, False])
                continue
            with pytest.raises(ValueError, match="dtype bool, cannot assign a value of dtype"):
                await strategy.run_steps(step, iter([element]), 1, **options)
            assert flags.version == 0


@pytest.mark.parametrize("options", [{}, {"compile": "jax"}], ids=["eager", "compiled"])
async def test_python_numbers_that_do_not_fit_are_refused(options: Any) -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            make = partial(ar.Variable, trainable=False, aggregation="only_first_replica")
            small, flag = make(np.uint8(0), name="small"), make(np.False_, name="flag")
        for variable, number, says in (
            (small, 300, "'small' of dtype uint8 holds 0 to 255, cannot assign 300"),
            (flag, 1, "'flag' has dtype bool, cannot assign a value of dtype int64"),
        ):

            def step(ctx: ar.MultiStepContext, x: Any, of: Any = (variable, number)) -> None:
                of[0].blocking.assign(of[1])

            with pytest.raises(ValueError, match=says):
                await strategy.run_steps(step, iter([np.float32(0)]), 1, **options)
            assert variable.version == 0


async def test_every_collective_gives_what_it_gives_eagerly(strategy: ar.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    parts = [np.arange(8, dtype=np.float32) + i for i in range(n)]
    plain = isinstance(strategy, ar.DefaultStrategy)
    element = parts[0] if plain else ar.PerReplica(parts)

    eager = await strategy.run_steps(everything, iter([element]), 1)
    compiled = await strategy.run_steps(everything, iter([element]), 1, compile="jax")

    assert compiled.last_step_outputs.keys() == eager.last_step_outputs.keys()
    for name, value in eager.last_step_outputs.items():
        pairs = zip(
            strategy.local_results(compiled.last_step_outputs[name]),
            strategy.local_results(value),
            strict=True,
        )
        for here, there in pairs:
            np.testing.assert_array_equal(here, there, err_msg=name)


@pytest.mark.parametrize("count", range(2, 9))
async def test_sums_are_in_the_order_of_the_replicas(count: int) -> None:
    rng = np.random.default_rng(count)
    parts = [(rng.normal(size=1000) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
             for _ in range(count)]  # fmt: skip

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("sum", me().blocking.all_reduce("sum", x))

    async with mirrored(count) as strategy:
        result = await strategy.run_steps(step, iter([ar.PerReplica(parts)]), 1, compile="jax")

    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    np.testing.assert_array_equal(result.last_step_outputs["sum"].values[0], expected)


async def test_variables_are_assigned_by_their_rules(gang: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with gang.scope():
            total = ar.Variable(np.float32(0), trainable=False, aggregation="sum")
            mean = ar.Variable(np.float32(1), trainable=False, aggregation="mean")
            first = ar.Variable(0, trainable=False, aggregation="only_first_replica")
            own = ar.Variable(
                np.zeros(2, np.float32), trainable=False, synchronization="on_read",
                aggregation="sum",
            )  # fmt: skip

        def step(
            ctx: ar.MultiStepContext, x: Any, variables: Any = (total, mean, first, own)
        ) -> None:
            total, mean, first, own = variables
            total.blocking.assign_add(jnp.sum(x))
            mean.blocking.assign(mean.value + jnp.max(x))
            first.blocking.assign_sub(1)
            own.blocking.assign_add(x[:2] * 1)

        await gang.run_steps(step, (x for (x,) in vectors(gang, 5)), 5, **options)
        variables = (total, mean, first, own)
        values = [np.asarray(v.components) for v in variables]
        found.append((values, [v.version for v in variables]))
        del total, mean, first, own, variables

    for here, there in zip(found[1][0], found[0][0], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5)
    assert found[1][1][:3] == found[0][1][:3] == [5, 5, 5]
    assert found[1][1][3] == found[0][1][3]  # the writes of all replicas


async def test_keys_of_jax_are_those_of_the_eager_step(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        own = jax.random.uniform(ar.autodiff.jax_key("a"), (2,))
        same = jax.random.uniform(ar.autodiff.jax_key("a", shared=True))
        total = ctx.last_step_outputs["total"] + jnp.sum(own) + same
        ctx.set_last_step_output("total", total)

    start = {"total": np.float32(0)}
    seeded = ar.RunOptions(seed=5)
    found = []
    for options in ({}, {"compile": "jax"}):
        async with mirrored(2) as strategy:
            result = await strategy.run_steps(
                step, iter(vectors(strategy, 4)), 4, start, seeded, **options
            )
        found.append(result.last_step_outputs["total"].values)

    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert found[1][0] != found[1][1]


async def test_recorded_numbers_reach_the_event_log(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        ctx.record("size", jnp.float32(2.5) + ctx.steps_run)

    await pair.run_steps(step, iter(vectors(pair, 3)), 3, compile="jax")

    events = [event for event in pair.events.events("scalar") if event.name == "size"]
    assert [event.value for event in events] == [2.5, 3.5, 4.5]
    assert [event.step for event in events] == [0, 1, 2]


async def test_gradients_go_through_collectives(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with pair.scope():
            w = ar.Variable(np.ones(3, np.float32))
            sgd = ar.optimizers.SGD(0.1)

        def step(ctx: ar.MultiStepContext, x: Any, y: Any, w: Any = w, sgd: Any = sgd) -> None:
            def loss() -> Any:
                scores = x @ w.value
                mean = ar.autodiff.all_reduce("mean", scores)
                joined = ar.autodiff.all_gather(scores, 0)
                return jnp.sum((scores - mean - y) ** 2) + 0.1 * jnp.sum(joined**3)

            sgd.blocking.minimize(loss, backend="jax")

        await pair.run_steps(step, iter(elements(pair, 2)), 2, **options)
        found.append(w.value.copy())

    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


async def test_models_of_jax_and_their_state_are_compiled(pair: ar.Strategy) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        with pair.scope():
            params = ar.autodiff.jax_variables(
                {"w": jnp.ones(3), "b": jnp.zeros(())}, name=f"params {options}"
            )
            state = ar.autodiff.jax_variables(
                {"m": jnp.zeros(3)}, trainable=False, name=f"state {options}"
            )
            sgd = ar.optimizers.SGD(0.01)

        def step(
            ctx: ar.MultiStepContext, x: Any, y: Any,
            params: Any = params, state: Any = state, sgd: Any = sgd,
        ) -> None:  # fmt: skip
            def loss() -> Any:
                p = params.value
                return jnp.mean(((x - state.value["m"]) @ p["w"] + p["b"] - y) ** 2)

            sgd.blocking.minimize(loss, params.variables)
            state.set_value({"m": 0.5 * state.value["m"] + 0.5 * jnp.mean(x, axis=0)})

        await pair.run_steps(step, iter(elements(pair, 4)), 4, **options)
        found.append([np.asarray(v.components) for v in (*params.variables, *state.variables)])

    for here, there in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-7)
