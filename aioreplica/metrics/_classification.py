"""Metrics of classes: accuracies, counts of two classes, and the mean intersection over union."""

from __future__ import annotations

from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from ..tree import Array
from ._metric import Metric, as_array, class_ids, numbers, weighted_total, weights_like


@final
class Accuracy(Metric):
    """The part of predictions that equal their labels; 0 before there are any.

    Args:
        name: Names it in variables and errors.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> accuracy.result()
        0.75

    Source:
        tf.keras.metrics.Accuracy.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name, ("total", "count"))

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Compare predictions with labels.

        Args:
            y_true: Labels.
            y_pred: Predicted labels: of scores, `scores.argmax(axis=-1)`.
            sample_weight: A weight per label, or per example: it belongs to the leading axes.

        Raises:
            ValueError: If the shapes differ, or the weights do not fit.
            TypeError: If the weights are not numbers.
            ContextError: If the metric belongs to another strategy.
        """
        labels, predictions = as_array(y_true), as_array(y_pred)
        if labels.shape != predictions.shape:
            raise ValueError(
                f"Metric {self.name!r} got labels of shape {labels.shape} and predictions of shape "
                f"{predictions.shape}. Pass one label for each: of scores, "
                "scores.argmax(axis=-1)."
            )
        self.add(*weighted_total(self.name, labels == predictions, sample_weight, y_true, y_pred))

    def result(self) -> float:
        """Return the part that was right since the last reset, 0 for nothing."""
        total, count = self.totals()
        return float(total / count) if count else 0.0


@final
class TopKAccuracy(Metric):
    """The part of labels whose score is among the k highest; 0 before there are any.

    A label counts if fewer than k classes have a higher score, so ties are in its favour; one
    whose score is not finite never does.

    Args:
        k: How many of the highest scores count.
        name: Names it in variables and errors.

    Raises:
        ValueError: If `k` is below 1.

    Example:
        >>> top = TopKAccuracy(2)
        >>> top.update_state([2, 1], [[0.1, 0.9, 0.8], [0.5, 0.1, 0.4]])
        >>> top.result()
        0.5

    Source:
        tf.keras.metrics.SparseTopKCategoricalAccuracy.
    """

    def __init__(self, k: int = 5, name: str = "top_k_accuracy") -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        super().__init__(name, ("total", "count"))
        self._k = k

    def update_state(self, y_true: Any, y_pred: object, sample_weight: object = None) -> None:
        """Compare labels with scores.

        Args:
            y_true: Class ids.
            y_pred: A score for each class.
            sample_weight: A weight per label, or per example: it belongs to the leading axes.

        Raises:
            ValueError: If the shapes do not fit, or an id is out of range.
            TypeError: If labels are not integers, or scores or weights not numbers.
            ContextError: If the metric belongs to another strategy.

        Shapes:
            y_true: (...). y_pred: (..., num_classes).
        """
        scores = numbers(self.name, "scores", y_pred)
        if scores.ndim == 0 or np.shape(y_true) != scores.shape[:-1]:
            raise ValueError(
                f"Metric {self.name!r} got labels of shape {np.shape(y_true)} and scores of shape "
                f"{scores.shape}. Pass one label for each row of scores."
            )
        labels = class_ids(self.name, "labels", y_true, scores.shape[-1])
        own = np.take_along_axis(scores, labels[..., None], axis=-1)
        num_higher = np.sum(scores > own, axis=-1)
        is_right = (num_higher < self._k) & np.isfinite(own[..., 0])
        self.add(*weighted_total(self.name, is_right, sample_weight, y_true))

    def result(self) -> float:
        """Return the part that was right since the last reset, 0 for nothing."""
        total, count = self.totals()
        return float(total / count) if count else 0.0


