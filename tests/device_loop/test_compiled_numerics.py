"""Compiled updates beside the eager ones: every optimizer and option, each step from one state."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import NonFiniteError
from aioreplica.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ElementwiseOptimizer,
    Optimizer,
    RMSprop,
)
from tests.conftest import mirrored

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - jax may be missing

from .compiled_steps import vectors  # noqa: E402

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
STEPS = 3
DTYPES = {"float32": 1e-5, "float64": 1e-12}


def warming(iteration: int) -> float:
    return 0.02 * min(1.0, (iteration + 1) / 3)


class Signs(ElementwiseOptimizer):
    """A rule of a user: operators, several numbers, a mask, and a function without `out`."""

    def __init__(self) -> None:
        super().__init__(0.05, ("age",))

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> dict[str, Any]:
        return {"rate": learning_rate, "more": (0.5**iteration, iteration), "name": "signs"}

    def update_block(self, prepared: dict[str, Any], block: Any) -> None:
        [age], [new_age] = block.slots, block.new_slots
        np.add(age, 1, out=new_age)
        step = np.where(np.abs(block.gradient) > 0.1, np.sign(block.gradient), block.gradient)
        np.copyto(block.new_value, block.value)
        np.subtract(
            block.value, step * prepared["rate"] * prepared["more"][0], out=block.new_value,
            where=block.gradient != 0,
        )  # fmt: skip

    def finish(self, prepared: Any) -> dict[Any, Any]:
        return {}


class Whole(Optimizer):
    """A rule of a user that returns new arrays."""

    def __init__(self) -> None:
        super().__init__(0.05, ("last",))

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        return learning_rate

    def update(self, prepared: float, value: Any, gradient: Any, slots: Any) -> Any:
        last = np.add(slots["last"] * 0.5, gradient)
        return value - prepared * last, {"last": last}

    def finish(self, prepared: Any) -> dict[Any, Any]:
        return {}


class Logged(Whole):
    """A rule of a user that writes down what it and its schedule are asked."""

    def __init__(self, b: ar.Variable) -> None:
        self.asked: list[tuple[str, int, float]] = []
        Optimizer.__init__(self, self.rate, ("last",), learning_rate_multipliers={b: 2.0})

    def rate(self, iteration: int) -> float:
        self.asked.append(("rate", iteration, 0.0))
        return warming(iteration)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        self.asked.append(("prepare", iteration, learning_rate))
        return learning_rate


OPTIMIZERS: dict[str, Callable[[Any, Any], Optimizer]] = {
    "sgd": lambda w, b: SGD(0.05),
    "momentum": lambda w, b: SGD(0.05, momentum=0.9),
    "nesterov": lambda w, b: SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda w, b: Adam(0.05),
    "adamw": lambda w, b: AdamW(0.05, weight_decay=0.1),
    "adamw masked": lambda w, b: AdamW(0.05, weight_decay=0.1, weight_decay_mask=[w]),
    "adagrad": lambda w, b: Adagrad(0.05),
    "rmsprop": lambda w, b: RMSprop(0.05),
    "rmsprop momentum": lambda w, b: RMSprop(0.05, momentum=0.9),
    "rmsprop centered": lambda w, b: RMSprop(0.05, momentum=0.5, centered=True),
    "schedule": lambda w, b: Adam(warming),
    "schedule of jax": lambda w, b: SGD(lambda i: 0.1 * jnp.exp(-i / 10)),
    "mean": lambda w, b: SGD(0.05, loss_reduction="mean"),
    "clipnorm": lambda w, b: SGD(0.05, clipnorm=0.5),
    "clipvalue": lambda w, b: SGD(0.05, clipvalue=0.1),
    "global_clipnorm": lambda w, b: Adam(0.05, global_clipnorm=0.5),
    "measure_norm": lambda w, b: SGD(0.05, measure_norm=True),
    "loss_scale": lambda w, b: SGD(0.05, loss_scale=1024.0),
    "dynamic": lambda w, b: Adam(
        0.05, loss_scale=ar.optimizers.DynamicLossScale(4.0, growth_interval=2)
    ),
    "skip": lambda w, b: SGD(0.05, momentum=0.5, on_non_finite="skip"),
    "ignore": lambda w, b: Adam(0.05, on_non_finite="ignore"),
    "multipliers": lambda w, b: Adam(0.05, learning_rate_multipliers={b: 0.1}),
    "a rule of blocks": lambda w, b: Signs(),
    "a rule of arrays": lambda w, b: Whole(),
    "a rule that is asked": lambda w, b: Logged(b),
}


def squares(scores: Any, y: Any) -> Any:
    return jnp.sum((scores - y) ** 2)


def entropy(scores: Any, y: Any) -> Any:
    return jnp.sum(jnp.logaddexp(0, -scores * jnp.sign(y)))


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "squares": squares,
    "mean of examples": lambda scores, y: ar.Weighted(squares(scores, y), len(y)),
    "entropy": lambda scores, y: ar.Weighted(entropy(scores, y), len(y)),
    "weights of examples": lambda scores, y: ar.Weighted(
        jnp.sum(jnp.where(y > 0, (scores - y) ** 2, 0)), jnp.sum(y > 0)
    ),
}


class Training:
    """Two variables for each optimizer, and a step that updates all of them, on some replicas."""

    def __init__(self, strategy: ar.Strategy, names: Sequence[str], loss: Any, dtype: str) -> None:
        self.strategy = strategy
        self.parts = {}
        with strategy.scope():
            for name in names:
                rng = np.random.default_rng(3)
                w = ar.Variable(rng.normal(size=(3, 2)).astype(dtype))
                b = ar.Variable(
                    rng.normal(size=2).astype(dtype), constraint=lambda b: np.clip(b, -0.9, 0.9)
                )
                self.parts[name] = w, b, OPTIMIZERS[name](w, b), ar.Variable(0, trainable=False)

        def applies(ctx: ar.MultiStepContext, *gradients: Any) -> None:
            for w, b, optimizer, global_step in self.parts.values():
                pairs = zip((ar.Weighted(g, 5) for g in gradients), (w, b), strict=True)
                optimizer.blocking.apply_gradients(pairs, global_step)

        def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
            for name, (w, b, optimizer, global_step) in self.parts.items():

                def total(w: ar.Variable = w, b: ar.Variable = b) -> Any:
                    return loss(jnp.sum(jnp.tanh(x @ w.value + b.value), axis=1), y)

                value = optimizer.blocking.minimize(total, [w, b], global_step, backend="jax")
                ctx.set_last_step_output(name, value)

        self.step = applies if loss is None else step

    @property
    def variables(self) -> list[tuple[str, ar.Variable]]:
        return [
            (name, variable)
            for name, (w, b, optimizer, global_step) in self.parts.items()
            for variable in (w, b, global_step, *optimizer.variables)
        ]

    async def run(self, elements: Sequence[Any], **options: Any) -> None:
        await self.strategy.run_steps(self.step, iter(elements), len(elements), **options)

    async def become(self, other: "Training") -> None:
        """Have the values of another one."""
        for (_, mine), (_, theirs) in zip(self.variables, other.variables, strict=True):
            await mine.assign(theirs.value)


def elements(dtype: str, count: int, num_replicas: int) -> list[Any]:
    rng, found = np.random.default_rng(7), []
    for _ in range(count):
        x = [rng.normal(size=(5, 3)).astype(dtype) for _ in range(num_replicas)]
        y = [rng.normal(size=5).astype(dtype) for _ in range(num_replicas)]
        found.append((ar.PerReplica(x), ar.PerReplica(y)))
    return found


@pytest.fixture
def wide() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def gradients(dtype: str, count: int, num_replicas: int) -> list[Any]:
    rng, found = np.random.default_rng(5), []
    for _ in range(count):
        w = [rng.normal(size=(3, 2)).astype(dtype) for _ in range(num_replicas)]
        b = [rng.normal(size=2).astype(dtype) for _ in range(num_replicas)]
        found.append((ar.PerReplica(w), ar.PerReplica(b)))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
async def test_updates_of_every_optimizer(dtype: str, request: pytest.FixtureRequest) -> None:
    if dtype == "float64":
        request.getfixturevalue("wide")
    await compare(list(OPTIMIZERS), None, dtype, gradients(dtype, STEPS, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
async def test_every_loss(loss: str, dtype: str, request: pytest.FixtureRequest) -> None:
    if dtype == "float64":
        request.getfixturevalue("wide")
    await compare(["sgd", "momentum", "loss_scale"], LOSSES[loss], dtype, elements(dtype, STEPS, 2))


@pytest.mark.usefixtures("wide")
async def test_every_optimizer_with_a_loss() -> None:
    loss = LOSSES["weights of examples"]
    await compare(list(OPTIMIZERS), loss, "float64", elements("float64", 1, 2))


async def test_every_other_rule_with_a_loss_in_float32() -> None:
    """No gradient is near 0 here: what divides by its size would show the rounding of its parts."""
    names = ["nesterov", "adam", "adamw", "adagrad", "rmsprop", "rmsprop centered"]
    names += ["a rule of blocks", "a rule of arrays"]
    await compare(names, LOSSES["mean of examples"], "float32", elements("float32", 1, 2))


async def compare(names: Sequence[str], loss: Any, dtype: str, batches: Sequence[Any]) -> None:
    """Compare each step with the eager one, both from the state that this one has left."""
    async with mirrored(2) as strategy, mirrored(2) as other:
        eager = Training(strategy, names, loss, dtype)
        compiled = Training(other, names, loss, dtype)
        for number, element in enumerate(batches):
            if number:
                await compiled.become(eager)
            await eager.run([element])
            await compiled.run([element], compile="jax")
            pairs = zip(eager.variables, compiled.variables, strict=True)
            for (name, expected), (_, found) in pairs:
                size = max(1e-30, float(np.max(np.abs(expected.value))))
                difference = np.max(np.abs(found.value - expected.value)) / size
                assert difference <= DTYPES[dtype], (name, expected.name, number, difference)
                assert found.dtype == expected.dtype


async def test_runs_have_the_same_bits() -> None:
    found = []
    for _ in range(2):
        async with mirrored(4) as strategy:
            training = Training(strategy, ["adam", "clipnorm"], LOSSES["entropy"], "float32")
            await training.run(elements("float32", 70, 4), compile="jax")
            found.append([variable.value.copy() for _, variable in training.variables])

    for here, there in zip(*found, strict=True):
        np.testing.assert_array_equal(here, there)


async def test_numbers_are_asked_for_step_by_step() -> None:
    """As eagerly, with all multipliers of a step before the next one."""
    name, asked = "a rule that is asked", []
    async with mirrored(2) as strategy:
        for options in ({}, {"compile": "jax"}):
            training = Training(strategy, [name], None, "float32")
            await training.run(gradients("float32", 4, 2), **options)
            rule = training.parts[name][2]
            assert isinstance(rule, Logged)
            asked.append([each for each in rule.asked if each[1] > 0])  # the first: to record, too

    rate, base = asked[0][-3:-1]
    assert [each[:2] for each in asked[0][-3:]] == [("rate", 3), ("prepare", 3), ("prepare", 3)]
    assert asked[1] == [*asked[0], rate, base]  # for `finish`, once


@pytest.mark.parametrize(
    "factor", [lambda i: min(1, (i + 1) / 4), lambda i: 0 if i < 4 else 0.9], ids=["last", "first"]
)
@pytest.mark.parametrize("every", [None, 2])
async def test_numbers_that_are_integers_in_some_steps(factor: Any, every: int | None) -> None:
    class Ramped(Whole):
        def prepare(self, learning_rate: float, iteration: int) -> Any:
            return {"rate": learning_rate, "factor": factor(iteration)}

        def update(self, prepared: Any, value: Any, gradient: Any, slots: Any) -> Any:
            return value - prepared["rate"] * prepared["factor"] * gradient, slots

    rows = [[1, 2]] * 12
    options = {} if every is None else {"every": every}

    eager = await left_of(Ramped, [0.0, 1.0], rows)
    compiled = await left_of(Ramped, [0.0, 1.0], rows, compile="jax", **options)

    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-5)
    assert compiled[1:] == eager[1:]


def by_a_branch(w: Any) -> Any:
    return np.clip(w, -1, 1) if np.any(w > 5) else w


def by_an_array(w: Any) -> Any:
    return np.clip(np.asarray(w), -1, 1)


def by_a_number(w: Any) -> Any:
    return w / max(1.0, float(np.linalg.norm(w)))


CONSTRAINTS = {
    "norm": lambda w: w / np.maximum(1, np.linalg.norm(w)),
    "jax": lambda w: jnp.clip(w, -1, 1),
    "method": lambda w: w.clip(-1, 1),
    "rows": lambda w: np.stack([np.maximum(row, 0) for row in w]) / len(w),
    "parts": lambda w: np.concatenate([w[:1] * 0, w[1:]]),
    "kind": lambda w: np.where(w > 1, 1, w) if isinstance(w, np.ndarray) else jnp.minimum(w, 1),
    "branch": by_a_branch,
    "array": by_an_array,
    "number": by_a_number,
}
UNKNOWN = {"branch": "branches on", "array": "function of NumPy", "number": "a number that is not"}


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_constraints_give_the_same_or_say_what_is_not_known(kind: str) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        async with mirrored(2) as strategy:
            with strategy.scope():
                begin = np.full((3, 2), 2, np.float32)
                w = ar.Variable(begin, constraint=CONSTRAINTS[kind])
                sgd = ar.optimizers.SGD(0.1)

            def step(ctx: ar.MultiStepContext, x: Any, w: Any = w, sgd: Any = sgd) -> None:
                sgd.blocking.apply_gradients([(x, w)])

            batches = [ar.PerReplica([np.full((3, 2), i, np.float32)] * 2) for i in range(4)]
            if options and kind in UNKNOWN:
                with pytest.raises(TypeError, match=UNKNOWN[kind]):
                    await strategy.run_steps(step, iter(batches), 4, **options)
                np.testing.assert_array_equal(w.value, begin)
                return
            await strategy.run_steps(step, iter(batches), 4, **options)
            found.append(w.value.copy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(
    "weight",
    [True, np.True_, np.int8(100), np.int16(20_000), np.uint8(200), 2**31 - 1],
    ids=lambda weight: f"{type(weight).__name__}-{weight}",
)
async def test_a_sum_of_integer_weights_does_not_wrap(weight: Any, as_array: bool) -> None:
    found = []
    for options in ({}, {"compile": "jax"}):
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                w, optimizer = ar.Variable(np.ones(4, np.float32)), ar.optimizers.SGD(0.1)

            def step(
                ctx: ar.MultiStepContext, x: Any, w: Any = w, optimizer: Any = optimizer
            ) -> None:
                given = jnp.asarray(weight) if as_array else weight
                optimizer.blocking.minimize(
                    lambda: ar.Weighted(jnp.sum(x * w.value) * 1000, given), backend="jax"
                )

            await strategy.run_steps(step, iter(vectors(strategy, 3)), 3, **options)
            found.append(w.value.copy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


# --- values that were not finite before -----------------------------------------------------------


async def left_of(
    make: Callable[[], Optimizer],
    start: Any,
    rows: Sequence[Any],
    calls: Sequence[int] = (),
    **options: Any,
) -> tuple[Any, ...]:
    """Return a value and what is counted behind updates with some gradients, and the error."""
    async with mirrored(2) as strategy:
        with strategy.scope():
            w, optimizer = ar.Variable(np.float32(start)), make()

        def step(ctx: ar.MultiStepContext, x: Any) -> None:
            optimizer.blocking.apply_gradients([(x, w)])

        iterator, error = iter([(ar.PerReplica([np.float32(row)] * 2),) for row in rows]), ""
        try:
            for count in calls or [len(rows)]:
                await strategy.run_steps(step, iterator, count, **options)
        except NonFiniteError as found:
            error = "gradient" if "The gradient of" in str(found) else "update"
        counted = [optimizer.iterations, optimizer.skipped_steps]
        counts = [int(each.value) for each in counted if each is not None]
        return w.value.copy(), w.version, counts, error


MASKED: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.1),
    "adam": lambda: Adam(0.1),
    "clipvalue": lambda: SGD(0.1, clipvalue=0.1),  # looks at every step
    "skip": lambda: Adam(0.1, on_non_finite="skip"),
    "dynamic": lambda: SGD(0.1, loss_scale=ar.optimizers.DynamicLossScale(4.0)),
    "a rule of arrays": lambda: Whole(),
}


@pytest.mark.parametrize("name", MASKED)
async def test_what_was_not_finite_before_is_no_failure(name: str) -> None:
    start, rows = [-np.inf, 1.0, np.nan], [[0, 1, 0]] * 5

    eager = await left_of(MASKED[name], start, rows)
    compiled = await left_of(MASKED[name], start, rows, compile="jax")
    parts = await left_of(MASKED[name], start, rows, [2, 3], compile="jax")

    assert compiled[1:] == parts[1:] == eager[1:]
    assert compiled[-1] == ""
    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-5)
    np.testing.assert_array_equal(parts[0], compiled[0])


@pytest.mark.parametrize("row", [[np.nan, 1], [0, np.inf], [0, 3e38]])
@pytest.mark.parametrize("name", ["sgd", "adam", "skip"])
async def test_what_fails_beside_it_still_does(name: str, row: Any) -> None:
    """Also where the value shows nothing, as it was not finite before."""
    rows = [[0, 1], [0, 1], row, [0, 1]]

    eager = await left_of(MASKED[name], [-np.inf, 1.0], rows)
    compiled = await left_of(MASKED[name], [-np.inf, 1.0], rows, compile="jax")

    assert compiled[1:] == eager[1:]
    np.testing.assert_allclose(compiled[0], eager[0], rtol=1e-5)
