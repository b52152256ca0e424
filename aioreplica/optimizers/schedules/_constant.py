"""A learning rate that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .._hyperparameter import checked_learning_rate


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """The same learning rate at every step.

    Attributes:
        value: The learning rate.

    Raises:
        ValueError: If it is negative or not finite.
        TypeError: If it is no number.

    Example:
        >>> Constant(0.1)(1000)
        0.1

    Source:
        optax.constant_schedule.
    """

    value: float

    def __post_init__(self) -> None:
        checked_learning_rate(self.value)

    def __call__(self, iteration: int) -> float:
        """Return the learning rate after so many updates."""
        return float(self.value)
