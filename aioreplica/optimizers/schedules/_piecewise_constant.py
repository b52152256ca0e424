"""A learning rate that changes at given steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from .._hyperparameter import checked_learning_rate


@final
@dataclass(frozen=True, slots=True)
class PiecewiseConstantDecay:
    """`values[0]` up to and including `boundaries[0]` updates, then `values[1]`, and so on.

    Attributes:
        boundaries: Numbers of updates, ascending.
        values: The learning rates between them: one more.

    Raises:
        ValueError: If the numbers do not fit together, or a learning rate is out of range.
        TypeError: If a learning rate is no number.

    Example:
        >>> schedule = PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.25])
        >>> schedule(0), schedule(10), schedule(11), schedule(20), schedule(21)
        (1.0, 1.0, 0.5, 0.5, 0.25)

    Source:
        tf.keras.optimizers.schedules.PiecewiseConstantDecay.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.boundaries)} boundaries divide {len(self.boundaries) + 1} values, got "
                f"{len(self.values)}: boundaries {list(self.boundaries)}, values "
                f"{list(self.values)}."
            )
        if any(first >= second for first, second in pairwise(self.boundaries)):
            raise ValueError(f"boundaries must ascend, got {list(self.boundaries)}.")
        for value in self.values:
            checked_learning_rate(value)
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(self.values))

    def __call__(self, iteration: int) -> float:
        """Return the learning rate after so many updates."""
        return float(self.values[bisect_left(self.boundaries, iteration)])
