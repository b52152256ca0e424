"""Checks of where optimizers are made and applied, and of whose variables they write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..context import CLOSURE, PLACE, Place
from ..errors import ContextError
from ..replica import ReplicaContext
from ..values import Variable


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


def require_replica(place: Place, what: str) -> None:
    """Check that a replica runs here, or no strategy is in charge: then the code acts alone.

    Raises:
        ContextError: If the code runs in cross-replica or update context.
    """
    if type(place.replica) is not ReplicaContext and place.strategy is not None:
        raise ContextError(
            f"{what} was called in {place.describe()}, but it is a collective of the replicas. "
            f"Call it in the step: `await optimizer.{what}(...)` in an `async def step(...)`, "
            "and run that with `await strategy.run(step, args=(...))`. For gradients that are here "
            "already: `await optimizer.distributed_apply(grads_and_vars)`."
        )


def replica_on_device(name: str) -> ReplicaContext:
    """Return the replica whose device thread this is, for a blocking method.

    Args:
        name: The method, such as "optimizer.blocking.minimize".

    Raises:
        ContextError: If it is the device thread of no replica.
    """
    place = PLACE.get()
    if not isinstance(place.replica, ReplicaContext):
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
        if variable.strategy is owner:
            continue
        if owner is None:
            raise ContextError(
                f"Variable {variable.name!r} belongs to {variable.strategy!r}. Update it in a step "
                "of that strategy: await strategy.run(step)."
            )
        raise ContextError(
            f"Variable {variable.name!r} does not belong to {owner!r}. Create it in that "
            "strategy's scope: `with strategy.scope(): ar.Variable(...)`."
        )


def push_elsewhere(optimizer: Any, pairs: Sequence[Any], global_step: Variable | None) -> Any:
    """Push gradients to parameter servers, if a closure runs here and they are for variables there.

    Returns:
        What may be awaited, and is done; None if they are for variables of this process.
    """
    closure = CLOSURE.get()
    if closure is None or not closure.takes(pairs):
        return None
    return closure.apply_gradients(optimizer, pairs, global_step)
