"""Refusals of compiled steps: at the first call, with the line, before anything changed."""

import io
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, DeviceError, NonFiniteError
from aioreplica.optimizers import Optimizer
from tests.conftest import mirrored, one_worker
from tests.replica.gated import me

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from tests.device_loop.compiled_steps import line_of  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


def element(num_replicas: int = 2) -> Any:
    return ar.PerReplica([np.arange(4, dtype=np.float32)] * num_replicas)


def branches(ctx: ar.MultiStepContext, x: Any) -> None:
    if jnp.sum(x) > 0:  # here
        ctx.set_last_step_output("x", x)


def asks_numpy(ctx: ar.MultiStepContext, x: Any) -> None:
    np.tanh(x)  # here


def asks_for_a_number(ctx: ar.MultiStepContext, x: Any) -> None:
    float(jnp.sum(x))  # here


def counts(ctx: ar.MultiStepContext, x: Any) -> None:
    range(jnp.argmax(x))  # here


def merges(ctx: ar.MultiStepContext, x: Any) -> None:
    me().blocking.merge_call(lambda strategy, x: x, (x,))  # here


def leaves(ctx: ar.MultiStepContext, x: Any) -> None:
    ar.outside_compilation(len, [x])  # here


def prints(ctx: ar.MultiStepContext, x: Any) -> None:
    print("a step")  # here


def writes(ctx: ar.MultiStepContext, x: Any) -> None:
    io.StringIO().write("a step")  # here


def sleeps(ctx: ar.MultiStepContext, x: Any) -> None:
    time.sleep(0)  # here


def draws(ctx: ar.MultiStepContext, x: Any) -> None:
    random.random()  # here


def draws_of_numpy(ctx: ar.MultiStepContext, x: Any) -> None:
    me().rng("dropout").random()  # here


def keeps_an_object(ctx: ar.MultiStepContext, x: Any) -> None:
    ctx.set_non_tensor_output("x", object())  # here


TYPE_ERRORS = [branches, asks_numpy, asks_for_a_number, counts]
CONTEXT_ERRORS = [
    merges, leaves, prints, writes, sleeps, draws, draws_of_numpy, keeps_an_object,
]  # fmt: skip


@pytest.mark.parametrize("step", TYPE_ERRORS, ids=lambda step: step.__name__)
async def test_a_number_that_is_not_known_yet(pair: ar.Strategy, step: Any) -> None:
    with pytest.raises(TypeError, match=f"The step {step.__name__} cannot be compiled") as caught:
        await pair.run_steps(step, iter([element()]), 1, compile="jax")

    assert line_of(step) in str(caught.value)
    assert str(caught.value).endswith("or leave out `compile`.")


@pytest.mark.parametrize("step", CONTEXT_ERRORS, ids=lambda step: step.__name__)
async def test_python_in_each_step(pair: ar.Strategy, step: Any) -> None:
    with pytest.raises(ContextError, match=r"in a step that run_steps compiles") as caught:
        await pair.run_steps(step, iter([element()]), 1, compile="jax")

    assert any(line_of(step) in note for note in caught.value.__notes__)


def keeps_on_printing(ctx: ar.MultiStepContext, x: Any) -> None:
    try:
        print("a step")  # here
    except ContextError:
        time.sleep(0)  # nobody looks any more
    ctx.set_last_step_output("x", x)


def keeps_on_cutting(ctx: ar.MultiStepContext, x: Any) -> None:
    for number in (np.int64(2**40), 1):
        try:
            x = jnp.asarray(x) + number
            break
        except OverflowError:
            x = x - np.int64(2**41)  # here
    ctx.set_last_step_output("x", x)


async def test_a_refusal_that_the_step_catches(pair: ar.Strategy) -> None:
    """Python takes the profile function away that has raised: what comes then is not seen."""
    for _ in range(2):
        with pytest.raises(ContextError, match=r"print\(\) was called in a step") as caught:
            await pair.run_steps(keeps_on_printing, iter([element()]), 1, compile="jax")
        assert any(line_of(keeps_on_printing) in note for note in caught.value.__notes__)
        with pytest.raises(OverflowError, match="The step holds 1099511627776, which int32"):
            await pair.run_steps(keeps_on_cutting, iter([element()]), 1, compile="jax")
        assert sys.getprofile() is None


