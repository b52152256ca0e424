"""Accuracy: how often predictions equal labels."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from ._metric import Metric, weighted_total


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
            TypeError: If the weights are no numbers.
            ContextError: If the metric belongs to another strategy.
        """
        labels, predictions = np.asarray(y_true), np.asarray(y_pred)
        if labels.shape != predictions.shape:
            raise ValueError(
                f"Metric {self.name!r} got labels of shape {labels.shape} and predictions of shape "
                f"{predictions.shape}. Pass one label for each: of scores, "
                "scores.argmax(axis=-1)."
            )
        self.add(*weighted_total(self.name, labels == predictions, sample_weight))

    def result(self) -> float:
        """Return the part that was right since the last reset, 0 for nothing."""
        total, count = self.totals()
        return total / count if count else 0.0