@final
class Precision(Metric):
    """The part of positive predictions that is right; 0 while there are none.

    Args:
        threshold: A score above it is a positive prediction.
        name: Names it in variables and errors.

    Example:
        >>> precision = Precision()
        >>> precision.update_state([0, 1, 1, 1], [0.9, 0.2, 0.8, 0.7])
        >>> round(precision.result(), 3)
        0.667

    Source:
        tf.keras.metrics.Precision.
    """

    def __init__(self, threshold: float = 0.5, name: str = "precision") -> None:
        super().__init__(name, ("true_positives", "false_positives"))
        self._threshold = float(threshold)

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Compare scores with labels.

        Args:
            y_true: Labels, 0 or 1 (or False and True).
            y_pred: Scores.
            sample_weight: A weight per label, or per example: it belongs to the leading axes.

        Raises:
            ValueError: If the shapes differ, a label is neither 0 nor 1, a score that has a weight
                is NaN, or the weights do not fit.
            TypeError: If something is not a number.
            ContextError: If the metric belongs to another strategy.
        """
        labels, scores, weights = _checked(self.name, y_true, y_pred, sample_weight)
        predicted = scores > self._threshold
        self.add(
            float(weights[predicted & labels].sum()), float(weights[predicted & ~labels].sum())
        )

    def result(self) -> float:
        """Return the part that was right since the last reset."""
        right, wrong = self.totals()
        return float(right / (right + wrong)) if right + wrong else 0.0


@final
class Recall(Metric):
    """The part of positive labels that is predicted; 0 while there are none.

    Args:
        threshold: A score above it is a positive prediction.
        name: Names it in variables and errors.

    Example:
        >>> recall = Recall()
        >>> recall.update_state([0, 1, 1, 1], [0.9, 0.2, 0.8, 0.7])
        >>> round(recall.result(), 3)
        0.667

    Source:
        tf.keras.metrics.Recall.
    """

    def __init__(self, threshold: float = 0.5, name: str = "recall") -> None:
        super().__init__(name, ("true_positives", "false_negatives"))
        self._threshold = float(threshold)

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Compare scores with labels.

        Args:
            y_true: As for `Precision`.
            y_pred: As for `Precision`.
            sample_weight: As for `Precision`.

        Raises:
            Exception: As for `Precision`.
        """
        labels, scores, weights = _checked(self.name, y_true, y_pred, sample_weight)
        found = scores > self._threshold
        self.add(float(weights[found & labels].sum()), float(weights[~found & labels].sum()))

    def result(self) -> float:
        """Return the part that was found since the last reset."""
        found, missed = self.totals()
        return float(found / (found + missed)) if found + missed else 0.0