@pytest.mark.parametrize("file", ["<ipython-input-3>", "/lib/site-packages/training/steps.py"])
@pytest.mark.parametrize("partly", [False, True])
async def test_the_file_of_a_step_is_the_users(pair: ar.Strategy, file: str, partly: bool) -> None:
    """It may have been typed at a prompt, or be part of an installed package."""
    names: dict[str, Any] = {"WIDE": np.int64(2**40)}
    lines = """
def prints(ctx, x):
    print("a step")

def cuts(ctx, x):
    ctx.set_last_step_output("x", x + WIDE)
"""
    exec(compile(lines, file, "exec"), names)
    prints, cuts = (partial(names[n]) if partly else names[n] for n in ("prints", "cuts"))

    with pytest.raises(ContextError, match=r"print\(\) was called in a step"):
        await pair.run_steps(prints, iter([element()]), 1, compile="jax")
    with pytest.raises(OverflowError, match="The step holds 1099511627776, which int32"):
        await pair.run_steps(cuts, iter([element()]), 1, compile="jax")


async def test_awaiting(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)

    async def later(x: Any) -> None:
        """Never run."""

    def minimizes(ctx: ar.MultiStepContext, x: Any) -> None:
        sgd.minimize(lambda: jnp.sum(w.value * x), backend="jax")

    async def waits(ctx: ar.MultiStepContext, x: Any) -> None:
        """Never run."""

    with pytest.raises(TypeError, match="returned a coroutine, which cannot be compiled"):
        await pair.run_steps(lambda ctx, x: later(x), iter([element()]), 1, compile="jax")
    with pytest.raises(TypeError, match="is `async def`"):
        await pair.run_steps(waits, iter([element()]), 1, compile="jax")
    with pytest.raises(ContextError, match="minimize was called in a replica"):
        await pair.run_steps(minimizes, iter([element()]), 1, compile="jax")
    assert w.version == 0


async def test_averages_and_rows_of_a_variable(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32), aggregation="mean")
        average = ar.optimizers.ExponentialMovingAverage([w], decay=0.9)

    def averages(ctx: ar.MultiStepContext, x: Any) -> None:
        average.blocking.update()

    rows = np.ones(1, np.float32)

    def scatters(ctx: ar.MultiStepContext, x: Any) -> None:
        w.blocking.scatter_update(ar.IndexedSlices(rows, np.array([0]), (4,)))

    with pytest.raises(ContextError, match=r"update was called in a step that run_steps compiles"):
        await pair.run_steps(averages, iter([element()]), 1, compile="jax")
    with pytest.raises(TypeError, match="with IndexedSlices cannot be compiled"):
        await pair.run_steps(scatters, iter([element()]), 1, compile="jax")
    assert w.version == 0


async def test_a_slice_of_a_variable_is_that_of_its_value_in_the_step(pair: ar.Strategy) -> None:
    with pair.scope():
        w, first = (ar.Variable(np.zeros(4, np.float32), aggregation="mean") for _ in range(2))

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        w.blocking.assign_add(jnp.asarray(x) + 1)
        first.blocking.assign(jnp.tile(w[1:3], 2))

    await pair.run_steps(step, iter([element()] * 3), 3, compile="jax")

    assert w.value.tolist() == [3.0, 6.0, 9.0, 12.0]
    assert first.value.tolist() == [6.0, 9.0, 6.0, 9.0]


async def test_a_refused_step_gives_its_element_back(pair: ar.Strategy) -> None:
    iterator = iter([element(), element()])
    with pytest.raises(TypeError):
        await pair.run_steps(branches, iterator, 2, compile="jax")

    left = await pair.run_steps(lambda ctx, x: None, iterator, 5)

    assert left.steps_run == 2


async def test_printing_of_a_library_is_its_own_affair(pair: ar.Strategy) -> None:
    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        logging.getLogger("a library").debug("not shown")
        ctx.set_last_step_output("x", jnp.sum(x))

    result = await pair.run_steps(step, iter([element()]), 1, compile="jax")

    assert result.last_step_outputs["x"].values == (6.0, 6.0)


async def test_arguments(pair: ar.Strategy) -> None:
    def run(**options: Any) -> Any:
        return pair.run_steps(lambda ctx, x: None, iter([element()]), 1, **options)

    with pytest.raises(ValueError, match="compile must be \"jax\" or None, got 'xla'"):
        await run(compile="xla")
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        await run(compile="jax", every=0)
    with pytest.raises(ValueError, match="every=2 says when compiled steps are published"):
        await run(every=2)
    with pytest.raises(TypeError, match="takes arrays of numbers, but an element holds 'text'"):
        await pair.run_steps(lambda ctx, x: None, iter(["text"]), 1, compile="jax")


