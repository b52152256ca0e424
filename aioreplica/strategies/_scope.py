"""`with strategy.scope():` makes a strategy current."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import Generic, TypeVar, final

from ..context import PLACE, Place
from ..errors import ContextError

S = TypeVar("S")


@final
class Scope(Generic[S]):
    """The context manager behind `strategy.scope()`; it may be entered again, nested too.

    Args:
        strategy: What it makes current.
        place: Where code in it runs; None for the default strategy, whose scope changes nothing.

    Raises:
        ContextError: If another strategy is in charge, if entered inside a replica, or if left in
            another context than it was entered in.
    """

    def __init__(self, strategy: S, place: Place | None) -> None:
        self._strategy = strategy
        self._place = place
        self._tokens: list[Token[Place]] = []

    def __enter__(self) -> S:
        current = PLACE.get()
        is_own = current.strategy is None or current.strategy is self._strategy
        is_inside = current.is_in_step
        if is_inside and not (is_own and self._place is None):
            raise ContextError(
                f"scope() of {self._strategy!r} was entered in {current.describe()}. Enter it "
                "around run, not inside a step."
            )
        if not is_own:
            raise ContextError(
                f"scope() of {self._strategy!r} was entered in {current.describe()}. Leave the "
                "other scope first: two strategies cannot be in charge at once."
            )
        place = current if self._place is None or current.in_merge else self._place
        self._tokens.append(PLACE.set(place))
        return self._strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for token in reversed(self._tokens):  # the last one of this context: tasks may share it
            try:
                PLACE.reset(token)
            except ValueError:
                continue
            self._tokens.remove(token)
            return
        raise ContextError(
            f"scope() of {self._strategy!r} was left in another context than it was entered "
            "in. Enter and leave it in the same task; do not let it span a `yield`."
        )
