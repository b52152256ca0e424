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
    before = pair._runtime.store.version

    mean.update_state([1.0, 2.0])

    assert pair._runtime.store.version == before + 1
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
async def test_a_metric_of_another_strategy_is_an_error(
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
def test_updates_with_invalid_values_are_refused(update: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        update()


# ---- classes and tensors -------------------------------------------------------------------------


def exact_roc(labels: Any, scores: Any, weights: Any) -> float:
    """The part of pairs of a positive and a negative that the scores order; ties count half."""
    above = (scores[labels == 1][:, None] > scores[labels == 0]) * 1.0
    above += (scores[labels == 1][:, None] == scores[labels == 0]) * 0.5
    pairs = weights[labels == 1][:, None] * weights[labels == 0]
    return float((above * pairs).sum() / pairs.sum())


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_area_under_a_curve_is_that_of_all_pairs(is_weighted: bool) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 500)
    scores = np.round(np.clip(0.3 * labels + rng.random(500) * 0.7, 0, 1), 2)  # with ties
    weights = rng.random(500) if is_weighted else np.ones(500)
    auc = ar.metrics.AUC(num_thresholds=2001)

    for part in np.array_split(np.arange(500), 7):
        auc.update_state(labels[part], scores[part], weights[part] if is_weighted else None)

    assert auc.result() == pytest.approx(exact_roc(labels, scores, weights), abs=1e-12)


def test_areas_are_those_of_keras() -> None:
    # The examples of tf.keras.metrics.AUC: three thresholds, and weights.
    auc, weighted = ar.metrics.AUC(num_thresholds=3), ar.metrics.AUC(num_thresholds=3)
    auc.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])
    weighted.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9], sample_weight=[1, 0, 0, 1])

    assert (auc.result(), weighted.result()) == (0.75, 1.0)


def test_the_area_under_precision_is_that_of_a_fine_curve() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 400)
    scores = np.clip(0.4 * labels + rng.random(400) * 0.6, 0, 1)
    auc = ar.metrics.AUC(num_thresholds=5001, curve="PR")
    auc.update_state(labels, scores)

    order = np.argsort(-scores)
    hits = np.cumsum(labels[order])
    average = np.sum(hits / np.arange(1, 401) * labels[order]) / labels.sum()
    assert auc.result() == pytest.approx(average, abs=5e-3)
    empty = ar.metrics.AUC(curve="PR")
    assert (empty.result(), ar.metrics.AUC().result()) == (0.0, 0.0)


def test_precision_and_recall_count_with_weights() -> None:
    labels, scores = [[0, 1], [1, 1]], [[0.9, 0.2], [0.8, 0.6]]
    precision, recall = ar.metrics.Precision(), ar.metrics.Recall(threshold=0.7)
    assert (precision.result(), recall.result()) == (0.0, 0.0)

    precision.update_state(labels, scores, sample_weight=[3.0, 1.0])
    recall.update_state(labels, scores)

    assert precision.result() == 2 / 5
    assert recall.result() == 1 / 3


def test_the_k_highest_scores_count() -> None:
    labels, scores = [[2, 1], [0, 3]], np.array([[[1, 3, 2, 0], [0, 1, 1, 1]],
                                               [[np.nan, 0, 0, 0], [3, 2, 1, 0]]])  # fmt: skip
    results = []
    for k in (1, 2, 3, 4):
        top = ar.metrics.TopKAccuracy(k)
        top.update_state(labels, scores)
        results.append(top.result())

    assert results == [0.25, 0.5, 0.5, 0.75]


def test_iou_leaves_out_classes_that_are_not_there() -> None:
    iou = ar.metrics.MeanIoU(4)
    iou.update_state([0, 0, 1, 1, 2], [0, 1, 1, 1, 2], sample_weight=[1, 2, 1, 1, 0.5])

    assert iou.result() == pytest.approx(np.mean([1 / 3, 2 / 4, 1.0]))


