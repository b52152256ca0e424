"""Mean: the average of everything it was given."""

from __future__ import annotations

from typing import Any, final

from ..values import Weighted
from ._metric import Metric, weighted_total


@final
class Mean(Metric):
    """The mean of values, weighted if asked for; 0 before there are any.

    Args:
        name: Names it in variables and errors.

    Example:
        >>> from aioreplica import Weighted
        >>> mean = Mean()
        >>> mean.update_state([1.0, 3.0])
        >>> mean.update_state(Weighted(8.0, 2))  # a loss: a total and a weight
        >>> mean.result()
        3.0

    Source:
        tf.keras.metrics.Mean.
    """

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name, ("total", "count"))

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: Numbers, any number of them; or a `Weighted` total.
            sample_weight: A weight per value, or per example: it belongs to the leading axes.

        Raises:
            TypeError: If something is no number.
            ValueError: If the weights do not fit, or there are weights for a `Weighted`.
            ContextError: If the metric belongs to another strategy.
        """
        if isinstance(values, Weighted):
            if sample_weight is not None:
                raise ValueError(
                    f"Metric {self.name!r} got {values!r} and sample_weight={sample_weight!r}. A "
                    "Weighted has its weight already."
                )
            total, _ = weighted_total(self.name, values.total, None)
            weight, _ = weighted_total(self.name, values.weight, None)
            self.add(total if weight else 0.0, weight)
            return
        self.add(*weighted_total(self.name, values, sample_weight))

    def result(self) -> float:
        """Return the mean of everything since the last reset, 0 for nothing."""
        total, count = self.totals()
        return total / count if count else 0.0
