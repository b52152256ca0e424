"""One application of gradients: exact sums, shared components, all or nothing."""

import asyncio
import gc
import inspect
import threading
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import Reducer
from aioreplica.optimizers import SGD, DynamicLossScale
from aioreplica.optimizers._merged_gradient import merge_gradients
from aioreplica.optimizers._step import take_step
from tests.optimizers.rules import LARGE, Descent, made


@pytest.mark.asyncio
async def test_gradients_are_summed_over_replicas(strategy: ar.Strategy) -> None:
    w = made(strategy, [10.0, 20.0])
    optimizer = Descent(0.5)

    async def step() -> Any:
        replica_id = ar.get_replica_context().replica_id_in_sync_group
        gradient = np.array([1.0, 0.0]) * (replica_id + 1)
        assert await optimizer.apply_gradients([(gradient, w)]) is None
        return w.value

    await strategy.run(step)

    n = strategy.num_replicas_in_sync
    for component in w.components:
        np.testing.assert_array_equal(component, [10 - 0.5 * n * (n + 1) / 2, 20.0])


@pytest.mark.asyncio
async def test_weighted_gradients_are_divided_once(gang: ar.MirroredStrategy) -> None:
    w = made(gang, 0.0)
    optimizer = Descent()

    async def step(total: Any, weight: Any) -> Any:
        await optimizer.apply_gradients([(ar.Weighted(total, weight), w)])

    n = gang.num_replicas_in_sync
    totals, weights = [1.0, 5.0, 2.5, 3.0][:n], [1, 4, 2, 3][:n]
    await gang.run(step, args=(ar.PerReplica(totals), ar.PerReplica(weights)))

    assert w.value == -sum(totals) / sum(weights)


@pytest.mark.asyncio
async def test_a_part_of_weight_zero_contributes_nothing(pair: ar.MirroredStrategy) -> None:
    w = made(pair, 0.0)
    optimizer = Descent()

    async def step(total: Any, weight: Any) -> Any:
        await optimizer.apply_gradients([(ar.Weighted(total, weight), w)])

    await pair.run(step, args=(ar.PerReplica([float("nan"), 6.0]), ar.PerReplica([0, 3])))
    assert w.value == -2.0

    with pytest.raises(ValueError, match=r"'w' has total weight 0.*\[0, 0\]"):
        await pair.run(step, args=(float("nan"), 0))
    assert w.value == -2.0


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [3, LARGE])
async def test_one_and_four_replicas_agree_on_uneven_batches(size: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 3)), rng.normal(size=10)
    start = rng.normal(size=size)

    async def trained(num_replicas: int) -> Any:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) as strategy:
            w = made(strategy, start)
            with strategy.scope():
                adam = ar.optimizers.Adam(0.01)

            def loss(x: Any, y: Any) -> Any:
                return ar.Weighted(anp.sum((anp.dot(x, w.value[:3]) - y) ** 2), len(y))

            async def step(x: Any, y: Any) -> Any:
                return await adam.minimize(lambda: loss(x, y))

            losses = []
            data = ar.ArrayDataset((x, y), 7)  # 7 and 3 examples: 3 leave a replica of 4 without
            async with strategy.distribute_dataset(data) as batches:
                for _ in range(4):
                    async for batch in batches:
                        parts = await strategy.run(step, args=batch)
                        losses.append((await strategy.reduce("sum", parts)).mean())
            return losses, w.value

    one, four = await trained(1), await trained(4)

    np.testing.assert_allclose(one[0], four[0], rtol=1e-9)
    np.testing.assert_allclose(one[1], four[1], rtol=1e-9)
    assert len(one[0]) == 8


@pytest.mark.asyncio
async def test_components_that_are_equal_are_one_read_only_array(
    gang: ar.MirroredStrategy,
) -> None:
    w = made(gang, [1.0, 2.0])
    optimizer = Descent()

    async def step() -> Any:
        await optimizer.apply_gradients([(np.ones(2), w)])

    await gang.run(step)

    slot = optimizer.get_slot(w, "count")
    for variable in (w, slot, optimizer.iterations):
        assert len(set(map(id, variable.components))) == 1
        assert not variable.components[0].flags.writeable
    assert optimizer.hooks.count("update") == 1


@pytest.mark.asyncio
async def test_components_that_differ_are_updated_one_by_one(pair: ar.MirroredStrategy) -> None:
    w = made(pair, 0.0)
    w.store.write({w: (np.array(1.0), np.array(10.0))})
    optimizer = Descent()

    async def step() -> Any:
        await optimizer.apply_gradients([(np.float64(0.25), w)])
        return w.value

    values = await pair.run(step)

    assert [float(value) for value in values] == [0.5, 9.5]
    assert optimizer.hooks.count("update") == 2


@pytest.mark.asyncio
async def test_dtypes_of_variables_are_kept(pair: ar.MirroredStrategy) -> None:
    w = made(pair, np.float32([1.0, 2.0]))
    with pair.scope():
        adam = ar.optimizers.Adam()

    async def step() -> Any:
        await adam.apply_gradients([(ar.Weighted(np.ones(2, np.float64), 3), w)])

    await pair.run(step)

    assert {v.dtype for v in (w, adam.get_slot(w, "m"), adam.get_slot(w, "v"))} == {
        np.dtype(np.float32)
    }


