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
    """The context manager behind `strategy.scope()`; each `with` needs a new one.

    Raises:
        ContextError: If another strategy is in charge, if entered inside a replica, or if left in
            another context than it was entered in.
    """

    def __init__(self, strategy: S, place: Place) -> None:
        self._strategy = strategy
        self._place = place
        self._token: Token[Place] | None = None

    def __enter__(self) -> S:
        current = PLACE.get()
        if current.replica is not None or current.update_replica_id is not None:
            raise ContextError(
                f"scope() of {self._strategy!r} was entered in {current.describe()}. Enter it "
                "around run, not inside a step."
            )
        if current.strategy is not None and current.strategy is not self._strategy:
            raise ContextError(
                f"scope() of {self._strategy!r} was entered in {current.describe()}. Leave the "
                "other scope first: two strategies cannot be in charge at once."
            )
        self._token = PLACE.set(current if current.in_merge else self._place)
        return self._strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._token is not None
        try:
            PLACE.reset(self._token)
        except (ValueError, RuntimeError) as wrong:
            raise ContextError(
                f"scope() of {self._strategy!r} was left in another context than it was entered "
                "in. Enter and leave it in the same task; do not let it span a `yield`."
            ) from wrong
