"""Accuracy and TopKAccuracy: how often predictions are right."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from ._metric import Metric, class_ids, numbers, weighted_total


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

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
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
        labels, predictions = np.asarray(y_true), np.asarray(y_pred)
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

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
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
