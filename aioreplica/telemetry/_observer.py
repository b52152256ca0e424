"""The observer protocol: the one way to be told what happens in runs.

An `Observer` names the kinds of events it wants by giving a function for each; `Observers` holds
those of one strategy, one slot per kind. A kind that no observer wants is None, so telling costs
one test:

    if (tell := observers.call_made) is not None:
        tell(call)

Events are live objects, described by the protocols below. They are read at once or let go: an
observer that keeps one keeps the arrays of a step alive.
"""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, fields
from functools import partial
from threading import Lock
from types import CodeType
from typing import NamedTuple, Protocol, TypeAlias, final

from .._functions import is_async, require_no_yield
from ..context import REGISTRY, Living
from ..typing import ReduceOp

Visit: TypeAlias = tuple[CodeType, int, float]
"""One replica's call: the code object and byte offset it was made at, and when it arrived."""


@final
class Event(NamedTuple):
    """Something that happened, in strings and numbers.

    Attributes:
        time_s: When, on the event loop's clock.
        kind: In `strategy.events`: "loop", "infeed", "outside" or "scalar". What sinks are given
            has these and "run", "replica", "call", "wait", "merge", "message", "op", "write",
            "fault" and "checkpoint".
        name: What: "begin" or "end" of a loop or a run, "exhausted", a cluster, a function, a
            collective, or what the user named. An "end" of a loop comes for failed ones too; its
            value says how many steps are complete.
        step: Number of the step in its strategy; for a loop that of its first step; -1 for what
            belongs to no step.
        replica_id: Whose it is; None for all replicas together.
        value: A number or a text that belongs to it; None if there is none.
    """

    time_s: float
    kind: str
    name: str
    step: int
    replica_id: int | None
    value: float | str | None


MergeEntry: TypeAlias = tuple[
    float,
    int,
    int,
    str,
    ReduceOp | None,
    tuple[int, ...],
    tuple[int, ...],
    Sequence[Visit],
]
"""A merge as it is recorded: end, step, sequence, collective, operator, sizes, members, visits."""


MessageEntry: TypeAlias = tuple[float, int, int, str | None, tuple[int, int], Sequence[Visit]]
"""A value that was handed over, as it is recorded: end, step, number, tag, the two, their calls."""


class ObservedCall(Protocol):
    """One replica's call of a collective, or its send or receive."""

    @property
    def replica_id(self) -> int:
        """Index of the caller among the replicas of the run."""

    @property
    def sequence(self) -> int:
        """Number of the call among those of its replica in its group, from 1."""

    @property
    def run(self) -> object:
        """Identifies the run, together with `members` the group that the call is numbered in."""

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that it is to meet, ascending."""

    @property
    def file(self) -> str:
        """Source file of the call."""

    @property
    def line(self) -> int:
        """Source line of the call."""

    @property
    def site(self) -> str:
        """File and line of the call, with a colon between them."""

    def describe(self) -> str:
        """Name the collective with its number and argument, such as "all_reduce #3 (SUM)"."""


class ObservedMerge(Protocol):
    """One generation of calls that meet."""

    @property
    def step(self) -> int:
        """Number of the run in its strategy."""

    @property
    def sequence(self) -> int:
        """Number of the collective in its group, from 1."""

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that meet, ascending."""

    def missing_members(self) -> tuple[int, ...]:
        """Return the replicas that have not arrived."""

    def describe(self) -> str:
        """Name the collective with its number and argument."""

    def entry(self, time_s: float, /) -> MergeEntry:
        """Return what is recorded of it, once it has ended, at that time."""


class ObservedMessage(Protocol):
    """A value that one replica has sent and another one has received."""

    @property
    def step(self) -> int:
        """Number of the run in its strategy."""

    @property
    def members(self) -> tuple[int, int]:
        """The replica that sent it, and the one that has received it."""

    def describe(self) -> str:
        """Name the receive with its number, such as "receive #3 from replica 0"."""

    def entry(self, time_s: float, /) -> MessageEntry:
        """Return what is recorded of it, at that time."""


class ObservedWait(Protocol):
    """Wait of a task or a device thread of a replica inside the library."""

    def describe(self) -> str:
        """Say what is waited for, such as "all_reduce #3 (SUM)" or "the infeed"."""

    def missing_members(self) -> tuple[int, ...]:
        """Return the replicas whose arrival is waited for; empty for other waits."""

    def awaited(self) -> Future[object] | None:
        """Return the task on the event loop that is waited for; None for other waits."""


