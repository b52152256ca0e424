"""Parts of a meeting: the members, the collective, and the call of each replica.

A `SyncGroup` is some replicas of a run, or all. A `Call` is what one of them brought to a
`Collective`. The calls with one number of a group are a `Generation`; when it is complete the
collective merges them, at once or, if there is something to await, as a `Pending`.

One call is made per collective and replica, one generation per merge, so both are built by plain
functions, without the frame of an `__init__`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, final

from ..collectives import CommunicationOptions, Reducer, Turn
from ..context import DEFAULT_PLACE, REGISTRY, CurrentStrategy, Place
from ..errors import ContextError
from ..telemetry import MergeEntry, source_line
from ._pending import Pending

Parts: TypeAlias = Sequence[Any]
"""One result per replica, in replica order. Any: results of collectives have every type."""

_new = object.__new__


class WaitedFor(Protocol):
    """Something that a replica can wait for: a generation of calls, or a message."""

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that it concerns."""

    @property
    def sequence(self) -> int:
        """Number among its like."""

    @property
    def missing(self) -> int:
        """Number of replicas that have to come before the wait can end."""

    @property
    def is_merged(self) -> bool:
        """True if those who wait were released."""

    def describe(self) -> str:
        """Name it, with its number."""

    def missing_members(self) -> tuple[int, ...]:
        """Return the replicas that have to come."""

    def awaited(self) -> None:
        """Return None: only replicas are waited for."""

    def call_of(self, replica_id: int, /) -> Any:  # Any: a Call or a Transfer, which imports this
        """Return the call of a replica that waits."""


@final
class CallSite(NamedTuple):
    """Line of a call, in place of its frame, which would keep variables alive."""

    f_code: CodeType
    f_lasti: int

    @staticmethod
    def of(frame: FrameType) -> CallSite:
        """Remember where a frame is now."""
        return CallSite(frame.f_code, frame.f_lasti)


class AcrossWorkers(Protocol):
    """Interface of a run's connection with other workers."""

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""

    def merge(self, generation: Generation) -> Pending:
        """Take a turn for a generation that is complete here; return what to await."""

    def group(self, ids: tuple[int, ...]) -> AcrossWorkers:
        """Return that of some replicas, of several workers."""

    def absent_workers(self) -> tuple[int, ...] | None:
        """Return the workers that have not come to where this one waits; None if not known."""


