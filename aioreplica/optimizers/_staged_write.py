"""One write of several variables, built beside the old values and published in one swap.

The old components are captured first, the new ones computed from them (perhaps on other threads),
and published in one go. What a cancellation interrupts therefore leaves the old values, and a write
that was overtaken by another one is told so and can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from ..tree import Array
from ..values import Variable, is_floating, writable_buffer

Arrays: TypeAlias = Sequence[Array]
ComputeComponent: TypeAlias = Callable[[tuple[Array, ...]], tuple[Any, ...]]

SMALL_BYTES = 16 * 1024
"""Up to here a fresh array costs less than finding out that an old buffer is free: 0.2 µs beside
1.5 µs for 32 bytes, and as much for 16 KiB."""


@final
class StagedWrite:
    """New components of the variables that one step writes.

    Args:
        variables: Those that are read before they are written.

    Invariants:
        * No variable changes before `publish`, and all of them change in it.
        * Components that start as one shared array stay shared: they are computed once.
    """

    __slots__ = ("_new", "_old")

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._old = {variable: variable.components for variable in variables}
        self._new: dict[Variable, tuple[Array, ...]] = {}

    def begin(self, group: Sequence[Variable]) -> list[tuple[Arrays, Arrays]]:
        """Stage new components that are filled in later.

        Args:
            group: A variable and its slots.

        Returns:
            For each different component the old arrays of the group, and arrays for the new ones,
            which hold anything: older buffers of the variables, where nobody can be reading those.
        """
        old = [self._old[variable] for variable in group]
        if all(len({*map(id, components)}) == 1 for components in old):  # as a rule
            shared = [components[0] for components in old]
            new = list(map(_memory, group, shared))
            for variable, array, components in zip(group, new, old, strict=True):
                self._new[variable] = (array,) * len(components)
            return [(shared, new)]
        pairs: list[tuple[Arrays, Arrays]] = []
        made: dict[tuple[int, ...], Arrays] = {}
        replicas = []
        for arrays in zip(*old, strict=True):
            key = tuple(map(id, arrays))
            if key not in made:
                made[key] = new = list(map(_memory, group, arrays))
                pairs.append((arrays, new))
            replicas.append(made[key])
        for variable, components in zip(group, zip(*replicas, strict=True), strict=True):
            self._new[variable] = components
        return pairs

    def compute(self, group: Sequence[Variable], fn: ComputeComponent) -> None:
        """Stage new components that a function returns.

        Args:
            group: A variable and its slots.
            fn: Takes one component of each and returns the new ones, in the same order.
        """
        made: dict[tuple[int, ...], list[Array]] = {}
        replicas = []
        for arrays in zip(*(self._old[variable] for variable in group), strict=True):
            key = tuple(map(id, arrays))
            if key not in made:
                made[key] = list(map(_fitting, group, arrays, fn(arrays)))
            replicas.append(made[key])
        for variable, components in zip(group, zip(*replicas, strict=True), strict=True):
            self._new[variable] = components

    def follow(
        self, variable: Variable, other: Variable, fn: Callable[[Array, Array, Array], None]
    ) -> list[Callable[[], None]]:
        """Stage new components of a variable that come from its own and those of another one.

        Args:
            variable: The one that is written.
            other: The one that is only read.
            fn: Fills in its third argument from a component of each.

        Returns:
            What fills them in.
        """
        made: dict[tuple[int, int], Array] = {}
        work: list[Callable[[], None]] = []
        new = []
        for pair in zip(self._old[variable], self._old[other], strict=True):
            key = (id(pair[0]), id(pair[1]))
            if key not in made:
                made[key] = _memory(variable, pair[0])
                work.append(partial(fn, *pair, made[key]))
            new.append(made[key])
        self._new[variable] = tuple(new)
        return work

    def replace(self, variable: Variable, value: object) -> None:
        """Stage one value for all components of a variable, whatever they hold now."""
        old = self._old.get(variable)
        if old is None:
            old = self._old[variable] = variable.components
        self._new[variable] = (_fitting(variable, old[0], value),) * len(old)

    def change(self, variable: Variable, fn: Callable[[Array], object]) -> None:
        """Replace staged components by what a function makes of each."""
        made = {id(array): array for array in self._new[variable]}
        for key, array in made.items():
            array.flags.writeable = False
            made[key] = _fitting(variable, array, fn(array))
        self._new[variable] = tuple(made[id(array)] for array in self._new[variable])

    def round(self, variable: Variable, master: Variable) -> bool:
        """Stage what the staged components of a master are in its variable's dtype.

        Returns:
            Whether all of them are finite.
        """
        made: dict[int, Array] = {}
        components = self._new[master]
        for array, old in zip(components, variable.components, strict=True):
            if id(array) not in made:
                made[id(array)] = rounded = _memory(variable, old)
                with np.errstate(over="ignore"):
                    np.copyto(rounded, array, casting="unsafe")
        self._new[variable] = tuple(made[id(array)] for array in components)
        return all(bool(np.isfinite(rounded).all()) for rounded in made.values())

    def find_non_finite(
        self, group: Sequence[Variable]
    ) -> tuple[Variable, tuple[int, ...], float] | None:
        """Return the first staged element that is not finite while the old one was.

        Args:
            group: Variables, in the order in which they are looked at.

        Returns:
            The variable, the index and the number; None if there is no such element.
        """
        for variable in dict.fromkeys(group):
            if not is_floating(variable.dtype):
                continue
            pairs = zip(self._old[variable], self._new[variable], strict=True)
            for old, new in {id(pair[1]): pair for pair in pairs}.values():
                is_wrong = ~np.isfinite(new)
                if is_wrong.any():
                    is_wrong &= np.isfinite(old)
                if is_wrong.any():
                    where = np.unravel_index(int(np.argmax(is_wrong)), new.shape)
                    return variable, tuple(map(int, where)), float(new[where])
        return None

    def publish(self) -> bool:
        """Swap everything in; False, with nothing changed, if somebody has written meanwhile."""
        for components in self._new.values():
            for array in components:
                array.setflags(write=False)
        store = next(iter(self._new)).store
        if all(variable.store is store for variable in self._new):
            return bool(store.write(self._new, self._old))
        # An optimizer made outside the scope counts in plain variables, which have another store.
        if any(variable.components is not self._old[variable] for variable in self._new):
            return False
        return all(
            each.write({v: p for v, p in self._new.items() if v.store is each}, self._old)
            for each in dict.fromkeys(variable.store for variable in self._new)
        )


def _memory(variable: Variable, old: Array) -> Array:
    if old.nbytes > SMALL_BYTES:
        buffer = writable_buffer(variable)
        if buffer.flags.c_contiguous:
            return buffer
    return np.empty(old.shape, old.dtype)  # it is written through a flat view


def _fitting(variable: Variable, old: Array, value: object) -> Array:
    """Return a new component, as a read-only array of the shape and dtype of the old one."""
    array = np.asarray(value, dtype=old.dtype)
    if array.shape != old.shape:
        raise ValueError(
            f"The update of {variable.name!r} has shape {array.shape}, but the variable has "
            f"shape {old.shape}."
        )
    array.setflags(write=False)
    return array
