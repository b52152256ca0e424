"""Optimizers whose state follows the steps, where variables live on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.optimizers.schedules import LinearWarmup, ReduceOnPlateau
from aioreplica.strategies.parameter_server._messages import Judgement, NewShard, Pull, Stamp
from aioreplica.strategies.parameter_server._server import ParameterServer
from tests.parameter_server.coordinating import coordinating
from tests.parameter_server_engine.closures import scaled_step

pytestmark = pytest.mark.asyncio

START = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)


def scaled_steps(w: Any, optimizers: Any, gradient: float) -> float:
    for optimizer in optimizers:
        scale = scaled_step(w, optimizer, gradient)
    return scale


def quadratic_step(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(np.asarray(2.0 * w.value), w)])


def two_steps(first: Any, second: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(first.value, first), (second.value, second)])


async def one_by_one(coordinator: Any, fn: Any, calls: Any) -> list[Any]:
    return [await (await coordinator.schedule(fn, args)).fetch() for args in calls]


# ---- loss scales ---------------------------------------------------------------------------------


async def test_a_loss_scale_follows_the_steps_of_closures_as_those_of_replicas() -> None:
    gradients = [1.0, 1.0, np.inf, 1.0, np.nan, 1.0, 1.0, 1.0]
    async with ar.OneDeviceStrategy("cpu:0") as alone:
        with alone.scope():
            v = ar.Variable(START)
            theirs = ar.optimizers.SGD(
                0.1, loss_scale=ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            )

        async def step(gradient: float) -> float:
            scale = theirs.loss_scale.scale  # type: ignore[union-attr]  # it was given
            whole = np.full(v.shape, gradient, v.dtype)
            await theirs.apply_gradients([(ar.optimizers.ScaledGradient(whole * scale, scale), v)])
            return scale

        runs = [await alone.run(step, (gradient,)) for gradient in gradients]
        expected = [float(alone.local_results(run)[0]) for run in runs]
        last = v.value.copy()
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START)
            scaling = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            ours = ar.optimizers.SGD(0.1, loss_scale=scaling)
        seen = await one_by_one(coordinator, scaled_step, [(w, ours, g) for g in gradients])
        assert seen == expected == [8.0, 8.0, 16.0, 8.0, 8.0, 4.0, 4.0, 8.0]
        np.testing.assert_array_equal(await w.read(), last)
        assert ours.skipped_steps is not None
        assert int(await ours.skipped_steps.read()) == 2  # type: ignore[attr-defined]  # it is served
        assert repr(scaling) == "<DynamicLossScale on a parameter server>"


async def test_optimizers_that_share_a_scale_count_a_step_once() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START)
            scaling = ar.optimizers.DynamicLossScale(8.0, growth_interval=2)
            both = [ar.optimizers.SGD(0.1, loss_scale=scaling) for _ in range(2)]
        seen = await one_by_one(coordinator, scaled_steps, [(w, both, 1.0)] * 4)
        assert seen == [8.0, 16.0, 16.0, 32.0]  # what the second one read, after the first had told


async def test_a_minimized_loss_is_multiplied_with_the_scale() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START)
            scaling = ar.optimizers.DynamicLossScale(4.0, growth_interval=1)
            sgd = ar.optimizers.SGD(0.5, loss_scale=scaling)
        losses = await one_by_one(coordinator, minimized, [(w, sgd)] * 2)
        assert losses == [float(np.sum(START)), float(np.sum(START - 0.5))]
        np.testing.assert_array_equal(await w.read(), START - 1.0)
        assert float(await scaling.variables[0].read()) == 16.0  # type: ignore[attr-defined]  # served


def minimized(w: Any, optimizer: Any) -> float:
    import autograd.numpy as anp

    return float(optimizer.blocking.minimize(lambda: anp.sum(w.value)))


async def test_an_overflow_that_was_answered_to_changes_nothing() -> None:
    scale, num_finite = (0, 0), (1, 0)
    server = ParameterServer(0)
    server.create([
        NewShard(scale, np.float64(8.0), "loss_scale", False, None),
        NewShard(num_finite, np.int64(1), "steps", False, None),
    ])  # fmt: skip
    rule = ar.optimizers.DynamicLossScale(8.0, growth_interval=9).rule
    for closure in range(2):  # both had a scale of 8
        server.push(Stamp(0, closure, 0), [Judgement(scale, 0, num_finite, rule, False, 8.0)])
    server.push(Stamp(0, 1, 0), [Judgement(scale, 0, num_finite, rule, False, 4.0)])  # again
    values = [value for _, value in server.pull([Pull(scale), Pull(num_finite)])]
    assert [float(each) for each in values if each is not None] == [4.0, 0.0]
    assert server.report(0).dropped == 1


async def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START)
            scaling = ar.optimizers.DynamicLossScale(8.0, growth_interval=1)
            sgd = ar.optimizers.SGD(0.1, loss_scale=scaling)
        await one_by_one(coordinator, scaled_step, [(w, sgd, 1.0)])
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"w": w, "sgd": sgd})
            await one_by_one(coordinator, scaled_step, [(w, sgd, 1.0)] * 2)
            await manager.restore({"w": w, "sgd": sgd})
        assert await one_by_one(coordinator, scaled_step, [(w, sgd, 1.0)]) == [16.0]


# ---- learning rates ------------------------------------------------------------------------------


async def test_a_plateau_is_observed_in_the_program_and_closures_have_its_rate(
    tmp_path: Path,
) -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(np.ones(()))
            rate = ReduceOnPlateau(0.5, factor=0.5, patience=0)
            sgd = ar.optimizers.SGD(rate)
        await one_by_one(coordinator, quadratic_step, [(w, sgd)])
        assert float(await w.read()) == 0.0  # type: ignore[attr-defined]  # it is served
        await w.assign(1.0)
        rate.observe(1.0)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"sgd": sgd})
            rate.observe(1.0)  # no better: it falls
            assert rate(0) == 0.25
            await one_by_one(coordinator, quadratic_step, [(w, sgd)])
            assert float(await w.read()) == 0.5  # type: ignore[attr-defined]  # it is served
            await manager.restore({"sgd": sgd})
        assert rate(0) == 0.5
        rate.observe(1.0)
        assert rate(0) == 0.25


async def test_a_plateau_behind_a_warm_up_is_a_number_in_closures() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(np.zeros(()))
            rate = ReduceOnPlateau(1.0, factor=0.5, patience=0)
            sgd = ar.optimizers.SGD(LinearWarmup(rate, 2))
        await one_by_one(coordinator, push_one, [(w, sgd)] * 3)
        assert float(await w.read()) == -(0.0 + 0.5 + 1.0)  # type: ignore[attr-defined]  # it is served
        for _ in range(2):
            rate.observe(1.0)
        await one_by_one(coordinator, push_one, [(w, sgd)])
        assert float(await w.read()) == -(0.0 + 0.5 + 1.0 + 0.5)  # type: ignore[attr-defined]


def push_one(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(np.ones(()), w)])


# ---- rules with arrays -------------------------------------------------------------------------


class Masked(ar.optimizers.Optimizer):
    def __init__(self, mask: Any) -> None:
        super().__init__(1.0, slot_names=())
        self._mask = mask

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        raise AssertionError("there are no slots")

    def prepare(self, learning_rate: float, iteration: int) -> float:
        return learning_rate

    def update(self, prepared: Any, value: Any, gradient: Any, slots: Any) -> tuple[Any, Any]:
        return value - prepared * self._mask * gradient, {}

    def finish(self, prepared: Any) -> dict[Any, Any]:
        return {}


async def test_a_rule_may_have_a_large_array() -> None:
    mask = np.arange(2.0**17) % 2.0
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w, masked = ar.Variable(np.ones(mask.shape)), Masked(mask)
        await one_by_one(coordinator, quadratic_step, [(w, masked)])
        np.testing.assert_array_equal(await w.read(), 1.0 - 2.0 * mask)  # type: ignore[attr-defined]


async def test_settings_that_a_server_has_refused_are_told_to_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object) -> None:
        raise MemoryError("no")

    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w, sgd = ar.Variable(np.ones(())), ar.optimizers.SGD(0.5)
        with monkeypatch.context() as full:
            full.setattr(ParameterServer, "learn", refuse)
            for _ in range(2):
                remote = await coordinator.schedule(quadratic_step, (w, sgd), isolate=True)
                with pytest.raises(MemoryError, match="no"):
                    await remote.fetch()
        await one_by_one(coordinator, quadratic_step, [(w, sgd)])
        assert float(await w.read()) == 0.0  # type: ignore[attr-defined]  # it is served


# ---- rules of other libraries --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adafactor"])
async def test_an_optimizer_of_torch_takes_the_steps_that_it_takes_elsewhere(kind: str) -> None:
    torch = pytest.importorskip("torch")
    options = {"lr": 0.05, **({"momentum": 0.9} if kind == "SGD" else {})}

    def made(first: Any, second: Any) -> Any:
        groups = [{"params": [first]}, {"params": [second], "weight_decay": 0.1}]
        return ar.optimizers.from_torch(
            getattr(torch.optim, kind), groups, scheduler=halving, **options
        )

    async with ar.OneDeviceStrategy("cpu:0") as alone:
        with alone.scope():
            one, two = ar.Variable(START, name="one"), ar.Variable(START + 1, name="two")
            theirs = made(one, two)

        async def step() -> None:
            await theirs.apply_gradients([(one.value, one), (two.value, two)])

        for _ in range(4):
            await alone.run(step)
        expected = one.value.copy(), two.value.copy()
    async with coordinating(num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            first, second = ar.Variable(START, name="one"), ar.Variable(START + 1, name="two")
            ours = made(first, second)
        await one_by_one(coordinator, two_steps, [(first, second, ours)] * 4)
        for variable, value in zip((first, second), expected, strict=True):
            np.testing.assert_allclose(await variable.read(), value, rtol=1e-6)  # type: ignore[attr-defined]


def halving(optimizer: Any) -> Any:
    from torch.optim.lr_scheduler import StepLR

    return StepLR(optimizer, 2, 0.5)


@pytest.mark.slow
async def test_the_state_of_torch_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START, name="w")
            adam = ar.optimizers.from_torch(torch.optim.Adam, lr=0.1)
        state = {"w": w, "adam": adam}
        await one_by_one(coordinator, quadratic_step, [(w, adam)] * 2)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, state)
            await one_by_one(coordinator, quadratic_step, [(w, adam)] * 2)
            expected = await w.read()  # type: ignore[attr-defined]  # it is served
            await manager.restore(state)
        await one_by_one(coordinator, quadratic_step, [(w, adam)] * 2)
        np.testing.assert_array_equal(await w.read(), expected)  # type: ignore[attr-defined]


async def test_torch_wants_whole_variables() -> None:
    torch = pytest.importorskip("torch")
    async with coordinating(variable_partitioner=ar.FixedShardsPartitioner(2)) as (
        strategy,
        coordinator,
    ):
        with strategy.scope():
            w = ar.Variable(START, name="table")
            sgd = ar.optimizers.from_torch(torch.optim.SGD, lr=0.1)
        remote = await coordinator.schedule(quadratic_step, (w, sgd), isolate=True)
        with pytest.raises(TypeError, match=r"'table' is cut into 2 shards"):
            await remote.fetch()
        np.testing.assert_array_equal(await w.read(), START)  # type: ignore[attr-defined]


async def test_optax_is_refused_with_the_reason() -> None:
    optax = pytest.importorskip("optax")
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START)
            adam = ar.optimizers.from_optax(optax.adam(0.1))
        with pytest.raises(TypeError, match="updates all variables together"):
            await coordinator.schedule(quadratic_step, (w, adam))


@pytest.mark.parametrize("way", ["clipnorm", "global_clipnorm"])
async def test_norms_are_those_of_whole_variables_and_of_all_of_them(way: str) -> None:
    gradients = np.full(START.shape, 3.0, np.float32)
    async with coordinating(variable_partitioner=ar.FixedShardsPartitioner(2)) as (
        strategy,
        coordinator,
    ):
        with strategy.scope():
            first, second = ar.Variable(gradients, name="a"), ar.Variable(gradients, name="b")
            clipped: dict[str, Any] = {way: 6.0}
            sgd = ar.optimizers.SGD(1.0, **clipped)
        await one_by_one(coordinator, two_steps, [(first, second, sgd)])
        norm = np.sqrt(np.sum(gradients**2) * (2 if way == "global_clipnorm" else 1))
        expected = gradients - gradients * min(1.0, 6.0 / norm)
        for variable in (first, second):
            np.testing.assert_allclose(await variable.read(), expected, rtol=1e-6)  # type: ignore[attr-defined]


# ---- masks ---------------------------------------------------------------------------------------

MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda kernel, _: [kernel],
    "same": lambda kernel, _: lambda variable: variable is kernel,
    "name": lambda *_: lambda variable: variable.name.startswith("kernel"),
}


@pytest.mark.parametrize("kind", MASKS)
async def test_a_mask_of_weight_decay_knows_the_variables_on_servers(kind: str) -> None:
    def made(scope: Any) -> tuple[Any, Any, Any]:
        with scope:
            kernel, bias = ar.Variable(START, name="kernel"), ar.Variable(START, name="bias")
            mask = MASKS[kind](kernel, bias)
            return kernel, bias, ar.optimizers.AdamW(0.1, weight_decay=0.5, weight_decay_mask=mask)

    kernel, bias, theirs = made(nullcontext())
    for _ in range(3):
        await theirs.apply_gradients([(kernel.value, kernel), (bias.value, bias)])
    assert not np.array_equal(kernel.value, bias.value)
    partitioner = ar.FixedShardsPartitioner(2)
    async with coordinating(variable_partitioner=partitioner) as (strategy, coordinator):
        first, second, ours = made(strategy.scope())
        await one_by_one(coordinator, two_steps, [(first, second, ours)] * 3)
        np.testing.assert_allclose(await first.read(), kernel.value, rtol=1e-6)
        np.testing.assert_allclose(await second.read(), bias.value, rtol=1e-6)


# ---- sums of gradients ---------------------------------------------------------------------------


async def window_of(w: Any, optimizer: Any, parts: Any, step: Any) -> int:
    window = ar.GradientAccumulator(optimizer)
    for part in parts:
        await window.add([(part, w)])
    await window.apply(step)
    return window.num_added


async def applied(w: Any, optimizer: Any, parts: Any, step: Any) -> int:
    total = sum(parts[1:], parts[0])
    await optimizer.distributed_apply([(total, w)], step)
    return 0


@pytest.mark.parametrize("fn", [window_of, applied])
async def test_sums_of_a_closure_are_pushed_as_one_update(fn: Any) -> None:
    parts = [START, 2 * START, -0.5 * START]
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w, step = ar.Variable(START), ar.Variable(0, name="step")
            sgd = ar.optimizers.SGD(0.5, momentum=0.9)
        found = await one_by_one(coordinator, fn, [(w, sgd, parts, step)])
        assert found == [0]
        np.testing.assert_allclose(await w.read(), START - 0.5 * 2.5 * START, rtol=1e-6)  # type: ignore[attr-defined]
        assert int(await sgd.iterations.read()) == int(await step.read()) == 1  # type: ignore[attr-defined]


async def weighted_window(w: Any, optimizer: Any) -> None:
    window = ar.GradientAccumulator(optimizer)
    await window.add([(ar.Weighted(START, 1.0), w)])
    await window.add([(ar.Weighted(3.0 * START, 3.0), w)])
    await window.apply()


async def window_of_rows(w: Any, optimizer: Any) -> None:
    window = ar.GradientAccumulator(optimizer)
    for row in (1, 1):
        await window.add([(ar.IndexedSlices(np.ones((1, 2), np.float32), [row], w.shape), w)])
    await window.apply()


async def test_windows_of_weights_and_of_rows_are_pushed() -> None:
    async with coordinating(variable_partitioner=ar.FixedShardsPartitioner(2)) as (
        strategy,
        coordinator,
    ):
        with strategy.scope():
            w, sgd = ar.Variable(START), ar.optimizers.SGD(1.0)
        await one_by_one(coordinator, weighted_window, [(w, sgd)])
        np.testing.assert_allclose(await w.read(), 0.0 * START, atol=1e-6)  # type: ignore[attr-defined]
        await one_by_one(coordinator, window_of_rows, [(w, sgd)])
        np.testing.assert_allclose(await w.read(), [[0.0, 0.0], [-2.0, -2.0]], atol=1e-6)  # type: ignore[attr-defined]


async def average_here(w: Any) -> None:
    await ar.optimizers.ExponentialMovingAverage([w]).update()


async def test_an_average_of_what_is_on_servers_is_refused_in_a_closure() -> None:
    async with coordinating() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(START, name="w")
        remote = await coordinator.schedule(average_here, (w,), isolate=True)
        with pytest.raises(ContextError, match="average of 'w' cannot be made in a closure"):
            await remote.fetch()
