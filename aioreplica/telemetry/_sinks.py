"""Events of strings and numbers: a ring that any thread may read, memory, a log.

`events_to` makes an observer that hands each happening on as an `Event`; the sinks here are what it
may be handed to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, final

from .._functions import is_async, require_no_yield
from ._observer import (
    KINDS,
    Event,
    ObservedCall,
    ObservedCheckpoint,
    ObservedMerge,
    ObservedMessage,
    ObservedOp,
    ObservedRun,
    ObservedWait,
    Observer,
    Observers,
)
from ._recorder import Ring

NO_STEP = -1


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
        self._ring: Ring[Event] = Ring(capacity)
        self._observers = observers

    @property
    def is_observed(self) -> bool:
        """True if an observer is told of events."""
        return self._observers is not None and self._observers.event_added is not None

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
        self._ring.add(event)
        if self._observers is not None and (tell := self._observers.event_added) is not None:
            tell(event)

    def add_scalar(self, step: int, replica_id: int | None, name: str, value: Any) -> None:
        """Add a number or a text that a step reports.

        Raises:
            TypeError: If `name` is not a str, or the value neither a number nor a text.
        """
        self.add("scalar", name, step, replica_id, checked_scalar(name, value))

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the kept events, oldest first; only those of one kind if it is named."""
        found = tuple(self._ring.copied())
        return found if kind is None else tuple(e for e in found if e.kind == kind)

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"<EventLog | {len(self._ring)} of {self._ring.capacity} events>"


