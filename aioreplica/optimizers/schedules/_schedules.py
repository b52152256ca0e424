"""Learning rates that change over time: functions of the number of updates done before."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

import numpy as np

from ...context import PLACE
from ...errors import ContextError
from ...values import Variable
from .._checks import (
    checked_learning_rate,
    checked_number,
    learning_rate_at,
    require_outside_replicas,
)
from .._slots import new_variable


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """The same learning rate at every step.

    Attributes:
        value: The learning rate.

    Raises:
        ValueError: If it is negative or not finite.
        TypeError: If it is not a number.

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
        TypeError: If one is not a number.

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
        TypeError: If one is not a number.

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
        TypeError: If one is not a number.

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
        TypeError: If a learning rate is not a number.

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


@final
class ReduceOnPlateau:
    """A learning rate that falls when a metric has not improved for a while.

    Make it in `strategy.scope()`, with the optimizer, and tell it the metric outside the step, such
    as once per epoch. Its state is in variables, which `optimizer.variables` has. With parameter
    servers these live in the program, and a closure has the rate of when it was scheduled.

    Args:
        initial_learning_rate: Where it starts.
        factor: What it is multiplied with.
        patience: How many metrics in a row may bring no improvement; the next one lowers it.
        mode: "min" if smaller metrics are better, "max" if larger ones are.
        threshold: What a metric has to be better by than the best one, as a part of that.
        cooldown: How many metrics after a fall do not count.
        minimum: Where it stops falling.

    Raises:
        ValueError: If a number is out of range, the minimum is above the initial rate, or the mode
            is unknown.
        TypeError: If one is not a number.
        ContextError: If made inside a replica.

    Example:
        >>> rate = ReduceOnPlateau(1.0, factor=0.5, patience=1)
        >>> for loss in (3.0, 2.0, 2.0, 2.0):
        ...     rate.observe(loss)
        >>> rate(0)
        0.5

    Source:
        torch.optim.lr_scheduler.ReduceLROnPlateau, with a relative threshold.
    """

    __slots__ = (
        "_best", "_cooldown", "_factor", "_minimum", "_mode", "_num_bad", "_num_idle", "_patience",
        "_rate", "_threshold",
    )  # fmt: skip

    def __init__(
        self,
        initial_learning_rate: float,
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: Literal["min", "max"] = "min",
        threshold: float = 1e-4,
        cooldown: int = 0,
        minimum: float = 0.0,
    ) -> None:
        require_outside_replicas(type(self).__name__)
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}.')
        start = checked_learning_rate(initial_learning_rate)
        self._factor = checked_number("factor", factor, "in (0, 1)", lambda number: 0 < number < 1)
        self._patience = checked_number("patience", patience, ">= 0", lambda number: number >= 0)
        self._threshold = checked_number("threshold", threshold, ">= 0", lambda n: n >= 0)
        self._cooldown = checked_number("cooldown", cooldown, ">= 0", lambda number: number >= 0)
        self._minimum = checked_number("minimum", minimum, ">= 0", lambda number: number >= 0)
        if self._minimum > start:
            raise ValueError(
                f"minimum={minimum!r} is above initial_learning_rate={initial_learning_rate!r}, so "
                "the rate would rise where it is meant to fall. Pass a minimum that is at most "
                "the initial rate."
            )
        self._mode = mode
        strategy = PLACE.get().strategy
        if strategy is not None and strategy.elsewhere is not None:
            strategy = None  # it is observed here; closures are told the rate
        worst = np.float64(np.inf if mode == "min" else -np.inf)
        self._rate = new_variable(strategy, np.float64(start), "learning_rate")
        self._best = new_variable(strategy, worst, "learning_rate_best_metric")
        self._num_bad = new_variable(strategy, np.int64(0), "learning_rate_bad_metrics")
        self._num_idle = new_variable(strategy, np.int64(0), "learning_rate_cooldown")

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The rate, the best metric, and what is counted since then."""
        return self._rate, self._best, self._num_bad, self._num_idle

    def observe(self, metric: float) -> None:
        """Take the next metric; the following step has the new rate.

        Args:
            metric: A number; NaN is not an improvement.

        Raises:
            ContextError: If called inside a replica, where each would count.
            TypeError: If it is not a number.
        """
        place = PLACE.get()
        if place.is_in_step:
            raise ContextError(
                f"ReduceOnPlateau.observe was called in {place.describe()}. Call it outside the "
                "step, once for all replicas."
            )
        value = float(metric)
        rate, best = float(self._rate.components[0]), float(self._best.components[0])
        num_bad, num_idle = int(self._num_bad.components[0]), int(self._num_idle.components[0])
        margin = self._threshold * (abs(best) if math.isfinite(best) else 0.0)
        is_better = value < best - margin if self._mode == "min" else value > best + margin
        best, num_bad = (value, 0) if is_better else (best, num_bad + 1)
        if num_idle:
            num_idle, num_bad = num_idle - 1, 0
        if num_bad > self._patience:
            rate = max(rate * self._factor, self._minimum)
            num_bad, num_idle = 0, int(self._cooldown)
        changes = {}
        for variable, new in zip(self.variables, (rate, best, num_bad, num_idle), strict=True):
            array = np.array(new, variable.dtype)
            array.flags.writeable = False
            changes[variable] = (array,) * len(variable.components)
        self._rate.store.write(changes)

    def __call__(self, iteration: int) -> float:
        """Return the learning rate now, whatever the number of updates."""
        return float(self._rate.components[0])

    def __repr__(self) -> str:
        return f"<ReduceOnPlateau | {self(0):g}>"
