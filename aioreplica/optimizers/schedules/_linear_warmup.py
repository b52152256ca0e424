"""A learning rate that rises in a straight line before another schedule takes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from .._hyperparameter import checked_learning_rate, checked_number, learning_rate_at


@final
@dataclass(frozen=True, slots=True)
class LinearWarmup:
    """From `initial_learning_rate` up to where `then` starts, and `then` from there on.

    Attributes:
        then: What comes after: a number, or a schedule that counts from the end of the warm-up.
        warmup_steps: How many updates the warm-up takes.
        initial_learning_rate: Where it starts.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is no number.

    Example:
        >>> schedule = LinearWarmup(0.5, warmup_steps=4)
        >>> [schedule(iteration) for iteration in range(6)]
        [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]

    Source:
        Goyal et al., "Accurate, Large Minibatch SGD" (2017); optax.warmup_constant_schedule.
    """

    then: float | Callable[[int], float]
    warmup_steps: int
    initial_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        checked_number("warmup_steps", self.warmup_steps, "> 0", lambda number: number > 0)
        checked_learning_rate(self.initial_learning_rate)
        learning_rate_at(self.then, 0)

    def __call__(self, iteration: int) -> float:
        """Return the learning rate after so many updates."""
        if iteration >= self.warmup_steps:
            return learning_rate_at(self.then, iteration - self.warmup_steps)
        start, target = self.initial_learning_rate, learning_rate_at(self.then, 0)
        return float(start + (target - start) * iteration / self.warmup_steps)
