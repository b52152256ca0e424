"""Updates: a function runs once per component of variables, what it writes is swapped in at once.

Each call has a context of its own, in which `ar.get_update_replica_id()` is the component's index
and reads and assigns act on that component alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from typing import final

from .._functions import require_finished
from ..context import DEVICE, PLACE, CurrentStrategy, Place
from ..devices import Device
from ..errors import ContextError
from ..tree import Array, Tree, leaves
from ._distributed import Mirrored, PerReplica
from ._regroup import split_per_replica
from ._store import Components
from ._variable import Variable


@final
class Staging:
    """New components of the variables written in one update, not visible outside it yet.

    Invariants:
        * A variable's published components do not change before `commit`.
        * Every component of a variable is read from one version, that of its first use here.
    """

    __slots__ = ("_base", "_staged")

    def __init__(self) -> None:
        self._base: dict[Variable, Components] = {}
        self._staged: dict[Variable, list[Array]] = {}

    def read(self, variable: Variable, index: int) -> Array:
        """Return the staged component, or the published one."""
        staged = self._staged.get(variable)
        return staged[index] if staged is not None else self._of(variable)[index]

    def write(self, variable: Variable, index: int, array: Array) -> None:
        """Stage one component."""
        staged = self._staged.setdefault(variable, list(self._of(variable)))
        if variable.num_copies == 1:
            staged[:] = [array] * len(staged)
        else:
            staged[index] = array

    def commit(self) -> bool:
        """Publish everything; False, with nothing changed, if another write came between."""
        changes = {variable: tuple(parts) for variable, parts in self._staged.items()}
        stores = {variable.store: None for variable in changes}
        return all(
            store.write({v: parts for v, parts in changes.items() if v.store is store}, self._base)
            for store in stores  # one: an update writes the variables of one strategy
        )

    def _of(self, variable: Variable) -> Components:
        return self._base.setdefault(variable, variable.components)


async def run_per_component(
    strategy: CurrentStrategy,
    fn: Callable[..., object],
    all_args: Sequence[Sequence[object]],
    all_kwargs: Sequence[dict[str, Tree]],
    places: Sequence[tuple[int, Device | None]],
) -> list[Tree]:
    """Run `fn` in the update context of one place after the other, then publish all writes.

    If one of the variables was written meanwhile (which takes an `fn` that awaits), everything is
    computed again from the new values.

    Args:
        strategy: Whose update it is.
        fn: A plain function (which may return an awaitable) or an async one.
        all_args: Positional arguments of every component.
        all_kwargs: Keyword arguments of every component.
        places: Index of each component to run for, and its device, None to leave that as it is.

    Cancellation:
        Publishes nothing.
    """
    while True:
        staging = Staging()
        results = []
        for index, device in places:
            own = copy_context()
            place = Place(strategy, update_replica_id=index, staging=staging)
            own.run(PLACE.set, place)
            if device is not None:
                own.run(DEVICE.set, device)
            try:
                result = own.run(fn, *all_args[index], **all_kwargs[index])
                if inspect.isawaitable(result):
                    result = await _in_context(own, result)
            finally:
                place.end()
            require_finished(result, fn, "update")
            results.append(result)
        if staging.commit():
            return results


async def update_components(
    strategy: CurrentStrategy,
    var: Variable,
    fn: Callable[..., object],
    all_args: Sequence[Sequence[object]],
    all_kwargs: Sequence[dict[str, Tree]],
    group: bool,
) -> Tree:
    """Run `fn(var, *args)` once per component of a variable, each with arguments of its own.

    Args:
        strategy: Whose update it is.
        var: The variable, one of this strategy.
        fn: A plain function (which may return an awaitable) or an async one.
        all_args: Positional arguments of every component, after the variable.
        all_kwargs: Keyword arguments of every component.
        group: False gives a list of the results instead of a Mirrored.

    Raises:
        TypeError: If `var` is not a variable.
        ContextError: If it belongs to another strategy.

    Cancellation:
        Leaves the variable as it was.
    """
    require_own(var, strategy, "update")
    results = await run_per_component(
        strategy,
        fn,
        [(var, *own) for own in all_args],
        all_kwargs,
        [(index, None) for index in range(var.num_copies)],
    )
    if strategy.has_plain_values:
        return results[0] if group else results
    if not group:
        return results
    return Mirrored(results * (len(var.components) // var.num_copies))


def split_arguments(
    args: Sequence[object], kwargs: dict[str, Tree] | None, count: int, what: str
) -> tuple[list[Tree], list[Tree]]:
    """Return the arguments of each component: Mirrored unwrapped, PerReplica refused.

    Raises:
        ValueError: If `args` is not a tuple or list, or an argument holds a PerReplica or a
            Mirrored of another length.
    """
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"{what} takes args as a tuple or list, got {args!r} ({type(args).__name__}). "
            "Write args=(value,) for one argument."
        )
    if any(isinstance(leaf, PerReplica) for leaf in leaves((tuple(args), kwargs))):
        raise ValueError(
            f"{what} got a PerReplica. Reduce it first, so that every component gets the same "
            "value."
        )
    return (
        split_per_replica(tuple(args), count, "args"),
        split_per_replica(kwargs or {}, count, "kwargs"),
    )


async def _in_context(context: Context, awaitable: Awaitable[object]) -> object:
    """Await with the update context's variables: place and device are set here and put back."""
    place = PLACE.set(context[PLACE])
    device = DEVICE.set(context.get(DEVICE))
    try:
        return await awaitable
    finally:
        DEVICE.reset(device)
        PLACE.reset(place)


def is_own(variable: Variable, strategy: CurrentStrategy) -> bool:
    """Tell whether a strategy made the variable."""
    owner = variable.store.owner
    return strategy.has_plain_values if owner is None else owner is strategy


def require_own(variable: object, strategy: CurrentStrategy, what: str) -> None:
    """Check that something is a variable of a strategy.

    Raises:
        TypeError: If it is not a variable.
        ContextError: If it belongs to another strategy.
    """
    if not isinstance(variable, Variable):
        raise TypeError(
            f"{what}: needs a variable, got a {type(variable).__name__}. Pass what ar.Variable "
            "gave."
        )
    if not is_own(variable, strategy):
        raise ContextError(
            f"{what}: {variable!r} does not belong to {strategy!r}. Go through its own strategy."
        )