@pytest.mark.asyncio
async def test_replicas_add_to_totals_of_any_shape(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        mean, iou = ar.metrics.MeanTensor((2, 2)), ar.metrics.MeanIoU(2)
        auc = ar.metrics.AUC(5)

    async def step(i: int) -> Any:
        mean.update_state(np.full((2, 2), float(i)), sample_weight=[1.0, i])
        iou.update_state([0, 1], [0, i % 2])
        auc.update_state([0, 1], [0.1, 0.3 * i % 1])
        return mean.result()

    n = gang.num_replicas_in_sync
    own = await gang.run(step, args=(ar.PerReplica(range(n)),))

    ids = np.arange(n)
    second = (ids * ids).sum() / ids.sum()
    np.testing.assert_allclose(mean.result(), [[ids.mean()] * 2, [second] * 2])
    assert own[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    alone = ar.metrics.MeanIoU(2)
    for i in range(n):
        alone.update_state([0, 1], [0, i % 2])
    assert iou.result() == alone.result()
    assert "shape (2, 2)" in repr(mean)
    mean.reset_state()
    assert not np.any(mean.result())


METRICS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "labels": (lambda: ar.metrics.Precision(), ([2], [0.5]), ValueError, "label 2.*0 or 1"),
    "scores": (lambda: ar.metrics.AUC(), ([1], [1.5]), ValueError, "score 1.5.*from 0 to 1"),
    "shapes": (lambda: ar.metrics.Recall(), ([1, 0], [0.5]), ValueError, r"\(2,\).*\(1,\)"),
    "ids": (lambda: ar.metrics.MeanIoU(2), ([0], [2]), ValueError, "predictions 2.*2 classes"),
    "floats": (lambda: ar.metrics.MeanIoU(2), ([0.5], [1]), TypeError, "class ids.*float64"),
    "rows": (lambda: ar.metrics.TopKAccuracy(1), ([0], [0.5]), ValueError, "label for each row"),
    "tensor": (lambda: ar.metrics.MeanTensor((2,)), (np.ones(3),), ValueError, r"\(2,\).*\(3,\)"),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_say_what_is_wrong_with_their_arguments(name: str) -> None:
    make, args, kind, said = METRICS[name]
    metric = make()

    with pytest.raises(kind, match=said):
        metric.update_state(*args)
    assert not np.any(metric.result())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ar.metrics.AUC(1), "num_thresholds must be at least 2, got 1"),
        (lambda: ar.metrics.AUC(curve="roc"), "curve must be .*got 'roc'"),
        (lambda: ar.metrics.TopKAccuracy(0), "k must be at least 1, got 0"),
        (lambda: ar.metrics.MeanIoU(0), "num_classes must be at least 1, got 0"),
        (lambda: ar.metrics.MeanTensor((2, -1)), r"no negative size, got \(2, -1\)"),
    ],
)
def test_metrics_are_checked_when_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_labels_of_other_libraries_are_taken_as_numbers_are() -> None:
    torch = pytest.importorskip("torch")
    accuracy, overlap, best = Accuracy(), ar.metrics.MeanIoU(3), ar.metrics.TopKAccuracy(1)

    for dtype in (torch.float64, torch.bfloat16):
        labels = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=dtype, requires_grad=True)
        accuracy.update_state(labels, torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=dtype))
    overlap.update_state(torch.tensor([1, 2]), torch.tensor([1, 2]))
    best.update_state(torch.tensor([1]), torch.tensor([[0.0, 1.0]], requires_grad=True))

    assert (accuracy.result(), overlap.result(), best.result()) == (0.75, 1.0, 1.0)


class Foreign:
    """An array of a library that no backend serves."""

    def __init__(self, *items: int) -> None:
        self._items = items

    def __array_namespace__(self, *, api_version: str | None = None) -> object:
        return np

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._items, dtype)


def test_arrays_that_no_backend_serves_are_converted_by_numpy() -> None:
    accuracy, overlap, mean = Accuracy(), ar.metrics.MeanIoU(2), Mean()

    accuracy.update_state(Foreign(1, 0, 1, 1), Foreign(1, 0, 0, 1))
    overlap.update_state(Foreign(0, 1), Foreign(0, 1))
    mean.update_state(Foreign(1, 2), sample_weight=Foreign(0, 1))

    assert (accuracy.result(), overlap.result(), mean.result()) == (0.75, 1.0, 2.0)


def test_nothing_has_no_class() -> None:
    overlap, accuracy = ar.metrics.MeanIoU(2), Accuracy()
    overlap.update_state([], [])
    accuracy.update_state([], [])
    assert (overlap.result(), accuracy.result()) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "torch.bfloat16"])
def test_values_of_half_precision_are_added_up_in_float64(kind: str) -> None:
    numbers: Any = np.full(4, 6e4, np.float16)
    if kind == "bfloat16":
        numbers = numbers.astype(pytest.importorskip("ml_dtypes").bfloat16)
    if kind == "torch.bfloat16":
        torch = pytest.importorskip("torch")
        numbers = torch.full((4,), 6e4, dtype=torch.bfloat16)
    mean, total = Mean(), Sum()
    mean.update_state(numbers)
    total.update_state(numbers)
    assert mean.result() == pytest.approx(6e4, rel=2.0**-8)
    assert total.result() == 4 * mean.result()


def test_masked_elements_do_not_count() -> None:
    values = np.ma.masked_array([1.0, np.nan, 5.0], mask=[0, 1, 0])
    mean, total, tensor = Mean(), Sum(), ar.metrics.MeanTensor((3,))
    for metric in (mean, total, tensor):
        metric.update_state(values)
    assert (mean.result(), total.result(), tensor.result().tolist()) == (3.0, 6.0, [1.0, 0.0, 5.0])
    mean.update_state(values, sample_weight=[0, 1, 2])
    assert mean.result() == pytest.approx((6 + 10) / 4)

    labels = np.ma.masked_array([1, 7, 0], mask=[0, 1, 0])
    accuracy, overlap = Accuracy(), ar.metrics.MeanIoU(2)
    precision, recall = ar.metrics.Precision(), ar.metrics.Recall()
    accuracy.update_state(labels, [1, 7, 1])
    overlap.update_state(labels, [1, 1, 0])
    for metric in (precision, recall):
        metric.update_state(labels, [0.9, 0.9, 0.8])
    assert (accuracy.result(), overlap.result()) == (0.5, 1.0)
    assert (precision.result(), recall.result()) == (0.5, 1.0)


@pytest.mark.parametrize("kind", ["Precision", "Recall", "AUC"])
def test_a_score_that_is_not_a_number_is_refused(kind: str) -> None:
    metric = getattr(ar.metrics, kind)()
    with pytest.raises(ValueError, match=r"score nan at index \(1,\)"):
        metric.update_state([0, 1], [0.2, np.nan])
    assert [float(np.sum(v.value)) for v in metric.variables] == [0.0, 0.0]

    metric.update_state([0, 1, 1], [0.2, np.nan, 0.9], sample_weight=[1, 0, 1])
    assert metric.result() == pytest.approx(1.0)
