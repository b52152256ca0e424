"""Variable creators: functions of the user that stand before the factory of variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from .._functions import require_finished
from ..context import CREATORS, PLACE

if TYPE_CHECKING:
    from ._variable import Variable

Creators: TypeAlias = "tuple[tuple[object, Callable[..., Variable]], ...]"


def create_through(
    creators: Creators, factory: Callable[..., Variable], options: dict[str, Any]
) -> Variable:
    """Have the innermost creator of the current strategy make a variable.

    Args:
        creators: Outermost first, each with the strategy that it is for.
        factory: Called by the outermost.
        options: Keyword arguments of `ar.Variable`.

    Raises:
        TypeError: If a creator returns something else.
    """
    from ._variable import Variable  # the factory and what is before it need each other

    if not creators:
        return factory(**options)
    *outer, (owner, creator) = creators
    if owner is not PLACE.get().strategy:
        return create_through(tuple(outer), factory, options)

    def next_creator(**changed: object) -> Variable:
        return create_through(tuple(outer), factory, changed)

    token = CREATORS.set(tuple(outer))  # ar.Variable in a creator is not its own next one
    try:
        made = creator(next_creator, **options)
    finally:
        CREATORS.reset(token)
    require_finished(made, creator, "variable_creator_scope")
    if not isinstance(made, Variable):
        raise TypeError(
            f"The variable creator {creator!r} returned {made!r:.80} ({type(made).__name__}). "
            "Return what next_creator(**options) gives."
        )
    return made
