"""A learning rate that falls by the same factor over and over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .._hyperparameter import checked_learning_rate, checked_number


@final
@dataclass(frozen=True, slots=True)
class ExponentialDecay:
    """`initial_learning_rate * decay_rate ** (iteration / decay_steps)`.

    Attributes:
        initial_learning_rate: Where it starts.
        decay_steps: Over how many updates it falls by `decay_rate` once.
        decay_rate: The factor.
        staircase: Whether it falls all at once after every `decay_steps` updates.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is no number.

    Example:
        >>> schedule = ExponentialDecay(0.1, decay_steps=100, decay_rate=0.25)
        >>> schedule(0), schedule(50), schedule(100)
        (0.1, 0.05, 0.025)

    Source:
        tf.keras.optimizers.schedules.ExponentialDecay; optax.exponential_decay.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        checked_learning_rate(self.initial_learning_rate)
        checked_number("decay_steps", self.decay_steps, "> 0", lambda number: number > 0)
        checked_number("decay_rate", self.decay_rate, "> 0", lambda number: number > 0)

    def __call__(self, iteration: int) -> float:
        """Return the learning rate after so many updates."""
        exponent = iteration / self.decay_steps
        if self.staircase:
            exponent = iteration // self.decay_steps
        return float(self.initial_learning_rate * self.decay_rate**exponent)
