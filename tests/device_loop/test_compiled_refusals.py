"""Refusals of compiled steps: at the first call, with the line, before anything changed."""

import inspect
import io
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
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

from aioreplica.device_loop._compiled._program import Trial  # noqa: E402

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


def line_of(step: Callable[..., Any]) -> str:
    """Return `file:line` of the line marked "here"."""
    lines, first = inspect.getsourcelines(step)
    [at] = [i for i, line in enumerate(lines) if line.rstrip().endswith("here")]
    return f"{inspect.getfile(step)}:{first + at}"


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


LARGEST = 2**31 - 1


@pytest.mark.parametrize("scans", [True, False])
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
    pair: ar.Strategy, dtype: Any, begin: int, change: Any, options: Any, at: int, scans: bool
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
    with mock.patch.object(Trial, "prefers_scan", return_value=scans):
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


@pytest.mark.parametrize("scans", [True, False])
@pytest.mark.parametrize("fails", ["a wrap", "no weight"])
async def test_an_update_that_is_not_finite_comes_before_what_fails_later(
    pair: ar.Strategy, scans: bool, fails: str
) -> None:
    """All in one chunk: neither is published, though only the later one has a code of its own."""
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        sgd = ar.optimizers.SGD(0.1)
        v = ar.Variable(np.array(LARGEST - 3), trainable=False, aggregation="only_first_replica")

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
        mock.patch.object(Trial, "prefers_scan", return_value=scans),
        pytest.raises(NonFiniteError, match="not finite in step 2"),
    ):
        await pair.run_steps(step, iter(batches), 8, compile="jax")
    assert w.version == v.version == 2
    np.testing.assert_allclose(w.value, 0.9)


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
    await pair.run_steps(step, iter([element()]), 1, compile="jax")
    with pytest.raises(OverflowError, match=r"have made \[2146435073\] updates"):
        await pair.run_steps(step, iter([element()]), 1, compile="jax")
    assert w.version == 1


async def test_optimizers_of_other_libraries(pair: ar.Strategy) -> None:
    optax = pytest.importorskip("optax")
    with pair.scope():
        w = ar.Variable(np.ones(4, np.float32))
        adam = ar.optimizers.from_optax(optax.adam(0.1))

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        adam.blocking.minimize(lambda: jnp.sum(w.value * x), backend="jax")

    with pytest.raises(ContextError, match="the rule of another library updates all variables"):
        await pair.run_steps(step, iter([element()]), 1, compile="jax")


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
