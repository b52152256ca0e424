"""Where optimizers may be made and applied, and whose variables they may write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..context import PLACE
from ..errors import ContextError
from ..replica import ReplicaContext
from ..values import Variable


def require_outside_replicas(what: str) -> None:
    """Check that the code runs outside the step.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.replica is not None or place.update_replica_id is not None:
        raise ContextError(
            f"{what} was made inside a step of {place.strategy!r}. Make optimizers in "
            "strategy.scope(), before the run."
        )


def require_replica_context(what: str) -> ReplicaContext | None:
    """Return the replica that runs here; None outside every strategy, where one acts alone.

    Raises:
        ContextError: If the code runs in cross-replica or update context, or in a plain function,
            where nothing can be awaited.
    """
    place = PLACE.get()
    if isinstance(place.replica, ReplicaContext):
        place.replica.require_awaitable(what)
        return place.replica
    if place.strategy is not None:
        raise ContextError(
            f"{what} was called in {place.describe()}, but it is a collective of the replicas. "
            f"Call it in the step: `await optimizer.{what}(...)` in an `async def step(...)`, "
            "and run that with `await strategy.run(step, args=(...))`. For gradients that are here "
            "already: `await optimizer.distributed_apply(grads_and_vars)`."
        )
    return None


def require_cross_replica_context() -> None:
    """Check that the code runs outside the replicas, and outside every update.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.replica is not None or place.update_replica_id is not None:
        raise ContextError(
            f"distributed_apply is a cross-replica method but was called in {place.describe()}. "
            "Use `await optimizer.apply_gradients(grads_and_vars)` there."
        )


def require_owner(variables: Iterable[Variable], default: Any = None) -> None:
    """Check that the strategy in charge here made the variables.

    Args:
        variables: What is to be written.
        default: The strategy that counts as in charge where none is.

    Raises:
        ContextError: If another one, or none, did.
    """
    strategy = PLACE.get().strategy or default
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
