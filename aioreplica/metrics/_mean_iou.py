"""MeanIoU: how well predicted regions cover those of the labels."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from ._metric import Metric, class_ids, weights_like


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

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
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