@final
class ThreadWait:
    """Wait of a device thread for something else than replicas; an `ObservedWait`."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def describe(self) -> str:
        """Say what is waited for."""
        return self._what

    def missing_members(self) -> tuple[int, ...]:
        """Return none: no replica is waited for."""
        return ()

    def awaited(self) -> None:
        """Return None: no task is waited for."""


class ObservedRun(Protocol):
    """One run of a step function."""

    @property
    def step(self) -> int:
        """Number of the run in its strategy."""

    @property
    def fn_name(self) -> str:
        """Name of the step function."""

    @property
    def works(self) -> Sequence[Future[object] | None]:
        """One task (or op of a plain function) per replica; None before it starts."""


class ObservedOp(Protocol):
    """A call on its way through a device's lane."""

    @property
    def fn_name(self) -> str:
        """Name of the function that the op runs."""

    @property
    def seconds(self) -> float:
        """Duration in seconds; 0 before its end."""

    @property
    def replica_id(self) -> int | None:
        """Index of the replica that made it; None outside steps."""

    @property
    def context(self) -> Context:
        """The context variables that it runs with; no other op has them."""

    @property
    def error(self) -> BaseException | None:
        """Exception that it has raised; None before its end, and if it raised none."""


@final
@dataclass(frozen=True, slots=True)
class ObservedCheckpoint:
    """A save or a restore that has ended. Told in the task that wrote, or that restored.

    Attributes:
        kind: "save" or "restore".
        step: Which step; None if the newest one was to be restored, and none was.
        began_s: When it began, by `time.monotonic`; of a save, once the steps under way had ended.
        seconds: How long it took.
        num_bytes: Length of the data files that a save has written.
        error: Exception that it raised; None if it was saved or restored.
    """

    kind: str
    step: int | None
    began_s: float
    seconds: float
    num_bytes: int
    error: BaseException | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Callbacks for the events of a run; a kind that is None is not wanted.

    Functions are called where the event happens, on the event loop or on a device thread, and must
    return quickly. What they raise is logged and does not reach the run, and the observer is told
    no more.

    Attributes:
        replica_began: A replica is about to start: its run, its id, and the context variables it
            will run with, where the observer may set some of its own.
        replica_ended: A replica has ended: its run, its id, and what it raised, else None.
        run_began: A run has started its replicas.
        run_ended: A run is over.
        call_made: A replica has called a collective, or sends or receives.
        wait_began: The current task, or the current device thread, begins to wait.
        wait_ended: It waits no longer, for whatever reason.
        merge_began: All members have arrived.
        merge_ended: The result is handed out; with the error if the merge failed, else None.
        value_received: A value that a replica sent is handed to the one that receives it.
        op_queued: An op was put on a lane, together with the lane's name.
        op_started: A lane's thread begins an op.
        op_ended: It has ended the op.
        write_published: Variables have new values: the number of the write.
        fault: A run ends early: its step, and why.
        event_added: `strategy.events` has got an event, such as a number that a step records.
        checkpoint_ended: A CheckpointManager has saved or restored a step, or failed to.
    """

    replica_began: Callable[[ObservedRun, int, Context], None] | None = None
    replica_ended: Callable[[ObservedRun, int, BaseException | None], None] | None = None
    run_began: Callable[[ObservedRun], None] | None = None
    run_ended: Callable[[ObservedRun], None] | None = None
    call_made: Callable[[ObservedCall], None] | None = None
    wait_began: Callable[[ObservedWait], None] | None = None
    wait_ended: Callable[[ObservedWait], None] | None = None
    merge_began: Callable[[ObservedMerge], None] | None = None
    merge_ended: Callable[[ObservedMerge, BaseException | None], None] | None = None
    value_received: Callable[[ObservedMessage], None] | None = None
    op_queued: Callable[[ObservedOp, str], None] | None = None
    op_started: Callable[[ObservedOp, str], None] | None = None
    op_ended: Callable[[ObservedOp, str], None] | None = None
    write_published: Callable[[int], None] | None = None
    fault: Callable[[int, BaseException], None] | None = None
    event_added: Callable[[Event], None] | None = None
    checkpoint_ended: Callable[[ObservedCheckpoint], None] | None = None

    def __post_init__(self) -> None:
        """Check that calling the functions runs them."""
        for kind in KINDS:
            tell = getattr(self, kind)
            if tell is None:
                continue
            if is_async(tell):
                raise TypeError(f"An observer's {kind} must be a plain function, got {tell!r}.")
            require_no_yield(tell, f"An observer ({kind})", "Make it a plain function.")


KINDS = tuple(field.name for field in fields(Observer))
"""The kinds of events that an observer may want."""


@final
class Observers:
    """The observers of the runs of one strategy, or of one CheckpointManager.

    Args:
        own: The strategy's own observer, which is told first.

    Every kind is an attribute: None if no observer wants it, else a function that tells those that
    do, in the order in which they were added.

    Example:
        >>> observers, seen = Observers(), []
        >>> remove = observers.add(Observer(write_published=seen.append))
        >>> observers.call_made is None
        True
        >>> observers.write_published(3)
        >>> remove()
        >>> observers.write_published is None, seen
        (True, [3])
    """

    __slots__ = (*KINDS, "__weakref__", "_added", "_lock", "_own")

    replica_began: Callable[[ObservedRun, int, Context], None] | None
    replica_ended: Callable[[ObservedRun, int, BaseException | None], None] | None
    run_began: Callable[[ObservedRun], None] | None
    run_ended: Callable[[ObservedRun], None] | None
    call_made: Callable[[ObservedCall], None] | None
    wait_began: Callable[[ObservedWait], None] | None
    wait_ended: Callable[[ObservedWait], None] | None
    merge_began: Callable[[ObservedMerge], None] | None
    merge_ended: Callable[[ObservedMerge, BaseException | None], None] | None
    value_received: Callable[[ObservedMessage], None] | None
    op_queued: Callable[[ObservedOp, str], None] | None
    op_started: Callable[[ObservedOp, str], None] | None
    op_ended: Callable[[ObservedOp, str], None] | None
    write_published: Callable[[int], None] | None
    fault: Callable[[int, BaseException], None] | None
    event_added: Callable[[Event], None] | None
    checkpoint_ended: Callable[[ObservedCheckpoint], None] | None

    def __init__(self, own: Observer | None = None) -> None:
        self._own = own
        self._lock = Lock()  # one that fails is removed in the thread where it does
        self._added: list[Observer] = []
        self._tell()
        _everywhere().join(self)

    def add(self, observer: Observer) -> Callable[[], None]:
        """Tell an observer from now on; call what is returned to stop that."""
        with self._lock:
            self._added.append(observer)
            self._tell()
        return partial(self.remove, observer)

    def remove(self, observer: Observer) -> None:
        """Stop telling an observer; idempotent."""
        with self._lock:
            self._added = [each for each in self._added if each is not observer]
            self._tell()

    def made(self, call: ObservedCall) -> None:
        """Tell of a call that was numbered."""
        if (tell := self.call_made) is not None:
            tell(call)

    def began_to_wait(self, wait: ObservedWait) -> None:
        """Tell that the current task or thread waits from now on."""
        if (tell := self.wait_began) is not None:
            tell(wait)

    def ended_to_wait(self, wait: ObservedWait) -> None:
        """Tell that it waits no longer."""
        if (tell := self.wait_ended) is not None:
            tell(wait)

    def _tell(self) -> None:
        for kind in KINDS:
            own = getattr(self._own, kind, None)
            told = [each for each in self._added if getattr(each, kind) is not None]
            setattr(self, kind, self._all_of(kind, own, told) if told else own)

    def _all_of(
        self, kind: str, own: Callable[..., None] | None, observers: Sequence[Observer]
    ) -> Callable[..., None]:
        """Return one function that tells all, and drops those of `observers` that raise."""
        told = [(observer, getattr(observer, kind)) for observer in observers]

        def tell_all(*event: object) -> None:
            if own is not None:
                own(*event)
            for observer, tell in told:
                try:
                    tell(*event)
                except Exception:
                    self.remove(observer)
                    _everywhere().drop(observer)
                    logging.getLogger("aioreplica.telemetry").warning(
                        "An observer failed when it was told of %s (%r). It is told no more.",
                        kind, tell, exc_info=True,
                    )  # fmt: skip

        return tell_all

    def __repr__(self) -> str:
        kinds = ", ".join(kind for kind in KINDS if getattr(self, kind) is not None)
        return f"<Observers | {len(self._added)} want {kinds or 'nothing'}>"


def observe_everywhere(observer: Observer) -> Callable[[], None]:
    """Add an observer to every strategy and CheckpointManager of the process, also those to come.

    Call what is returned to stop that. Events of all event loops and threads are told.
    """
    return _everywhere().add(observer)


@final
class _Everywhere:
    """Observers of all strategies of the process."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._strategies: Living[Observers] = Living()
        self._lock = Lock()  # a strategy that is made meanwhile is told once, not twice or never

    def join(self, strategy: Observers) -> None:
        """Let a strategy tell those that there are, and those to come."""
        with self._lock:
            for observer in self._observers:
                strategy.add(observer)
            self._strategies.add(strategy)

    def add(self, observer: Observer) -> Callable[[], None]:
        """Have every strategy tell an observer; call what is returned to stop that."""
        with self._lock:
            self._observers.append(observer)
            for each in self._strategies:
                each.add(observer)
        return partial(self.remove, observer)

    def remove(self, observer: Observer) -> None:
        """Have no strategy tell an observer any more; idempotent."""
        with self._lock:
            self._observers = [each for each in self._observers if each is not observer]
            for each in self._strategies:
                each.remove(observer)

    def drop(self, observer: Observer) -> None:
        """Remove an observer that has failed; one of single strategies stays with the others."""
        if any(each is observer for each in self._observers):
            self.remove(observer)


def _everywhere() -> _Everywhere:
    return REGISTRY.once("observers", _Everywhere)
