"""GradientAccumulator: several batches are one, whatever their sizes and numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, NonFiniteError
from aioreplica.optimizers import SGD, Adam, ScaledGradient
from aioreplica.optimizers._step import INLINE_STEP_BYTES
from tests.conftest import mirrored
from tests.optimizers.rules import made


def window_in(strategy: ar.Strategy, **options: Any) -> tuple[ar.Variable, ar.GradientAccumulator]:
    with strategy.scope():
        w = ar.Variable(np.zeros(2), name="w")
        return w, ar.GradientAccumulator(SGD(1.0, **options))


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
async def test_unequal_counts_and_a_partial_window_are_exact(num_replicas: int) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=2) * n, n) for n in (3, 1, 5, 2, 0, 4, 1, 1, 2)]  # (sum, size)
    windows = [batches[:4], batches[4:8], batches[8:]]  # the last one is shorter
    alone, adam = ar.Variable(np.zeros(2)), Adam(0.1)
    for window in windows:
        total, weight = sum(t for t, _ in window), sum(n for _, n in window)
        await adam.apply_gradients([(total / weight, alone)])

    async with mirrored(num_replicas) as strategy:
        with strategy.scope():
            w, accumulator = ar.Variable(np.zeros(2)), ar.GradientAccumulator(Adam(0.1))

        async def step(window: Any) -> None:
            me = ar.get_replica_context().replica_id_in_sync_group
            for total, weight in window[me::num_replicas]:  # unequal numbers, some none
                value = total if weight else np.full(2, np.nan)
                await accumulator.add([(ar.Weighted(value, weight), w)])
            await accumulator.apply()

        for window in windows:
            await strategy.run(step, args=(window,))

        np.testing.assert_allclose(w.value, alone.value, rtol=1e-12)
        assert accumulator.num_added == 0


@pytest.mark.asyncio
async def test_gradients_without_weights_are_added_up_or_averaged(
    pair: ar.MirroredStrategy,
) -> None:
    for reduction, expected in (("sum", -6.0), ("mean", -2.0)):
        with pair.scope():
            w, window = ar.Variable(0.0), ar.GradientAccumulator(SGD(1.0, loss_reduction=reduction))

        async def step(count: Any, w: Any = w, window: Any = window) -> None:
            for _ in range(count):
                await window.add([(2.0, w)])
            await window.apply()

        await pair.run(step, args=(ar.PerReplica([2, 1]),))
        assert w.value == expected


@pytest.mark.asyncio
async def test_the_last_window_can_be_applied_outside_the_step(
    pair: ar.MirroredStrategy,
) -> None:
    w, window = window_in(pair)
    global_step = made(pair, 0, "global_step")

    async def step() -> None:
        await window.add([(np.ones(2), w)])

    await pair.run(step)
    assert repr(window) == "<GradientAccumulator | 2 added for 1 variables>"
    await window.apply(global_step)

    assert (w.value.tolist(), global_step.value) == ([-2.0, -2.0], 1)


@pytest.mark.asyncio
async def test_a_failed_update_keeps_the_sums(pair: ar.MirroredStrategy) -> None:
    w, window = window_in(pair)

    async def step(gradient: Any) -> None:
        await window.add([(np.full(2, gradient), w)])
        await window.apply()

    with pytest.raises(NonFiniteError, match="replica 1"):
        await pair.run(step, args=(ar.PerReplica([1.0, np.nan]),))
    assert (w.version, window.num_added) == (0, 2)

    window.discard()
    await pair.run(step, args=(1.0,))
    assert w.value.tolist() == [-2.0, -2.0]


@pytest.mark.asyncio
async def test_rows_are_joined(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        table, window = ar.Variable(np.zeros((4, 1))), ar.GradientAccumulator(SGD(1.0))

    async def step(indices: Any) -> None:
        for index in indices:
            await window.add([(ar.IndexedSlices([[1.0]], [index], (4, 1)), table)])
        await window.apply()

    await pair.run(step, args=(ar.PerReplica([[0, 3, 3], []]),))

    assert table.value[:, 0].tolist() == [-1.0, 0.0, 0.0, -2.0]


@pytest.mark.asyncio
async def test_arrays_of_rows_may_be_used_again() -> None:
    table, window = ar.Variable(np.zeros((4, 1))), ar.GradientAccumulator(SGD(1.0))
    rows, indices = np.empty((2, 1)), np.empty(2, np.intp)
    for i in range(2):
        rows[:], indices[:] = i + 1.0, (i, i + 2)
        await window.add([(ar.IndexedSlices(rows, indices, (4, 1)), table)])
    await window.apply()

    assert table.value[:, 0].tolist() == [-1.0, -2.0, -1.0, -2.0]


@pytest.mark.asyncio
async def test_large_sums_are_built_on_the_device(pair: ar.MirroredStrategy) -> None:
    size = INLINE_STEP_BYTES // 8 + 1
    with pair.scope():
        w, window = ar.Variable(np.zeros(size)), ar.GradientAccumulator(SGD(1.0))

    def num_done() -> list[int]:
        """Return how many ops each device has done: also of what else uses it."""
        lanes = pair.statistics().lanes
        return [lanes[name].done if name in lanes else 0 for name in ("cpu:0", "cpu:1")]

    async def step() -> None:
        await window.add([(np.ones(size), w)])
        await window.add([(np.ones(size), w)])

    before = num_done()
    await pair.run(step)
    await window.apply()

    assert all(after > count for after, count in zip(num_done(), before, strict=True))
    assert w.value[-1] == -4.0


@pytest.mark.asyncio
async def test_misuse_is_refused(pair: ar.MirroredStrategy) -> None:
    w, window = window_in(pair)
    rows = ar.IndexedSlices(np.ones(1), [0], (2,))

    async def mixed(second: Any) -> None:
        await window.add([(np.ones(2), w)])
        await window.add([(second, w)])

    with pytest.raises(ValueError, match="nothing to apply"):
        await window.apply()
    with pair.scope(), pytest.raises(ContextError, match="gradients belong to replicas"):
        await window.add([(np.ones(2), w)])
    for second, said in ((ar.Weighted(np.ones(2), 1), "with and without"), (rows, "dense and")):
        window.discard()
        with pytest.raises(ValueError, match=said):
            await pair.run(mixed, args=(second,))
    with pytest.raises(TypeError, match=r"needs an optimizer, got 0\.1"):
        ar.GradientAccumulator(0.1)


@pytest.mark.asyncio
async def test_variables_of_another_strategy_are_refused(pair: ar.MirroredStrategy) -> None:
    _, window = window_in(pair)
    async with mirrored(2) as other:
        with other.scope():
            foreign = ar.Variable(np.zeros(2))

        async def step() -> None:
            await window.add([(np.ones(2), foreign)])

        with pytest.raises(ContextError, match="does not belong"):
            await pair.run(step)


@pytest.mark.asyncio
async def test_sums_that_overflow_are_refused_when_they_are_applied() -> None:
    w = ar.Variable(np.float32([0.0]), name="w")
    window = ar.GradientAccumulator(ar.optimizers.SGD(1.0))

    for _ in range(2):
        await window.add([(np.float32([3e38]), w)])
    with pytest.raises(ar.errors.NonFiniteError, match="'w'"):
        await window.apply()
    assert w.version == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("scale", [None, 4.0])
async def test_a_restored_window_is_divided_by_its_own_count(
    tmp_path: Path, is_sparse: bool, scale: float | None
) -> None:
    """Unequal numbers of gradients without weights, averaged: 3 and 1, saved after 2 and 1."""

    def gradient(number: float) -> Any:
        values: Any = np.array([number, 2 * number])
        if is_sparse:
            values = ar.IndexedSlices(values, [0, 1], (2,))
        return values if scale is None else ScaledGradient(values * scale, scale)

    async def trained(*, is_interrupted: bool) -> Any:
        async with mirrored(2) as strategy:
            w, window = window_in(strategy, loss_reduction="mean")

            async def step(own: Any) -> None:
                for number in own:
                    await window.add([(gradient(number), w)])

            await strategy.run(step, args=(ar.PerReplica([(1.0, 2.0), (3.0,)]),))
            if is_interrupted:
                manager = ar.CheckpointManager(tmp_path)
                await manager.save(1, {"w": w, "window": window})
                window.discard()
                await manager.restore({"w": w, "window": window})
            await strategy.run(step, args=(ar.PerReplica([(6.0,), ()]),))
            assert window.num_added == 4
            await window.apply()
            return w.value.tolist()

    assert await trained(is_interrupted=False) == [-3.0, -6.0]
    assert await trained(is_interrupted=True) == [-3.0, -6.0]


@pytest.mark.asyncio
async def test_an_empty_batch_after_a_good_one_counts_for_nothing(
    pair: ar.MirroredStrategy,
) -> None:
    w, window = window_in(pair)

    async def step() -> None:
        await window.add([(ar.Weighted(np.array([2.0, 4.0]), 2), w)])
        await window.add([(ar.Weighted(np.full(2, np.nan), 0), w)])
        await window.apply()

    await pair.run(step)
    assert w.value.tolist() == [-1.0, -2.0]