@final
class SyncGroup:
    """Replicas that meet in collectives, in ascending order: all of a run, or some of them.

    Args:
        members: Their replica ids.
        device_names: One per member.
        runtime: The strategy; None where decisions alone are made.
        merge_place: Where merge functions run.
        reducer: Does the work on arrays; None where decisions alone are made.
        step: Number of the run in its strategy.
        has_plain_values: Whether merge functions get plain values (the default strategy).
        is_blocking: Whether they meet on their device threads, where all work is done at once.
        whole: The group of all replicas of the run, of which this is a part; None if it is that.
        across: The same run of other workers, whose replicas it meets too; None if there are none.
        ids: The members among the replicas of all workers, if it is a part with some of others.

    Attributes:
        num_replicas: How many members there are.
        strategy: What merge functions get.
        open: The generations that are not complete, by sequence number.
        is_partial: Whether it is a part of the run's replicas, which tables then name.
        timeout_s: How long members wait for each other unless a call says otherwise, in seconds.
    """

    __slots__ = (
        "_ids", "_runtime", "_whole", "across", "device_names", "has_plain_values", "is_blocking",
        "is_partial", "members", "merge_place", "num_replicas", "open", "reducer", "step",
        "strategy", "timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        members: Sequence[int],
        device_names: Sequence[str] = (),
        runtime: CurrentStrategy | None = None,
        merge_place: Place = DEFAULT_PLACE,
        reducer: Reducer | None = None,
        step: int = 0,
        *,
        has_plain_values: bool = False,
        is_blocking: bool = False,
        whole: SyncGroup | None = None,
        across: AcrossWorkers | None = None,
        ids: tuple[int, ...] = (),
    ) -> None:
        self.across = across
        self._ids = ids
        self.members = tuple(members)
        self.num_replicas = len(self.members)
        self.device_names = device_names
        self._runtime = runtime
        self.strategy: Any = None
        if runtime is not None:
            is_all = whole is None
            self.strategy = runtime.facade if is_all else runtime.view_of(self.members, across)
        self.merge_place = merge_place
        self.reducer: Reducer = reducer  # type: ignore[assignment]  # see above
        self.step = step
        self.has_plain_values = has_plain_values
        self.is_blocking = is_blocking
        self.is_partial = whole is not None
        self._whole = whole
        self.open: dict[int, Generation] = {}
        self.timeout_s = None if reducer is None else reducer.options.timeout_seconds

    def part(self, members: tuple[int, ...], ids: tuple[int, ...] = ()) -> SyncGroup:
        """Return the group of some of the members, and of those of other workers with these ids.

        Raises:
            ValueError: If there are more of them on one worker than on another.
        """
        whole, place = self.run, self.merge_place
        across = None if whole.across is None or not ids else whole.across.group(ids)
        if whole.across is not None:
            # As many members of each worker, and as many replicas: so these are ratios of workers.
            num_here, num_in_all = len(members) * whole.across.num_replicas, len(ids or members)
            if num_here > num_in_all * whole.num_replicas:
                place = Place(
                    place.strategy, in_merge=True, holds_devices=place.holds_devices,
                    lacks_workers=True,
                )  # fmt: skip
        return SyncGroup(
            members,
            [self.device_names[i] for i in members],
            self._runtime,
            place,
            self.reducer,
            self.step,
            has_plain_values=self.has_plain_values,
            is_blocking=self.is_blocking,
            whole=whole,
            across=across,
            ids=ids,
        )

    def global_id(self, replica_id: int) -> int:
        """Return the id that a replica of this process has among those of all workers."""
        across = self.run.across
        return replica_id if across is None else across.first_replica + replica_id

    @property
    def global_members(self) -> tuple[int, ...]:
        """The ids of the members among the replicas of all workers."""
        across = self.run.across
        if across is not None and not self.is_partial:
            return tuple(range(across.num_replicas))
        return self._ids or tuple(map(self.global_id, self.members))

    @property
    def run(self) -> SyncGroup:
        """The group of all replicas of the run."""
        return self._whole or self

    def __repr__(self) -> str:
        return f"<SyncGroup {self.members} | {len(self.open)} open>"


class Collective(ABC):
    """One kind of collective; stateless, one instance per process.

    Args:
        name: What users call it, such as "all_reduce".

    Attributes:
        name: The same.
        is_uneven: Whether replicas may bring values of different sizes.
        is_reduction: Whether the decisive argument has an operator, as `op`.
    """

    __slots__ = ("name",)
    is_uneven = False
    is_reduction = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def detail(self, argument: Any) -> str:
        """Describe the decisive argument for tables; may be empty."""

    def options(self, argument: Any) -> CommunicationOptions | None:
        """Return the options of a call, None if it has none of its own."""
        return None

    def num_bytes(self, call: Call) -> int:
        """Return the size of what one replica brought."""
        return 0

    @abstractmethod
    def agrees(self, first: Call, call: Call) -> bool:
        """Tell quickly whether two calls of this collective can merge."""

    @abstractmethod
    def difference(self, first: Call, call: Call) -> str | None:
        """Say in words why two calls cannot merge; None exactly if they agree."""

    @abstractmethod
    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Merge the calls of all members, at once or, if that takes long, in a task."""

    def signature(self, call: Call) -> str:
        """Say what of a call has to be equal on all workers: what `agrees` compares."""
        return self.detail(call.argument)

    def across(
        self, group: SyncGroup, calls: Sequence[Call], turn: Turn
    ) -> Coroutine[object, None, Parts]:
        """Merge the calls of all members, and what other workers have made of theirs.

        Returns:
            What to await for the parts. The turn lasts as long.

        Raises:
            ContextError: If the collective is for the replicas of one worker only.
        """
        raise ContextError(
            f"{self.name} does not go to other workers. Use it under a strategy of one worker, or "
            "in a group of the replicas of one."
        )


@final
class Call:
    """Arguments that a replica brought to a collective, and the line of its call.

    Its line is looked up when it is wanted: only errors and readers of the record do.

    Attributes:
        collective: Which collective was called.
        argument: Its decisive argument: the merge function, or the reduce op.
        args: Positional arguments of the merge function, or what a collective works on.
        kwargs: Keyword arguments of the merge function.
        group: Whom it wants to meet.
        position: Index of the caller in that group.
        sequence: Number of the call among those of its replica in that group, from 1; 0 as long as
            it has none, and for what is not a collective.
        context: Context variables at the await, for the group's first member only.
        code: The code object that made the call.
        instruction: Where in it, as a byte offset.
    """

    __slots__ = (
        "args", "argument", "code", "collective", "context", "group", "instruction", "kwargs",
        "position", "sequence",
    )  # fmt: skip

    collective: Collective
    argument: Any  # Any: each collective has its own kind of argument
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    group: SyncGroup
    position: int
    sequence: int
    context: Context
    code: CodeType
    instruction: int

    @property
    def replica_id(self) -> int:
        """Index of the caller among the replicas of the run."""
        return self.group.members[self.position]

    @property
    def run(self) -> object:
        """Identifies the run."""
        return self.group.run

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that it is to meet."""
        return self.group.members

    @property
    def file(self) -> str:
        """Source file of the call."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Source line of the call."""
        return source_line(self.code, self.instruction)

    @property
    def site(self) -> str:
        """File and line of the call, with a colon between them."""
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        """Name the collective with its argument and number, such as "all_reduce #3 (SUM)"."""
        detail = self.collective.detail(self.argument)
        number = f" #{self.sequence}" if self.sequence else ""
        text = f"{self.collective.name}{number}" + (f" ({detail})" if detail else "")
        return f"{text} in group {self.group.global_members}" if self.group.is_partial else text


