"""Checks of hyperparameters, and learning rates that change over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..values import Variable

LearningRate: TypeAlias = float | Callable[[int], float]
Multipliers: TypeAlias = Mapping[Variable, float] | Callable[[Variable], float]


def checked_number(name: str, value: Any, legal: str, is_legal: Callable[[float], bool]) -> float:
    """Return a hyperparameter as a float.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not finite, or not legal; `legal` says in words what is.

    Example:
        >>> checked_number("epsilon", 1, "> 0", lambda value: value > 0)
        1.0
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}.") from error
    if not math.isfinite(number) or not is_legal(number):
        raise ValueError(f"{name} must be {legal}, got {value!r}.")
    return number


def checked_learning_rate(value: Any) -> float:
    """Return a learning rate as a float.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative or not finite.
    """
    return checked_number("learning_rate", value, ">= 0", lambda number: number >= 0)


def learning_rate_at(learning_rate: LearningRate, iteration: int) -> float:
    """Return the learning rate of one step: the number, or what the function gives.

    Example:
        >>> learning_rate_at(lambda iteration: 0.1 / (1 + iteration), 1)
        0.05
    """
    return checked_learning_rate(
        learning_rate(iteration) if callable(learning_rate) else learning_rate
    )


def checked_decay(name: str, value: float) -> float:
    """Return what a running mean is multiplied with at every step.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not in [0, 1).
    """
    return checked_number(name, value, "in [0, 1)", lambda number: 0 <= number < 1)


def checked_multipliers(given: Any) -> Callable[[Variable], float] | None:
    """Return a function that gives the multiplier of a variable's learning rate; None for None.

    Raises:
        TypeError: If `given` is neither None, a mapping nor a function, or a multiplier is no
            number.
        ValueError: If a multiplier is negative or not finite.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        for variable, value in given.items():
            if not isinstance(variable, Variable):
                raise TypeError(
                    f"learning_rate_multipliers must have variables as keys, got {variable!r}."
                )
            _checked_multiplier(variable, value)
        chosen = dict(given)
        return lambda variable: float(chosen.get(variable, 1.0))
    if not callable(given):
        raise TypeError(
            f"learning_rate_multipliers must be a dict or a function of a variable, got {given!r}."
        )
    return lambda variable: _checked_multiplier(variable, given(variable))


def _checked_multiplier(variable: Variable, value: Any) -> float:
    name = f"The learning rate multiplier of {variable.name!r}"
    return checked_number(name, value, ">= 0", lambda number: number >= 0)