async def test_without_jax_it_says_what_to_install(pair: ar.Strategy) -> None:
    def missing(name: str, *args: Any) -> Any:
        return None if name == "jax" else find_spec(name, *args)

    with (
        mock.patch("aioreplica.strategies._run_steps.find_spec", missing),
        pytest.raises(ImportError, match=r'pip install "aioreplica\[jax\]"'),
    ):
        await pair.run_steps(lambda ctx, x: None, iter([element()]), 1, compile="jax")


async def test_parts_of_two_sizes(pair: ar.Strategy) -> None:
    parts = ar.PerReplica([np.zeros(4, np.float32), np.zeros(3, np.float32)])

    with pytest.raises(ValueError, match=r"has float32\[3\] for replica 1, but float32\[4\] for"):
        await pair.run_steps(lambda ctx, x: None, iter([parts]), 1, compile="jax")


async def test_workers_and_processes() -> None:
    async with one_worker(2) as strategy:
        with pytest.raises(ContextError, match=r"<MultiWorkerMirroredStrategy.*cannot run_steps"):
            await strategy.run_steps(branches, iter([element()]), 1, compile="jax")
    async with mirrored(2) as strategy:
        with (
            mock.patch("aioreplica.devices._logical.is_process_device", return_value=True),
            pytest.raises(DeviceError, match=r'compile="jax"\) cannot run on cpu:0, whose ops run'),
        ):
            await strategy.run_steps(branches, iter([element()]), 1, compile="jax")


async def test_variables_of_64_bits_and_of_half_precision(pair: ar.Strategy) -> None:
    with pair.scope():
        wide, half = ar.Variable(np.ones(4)), ar.Variable(np.ones(4, np.float16))
        sgd = ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any, *, of: Any = None) -> None:
        sgd.blocking.minimize(lambda: jnp.sum(of.value * x), backend="jax")

    with pytest.raises(ContextError, match="has dtype float64, which jax computes in 32 bits"):
        await pair.run_steps(
            lambda ctx, x: step(ctx, x, of=wide), iter([element()]), 1, compile="jax"
        )
    with pytest.raises(TypeError, match="is of half precision"):
        await pair.run_steps(
            lambda ctx, x: step(ctx, x, of=half), iter([element()]), 1, compile="jax"
        )
    assert wide.version == half.version == 0


@pytest.mark.parametrize("fails", ["a wrap", "no weight"])
async def test_an_update_that_is_not_finite_comes_before_what_fails_later(
    pair: ar.Strategy, fails: str
) -> None:
    """All in one chunk: neither is published, though only the later one has a code of its own."""
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)
        v = ar.Variable(np.array(2**31 - 4), trainable=False, aggregation="only_first_replica")

    def step(ctx: ar.MultiStepContext, x: Any, n: Any) -> None:
        v.blocking.assign_add(1 if fails == "a wrap" else 0)
        sgd.blocking.minimize(lambda: ar.Weighted(jnp.sum(w.value * x), n), backend="jax")

    factors = [0, 1, np.nan, 1, 1, 1, 1, 1]  # the first one is a chunk of its own
    weights = [1, 1, 1, 1, 1, 1 if fails == "a wrap" else 0, 1, 1]
    batches = [
        (ar.PerReplica([np.full(4, x, np.float32)] * 2), ar.PerReplica([np.float32(n)] * 2))
        for x, n in zip(factors, weights, strict=True)
    ]
    with (
        pytest.raises(NonFiniteError, match="not finite in step 2"),
    ):
        await pair.run_steps(step, iter(batches), 8, compile="jax")
    assert w.version == v.version == 2
    np.testing.assert_allclose(w.value, 0.9)


async def test_optimizers_of_other_libraries(pair: ar.Strategy) -> None:
    optax = pytest.importorskip("optax")
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        adam = ar.optimizers.from_optax(optax.adam(0.1))

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        adam.blocking.minimize(lambda: jnp.sum(w.value * x), backend="jax")

    with pytest.raises(ContextError, match="the rule of another library updates all variables"):
        await pair.run_steps(step, iter([element()]), 1, compile="jax")


async def test_compression_of_the_strategy() -> None:
    options = ar.CommunicationOptions(compression=ar.collectives.Float16())
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"], options=options) as strategy:
        iterator = iter([element()])
        with pytest.raises(ContextError, match=r"was made with compression=.*Float16.*sums arrays"):
            await strategy.run_steps(lambda ctx, x: None, iterator, 1, compile="jax")

        left = await strategy.run_steps(lambda ctx, x: None, iterator, 1)
        assert left.steps_run == 1


