"""Learning rates that change over time: functions of the number of updates done before."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from .._hyperparameter import checked_learning_rate, checked_number, learning_rate_at


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
