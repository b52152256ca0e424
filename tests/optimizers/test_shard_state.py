"""State of optimizers divided among workers gives the bits of a step with whole state."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, NonFiniteError
from aioreplica.optimizers._merged_gradient import MEASURED
from aioreplica.values import DividedVariable
from tests.optimizers.rules import Descent
from tests.strategies.workers import on_workers

pytestmark = pytest.mark.asyncio

SHAPES = {
    "large": (2, MEASURED + 77),
    "matrix": (300, 250),
    "bias": (5,),
    "one": (),
    "none": (0, 2),
}
Make = Callable[..., ar.optimizers.Optimizer]


class Model:
    """Variables whose gradients follow from the step, the replica and the variable."""

    def __init__(self, strategy: ar.Strategy, make: Make, dtype: str, **options: Any) -> None:
        rng = np.random.default_rng(3)
        self.strategy, self.dtype = strategy, dtype
        with strategy.scope():
            self.variables = [
                ar.Variable(rng.standard_normal(shape).astype(dtype), name=name)
                for name, shape in SHAPES.items()
            ]
            self.steps = ar.Variable(0, name="steps", trainable=False)
            self.optimizer = make(**options)
        self.gradient: Callable[[int, int, Any], Any] = gradient_of

    async def step(self, number: int) -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        replica = ctx.replica_id_in_sync_group
        pairs = [(self.gradient(number, replica, v), v) for v in self.variables]
        await self.optimizer.apply_gradients(pairs, self.steps)

    async def train(self, num_steps: int, first: int = 0) -> None:
        for number in range(first, first + num_steps):
            await self.strategy.run(self.step, (number,))

    async def bits(self) -> dict[str, bytes]:
        """Return everything that a step has written."""
        everything = [*self.variables, self.steps, *self.optimizer.variables]
        found = {}
        for variable in everything:
            is_divided = isinstance(variable, DividedVariable)
            value = await variable.read() if is_divided else variable.value
            assert value.shape == variable.shape
            found[variable.name] = value.tobytes()
        return found


def gradient_of(number: int, replica: int, variable: ar.Variable) -> Any:
    seed = [number, replica, len(variable.name)]
    return np.random.default_rng(seed).standard_normal(variable.shape).astype(np.float32)


def weighted(number: int, replica: int, variable: ar.Variable) -> ar.Weighted:
    return ar.Weighted(gradient_of(number, replica, variable), 1.0 + replica)


RULES: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (ar.optimizers.SGD, {"learning_rate": 0.1, "momentum": 0.9}),
    "sgd without slots": (ar.optimizers.SGD, {"learning_rate": 0.1}),
    "adagrad": (ar.optimizers.Adagrad, {"learning_rate": 0.1}),
    "rmsprop": (ar.optimizers.RMSprop, {"centered": True, "momentum": 0.5}),
    "adam, norms": (ar.optimizers.Adam, {"global_clipnorm": 1.0}),
    "adam, norm": (ar.optimizers.Adam, {"clipnorm": 0.5}),
    "adamw, mean": (ar.optimizers.AdamW, {"loss_reduction": "mean", "clipvalue": 0.2}),
    "adam, scaled": (ar.optimizers.Adam, {"loss_scale": 8.0}),
}


async def trained(
    division: tuple[int, int], rule: str, dtype: str, gradient: Any, *, shard_state: bool
) -> list[dict[str, bytes]]:
    make, options = RULES[rule]

    async def program(strategy: ar.Strategy) -> dict[str, bytes]:
        model = Model(strategy, make, dtype, shard_state=shard_state, **options)
        model.gradient = gradient
        await model.train(3)
        return await model.bits()

    return await on_workers(*division, program)


@pytest.mark.parametrize("rule", RULES)
async def test_every_rule_gives_the_same_bits(rule: str) -> None:
    whole = await trained((2, 1), rule, "float32", gradient_of, shard_state=False)
    parts = await trained((2, 1), rule, "float32", gradient_of, shard_state=True)

    assert parts == whole


@pytest.mark.parametrize("division", [(3, 1), (2, 2), (1, 2)])
async def test_divisions_into_workers_give_the_same_bits(division: tuple[int, int]) -> None:
    whole = await trained(division, "adam, norms", "float32", weighted, shard_state=False)
    parts = await trained(division, "adam, norms", "float32", weighted, shard_state=True)

    assert parts == whole


@pytest.mark.parametrize("dtype", ["float64", "float16"])
async def test_other_dtypes_give_the_same_bits(dtype: str) -> None:
    whole = await trained((2, 1), "adam, norms", dtype, gradient_of, shard_state=False)
    parts = await trained((2, 1), "adam, norms", dtype, gradient_of, shard_state=True)

    assert parts == whole


@pytest.mark.xslow
async def test_a_hundred_steps_give_the_same_bits() -> None:
    async def program(strategy: ar.Strategy, *, shard_state: bool) -> dict[str, bytes]:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=shard_state)
        model.variables = model.variables[1:3]
        await model.train(100)
        return await model.bits()

    whole = await on_workers(2, 1, lambda s: program(s, shard_state=False))
    parts = await on_workers(2, 1, lambda s: program(s, shard_state=True))

    assert parts == whole


async def test_each_worker_keeps_its_part_only() -> None:
    async def program(strategy: ar.Strategy) -> tuple[int, int, str]:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=True)
        await model.train(1)
        slots = [v for v in model.optimizer.variables if isinstance(v, DividedVariable)]
        assert len(slots) == 2 * len(SHAPES)
        for slot in slots:  # no worker has more than a unit over its share
            assert abs(slot.local.size - slot.division.ranges[-1][1] / 3) <= MEASURED
        kept = sum(slot.local.nbytes for slot in slots)
        return kept, sum(v.value.nbytes for v in model.variables), repr(model.optimizer)

    found = await on_workers(3, 1, program)

    whole = 2 * found[0][1]
    assert sum(kept for kept, _, _ in found) == whole
    assert "divided among 3 workers" in found[0][2]


async def test_in_one_process_it_changes_nothing_and_says_so() -> None:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=True)
        await model.train(1)

        assert not any(isinstance(v, DividedVariable) for v in model.optimizer.variables)
        assert "whole in this process" in repr(model.optimizer)


@pytest.mark.parametrize("norms", [{}, {"global_clipnorm": 1.0}])
@pytest.mark.parametrize("worker", [0, 1])
async def test_a_gradient_that_is_not_finite_is_named_on_all_workers(
    worker: int, norms: dict[str, float]
) -> None:
    def wrong(number: int, replica: int, variable: ar.Variable) -> Any:
        gradient = gradient_of(number, replica, variable)
        if number == 1 and replica == worker and variable.name == "matrix":
            gradient[299, 249] = np.nan
        return gradient

    async def program(strategy: ar.Strategy) -> tuple[Any, ...]:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=True, **norms)
        model.gradient = wrong
        await model.train(1)
        before = [variable.value for variable in model.variables]
        with pytest.raises(NonFiniteError, match="The gradient of 'matrix' is not finite") as info:
            await model.train(1, first=1)
        after = [variable.value for variable in model.variables]
        assert all(a is b for a, b in zip(before, after, strict=True))
        return info.value.variable, info.value.replica_id, info.value.index, model.steps.value

    assert await on_workers(2, 1, program) == [("matrix", worker, (299, 249), 1)] * 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("is_divided", [True, False])
async def test_a_half_that_overflows_is_named(is_divided: bool, momentum: float) -> None:
    async def program(strategy: ar.Strategy) -> None:
        with strategy.scope():
            half = ar.Variable(np.ones(3, "float16"), name="half")
            sgd = ar.optimizers.SGD(1e4, momentum=momentum, shard_state=is_divided)

        async def step() -> None:
            await sgd.apply_gradients([(np.full(3, 100.0, "float16"), half)])

        with pytest.raises(NonFiniteError, match="'half' would be -inf"):
            await strategy.run(step)

    await on_workers(2, 1, program)


async def test_an_update_that_is_not_finite_is_named_on_all_workers() -> None:
    async def program(strategy: ar.Strategy) -> str:
        size = 3e38 / strategy.num_replicas_in_sync

        def huge(number: int, replica: int, variable: ar.Variable) -> Any:
            gradient = np.zeros(variable.shape, np.float32)
            if variable.name == "large":
                gradient[1, 5] = size
            return gradient

        model = Model(strategy, ar.optimizers.SGD, "float32", shard_state=True, learning_rate=10.0)
        model.gradient = huge
        with pytest.raises(NonFiniteError, match="The update of 'large'") as info:
            await model.strategy.run(model.step, (0,))
        assert info.value.index == (1, 5)
        return str(info.value)

    [text] = await on_workers(1, 1, program)
    assert await on_workers(2, 1, program) == [text, text]


async def test_skipped_steps_are_skipped_by_all() -> None:
    def wrong(number: int, replica: int, variable: ar.Variable) -> Any:
        gradient = gradient_of(number, replica, variable)
        if number == 1 and replica == 1 and variable.name == "bias":
            gradient[0] = np.inf
        return gradient

    async def program(strategy: ar.Strategy, *, shard_state: bool) -> dict[str, bytes]:
        def adam() -> ar.optimizers.Optimizer:
            scale = ar.optimizers.DynamicLossScale()
            return ar.optimizers.Adam(loss_scale=scale, shard_state=shard_state)

        model = Model(strategy, adam, "float32")
        model.gradient = wrong
        await model.train(3)
        assert model.optimizer.skipped_steps is not None
        assert model.optimizer.skipped_steps.value == 1
        return await model.bits()

    whole = await on_workers(2, 1, lambda s: program(s, shard_state=False))
    parts = await on_workers(2, 1, lambda s: program(s, shard_state=True))

    assert parts == whole


async def test_gradients_that_are_sums_give_the_same_bits() -> None:
    async def program(strategy: ar.Strategy, *, shard_state: bool) -> dict[str, bytes]:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=shard_state)
        pairs = [(gradient_of(0, 0, variable), variable) for variable in model.variables]
        await model.optimizer.distributed_apply(pairs)

        async def step() -> None:
            await model.optimizer.apply_gradients(pairs, aggregate=False)

        await strategy.run(step)
        return await model.bits()

    whole = await on_workers(2, 1, lambda s: program(s, shard_state=False))
    parts = await on_workers(2, 1, lambda s: program(s, shard_state=True))

    assert parts == whole


async def test_constraints_and_written_variables_count() -> None:
    async def program(strategy: ar.Strategy, *, shard_state: bool) -> bytes:
        with strategy.scope():
            w = ar.Variable(np.ones(3, "float32"), name="w", constraint=lambda x: x / x.sum())
            half = ar.Variable(np.ones(3, "float16"), name="half")
            adam = ar.optimizers.Adam(0.1, shard_state=shard_state)

        async def step() -> None:
            gradient = np.array([1.0, 2.0, 3.0], "float32")
            await adam.apply_gradients([(gradient, w), (gradient, half)])

        await strategy.run(step)
        await half.assign([5.0, 6.0, 7.0])
        await w.assign(w.value + 1)
        await strategy.run(step)
        await strategy.check_in_sync([w, half, *adam.variables])
        return w.value.tobytes() + half.value.tobytes()

    whole = await on_workers(2, 1, lambda s: program(s, shard_state=False))
    parts = await on_workers(2, 1, lambda s: program(s, shard_state=True))

    assert parts == whole


async def test_a_slot_says_how_it_is_read_and_written() -> None:
    async def program(strategy: ar.Strategy) -> None:
        model = Model(strategy, ar.optimizers.Adam, "float32", shard_state=True)
        await model.train(1)
        slot = model.optimizer.get_slot(model.variables[1], "m")
        assert isinstance(slot, DividedVariable)
        with pytest.raises(ContextError, match=r"await variable\.read\(\)"):
            _ = slot.value
        with pytest.raises(ContextError, match="written by its optimizer only"):
            await slot.assign(np.zeros(slot.shape, "float32"))
        assert slot.shape == (await slot.read()).shape == (300, 250)
        begin, end = slot.division.ranges[slot.division.rank]
        assert slot.local.tobytes() == (await slot.read()).reshape(-1)[begin:end].tobytes()

    await on_workers(2, 1, program)


async def test_what_cannot_be_divided_is_refused() -> None:
    class Sharded(Descent):
        def __init__(self) -> None:
            ar.optimizers.Optimizer.__init__(self, 1.0, ("count",), shard_state=True)

    with pytest.raises(TypeError, match="Sharded got shard_state=True, but its rule needs whole"):
        Sharded()

    async def program(strategy: ar.Strategy) -> None:
        model = Model(strategy, ar.optimizers.SGD, "float32", shard_state=True)

        async def step() -> None:
            [table] = [v for v in model.variables if v.name == "matrix"]
            rows = ar.IndexedSlices(np.ones((1, 250), "float32"), [3], (300, 250))
            await model.optimizer.apply_gradients([(rows, table)])

        with pytest.raises((TypeError, ar.errors.WorkerLostError), match="is an IndexedSlices"):
            await strategy.run(step)

    await on_workers(2, 1, program)
