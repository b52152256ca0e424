"""Optimizer: hooks, slots and counters, and one merge for all replicas."""

import threading
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from tests.optimizers.rules import LARGE, Descent, made


@pytest.mark.asyncio
async def test_hooks_are_called_in_order_once_for_all_replicas(gang: ar.MirroredStrategy) -> None:
    a, b = made(gang, 0.0, "a"), made(gang, 0.0, "b")
    optimizer = Descent()

    async def step() -> Any:
        await optimizer.apply_gradients([(1.0, a), (1.0, b)])

    await gang.run(step)
    first, optimizer.hooks = optimizer.hooks, []
    await gang.run(step)

    assert first == [
        "new_slot count of a",
        "new_slot count of b",
        "prepare 0",
        "update",
        "update",
        "finish",
    ]
    assert optimizer.hooks == ["prepare 1", "update", "update", "finish"]


@pytest.mark.asyncio
async def test_slots_live_beside_their_variables(strategy: ar.Strategy) -> None:
    w = made(strategy, [1.0, 2.0], "w")
    optimizer = Descent()
    assert optimizer.slot_names == ("count",)
    assert optimizer.get_slot(w, "count") is None

    async def step() -> Any:
        await optimizer.apply_gradients([(np.ones(2), w)])
        return optimizer.get_slot(w, "count").value

    await strategy.run(step)
    slot = optimizer.get_slot(w, "count")

    assert slot.name == "w/count"
    assert not slot.trainable
    assert slot.strategy is w.strategy
    assert len(slot.components) == len(w.components)
    assert slot.value == 1
    assert optimizer.get_slot(w, "velocity") is None


@pytest.mark.asyncio
async def test_iterations_and_global_step_advance(strategy: ar.Strategy) -> None:
    w, global_step = made(strategy), made(strategy, np.int32(5), "global_step")
    with strategy.scope():
        optimizer = Descent()

    async def step() -> Any:
        await optimizer.apply_gradients([(1.0, w)], global_step=global_step)
        await optimizer.minimize(lambda: w.value * 1.0, global_step=global_step)

    await strategy.run(step)

    assert (optimizer.iterations.value, global_step.value) == (2, 7)
    assert global_step.dtype == np.int32
    assert not optimizer.iterations.trainable


@pytest.mark.asyncio
async def test_results_of_finish_are_written_with_the_rest(pair: ar.MirroredStrategy) -> None:
    w, extra = made(pair), made(pair, 0.0, "extra")
    optimizer = Descent(finish_with={extra: 7.0})

    async def step() -> Any:
        await optimizer.apply_gradients([(1.0, w)])

    await pair.run(step)

    assert [float(component) for component in extra.components] == [7.0, 7.0]


@pytest.mark.asyncio
async def test_the_learning_rate_may_depend_on_the_iteration() -> None:
    w = ar.Variable(0.0)
    optimizer = Descent(lambda iteration: 1.0 / (1 + iteration))

    for _ in range(3):
        await optimizer.apply_gradients([(1.0, w)])

    assert optimizer.rates == [1.0, 0.5, 1 / 3]


@pytest.mark.asyncio
async def test_a_rule_that_returns_a_wrong_shape_is_an_error(pair: ar.MirroredStrategy) -> None:
    w = made(pair, np.zeros(3))
    optimizer = Descent(np.float64(1.0))
    optimizer.update = lambda prepared, value, gradient, slots: (np.zeros(2), slots)

    async def step() -> Any:
        await optimizer.apply_gradients([(np.ones(3), w)])

    with pytest.raises(ValueError, match=r"update of 'w' has shape \(2,\)"):
        await pair.run(step)
    assert w.version == 0


@pytest.mark.asyncio
async def test_minimize_returns_the_local_loss(gang: ar.MirroredStrategy) -> None:
    w = made(gang, 2.0)
    optimizer = Descent(0.1)

    async def step(x: Any) -> Any:
        return await optimizer.minimize(lambda: x * w.value**2)

    xs = [1.0, 2.0, 3.0, 4.0][: gang.num_replicas_in_sync]
    losses = await gang.run(step, args=(ar.PerReplica(xs),))

    assert list(losses) == [4 * x for x in xs]
    assert w.value == pytest.approx(2.0 - 0.1 * sum(4 * x for x in xs))


