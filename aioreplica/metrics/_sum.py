"""Sum: everything it was given, added up."""

from __future__ import annotations

from typing import Any, final

from ._metric import Metric, weighted_total


@final
class Sum(Metric):
    """The sum of values, weighted if asked for.

    Args:
        name: Names it in variables and errors.

    Example:
        >>> total = Sum()
        >>> total.update_state([1.0, 3.0])
        >>> total.update_state(2.0, sample_weight=0.5)
        >>> total.result()
        5.0

    Source:
        tf.keras.metrics.Sum.
    """

    def __init__(self, name: str = "sum") -> None:
        super().__init__(name, ("total",))

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: Numbers, any number of them.
            sample_weight: A weight per value, or per example: it belongs to the leading axes.

        Raises:
            TypeError: If something is no number.
            ValueError: If the weights do not fit.
            ContextError: If the metric belongs to another strategy.
        """
        self.add(weighted_total(self.name, values, sample_weight)[0])

    def result(self) -> float:
        """Return the sum of everything since the last reset."""
        return self.totals()[0]
