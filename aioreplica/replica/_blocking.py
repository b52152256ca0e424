"""The blocking twin of a replica context: collectives that wait on the device thread."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..context import PLACE, Place
from ..devices import HOST, name_of_served_lane
from ..values import Variable
from ._bridge import BridgedCall, CallSite, require_no_loop
from ._call import new_call
from ._clusters import ClusterNames
from ._collective import Collective
from ._collectives import Collectives
from ._group_context import require_members
from ._handle import Handle
from ._merge_call import merge_call_named
from ._misuse import blocking_misuse_error, no_blocking_handle_error
from ._seat import Seat
from ._sync_group import Generation, SyncGroup
from ._thread_point import ThreadPoint
from ._variables import create_variable, update_variable

if TYPE_CHECKING:
    from ..collectives import CommunicationOptions
    from ..typing import ReduceOp
    from ._group import ReplicaGroup

T = TypeVar("T")


class BlockingCollectives(Collectives):
    """The collectives of `Collectives`, which return their results instead of awaitables.

    Replicas of a plain step function meet on their device threads, without a trip through the
    event loop: the last one to arrive computes and wakes the others.

    Cancellation:
        When the run ends early, all parked threads wake at once with a CancelledError.

    Determinism:
        Bitwise the same results as the awaitable collectives.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # the same methods; what they return is there already

        def merge_call(
            self,
            merge_fn: Callable[..., Any],
            args: Sequence[Any] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any: ...
        def all_reduce(
            self, op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
        ) -> Any: ...
        def reduce_scatter(self, op: ReduceOp | str, value: Any, axis: int = 0) -> Any: ...
        def all_gather(
            self, value: Any, axis: int, options: CommunicationOptions | None = None
        ) -> Any: ...
        def all_to_all(self, value: Any, axis: int = 0) -> Any: ...
        def broadcast(self, value: Any, source: int = 0) -> Any: ...
        def barrier(self) -> None: ...  # type: ignore[override]
        def any(self, flag: Any) -> bool: ...  # type: ignore[override]
        def all(self, flag: Any) -> bool: ...  # type: ignore[override]
        def agree(self, value: T) -> T: ...  # type: ignore[override]

    def _start(
        self, collective: Collective, argument: Any, args: tuple[Any, ...], frame: FrameType
    ) -> Handle:
        raise no_blocking_handle_error()


@final
class BlockingContext(BlockingCollectives):
    """What a plain function calls to meet the other replicas; got as `ctx.blocking`.

    Usable on the device thread of its replica only (ContextError elsewhere). In a plain step
    function and a device loop the threads meet by themselves. A function that an `async def` step
    runs with `ctx.run_on_device` meets on the event loop, whatever the others call; its lane serves
    other ops while it waits.

    Attributes:
        clusters: Names the calls that leave the device program.
    """

    __slots__ = ("_group", "_live", "_point", "_seat", "_thread_id", "clusters")

    def __init__(self, seat: Seat, group: ReplicaGroup) -> None:
        self._seat = seat
        self._group = group
        self._point = group.threads
        self.clusters = ClusterNames()
        self._live: Place | None = None
        self._thread_id = 0

    def enter(self, place: Place) -> None:
        """Belong to the calling thread from now on; called by the strategy."""
        self._thread_id = self._seat.thread_id = get_ident()
        self._live = place

    def leave(self) -> None:
        """Refuse everything from now on; called by the strategy."""
        self._live = None

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica, from 0."""
        return self._seat.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas meet in a collective."""
        return self._group.num_replicas

    @property
    def step(self) -> int:
        """Number of the step under way, in its strategy."""
        return self._group.step + self._seat.steps_done

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the replica's, inside its step function."""
        return PLACE.get() is self._live and get_ident() == self._thread_id

    @property
    def is_live(self) -> bool:
        """Whether the replica runs a device program now, on whatever thread."""
        return self._live is not None

    def check_running(self) -> None:
        """Raise CancelledError if the run was aborted."""
        if self._group.is_aborted:
            raise CancelledError

    def group(self, members: Iterable[int]) -> BlockingGroup:
        """Return the collectives among some of the replicas, which this one must be one of.

        Args:
            members: Ids of the replicas, in any order; every member has to name the same.

        Raises:
            TypeError: If they are no ints.
            ValueError: If there is none, one is repeated or is not a replica, or this one is left
                out.
            ContextError: If called elsewhere than on the replica's device thread.
        """
        point = self._group.point if self._is_in_op else self.require_here("group")
        ids = require_members(members, self._seat.replica_id, self._group.num_replicas)
        return BlockingGroup(self, point.sub_group(ids))

    def variable(self, initial_value: Any, **options: Any) -> Variable:
        """Create one distributed variable from inside the step; a collective.

        Args:
            initial_value: As for `ar.Variable`; replica 0's is taken.
            **options: As for `ar.Variable`; equal on all replicas.

        Raises:
            Exception: As `ar.Variable`, and as `merge_call`.
        """
        merge, args = create_variable(initial_value, options)
        made: Variable = self.meet_as("variable", _on_the_loop(merge), args, sys._getframe(1))
        return made

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run replica 0's `fn(var, *args)` once per component, on the event loop.

        Args:
            var: A variable of the strategy, the same on all replicas.
            fn: As for `strategy.extended.update`.
            args: Positional arguments after the variable.
            kwargs: Keyword arguments.
            group: False gives every replica the list of all results instead of its own.

        Raises:
            Exception: As `strategy.extended.update`, and as `merge_call`.
        """
        merge, merged = update_variable(var, fn, args, kwargs, group)
        return self.meet_as("update", _on_the_loop(merge), merged, sys._getframe(1))

    def meet_as(
        self, name: str, merge_fn: Callable[..., Any], args: tuple[Any, ...], frame: FrameType
    ) -> Any:
        """Do a merge_call that tables show as `name`, called at `frame`; for the library."""
        return self._call(merge_call_named(name), merge_fn, args, None, frame)

    def call_on_host(
        self, fn: Callable[..., Any], args: tuple[Any, ...], place: Place, name: str
    ) -> Any:
        """Run a plain or async function on the event loop, where `place` is current, and wait.

        Stall reports show the replica as waiting for `name`.

        Raises:
            Exception: What the function raises.

        Cancellation:
            An async function is cancelled where it waits; the thread is let go at its end.
        """
        point = self.require_here("outside_compilation")
        context = copy_context()
        context.run(PLACE.set, place)
        with self.waiting(name):
            return point.call_on_host(fn, args, context, f"aioreplica {name}")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show the replica as waiting for `what` in stall reports, inside a `with` block."""
        self._seat.activity = what
        try:
            yield
        finally:
            self._seat.activity = None

    def step_ended(self) -> None:
        """Count a step of a device loop; a CancelledError if nobody waits for the next one."""
        self._seat.steps_done += 1
        if self.clusters.num_roots:
            self.clusters.restart()
        if self._point is not None:
            self._point.look()

    def require_device_thread(self, name: str) -> None:
        """Check that the code may wait here, in a device program or an op, for a call of `name`.

        Raises:
            ContextError: If it may not.
        """
        if not self._is_in_op:
            self.require_here(name)

    def require_here(self, name: str) -> ThreadPoint:
        """Check that the code runs on the replica's device thread, for a call of `name`.

        Raises:
            ContextError: If it does not.
        """
        if self._point is None or not self.is_here:
            raise self._misuse(name.rpartition(".")[2])
        return self._point

    def _call(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        frame: FrameType | CallSite,
    ) -> Any:
        point = self._point
        if point is None or PLACE.get() is not self._live or get_ident() != self._thread_id:
            if not self._is_in_op:
                raise self._misuse(collective.name)
            everyone, me = self._group.point.everyone, self._seat.replica_id
            return self._meet_on_loop(everyone, me, collective, argument, args, kwargs, frame)
        seat = self._seat
        seat.sequence = sequence = seat.sequence + 1
        call = new_call(
            collective, argument, args, kwargs, point.everyone, seat.replica_id, sequence, frame
        )
        return point.meet(seat, call)

    def meet(
        self, collective: Collective, argument: Any, args: tuple[Any, ...], site: CallSite
    ) -> Any:
        """Make a call among all replicas, in whatever thread works for this one; for the library.

        Raises:
            ContextError: If an event loop runs in the thread.

        Cancellation:
            CancelledError once the run is aborted.
        """
        require_no_loop(collective.name)
        point, seat = self._point, self._seat
        if point is None:
            everyone = self._group.point.everyone
            return self._meet_on_loop(
                everyone, seat.replica_id, collective, argument, args, None, site
            )
        seat.sequence = sequence = seat.sequence + 1
        call = new_call(
            collective, argument, args, None, point.everyone, seat.replica_id, sequence, site
        )
        return point.meet(seat, call)

    def call_in(
        self,
        group: SyncGroup,
        position: int,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        frame: FrameType,
    ) -> Any:
        """Make a call in a group; for `BlockingGroup`."""
        if self._is_in_op:
            return self._meet_on_loop(group, position, collective, argument, args, kwargs, frame)
        point = self.require_here(collective.name)
        sequence = self._seat.next_in(group)
        call = new_call(collective, argument, args, kwargs, group, position, sequence, frame)
        return point.meet(self._seat, call)

    def _meet_on_loop(
        self,
        group: SyncGroup,
        position: int,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        frame: FrameType | CallSite,
    ) -> Any:
        point, seat = self._group.point, self._seat
        site = CallSite(frame.f_code, frame.f_lasti)

        def arrive() -> Generation:
            sequence = seat.next_in(group)
            call = new_call(collective, argument, args, kwargs, group, position, sequence, site)
            return point.start(seat, call)

        return BridgedCall(point, seat, arrive, self._group.running_loop()).wait()

    @property
    def _is_in_op(self) -> bool:
        """Whether the calling thread runs an op that an `async def` step has put on its device."""
        lane, replica = name_of_served_lane(), PLACE.get().replica
        if lane is None or replica is None or self._point is not None or not self._group.has_loop:
            return False
        is_mine = replica.blocking is self and lane == (replica.device_name or HOST)
        return is_mine and not self._seat.work_is_over

    def _misuse(self, name: str) -> Exception:
        return blocking_misuse_error(
            name, self._seat, self._group.step, self._live, self._point is None
        )

    def __repr__(self) -> str:
        state = "open" if self._live is not None else "closed"
        seat, group = self._seat, self._group
        return (
            f"<BlockingContext {seat.replica_id}/{group.num_replicas} | step {group.step}, "
            f"{seat.sequence} collectives, {state}>"
        )


@final
class BlockingGroup(BlockingCollectives):
    """One replica's place in a group of some replicas; got from `ctx.blocking.group(members)`.

    Attributes:
        members: Ids of the replicas in the group, ascending.
    """

    __slots__ = ("_context", "_group", "_position", "members")

    def __init__(self, context: BlockingContext, group: SyncGroup) -> None:
        self._context = context
        self._group = group
        self.members = group.members
        self._position = self.members.index(context.replica_id_in_sync_group)

    @property
    def replica_id_in_sync_group(self) -> int:
        """Position of this replica in the group, from 0."""
        return self._position

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas are in the group."""
        return len(self.members)

    def _call(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        frame: FrameType,
    ) -> Any:
        return self._context.call_in(
            self._group, self._position, collective, argument, args, kwargs, frame
        )

    def __repr__(self) -> str:
        return f"<BlockingGroup {self.members} | position {self._position}>"


def _on_the_loop(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Make a merge function async, so that the event loop runs it and not a device thread."""

    async def merge_on_the_loop(strategy: Any, *args: Any) -> Any:
        result = merge(strategy, *args)
        return await result if hasattr(result, "__await__") else result

    return merge_on_the_loop
