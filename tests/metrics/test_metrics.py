"""Metrics: local updates, exact results over replicas, one write each."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.metrics import Accuracy, Mean, Sum
from tests.conftest import mirrored


def scoped(strategy: ar.Strategy, kind: Any) -> Any:
    with strategy.scope():
        return kind()


@pytest.mark.asyncio
@pytest.mark.parametrize("sizes", [(3, 3), (5, 0), (1, 2)], ids=["even", "empty", "uneven"])
@pytest.mark.parametrize("is_plain", [False, True])
async def test_results_do_not_depend_on_how_examples_are_divided(
    pair: ar.MirroredStrategy, sizes: Any, is_plain: bool
) -> None:
    mean, total, accuracy = (scoped(pair, kind) for kind in (Mean, Sum, Accuracy))
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, size) for size in sizes]

    def update(x: Any) -> None:
        mean.update_state(x)
        total.update_state(x, sample_weight=np.full(len(x), 2.0))
        accuracy.update_state(x % 2, np.zeros(len(x)))

    async def step(x: Any) -> None:
        update(x)

    for _ in range(2):
        await pair.run(update if is_plain else step, args=(ar.PerReplica(parts),))

    everything = np.concatenate(parts)
    assert mean.result() == pytest.approx(everything.mean())
    assert total.result() == 4 * everything.sum()
    assert accuracy.result() == pytest.approx(np.mean(everything % 2 == 0))


@pytest.mark.asyncio
async def test_a_replica_reads_and_resets_its_own_part(pair: ar.MirroredStrategy) -> None:
    mean = scoped(pair, Mean)

    async def step(x: Any) -> float:
        mean.update_state(x)
        return mean.result()

    assert list(await pair.run(step, args=(ar.PerReplica([1.0, 5.0]),))) == [1.0, 5.0]
    assert mean.result() == 3.0

    async def forget() -> None:
        if ar.get_replica_context().replica_id_in_sync_group:
            mean.reset_state()

    await pair.run(forget)
    assert mean.result() == 1.0
    mean.reset_state()
    assert mean.result() == 0.0


@pytest.mark.asyncio
async def test_updates_outside_the_replicas_count_once(gang: ar.MirroredStrategy) -> None:
    mean = scoped(gang, Mean)

    mean.update_state([1.0, 2.0])
    with gang.scope():
        mean.update_state(ar.Weighted(6.0, 1))
        assert mean.result() == 3.0
    with pytest.raises(TypeError, match="PerReplica"):
        mean.update_state(ar.PerReplica([1.0] * gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_total_and_count_are_one_write(pair: ar.MirroredStrategy) -> None:
    mean = scoped(pair, Mean)
    before = pair.store.version

    mean.update_state([1.0, 2.0])

    assert pair.store.version == before + 1
    assert [variable.version for variable in mean.variables] == [1, 1]


@pytest.mark.asyncio
async def test_no_update_is_lost_between_device_threads() -> None:
    async with mirrored(4) as strategy:
        total = scoped(strategy, Sum)

        def count() -> None:
            for _ in range(200):
                total.update_state(1)

        await asyncio.gather(*(strategy.run(count) for _ in range(2)))

    assert total.result() == 2 * 4 * 200


def test_outside_every_strategy_they_work_alike() -> None:
    mean = Mean("loss")

    mean.update_state(np.array([[1.0, 3.0], [np.nan, np.nan]]), sample_weight=[1, 0])
    mean.update_state(ar.Weighted(np.nan, 0))

    assert mean.result() == 2.0
    assert repr(mean) == "<Mean loss | 2>"


@pytest.mark.asyncio
async def test_names_are_free_within_a_strategy(pair: ar.MirroredStrategy) -> None:
    both = [scoped(pair, Mean) for _ in range(2)]  # what is dropped gives its names back
    names = [variable.name for mean in both for variable in mean.variables]

    assert names == ["mean/total", "mean/count", "mean/total_1", "mean/count_1"]


@pytest.mark.asyncio
async def test_a_metric_of_another_strategy_is_told(
    pair: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    mean = scoped(pair, Mean)

    async def step() -> None:
        mean.update_state(1.0)

    with pytest.raises(ContextError, match="Metric 'mean' belongs to"):
        await solo.run(step)


@pytest.mark.parametrize(
    ("update", "kind", "said"),
    [
        (lambda: Mean().update_state("x"), TypeError, "needs numbers as values, got 'x'"),
        (lambda: Sum().update_state(1.0, "x"), TypeError, "as sample_weight, got 'x'"),
        (lambda: Mean().update_state(np.ones(3), np.ones(2)), ValueError, r"\(3,\).*\(2,\)"),
        (lambda: Mean().update_state(ar.Weighted(1, 2), 3), ValueError, "weight already"),
        (lambda: Accuracy().update_state([1], [[0.1]]), ValueError, r"\(1,\).*\(1, 1\).*argmax"),
        (lambda: Mean(3), TypeError, "must be a str, got 3"),
    ],
)
def test_what_does_not_fit_is_told(update: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        update()