@pytest.mark.asyncio
async def test_the_result_is_the_same_on_the_loop_and_on_the_host(
    pair: ar.MirroredStrategy,
) -> None:
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=LARGE), rng.normal(size=(2, LARGE))

    async def result(size: int) -> Any:
        w = made(pair, start[:size])
        with pair.scope():
            adam = ar.optimizers.Adam()

        async def step(gradient: Any) -> Any:
            for _ in range(3):
                await adam.apply_gradients([(gradient[:size], w)])

        await pair.run(step, args=(ar.PerReplica(gradients),))
        return w.value

    small, large = await result(5), await result(LARGE)
    np.testing.assert_array_equal(small, large[:5])


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 3])
async def test_cancelling_the_merge_leaves_everything_as_it_was(num_replicas: int) -> None:
    strategy = ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    a, b = made(strategy, np.zeros(LARGE), "a"), made(strategy, np.zeros(LARGE), "b")
    global_step = made(strategy, 0, "global_step")
    loop, started, gate = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def in_update() -> None:
        loop.call_soon_threadsafe(started.set)
        assert gate.wait(timeout=10)

    optimizer = Descent(in_update=in_update)

    async def step() -> Any:
        pairs = [(np.ones(LARGE), a), (np.ones(LARGE), b)]
        await optimizer.apply_gradients(pairs, global_step=global_step)

    run = asyncio.ensure_future(strategy.run(step))
    await started.wait()
    run.cancel()
    loop.call_soon(gate.set)
    with pytest.raises(asyncio.CancelledError):
        await run

    written = [a, b, global_step, optimizer.iterations, optimizer.get_slot(a, "count")]
    assert [variable.version for variable in written] == [0] * 5

    await strategy.run(step)
    assert [variable.version for variable in written] == [1] * 5
    await strategy.aclose()


@pytest.mark.asyncio
async def test_a_failing_rule_leaves_everything_as_it_was(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, 0.0, "a"), made(pair, 0.0, "b")
    calls = []

    def in_update() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second variable")

    optimizer = Descent(in_update=in_update)

    async def step() -> Any:
        await optimizer.apply_gradients([(1.0, a), (1.0, b)])

    with pytest.raises(KeyError, match="second variable"):
        await pair.run(step)

    assert (a.version, b.version, optimizer.iterations.version) == (0, 0, 0)


@pytest.mark.asyncio
async def test_a_write_during_the_update_is_not_lost(pair: ar.MirroredStrategy) -> None:
    w = made(pair, np.zeros(LARGE))

    def in_update() -> None:
        if w.version == 0:  # somebody else writes while the new values are computed
            w.store.write({w: (np.full(LARGE, 10.0),) * 2})

    optimizer = Descent(in_update=in_update)

    async def step() -> Any:
        await optimizer.apply_gradients([(np.ones(LARGE), w)])

    await pair.run(step)

    assert w.value[0] == 8.0
    assert optimizer.hooks.count("update") == 2
    assert optimizer.iterations.value == 1


@pytest.mark.asyncio
async def test_a_step_with_the_rate_of_an_older_count_is_done_again() -> None:
    seen: list[int] = []

    def rate(count: int) -> float:
        seen.append(count)
        if len(seen) == 1:  # another run's steps end while this one begins
            sgd.iterations.store.write({sgd.iterations: (np.array(5),)})
        return float(count)

    w, sgd = ar.Variable(0.0), SGD(rate)
    await sgd.apply_gradients([(1.0, w)])

    assert (seen, w.value, sgd.iterations.value) == ([0, 5], -5.0, 6)


@pytest.mark.asyncio
@pytest.mark.parametrize(("gradient", "expected"), [(np.inf, (2.0, 0)), (0.0, (8.0, 2))])
async def test_no_change_of_a_loss_scale_by_another_run_is_lost(
    monkeypatch: pytest.MonkeyPatch, gradient: float, expected: Any
) -> None:
    w, scaling = ar.Variable(np.zeros(1)), DynamicLossScale(8.0)
    after, others = DynamicLossScale.after, [gradient == 0]

    def overtaken(self: DynamicLossScale, is_finite: bool) -> Any:
        changes = after(self, is_finite)
        while others and is_finite is others[0]:  # the step of another run ends here
            for variable, value in after(self, others.pop()).items():
                variable.store.write({variable: (np.array(value, variable.dtype),)})
        return changes

    monkeypatch.setattr(DynamicLossScale, "after", overtaken)
    await SGD(loss_scale=scaling).apply_gradients([(np.array([gradient]), w)])

    assert (scaling.scale, scaling.variables[1].value) == expected


@pytest.mark.asyncio
async def test_concurrent_runs_lose_no_update(pair: ar.MirroredStrategy) -> None:
    w = made(pair, np.zeros(LARGE))
    optimizer = Descent()

    async def step() -> Any:
        await optimizer.apply_gradients([(np.ones(LARGE), w)])

    await asyncio.gather(*(pair.run(step) for _ in range(5)))

    assert (w.value[0], optimizer.iterations.value) == (-10.0, 5)


@pytest.mark.asyncio
async def test_a_slot_that_is_the_gradient_does_not_follow_the_user_s_array() -> None:
    class Keeping(Descent):
        def new_slot(self, name: str, variable: ar.Variable) -> Any:
            return np.zeros(variable.shape)

        def update(self, prepared: float, value: Any, gradient: Any, slots: Any) -> Any:
            return value - gradient, {"count": gradient}

    w, rule, gradient = ar.Variable([1.0]), Keeping(), np.array([1.0])

    await rule.apply_gradients([(gradient, w)])
    gradient[:] = 9.0

    slot = rule.get_slot(w, "count")
    assert slot is not None
    assert slot.value == 1.0


def test_a_large_step_that_never_begins_leaves_nothing_to_await(recwarn: Any) -> None:
    w = ar.Variable(np.zeros(LARGE))
    gradients = merge_gradients([w], [[np.ones(LARGE)] * 2], is_mean=False)

    pending = take_step(SGD(1.0, clipnorm=1.0), gradients, Reducer(), None)
    assert inspect.iscoroutine(pending)
    pending.close()
    del pending
    gc.collect()

    assert not recwarn.list