def checked_scalar(name: object, value: Any) -> float | str:
    """Return the number or the text of an event.

    Raises:
        TypeError: If `name` is not a str, or the value neither a number nor a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of an event must be a str, got {name!r}.")
    if isinstance(value, str):
        return value
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"Event {name!r} takes a number or a text, got {value!r} "
            f"({type(value).__name__}). Reduce arrays to one number first."
        ) from None


def printable(text: str) -> str:
    r"""Return a text in which nothing controls a terminal, a log or a table.

    Control characters, line breaks and lone surrogates become escapes.

    Example:
        >>> printable("grün")
        'grün'
        >>> print(printable("loss\x1b[2J\n"))
        loss\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def events_to(
    emit: Callable[[Event], None],
    *,
    kinds: Iterable[str] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Observer:
    """Return an observer that describes what happens in events, and hands them on.

    Args:
        emit: Called with each event, where it happens: on the event loop or a device thread.
        kinds: The fields of `Observer` that are wanted; None wants all.
        now: The clock, in seconds.

    Raises:
        TypeError: If `emit` is not a plain function.
        ValueError: If a kind is unknown.

    Example:
        >>> seen = []
        >>> observer = events_to(seen.append, kinds=["write_published"])
        >>> observer.write_published(7)
        >>> seen[0].kind, seen[0].value
        ('write', 7)
    """
    if is_async(emit):
        raise TypeError(f"emit must be a plain function, got {emit!r}.")
    require_no_yield(emit, "events_to", "Make it a plain function.")
    observer = Observer(**_functions(emit, now))
    if kinds is None:
        return observer
    wanted = tuple(kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise ValueError(f"Unknown kind of event {kind!r}. Choose from {', '.join(KINDS)}.")
    return replace(observer, **{kind: None for kind in KINDS if kind not in wanted})


@final
class MemorySink:
    """Keeps the newest events in memory, for tests.

    Args:
        capacity: How many are kept; older ones are dropped.
        kinds: The fields of `Observer` that are wanted; None wants all.

    Attributes:
        observer: What to add to `strategy.observers`.

    Raises:
        ValueError: If the capacity is below 1, or a kind is unknown.

    Example:
        >>> import asyncio
        >>> import aioreplica as ar
        >>> sink = MemorySink(kinds=["run_began", "merge_ended"])
        >>> async def step():
        ...     await ar.get_replica_context().barrier()
        >>> async def main():
        ...     async with ar.OneDeviceStrategy("cpu:0") as strategy:
        ...         strategy.observers.add(sink.observer)
        ...         await strategy.run(step)
        >>> asyncio.run(main())
        >>> [(event.kind, event.name) for event in sink.events()]
        [('run', 'begin'), ('merge', 'barrier #1')]
    """

    __slots__ = ("_kept", "observer")

    def __init__(self, *, capacity: int = 65_536, kinds: Iterable[str] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"A memory sink keeps at least 1 event, got capacity={capacity}.")
        self._kept: Ring[Event] = Ring(capacity)
        self.observer = events_to(self._kept.add, kinds=kinds)

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the kept events, oldest first; only those of one kind if it is named."""
        found = tuple(self._kept.copied())
        return found if kind is None else tuple(event for event in found if event.kind == kind)

    def clear(self) -> None:
        """Forget all events."""
        self._kept.clear()

    def __repr__(self) -> str:
        return f"<MemorySink | {len(self._kept)} of {self._kept.capacity} events>"


def log_observer(
    logger: logging.Logger | None = None,
    *,
    level: int = logging.DEBUG,
    kinds: Iterable[str] | None = None,
) -> Observer:
    """Return an observer that writes a line to a logger for each event.

    Faults are logged as warnings, all else at `level`. Names are written without control
    characters, so that none can forge a line or drive a terminal.

    Args:
        logger: None takes the logger "aioreplica.telemetry".
        level: The level of what is not a fault.
        kinds: The fields of `Observer` that are wanted; None wants all.

    Raises:
        ValueError: If a kind is unknown.
    """
    chosen = logger or logging.getLogger("aioreplica.telemetry")

    def emit(event: Event) -> None:
        at = logging.WARNING if event.kind == "fault" else level
        if chosen.isEnabledFor(at):
            chosen.log(at, "%s", describe_event(event))

    return events_to(emit, kinds=kinds)


def describe_event(event: Event) -> str:
    """Return an event as one line.

    Example:
        >>> describe_event(Event(0.5, "scalar", "loss", 3, 0, 0.25))
        'step 3, replica 0: scalar loss 0.25'
    """
    where = [] if event.step == NO_STEP else [f"step {event.step}"]
    where += [] if event.replica_id is None else [f"replica {event.replica_id}"]
    value = "" if event.value is None else f" {event.value}"
    text = f"{event.kind} {event.name}{value}"
    return printable(f"{', '.join(where)}: {text}" if where else text)


def error_text(error: BaseException) -> str:
    """Return type and text of an exception, whatever its `str` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - of the user
        return type(error).__name__


def _tell_checkpoint(tell: Callable[..., None], done: ObservedCheckpoint) -> None:
    step = NO_STEP if done.step is None else done.step
    value = None if done.error is None else error_text(done.error)
    tell("checkpoint", done.kind, step, None, value)


def _functions(
    emit: Callable[[Event], None], now: Callable[[], float]
) -> dict[str, Callable[..., None]]:
    """Return a function for each kind, which describes what it is told."""

    def tell(
        kind: str, name: str, step: int, replica_id: int | None = None, value: Any = None
    ) -> None:  # Any: a number or a text
        emit(Event(now(), kind, name, step, replica_id, value))

    def replica_began(run: ObservedRun, replica_id: int, _context: Context) -> None:
        tell("replica", "begin", run.step, replica_id)

    def replica_ended(run: ObservedRun, replica_id: int, error: BaseException | None) -> None:
        tell("replica", "end", run.step, replica_id, None if error is None else error_text(error))

    def run_happened(what: str, run: ObservedRun) -> None:
        tell("run", what, run.step, None, run.fn_name)

    def call_made(call: ObservedCall) -> None:
        tell("call", call.describe(), NO_STEP, call.replica_id, call.site)

    def wait_happened(what: str, wait: ObservedWait) -> None:
        tell("wait", wait.describe(), NO_STEP, None, what)

    def merge_began(merge: ObservedMerge) -> None:
        tell("merge", merge.describe(), merge.step, None, "begin")

    def merge_ended(merge: ObservedMerge, error: BaseException | None) -> None:
        value = None if error is None else error_text(error)
        tell("merge", merge.describe(), merge.step, None, value)

    def value_received(message: ObservedMessage) -> None:
        tell("message", message.describe(), message.step, message.members[1])

    def op_happened(what: str, op: ObservedOp, lane: str) -> None:
        tell("op", op.fn_name, NO_STEP, op.replica_id, f"{what} on {lane}")

    return {
        "replica_began": replica_began,
        "replica_ended": replica_ended,
        "run_began": partial(run_happened, "begin"),
        "run_ended": partial(run_happened, "end"),
        "call_made": call_made,
        "wait_began": partial(wait_happened, "begin"),
        "wait_ended": partial(wait_happened, "end"),
        "merge_began": merge_began,
        "merge_ended": merge_ended,
        "value_received": value_received,
        "op_queued": partial(op_happened, "queued"),
        "op_started": partial(op_happened, "started"),
        "op_ended": partial(op_happened, "ended"),
        "write_published": lambda number: tell("write", "published", NO_STEP, None, number),
        "fault": lambda step, error: tell(
            "fault", type(error).__name__, step, None, error_text(error)
        ),
        "event_added": emit,
        "checkpoint_ended": partial(_tell_checkpoint, tell),
    }
