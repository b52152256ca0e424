"""One update: new components of everything that one step writes, swapped in together.

The old components are captured first, the new ones computed from them (perhaps on another thread),
and committed in one go. What a cancellation interrupts therefore leaves the old values, and an
update that ran while somebody else wrote can tell so and be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..values import Variable

Array: TypeAlias = npt.NDArray[Any]
ComputeComponent: TypeAlias = Callable[[tuple[Array, ...]], tuple[Any, ...]]


@final
class Update:
    """Old and new components of the variables that one step writes.

    Args:
        variables: All of them.

    Invariants:
        * No variable changes before `commit`, and all of them change in it.
        * Components that start as one shared array stay shared: they are computed once.
    """

    __slots__ = ("_new", "_old", "_versions")

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._old = {variable: variable.components for variable in variables}
        self._versions = {variable: variable.version for variable in self._old}
        self._new: dict[Variable, tuple[Array, ...]] = {}

    def compute(self, group: tuple[Variable, ...], fn: ComputeComponent) -> None:
        """Stage new components of variables that depend on each other.

        Args:
            group: A variable and its slots.
            fn: Takes one component of each and returns the new ones, in the same order.
        """
        made: dict[tuple[int, ...], tuple[Array, ...]] = {}
        columns = []
        for old in zip(*(self._old[variable] for variable in group), strict=True):
            key = tuple(map(id, old))
            if key not in made:
                made[key] = _frozen(group, fn(old))
            columns.append(made[key])
        for variable, components in zip(group, zip(*columns, strict=True), strict=True):
            self._new[variable] = components

    def replace(self, variable: Variable, value: Any) -> None:
        """Stage one value for all components of a variable, whatever they hold now."""
        (array,) = _frozen((variable,), (value,))
        self._new[variable] = (array,) * len(variable.components)

    def is_current(self) -> bool:
        """Tell whether nobody has written the variables since they were captured."""
        return all(variable.version == seen for variable, seen in self._versions.items())

    def commit_if_current(self) -> bool:
        """Swap everything in, unless somebody has written; from any thread.

        The variables must be of one strategy.
        """
        first = next(iter(self._new))
        bases = {v: self._old.get(v, v.components) for v in self._new}
        return bool(first.store.write(self._new, bases))

    def commit(self) -> None:
        """Swap everything in."""
        for store in {variable.store: None for variable in self._new}:
            store.write({v: parts for v, parts in self._new.items() if v.store is store})


def _frozen(group: tuple[Variable, ...], values: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return new component values as read-only arrays in their variables' dtypes."""
    frozen = []
    for variable, value in zip(group, values, strict=True):
        array = np.asarray(value, dtype=variable.dtype)
        if array.shape != variable.shape:
            raise ValueError(
                f"The update of {variable.name!r} has shape {array.shape}, but the variable has "
                f"shape {variable.shape}."
            )
        array.flags.writeable = False
        frozen.append(array)
    return tuple(frozen)
