"""Variables with one copy and no strategy: plain ones, and their stand-ins in device processes."""

from __future__ import annotations

from collections.abc import Awaitable
from types import FrameType
from typing import Any, NoReturn, final

import numpy as np

from ..context import PLACE, REGISTRY, Place
from ..errors import ContextError
from ..tree import Array
from ._store import Cell, Components, VariableStore
from ._variable import Variable, VariableOptions


@final
class PlainVariable(Variable):
    """A variable with one component, owned by the default strategy."""

    __slots__ = ()

    def __init__(self, value: Array, options: VariableOptions) -> None:
        self._set_up((value,), options, default_store())

    @property
    def is_mirrored(self) -> bool:
        """True: there is only one component."""
        return True

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> Awaitable[Array]:
        """Write in the default strategy's one replica; a collective, so that it must be awaited."""
        merging: Awaitable[Array] = replica.meet_as(verb, _merge_plain, (self, verb, array), frame)
        return merging


@final
class PublishedVariable(Variable):
    """Stands for a variable in a device process: it has one read-only value, and no writes.

    A gradient with respect to it is one with respect to the variable of the program.
    """

    __slots__ = ("_is_mirrored",)

    def __init__(self, options: VariableOptions, is_mirrored: bool) -> None:
        self._is_mirrored = is_mirrored
        self._set_up((np.empty(0),), options, VariableStore())

    @property
    def is_mirrored(self) -> bool:
        """True if the components of the variable are meant to be equal."""
        return self._is_mirrored

    def take_value(self, num_writes: int, value: Array) -> None:
        """Have another value from now on, that after so many writes."""
        value.flags.writeable = False
        self._cell = Cell(0, (value,), 0, (value,), num_writes)

    def _value_at(self, place: Place) -> Array:
        """Return the one value, which is that of the op's replica."""
        return self.components[0]

    def _write(self, verb: str, value: object, frame: FrameType) -> NoReturn:
        """Refuse: only the program writes its variables."""
        raise self._no_writes(verb)

    def _write_in_replica(
        self, verb: str, array: Array, replica: object, frame: FrameType
    ) -> Awaitable[Array]:
        """Refuse, as `write`."""
        raise self._no_writes(verb)

    def _require_owner_in_charge(self, place: Place) -> None:
        """Refuse: what asks is about to write."""
        raise self._no_writes("a write")

    def _no_writes(self, verb: str) -> ContextError:
        return ContextError(
            f"{verb} of variable {self.name!r} was called in {PLACE.get().describe()}, in a device "
            "process, where variables are read only. Return the value from the op, and write it "
            f"in the step: `await variable.{verb}(value)`."
        )


def _merge_plain(
    _strategy: object, variable: PlainVariable, verb: str, array: Array
) -> Array | Awaitable[Array]:
    new = variable._combine(verb, array)
    return new[0] if isinstance(new, tuple) else _first(new)


async def _first(pending: Awaitable[Components]) -> Array:
    return (await pending)[0]


def default_store() -> VariableStore:
    """Return the store of all plain variables of the process."""
    return REGISTRY.once("default_store", VariableStore)
