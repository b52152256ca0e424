"""Checks of hyperparameters, of where optimizers are made and applied, and of what they write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..context import PLACE, TRACE
from ..errors import ContextError
from ..replica import RunningReplica
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


def checked_learning_rate(value: object) -> float:
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


def checked_multipliers(given: object) -> Callable[[Variable], float] | None:
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


def _checked_multiplier(variable: Variable, value: object) -> float:
    name = f"The learning rate multiplier of {variable.name!r}"
    return checked_number(name, value, ">= 0", lambda number: number >= 0)


def require_outside_replicas(what: str) -> None:
    """Check that the code runs outside the step.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.is_in_step:
        raise ContextError(
            f"{what} was made inside a step of {place.strategy!r}. Make optimizers in "
            "strategy.scope(), before the run."
        )


def replica_on_device(name: str) -> RunningReplica:
    """Return the replica whose device thread this is, for a blocking method.

    Args:
        name: The method, such as "optimizer.blocking.minimize".

    Raises:
        ContextError: If it is the device thread of no replica.
    """
    place = PLACE.get()
    if (trace := TRACE.get()) is not None:
        raise trace.refusal(name)
    if not isinstance(place.replica, RunningReplica):
        raise ContextError(
            f"{name} was called in {place.describe()}, but it is for plain step functions and "
            f"run_steps. In an `async def` step use `await {name.replace('.blocking', '')}(...)`."
        )
    place.replica.blocking.require_here(name)
    return place.replica


def require_cross_replica_context(what: str, instead: str = "") -> None:
    """Check that the code runs outside the replicas, and outside every update.

    Args:
        what: Names the call in the error.
        instead: What to do.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.is_in_step:
        raise ContextError(
            f"{what} is a cross-replica method but was called in {place.describe()}. "
            f"{instead or 'Call it outside the step.'}"
        )


def require_owner(variables: Iterable[Variable], strategy: Any) -> None:
    """Check that the strategy in charge made the variables.

    Args:
        variables: What is to be written.
        strategy: The one in charge, None outside every strategy.

    Raises:
        ContextError: If another one, or none, made one of them.
    """
    owner = None if strategy is None or strategy.has_plain_values else strategy
    for variable in variables:
        if variable.store.owner is owner:
            continue
        if owner is None:
            raise ContextError(
                f"Variable {variable.name!r} belongs to {variable.store.owner!r}. Update it in a "
                "step of that strategy: await strategy.run(step)."
            )
        raise ContextError(
            f"Variable {variable.name!r} does not belong to {owner!r}. Create it in that "
            "strategy's scope: `with strategy.scope(): ar.Variable(...)`."
        )


def written(variables: Sequence[Variable], global_step: object) -> list[Variable]:
    """Return what a step writes for the user; TypeError if the global step is not a variable."""
    if global_step is None:
        return [*variables]
    if not isinstance(global_step, Variable):
        raise TypeError(f"global_step must be an ar.Variable or None, got {global_step!r}.")
    return [*variables, global_step]