async def test_options_of_a_call(pair: ar.Strategy) -> None:
    async def run(name: str, options: Any) -> Any:
        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            replica = me().blocking
            if name == "all_reduce":
                ctx.set_last_step_output("x", replica.all_reduce("sum", x, options))
            else:
                ctx.set_last_step_output("x", replica.all_gather(x, 0, options))

        result = await pair.run_steps(step, iter([element()]), 1, compile="jax")
        return result.last_step_outputs["x"].values[0].shape

    compressed = ar.CommunicationOptions(compression=ar.collectives.TopK(0.5))
    with pytest.raises(ContextError, match=r"all_reduce was called with compression=.*TopK"):
        await run("all_reduce", compressed)
    assert await run("all_gather", compressed) == (8,)  # as eagerly
    assert await run("all_reduce", ar.CommunicationOptions(timeout_seconds=1.0)) == (4,)
    for name in ("all_reduce", "all_gather"):
        with pytest.raises(TypeError, match=f"{name} takes options as an ar"):
            await run(name, "fast")


@dataclass(frozen=True)
class Rate:
    """Numbers of a rule, in a dataclass."""

    rate: float


class Uneven(Optimizer):
    """A rule whose `prepare` gives something else from its third update on."""

    def __init__(self, before: Callable[[float], Any], after: Callable[[float], Any]) -> None:
        self._before, self._after = before, after
        super().__init__(0.05, ())

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        raise AssertionError("it has no slots")

    def prepare(self, learning_rate: float, iteration: int) -> Any:
        return (self._before if iteration < 2 else self._after)(learning_rate)

    def update(self, prepared: Any, value: Any, gradient: Any, slots: Any) -> Any:
        return value - gradient, {}

    def finish(self, prepared: Any) -> dict[Any, Any]:
        return {}


def pair_of(rate: float) -> Any:
    return rate, rate


def unset(rate: float) -> Any:
    return Rate(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [(float, Rate), (Rate, float), (Rate, pair_of), (Rate, unset)])
async def test_numbers_of_another_structure_are_refused(kinds: Any) -> None:
    async with mirrored(2) as strategy:
        with strategy.scope():
            w = ar.Variable(np.ones(4, np.float32))
            optimizer = Uneven(*kinds)

        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            optimizer.blocking.minimize(lambda: jnp.sum(w.value * x), [w], backend="jax")

        with pytest.raises(ContextError, match="another structure at iteration 2"):
            await strategy.run_steps(step, iter([element()] * 4), 4, compile="jax")

        await strategy.run_steps(step, iter([element()] * 2), 2, compile="jax")
        assert w.version == 2  # alike until there


def in_units(rate: float) -> Any:
    return np.int64(2**40)


async def test_numbers_of_prepare_are_not_cut(pair: ar.Strategy) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        optimizer = Uneven(int, in_units)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        optimizer.blocking.apply_gradients([(x, w)])

    iterator = iter([element()] * 4)
    with pytest.raises(OverflowError, match=r"What prepare of .*Uneven.* gave holds 1099511627776"):
        await pair.run_steps(step, iterator, 4, compile="jax", every=2)
    assert w.version == 2


class Reshaping(Uneven):
    """A rule whose new value or slot has another shape than the old one."""

    def __init__(self, changes: str, **options: Any) -> None:
        Optimizer.__init__(self, 0.05, ("last",), **options)
        self._changes = changes

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        return learning_rate

    def update(self, prepared: Any, value: Any, gradient: Any, slots: Any) -> Any:
        new, last = value - gradient, slots["last"] + gradient
        one = np.add(gradient[:1], 0)
        return (one, {"last": last}) if self._changes == "value" else (new, {"last": one})


