"""A learning rate that falls along half a cosine wave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from .._hyperparameter import checked_learning_rate, checked_number


@final
@dataclass(frozen=True, slots=True)
class CosineDecay:
    """From `initial_learning_rate` down to `alpha` times that, and constant after that.

    Attributes:
        initial_learning_rate: Where it starts.
        decay_steps: Over how many updates it falls.
        alpha: Where it ends, as a part of where it starts.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is no number.

    Example:
        >>> schedule = CosineDecay(0.5, decay_steps=100)
        >>> schedule(0), round(schedule(50), 12), schedule(100), schedule(1000)
        (0.5, 0.25, 0.0, 0.0)

    Source:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (2017);
        tf.keras.optimizers.schedules.CosineDecay; optax.cosine_decay_schedule.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0

    def __post_init__(self) -> None:
        checked_learning_rate(self.initial_learning_rate)
        checked_number("decay_steps", self.decay_steps, "> 0", lambda number: number > 0)
        checked_number("alpha", self.alpha, "in [0, 1]", lambda number: 0 <= number <= 1)

    def __call__(self, iteration: int) -> float:
        """Return the learning rate after so many updates."""
        done = min(iteration, self.decay_steps) / self.decay_steps
        share = (1 + math.cos(math.pi * done)) / 2
        return float(self.initial_learning_rate * (self.alpha + (1 - self.alpha) * share))