@pytest.mark.asyncio
async def test_outside_every_strategy_the_steps_work_alike() -> None:
    w = ar.Variable([3.0, 4.0])
    optimizer = Descent(0.5)

    pairs = await optimizer.compute_gradients(lambda: anp.sum(w.value**2))
    await optimizer.apply_gradients(pairs)
    assert await optimizer.minimize(lambda: anp.sum(w.value)) == 0.0

    np.testing.assert_array_equal(pairs[0][0], [6.0, 8.0])
    np.testing.assert_array_equal(w.value, [-0.5, -0.5])
    assert optimizer.get_slot(w, "count").value == 2


@pytest.mark.asyncio
async def test_large_updates_go_to_threads_of_the_library() -> None:
    w = ar.Variable(np.zeros(LARGE))
    threads = []
    optimizer = Descent(in_update=lambda: threads.append(threading.current_thread().name))

    await optimizer.apply_gradients([(np.ones(LARGE), w)])

    assert [name.rstrip("-0123456789 ") for name in threads] == ["aioreplica collectives"]
    assert w.value[-1] == -1.0


@pytest.mark.asyncio
async def test_never_awaiting_fails_the_run(pair: ar.MirroredStrategy) -> None:
    w = made(pair)
    optimizer = Descent()

    async def step() -> Any:
        optimizer.apply_gradients([(1.0, w)])

    with pytest.raises(ContextError, match=r"never awaited.*apply_gradients.*test_optimizer\.py"):
        await pair.run(step)
    assert w.version == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["apply_gradients", "minimize"])
async def test_a_mismatch_shows_the_line_of_the_user(
    pair: ar.MirroredStrategy, method: str
) -> None:
    w = made(pair)
    optimizer = Descent()

    async def step(goes: Any) -> Any:
        if not goes:
            return
        if method == "minimize":
            await optimizer.minimize(lambda: w.value * 1.0)
        else:
            await optimizer.apply_gradients([(1.0, w)])

    with pytest.raises(MergeMismatchError) as caught:
        await pair.run(step, args=(ar.PerReplica([True, False]),))

    row = caught.value.rows[0]
    assert row.collective.startswith("apply_gradients #1")
    assert "test_optimizer.py:" in row.site
    assert method in source_line(row.site)


def source_line(site: str) -> str:
    file, _, line = site.rpartition(":")
    with open(file, encoding="utf-8") as source:  # noqa: PTH123
        return source.readlines()[int(line) - 1]


@pytest.mark.asyncio
async def test_gradients_of_different_variables_cannot_meet(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, 0.0, "a"), made(pair, 0.0, "b")
    optimizer = Descent()

    async def step(flag: Any) -> Any:
        await optimizer.apply_gradients([(1.0 if flag else None, a), (1.0, b)])

    with pytest.raises(MergeMismatchError, match=r"gradients for a, b.*gradients for b"):
        await pair.run(step, args=(ar.PerReplica([True, False]),))
    await pair.run(step, args=(False,))

    assert (a.value, b.value) == (0.0, -2.0)


@pytest.mark.asyncio
async def test_different_optimizers_cannot_meet(pair: ar.MirroredStrategy) -> None:
    w = made(pair)
    optimizers = [Descent(), Descent()]

    async def step(index: Any) -> Any:
        await optimizers[index].apply_gradients([(1.0, w)])

    with pytest.raises(MergeMismatchError, match="iterations"):
        await pair.run(step, args=(ar.PerReplica([0, 1]),))


def test_the_global_step_must_be_a_variable() -> None:
    with pytest.raises(TypeError, match=r"global_step.*3"):
        Descent().apply_gradients([(1.0, ar.Variable(0.0))], global_step=3)


def test_repr_shows_the_state() -> None:
    assert repr(Descent()) == "<Descent | 0 iterations, slots of 0 variables>"
