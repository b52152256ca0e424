"""Events: what happens inside a run, kept in a ring that any thread may read."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, final

from ._observer import Event, Observers


@final
class EventLog:
    """Keeps the newest events of a strategy; any thread may add to it.

    Args:
        capacity: How many are kept; older ones are dropped.
        observers: Who is told of each event, besides.

    Example:
        >>> log = EventLog(capacity=2)
        >>> for step in range(3):
        ...     log.add_scalar(step, 0, "loss", 1.0 / (step + 1))
        >>> [(event.step, event.value) for event in log.events("scalar")]
        [(1, 0.5), (2, 0.3333333333333333)]
    """

    __slots__ = ("_observers", "_ring", "now")

    def __init__(self, capacity: int = 1024, observers: Observers | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"An event log keeps at least 1 event, got capacity={capacity}.")
        self.now = time.monotonic  # looked up now: a test may have put another clock there
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._observers = observers

    def add(
        self,
        kind: str,
        name: str,
        step: int,
        replica_id: int | None = None,
        value: float | str | None = None,
    ) -> None:
        """Add an event that happens now."""
        event = Event(self.now(), kind, name, step, replica_id, value)
        self._ring.append(event)
        if self._observers is not None and (tell := self._observers.event_added) is not None:
            tell(event)

    def add_scalar(self, step: int, replica_id: int | None, name: str, value: Any) -> None:
        """Add a number or a text that a step reports.

        Raises:
            TypeError: If `name` is not a str, or the value neither a number nor a text.
        """
        if not isinstance(name, str):
            raise TypeError(f"The name of an event must be a str, got {name!r}.")
        if not isinstance(value, str):
            try:
                value = float(value.item() if hasattr(value, "item") else value)
            except (TypeError, ValueError, OverflowError):
                raise TypeError(
                    f"Event {name!r} takes a number or a text, got {value!r} "
                    f"({type(value).__name__}). Reduce arrays to one number first."
                ) from None
        self.add("scalar", name, step, replica_id, value)

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the kept events, oldest first; only those of one kind if it is named."""
        found = tuple(self._ring)
        return found if kind is None else tuple(e for e in found if e.kind == kind)

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"<EventLog | {len(self._ring)} of {self._ring.maxlen} events>"
