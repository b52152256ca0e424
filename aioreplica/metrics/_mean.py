"""Mean, MeanTensor and Sum: averages and totals of everything they were given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from ..values import Weighted
from ._metric import Metric, numbers, weighted_total, weights_like


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

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add values.

        Args:
            values: Numbers, any number of them, of half precision too; or a `Weighted` total.
                What a `numpy.ma.MaskedArray` masks does not count.
            sample_weight: A weight per value, or per example: it belongs to the leading axes. A
                mask of booleans is one.

        Raises:
            TypeError: If something is not a number.
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
        return float(total / count) if count else 0.0


@final
class MeanTensor(Metric):
    """The mean of arrays of one shape, element by element; zeros before there are any.

    Args:
        shape: That of the arrays.
        name: Names it in variables and errors.

    Raises:
        ValueError: If a size is negative.

    Example:
        >>> mean = MeanTensor((2,))
        >>> mean.update_state([1.0, 2.0])
        >>> mean.update_state([5.0, 4.0], sample_weight=[3.0, 1.0])
        >>> mean.result()
        array([4., 3.])

    Source:
        tf.keras.metrics.MeanTensor.
    """

    def __init__(self, shape: Sequence[int], name: str = "mean_tensor") -> None:
        if any(size < 0 for size in shape):
            raise ValueError(f"shape must have no negative size, got {tuple(shape)}.")
        super().__init__(name, ("total", "count"), tuple(shape))

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add an array.

        Args:
            values: Numbers.
            sample_weight: A weight for each, or for each of the leading axes.

        Raises:
            TypeError: If something is not a number.
            ValueError: If the shape is another one, or the weights do not fit.
            ContextError: If the metric belongs to another strategy.
        """
        array = numbers(self.name, "values", values)
        if array.shape != self.variables[0].shape:
            raise ValueError(
                f"Metric {self.name!r} takes arrays of shape {self.variables[0].shape}, got shape "
                f"{array.shape}."
            )
        weights = weights_like(self.name, array, sample_weight, values)
        counted = np.where(weights == 0, 0, array)  # what has no weight may hold anything
        self.add(counted * weights, weights)

    def result(self) -> npt.NDArray[np.float64]:
        """Return the mean of everything since the last reset, 0 where there is nothing."""
        total, count = self.totals()
        return np.divide(total, count, out=np.zeros(total.shape), where=count != 0)


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

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add values.

        Args:
            values: Numbers, any number of them.
            sample_weight: A weight per value, or per example: it belongs to the leading axes.

        Raises:
            TypeError: If something is not a number.
            ValueError: If the weights do not fit.
            ContextError: If the metric belongs to another strategy.
        """
        self.add(weighted_total(self.name, values, sample_weight)[0])

    def result(self) -> float:
        """Return the sum of everything since the last reset."""
        return float(self.totals()[0])