@final
class AUC(Metric):
    """The area under a curve of scores, by counts at equally spaced thresholds; 0 for nothing.

    More thresholds bring it nearer to the exact area, which needs every score.

    Args:
        num_thresholds: How many, from just below 0 to just above 1.
        curve: "ROC" for true against false positive rates, "PR" for precision against recall.
        name: Names it in variables and errors.

    Raises:
        ValueError: If there are fewer than 2 thresholds, or the curve is unknown.

    Units:
        Scores are from 0 to 1.

    Example:
        >>> auc = AUC()
        >>> auc.update_state([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
        >>> round(auc.result(), 3)
        0.75

    Source:
        tf.keras.metrics.AUC with summation by interpolation; for "PR" Davis and Goadrich, "The
        Relationship Between Precision-Recall and ROC Curves" (2006).
    """

    def __init__(
        self, num_thresholds: int = 200, curve: Literal["ROC", "PR"] = "ROC", name: str = "auc"
    ) -> None:
        if num_thresholds < 2:
            raise ValueError(f"num_thresholds must be at least 2, got {num_thresholds}.")
        if curve not in ("ROC", "PR"):
            raise ValueError(f'curve must be "ROC" or "PR", got {curve!r}.')
        super().__init__(name, ("positives", "negatives"), (num_thresholds + 1,))
        self._thresholds = np.linspace(0.0, 1.0, num_thresholds)
        self._thresholds[[0, -1]] = -1e-7, 1 + 1e-7
        self._curve = curve

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Count labels between the thresholds.

        Args:
            y_true: As for `Precision`.
            y_pred: Scores from 0 to 1.
            sample_weight: As for `Precision`.

        Raises:
            ValueError: As for `Precision`; or if a score is not in [0, 1].
            Exception: As for `Precision`.
        """
        labels, scores, weights = _checked(self.name, y_true, y_pred, sample_weight)
        scores = np.where(np.isnan(scores), 0.0, scores)  # of those without a weight
        is_right = (scores >= 0) & (scores <= 1)
        if not is_right.all():
            raise ValueError(
                f"Metric {self.name!r} got the score {scores[~is_right].flat[0]}. Pass scores from "
                "0 to 1, such as probabilities."
            )
        number = len(self._thresholds) + 1
        above = np.searchsorted(self._thresholds, scores)  # how many thresholds are below
        self.add(
            np.bincount(above[labels], weights[labels], number),
            np.bincount(above[~labels], weights[~labels], number),
        )

    def result(self) -> float:
        """Return the area since the last reset."""
        positives, negatives = self.totals()
        # A score is above threshold i if more than i thresholds are below it.
        true, false = (np.cumsum(part[::-1])[::-1][1:] for part in (positives, negatives))
        if self._curve == "PR":
            return _area_of_precision(true, false, float(positives.sum()))
        if not positives.sum() or not negatives.sum():
            return 0.0
        x, y = false / negatives.sum(), true / positives.sum()
        return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2))


def _area_of_precision(true: Array, false: Array, num_positives: float) -> float:
    """Integrate precision over recall; between two thresholds true positives grow linearly."""
    if not num_positives:
        return 0.0
    found = true + false
    more_true, more = true[:-1] - true[1:], found[:-1] - found[1:]
    slope = np.divide(more_true, more, out=np.zeros(more.shape), where=more > 0)
    start = true[1:] - slope * found[1:]
    is_ratio = (found[:-1] > 0) & (found[1:] > 0)
    ratio = np.divide(found[:-1], found[1:], out=np.ones(more.shape), where=is_ratio)
    return float(np.sum(slope * (more_true + start * np.log(ratio))) / num_positives)


def _checked(
    name: str, y_true: object, y_pred: object, sample_weight: object
) -> tuple[npt.NDArray[np.bool_], Array, Array]:
    labels, scores = numbers(name, "labels", y_true), numbers(name, "scores", y_pred)
    if labels.shape != scores.shape:
        raise ValueError(
            f"Metric {name!r} got labels of shape {labels.shape} and scores of shape "
            f"{scores.shape}. Pass one score for each label."
        )
    weights = weights_like(name, scores, sample_weight, y_true, y_pred)
    is_legal = (labels == 0) | (labels == 1)
    if not is_legal.all():
        raise ValueError(
            f"Metric {name!r} got the label {labels[~is_legal].flat[0]}. Labels are 0 or 1."
        )
    is_nan = np.isnan(scores) & (weights != 0)  # what has no weight may hold anything
    if is_nan.any():
        where = tuple(map(int, np.argwhere(is_nan)[0]))
        raise ValueError(
            f"Metric {name!r} got the score nan at index {where}, which is neither above a "
            "threshold nor below. Look for a division by 0, or give it a sample_weight of 0."
        )
    return labels == 1, scores, weights


@final
class MeanIoU(Metric):
    """The mean over classes of intersection over union; 0 before there are any.

    Classes that neither labels nor predictions have are left out.

    Args:
        num_classes: How many there are.
        name: Names it in variables and errors.

    Raises:
        ValueError: If there are fewer than 1 class.

    Example:
        >>> iou = MeanIoU(2)
        >>> iou.update_state([0, 0, 1, 1], [0, 1, 0, 1])
        >>> round(iou.result(), 3)
        0.333

    Source:
        tf.keras.metrics.MeanIoU.
    """

    def __init__(self, num_classes: int, name: str = "mean_iou") -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}.")
        super().__init__(name, ("confusion",), (num_classes, num_classes))
        self._num_classes = num_classes

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
        """Compare predictions with labels.

        Args:
            y_true: Class ids.
            y_pred: Predicted class ids.
            sample_weight: A weight per label, or per example: it belongs to the leading axes.

        Raises:
            ValueError: If the shapes differ, an id is out of range, or the weights do not fit.
            TypeError: If ids are not integers, or the weights not numbers.
            ContextError: If the metric belongs to another strategy.
        """
        count = self._num_classes
        labels = class_ids(self.name, "labels", y_true, count)
        predictions = class_ids(self.name, "predictions", y_pred, count)
        if labels.shape != predictions.shape:
            raise ValueError(
                f"Metric {self.name!r} got labels of shape {labels.shape} and predictions of shape "
                f"{predictions.shape}. Pass one prediction for each label."
            )
        weights = weights_like(self.name, labels, sample_weight, y_true, y_pred)
        cells = (labels * count + predictions).reshape(-1)
        found = np.bincount(cells, weights.reshape(-1), count * count)
        self.add(found.reshape(count, count))

    def result(self) -> float:
        """Return the mean since the last reset."""
        [confusion] = self.totals()
        both = np.diag(confusion)
        either = confusion.sum(axis=0) + confusion.sum(axis=1) - both
        is_there = either > 0
        return float(np.mean(both[is_there] / either[is_there])) if is_there.any() else 0.0
