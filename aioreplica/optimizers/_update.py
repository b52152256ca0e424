"""One update: new components of everything that one step writes, swapped in together.

The old components are captured first, the new ones computed from them (perhaps on other threads),
and committed in one go. What a cancellation interrupts therefore leaves the old values, and an
update that ran while somebody else wrote is told so and can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..values import Variable, writable_buffer

Array: TypeAlias = npt.NDArray[Any]
ComputeComponent: TypeAlias = Callable[[tuple[Array, ...]], tuple[Any, ...]]


@final
class Column(NamedTuple):
    """One component of variables that depend on each other: a variable and its slots.

    Attributes:
        old: The component of each, read-only.
        new: Arrays for the new ones, which hold anything.
    """

    old: tuple[Array, ...]
    new: tuple[Array, ...]


@final
class Update:
    """Old and new components of the variables that one step writes.

    Args:
        variables: All of them.

    Invariants:
        * No variable changes before `commit`, and all of them change in it.
        * Components that start as one shared array stay shared: they are computed once.
    """

    __slots__ = ("_new", "_old")

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._old = {variable: variable.components for variable in variables}
        self._new: dict[Variable, tuple[Array, ...]] = {}

    def begin(self, group: tuple[Variable, ...]) -> list[Column]:
        """Stage new components that are filled in later; one column for equal ones.

        The arrays are the variables' older buffers where nobody can be reading those.
        """
        made: dict[tuple[int, ...], Column] = {}
        columns = []
        for old in zip(*(self._old[variable] for variable in group), strict=True):
            key = tuple(map(id, old))
            if key not in made:
                made[key] = Column(old, tuple(map(_buffer, group)))
            columns.append(made[key].new)
        for variable, components in zip(group, zip(*columns, strict=True), strict=True):
            self._new[variable] = components
        return list(made.values())

    def compute(self, group: tuple[Variable, ...], fn: ComputeComponent) -> None:
        """Stage new components that a function returns.

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
        self._old.setdefault(variable, variable.components)
        self._new[variable] = (array,) * len(variable.components)

    def commit(self) -> bool:
        """Swap everything in; False, with nothing changed, if somebody has written meanwhile."""
        for components in self._new.values():
            for array in components:
                array.flags.writeable = False
        stores = {variable.store: None for variable in self._new}
        return all(
            store.write({v: p for v, p in self._new.items() if v.store is store}, self._old)
            for store in stores  # one: a step writes the variables of one strategy
        )


def _buffer(variable: Variable) -> Array:
    buffer = writable_buffer(variable)
    if buffer.flags.c_contiguous:
        return buffer
    return np.empty(variable.shape, variable.dtype)  # it is written through a flat view


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