@pytest.mark.parametrize("on_non_finite", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("changes", ["value", "slot", "constraint"])
async def test_an_update_of_another_shape(
    pair: ar.Strategy, changes: str, on_non_finite: Any
) -> None:
    with pair.scope():
        bounds = jnp.max if changes == "constraint" else None
        w = ar.Variable(np.ones(4, np.float32), name="w", constraint=bounds)
        options = {"on_non_finite": on_non_finite}
        plain, reshaping = ar.optimizers.SGD(0.1, **options), Reshaping(changes, **options)
        optimizer = plain if changes == "constraint" else reshaping

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        optimizer.blocking.apply_gradients([(x, w)])

    iterator = iter([element()] * 4)
    with pytest.raises(ValueError, match=r"The update of .* has shape \(1?,?\), but .* \(4,\)"):
        await pair.run_steps(step, iterator, 4, compile="jax")
    left = await pair.run_steps(lambda ctx, x: None, iterator, 4)
    assert (w.version, left.steps_run) == (0, 4)


@pytest.mark.parametrize("writer", ["step", "optimizer"])
async def test_iterations_that_something_else_writes(writer: str) -> None:
    """The numbers of updates are those of a table, whose rows follow one by one."""
    w, b = (ar.Variable(np.ones(4, np.float32)) for _ in range(2))
    first, second = ar.optimizers.Adam(0.1), ar.optimizers.SGD(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        first.blocking.apply_gradients([(x, w)])
        if writer == "step":
            first.iterations.blocking.assign(first.iterations.value * 0)
        else:
            second.blocking.apply_gradients([(x, b)], first.iterations)

    iterator = iter([np.ones(4, np.float32)] * 2)
    with pytest.raises(ContextError, match="something else in the step writes its `iterations`"):
        await ar.get_strategy().run_steps(step, iterator, 2, compile="jax")
    left = await ar.get_strategy().run_steps(step, iterator, 2)
    assert (left.steps_run, w.version) == (2, 2)


class Finishing(Uneven):
    """A rule that writes a variable behind its updates, from one of them on."""

    def __init__(self, variable: ar.Variable, begin: int) -> None:
        super().__init__(float, float)
        self._variable, self._begin = variable, begin

    def prepare(self, learning_rate: float, iteration: int) -> float:
        return float(iteration)

    def finish(self, prepared: Any) -> dict[Any, Any]:
        return {self._variable: np.float32(prepared)} if prepared >= self._begin else {}


@pytest.mark.parametrize("begin", [0, 2])
async def test_variables_that_finish_writes(pair: ar.Strategy, begin: int) -> None:
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        last = ar.Variable(np.float32(0), trainable=False, name="last")
        optimizer = Finishing(last, begin)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        optimizer.blocking.apply_gradients([(x, w)])

    iterator = iter([element()] * 4)
    with pytest.raises(ContextError, match=r"cannot be compiled: its `finish` writes 'last'"):
        await pair.run_steps(step, iterator, 4, compile="jax")

    assert w.version == last.version == 0
    left = await pair.run_steps(step, iterator, 4)
    assert (left.steps_run, float(last.value)) == (4, 3.0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "structure": ({"metrics": {}, "best": 5.0}, "Output 'metrics' begins with {}, but the step"),
    "shape": ({"best": np.zeros(3)}, r"Output 'best' begins with array.* with shapes \[\(\)\]"),
    "number": ({"count": 0.5}, r"Output 'count' begins with .*0\.5.* the step leaves int32"),
    "nan": ({"count": np.nan}, r"Output 'count' begins with .*nan.* the step leaves int32"),
    "second": ({"best": 1.0, "count": 0.5}, r"Output 'count' begins with .*0\.5"),
    "complex": ({"best": 1j}, r"Output 'best' begins with .*1.?j.* the step leaves float32"),
}


def reports(ctx: ar.MultiStepContext, x: Any) -> None:
    ctx.set_last_step_output("metrics", {"loss": jnp.sum(x)})
    ctx.set_last_step_output("best", jnp.max(x))
    ctx.set_last_step_output("count", jnp.int32(1))


@pytest.mark.parametrize("kind", WRONG)
async def test_initial_values_of_another_kind_than_the_outputs(
    pair: ar.Strategy, kind: str
) -> None:
    initial, message = WRONG[kind]
    iterator = iter([element()] * 2)

    with pytest.raises(ValueError, match=message):
        await pair.run_steps(reports, iterator, 2, initial, compile="jax")

    left = await pair.run_steps(reports, iterator, 2, {"best": 7, "count": True}, compile="jax")
    assert left.steps_run == 2


async def test_initial_values_are_those_of_their_outputs(pair: ar.Strategy) -> None:
    seen = {}

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        before = ctx.last_step_outputs
        ctx.set_last_step_output("loss", {"a": before["loss"]["a"] + 1, "b": before["loss"]["b"]})
        ctx.set_last_step_output("best", jnp.maximum(before["best"], jnp.max(x)))

    initial = {"best": 5, "loss": {"b": np.arange(2.0), "a": 3}}
    for options in ({}, {"compile": "jax"}):
        result = await pair.run_steps(step, iter([element()] * 4), 4, initial, **options)
        seen[len(options)] = {
            name: jax.tree.map(lambda value: value.values[0], found)
            for name, found in result.last_step_outputs.items()
        }
    assert jax.tree.all(jax.tree.map(np.array_equal, seen[0], seen[1]))
