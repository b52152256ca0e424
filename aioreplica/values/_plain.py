"""Plain variables: one copy, no strategy; what `ar.Variable` gives outside every scope."""

from __future__ import annotations

from collections.abc import Awaitable
from types import FrameType
from typing import Any, final

from ..context import REGISTRY
from ._store import Components, VariableStore
from ._variable import Array, Variable, VariableOptions


@final
class PlainVariable(Variable):
    """A variable with one component, owned by the default strategy."""

    __slots__ = ()

    def __init__(self, value: Array, options: VariableOptions) -> None:
        self._set_up((value,), options, None, default_store())

    @property
    def is_mirrored(self) -> bool:
        """True: there is only one component."""
        return True

    def write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> Awaitable[Array]:
        """Write in the default strategy's one replica; a collective, so that it must be awaited."""
        merging: Awaitable[Array] = replica.meet_as(verb, _merge_plain, (self, verb, array), frame)
        return merging


def _merge_plain(
    _strategy: object, variable: PlainVariable, verb: str, array: Array
) -> Array | Awaitable[Array]:
    new = variable.combine(verb, array)
    return new[0] if isinstance(new, tuple) else _first(new)


async def _first(pending: Awaitable[Components]) -> Array:
    return (await pending)[0]


def default_store() -> VariableStore:
    """Return the store of all plain variables of the process."""
    return REGISTRY.once("default_store", VariableStore)