def new_call(
    collective: Collective,
    argument: object,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None,
    group: SyncGroup,
    position: int,
    sequence: int,
    frame: FrameType | CallSite,
) -> Call:
    """Make the call that a replica made at `frame`; 0 stands for a number that is set later."""
    call = _new(Call)
    call.collective = collective
    call.argument = argument
    call.args = args
    call.kwargs = kwargs
    call.group = group
    call.position = position
    call.sequence = sequence
    call.code = frame.f_code
    call.instruction = frame.f_lasti
    return call


@final
class Generation:
    """The calls with one sequence number of a group: one per member, as they arrive.

    Attributes:
        group: Whose calls.
        first: The call that arrived first; the others are compared with it.
        calls: One per member, None for those who are missing.
        visits: Where each call was made and when it arrived, for the recorder.
        missing: How many are.
        is_merged: Whether the members have been released.
        waiter: The future that all waiting tasks share; it carries no result, only the wake-up.
        watchers: Futures of tasks that wait for what was started, and may stop waiting; or None.
        timer: What ends the run if the members do not meet in time, or None.
        pending: The merge, if it takes longer, or None.
        parts: One result per member, once it is merged.
        error: What the merge raised, or None.
        traceback: Where it was raised: each member that raises it again adds its own frames.

    Invariants:
        * `is_merged` is set after `parts` and `error`.
    """

    __slots__ = (
        "calls", "error", "first", "group", "is_merged", "missing", "parts", "pending", "timer",
        "traceback", "visits", "waiter", "watchers",
    )  # fmt: skip

    group: SyncGroup
    first: Call
    calls: list[Any]  # of Call | None; of Call alone once none is missing
    visits: list[Any]  # of Visit
    missing: int
    is_merged: bool
    waiter: asyncio.Future[None] | None
    watchers: list[asyncio.Future[None]] | None
    timer: asyncio.TimerHandle | None
    pending: Pending | None
    parts: Parts
    error: BaseException | None
    traceback: TracebackType | None

    @property
    def step(self) -> int:
        """Number of the run in its strategy."""
        return self.group.step

    @property
    def sequence(self) -> int:
        """Number of the collective in its group."""
        return self.first.sequence

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that meet."""
        return self.group.members

    def describe(self) -> str:
        """Name the collective with its number and argument."""
        return self.first.describe()

    def call_of(self, replica_id: int) -> Call:
        """Return what a member brought, who has arrived."""
        call: Call = self.calls[self.group.members.index(replica_id)]
        return call

    def lacks(self, replica_id: int) -> bool:
        """Tell whether a replica is a member who has not arrived."""
        members = self.group.members
        return replica_id in members and self.calls[members.index(replica_id)] is None

    def present_members(self) -> tuple[int, ...]:
        """Return the members who have arrived."""
        pairs = zip(self.group.members, self.calls, strict=True)
        return tuple(member for member, call in pairs if call is not None)

    def missing_members(self) -> tuple[int, ...]:
        """Return the members who have not."""
        pairs = zip(self.group.members, self.calls, strict=True)
        return tuple([member for member, call in pairs if call is None])

    def awaited(self) -> None:
        """Return None: only replicas are waited for."""

    def new_watcher(self, loop: asyncio.AbstractEventLoop | None) -> asyncio.Future[None]:
        """Return a future that is done when the waiter is; cancelling it leaves that one alone."""
        watcher: asyncio.Future[None] = asyncio.Future(loop=loop)
        if self.watchers is None:
            self.watchers = []
        self.watchers.append(watcher)
        return watcher

    def discard(self) -> None:
        """Close what its merge would have awaited, which never begins."""
        if self.pending is not None:
            self.pending.discard()

    def give_up(self) -> None:
        """Cancel all who wait, on the event loop."""
        if self.timer is not None:
            self.timer.cancel()
        for future in (self.waiter, *(self.watchers or ())):
            if future is not None:
                future.cancel()

    async def unread(self) -> None:
        """Wait until nothing reads the replicas' own arrays, through every cancellation."""
        reading = None if self.pending is None else self.pending.reading(self.calls[0])
        if reading is not None:
            await reading.over()

    def take(self, position: int) -> object:
        """Take a member's part out, so that its memory is free as soon as the replica lets go.

        Raises:
            BaseException: What the merge raised.
        """
        if self.error is not None:
            self.raise_error()
        parts = self.parts
        part = parts[position]
        if type(parts) is list:
            parts[position] = None
        return part

    def look(self, position: int) -> object:
        """Return a member's part, or raise what the merge raised; as often as wanted."""
        if self.error is not None:
            self.raise_error()
        return self.parts[position]

    def raise_error(self) -> None:
        """Raise what the merge raised, with the frames of the merge itself."""
        error = self.error
        if isinstance(error, StopIteration):  # would look like the end of a coroutine
            raise RuntimeError(f"A merge raised {error!r}.") from error
        if error is not None:
            raise error.with_traceback(self.traceback)

    def entry(self, time_s: float) -> MergeEntry:
        """Return the record of the merge, which ended at that time: nothing of what was brought."""
        first: Call = self.calls[0]
        collective, group = first.collective, self.group
        if collective.is_uneven:
            sizes = tuple(map(collective.num_bytes, self.calls))
        else:
            sizes = (collective.num_bytes(first),)
        op = first.argument.op if collective.is_reduction else None
        return (time_s, group.step, first.sequence, collective.name, op, sizes, group.members,
                self.visits)  # fmt: skip

    def __repr__(self) -> str:
        return f"<Generation {self.first.describe()} | {self.missing} missing>"


def new_generation(group: SyncGroup, first: Call) -> Generation:
    """Open the generation of a call that is the first of its number to arrive."""
    generation = _new(Generation)
    generation.group = group
    generation.first = first
    size = len(group.members)
    generation.calls = [None] * size
    generation.visits = [None] * size
    generation.missing = size
    generation.is_merged = False
    generation.waiter = generation.timer = generation.pending = generation.error = None
    generation.watchers = None
    group.open[first.sequence] = generation
    return generation


def collective_named(kind: Callable[[str], Collective], name: str) -> Collective:
    """Return the one collective of a kind that tables show as `name`."""
    return _named(kind, name)


@lru_cache(maxsize=256)
def _named(kind: Callable[[str], Collective], name: str) -> Collective:
    # A cache that two threads miss at once gives each its own, and replicas compare identities.
    made = REGISTRY.once("named_collectives", dict[tuple[object, str], Collective])
    return made.setdefault((kind, name), kind(name))
