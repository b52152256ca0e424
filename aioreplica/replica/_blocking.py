"""The blocking twin of a replica context: collectives that wait on the device thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, final

from .._functions import require_finished
from ..collectives import CommunicationOptions
from ..context import PLACE, CurrentReplica, Place
from ..devices import follow_others, served_streams, synchronise_lane
from ..errors import ContextError
from ..telemetry import ThreadWait
from ..tree import Tree
from ..typing import OpName, ReduceOp
from ..values import Variable
from ._collectives import Collectives, group_of
from ._device_waiters import OpWaiter, ThreadWaiter
from ._errors import blocking_misuse_error
from ._group import ReplicaGroup
from ._host_call import call_on_host
from ._meeting import CallSite, Collective, collective_named, new_call
from ._merge_call import create_variable, merge_call_named, update_variable
from ._reductions import all_reduce_named, parse_reduction, payload_of_numbers
from ._replica import Replica
from ._sending import receive, send

T = TypeVar("T")
KEPT_CALLS = 4  # gradient calls that may be under way inside each other


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
            merge_fn: Callable[..., object],
            args: Sequence[Tree] = (),
            kwargs: dict[str, Tree] | None = None,
        ) -> Tree: ...
        def all_reduce(
            self, op: ReduceOp | OpName, value: Tree, options: CommunicationOptions | None = None
        ) -> Tree: ...
        def reduce_scatter(self, op: ReduceOp | OpName, value: Tree, axis: int = 0) -> Tree: ...
        def all_gather(
            self, value: Tree, axis: int, options: CommunicationOptions | None = None
        ) -> Tree: ...
        def all_to_all(self, value: Tree, axis: int = 0) -> Tree: ...
        def broadcast(self, value: Tree, source: int = 0) -> Tree: ...
        def barrier(self) -> None: ...  # type: ignore[override]
        def any(self, flag: object) -> bool: ...  # type: ignore[override]
        def all(self, flag: object) -> bool: ...  # type: ignore[override]
        def agree(self, value: T) -> T: ...  # type: ignore[override]

    def meet_as(
        self, name: str, merge_fn: Callable[..., object], args: tuple[object, ...], frame: FrameType
    ) -> Any:
        """Do a merge_call that tables show as `name`, called at `frame`; for the library."""
        return self._call(merge_call_named(name), merge_fn, args, None, frame)

    def reduce_as(self, name: str, value: Tree, frame: FrameType) -> Any:
        """Do an all_reduce that tables show as `name`, called at `frame`; for the library."""
        args = payload_of_numbers(value, ReduceOp.SUM, name, self._waiter.home)
        collective = collective_named(all_reduce_named, name)
        return self._call(collective, parse_reduction(ReduceOp.SUM, None), args, None, frame)


@final
class BlockingContext(BlockingCollectives):
    """Collectives for plain functions, as `ctx.blocking`.

    Usable on the device thread of its replica only (ContextError elsewhere). In a plain step
    function and a device loop the threads meet by themselves. A function that an `async def` step
    runs with `ctx.run_on_device` meets on the event loop, whatever the others call; its lane serves
    other ops while it waits.

    Attributes:
        clusters: Names the calls that leave the device program.
    """

    __slots__ = ("_group", "_replica", "clusters")

    def __init__(self, replica: Replica, group: ReplicaGroup) -> None:
        point = group.point
        is_async = point.lock is None
        waiter = OpWaiter(point, replica, group.ops) if is_async else ThreadWaiter(point, replica)
        super().__init__(waiter, point.everyone, replica.replica_id)
        self._replica = replica
        self._group = group
        self.clusters = ClusterNames()

    def enter(self, place: Place) -> None:
        """Belong to the calling thread from now on; called by the strategy."""
        self._waiter.open(place)
        self._replica.thread_id = self._waiter.thread_id
        if served_streams() is not None:
            self._group.point.has_streams = True

    def leave(self) -> None:
        """Refuse everything from now on; called by the strategy."""
        self._waiter.close()

    @property
    def local_replica_id(self) -> int:
        """Index of the replica among those of this process."""
        return self._replica.replica_id

    @property
    def step(self) -> int:
        """Number of the step under way, in its strategy."""
        return self._group.step + self._replica.steps_done

    @property
    def is_here(self) -> bool:
        """True if the calling thread is the replica's, inside its step function."""
        return self._waiter.is_here

    @property
    def is_live(self) -> bool:
        """True if the replica runs a device program now, on whatever thread."""
        return self._waiter.place is not None

    def check_running(self) -> None:
        """Raise CancelledError if the run was aborted."""
        if self._group.is_aborted:
            raise asyncio.CancelledError

    def group(self, members: Iterable[int]) -> BlockingGroup:
        """Return the collectives among some of the replicas, which this one must be one of.

        Args:
            members: Ids of the replicas, in any order; every member has to name the same.

        Raises:
            TypeError: If they are not ints.
            ValueError: If there is none, one is repeated or is not a replica, or this one is left
                out.
            ContextError: If called elsewhere than on the replica's device thread.
        """
        self.require_device_thread("group")
        own = self._replica.replica_id
        group = group_of(members, own, self._group.point)
        return BlockingGroup(self._waiter, group, group.members.index(own))

    def variable(self, initial_value: object, **options: object) -> Variable:
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
        args: Sequence[object] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
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

    def send(self, value: object, to: int, tag: Hashable = None) -> None:
        """Hand a value to one other replica; as `ctx.send`, waiting on the device thread."""
        if self._group.point.has_streams:
            synchronise_lane(value)
        send(self._waiter, self._members, value, to, tag, sys._getframe(1))

    def receive(self, from_: int, tag: Hashable = None) -> Tree:
        """Take the next value of another replica; as `ctx.receive`, waiting on the thread."""
        found = receive(self._waiter, self._members, from_, tag, sys._getframe(1))
        return follow_others(found) if self._group.point.has_streams else found

    def call_on_host(
        self, fn: Callable[..., object], args: tuple[object, ...], place: Place, name: str
    ) -> Tree:
        """Run a plain or async function on the event loop, where `place` is current, and wait.

        Stall reports show the replica as waiting for `name`.

        Raises:
            Exception: What the function raises.

        Cancellation:
            An async function is cancelled where it waits; the thread is let go at its end.
        """
        self.require_here("outside_compilation")
        context = copy_context()
        context.run(PLACE.set, place)
        synchronise_lane(args)
        with self._shown(name):
            return follow_others(call_on_host(self._group.point, fn, args, context, name))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show the replica as waiting for `what`, inside a `with` block."""
        wait, point = ThreadWait(what), self._group.point
        point.observers.began_to_wait(wait)
        try:
            with self._shown(what):
                yield
        finally:
            point.observers.ended_to_wait(wait)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Be no stall, inside a `with` block: a program runs there that ends in any case."""
        point = self._group.point
        point.is_busy = True
        try:
            yield
        finally:
            point.is_busy = False

    @contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        """Show the replica as waiting for `what` in stall reports."""
        self._replica.activity = what
        try:
            yield
        finally:
            self._replica.activity = None

    def when_aborted(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the run is aborted, from any thread and perhaps repeatedly."""
        self._group.point.on_abort.append(wake)

    def step_ended(self, count: int = 1) -> None:
        """Count a step of a device loop, or `count` of them at once.

        Raises:
            CancelledError: If the run was aborted, or its event loop closed.
        """
        self._replica.steps_done += count
        if self.clusters.num_roots:
            self.clusters.restart()
        point = self._group.point
        if point.loop is not None and point.loop.is_closed():
            point.abandon()
        if point.is_aborted:
            raise asyncio.CancelledError

    def require_device_thread(self, name: str) -> None:
        """Check that the code may wait here, in a device program or an op, for a call of `name`.

        Raises:
            ContextError: If it may not.
        """
        waiter = self._waiter
        if not (isinstance(waiter, OpWaiter) and waiter.is_in_op()):
            self.require_here(name)

    def require_here(self, name: str) -> None:
        """Check that the code runs on the replica's device thread, for a call of `name`.

        Raises:
            ContextError: If it does not.
        """
        waiter = self._waiter
        if not waiter.is_here:
            is_async = isinstance(waiter, OpWaiter)
            what = name.rpartition(".")[2]
            raise blocking_misuse_error(
                what, self._replica, self._group.step, waiter.place, is_async=is_async
            )

    def meet(
        self, collective: Collective, argument: object, args: tuple[object, ...], site: CallSite
    ) -> Any:
        """Make a call among all replicas, in whatever thread works for this one; for the library.

        Raises:
            ContextError: If an event loop runs in the thread.

        Cancellation:
            CancelledError once the run is aborted.
        """
        require_no_loop(collective.name)
        waiter, replica = self._waiter, self._replica
        is_numbered = isinstance(waiter, ThreadWaiter)
        sequence = replica.next_in(self._members) if is_numbered else 0
        call = new_call(
            collective, argument, args, None, self._members, self._position, sequence, site
        )
        if is_numbered:
            waiter.point.observers.made(call)
        return waiter.meet(call)

    def __repr__(self) -> str:
        state = "open" if self._waiter.place is not None else "closed"
        replica, group = self._replica, self._group
        return (
            f"<BlockingContext {replica.replica_id}/{group.num_replicas} | step {group.step}, "
            f"{replica.sequence} collectives, {state}>"
        )


@final
class BlockingGroup(BlockingCollectives):
    """One replica's place in a group of some replicas; got from `ctx.blocking.group(members)`."""

    __slots__ = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the replicas in the group, ascending."""
        return self._members.global_members

    def __repr__(self) -> str:
        return f"<BlockingGroup {self.members} | position {self._position}>"


@final
class ClusterNames:
    """Names the outside calls of one step: "0", "1", and so on.

    The gradient of a call belongs to one gradient call (one pass backwards), whose uid is added to
    the name: "uid" for the first one of the step, then "uid_1". All outside calls that one pass
    goes back through share its uid; a gradient of a gradient has both.

    Example:
        >>> names, first, second = ClusterNames(), object(), object()
        >>> names.new_root(), names.new_root()
        ('0', '1')
        >>> names.gradient_of("1", first), names.gradient_of("0", first)
        ('1.uid', '0.uid')
        >>> names.gradient_of("0.uid", second)
        '0.uid.uid_1'

    Attributes:
        num_roots: How many calls of the step have a name.

    Source:
        tf.tpu's gradient_uid of outside compilation clusters.
    """

    __slots__ = ("_gradient_calls", "_num_gradient_calls", "num_roots")

    def __init__(self) -> None:
        self._gradient_calls: deque[tuple[object, str]] = deque(maxlen=KEPT_CALLS)
        self.restart()

    def restart(self) -> None:
        """Begin a step: number from 0 again."""
        self.num_roots = 0
        self._num_gradient_calls = 0
        self._gradient_calls.clear()

    def new_root(self) -> str:
        """Name a call of the step."""
        name = str(self.num_roots)
        self.num_roots += 1
        return name

    def gradient_of(self, name: str, gradient_call: object) -> str:
        """Name the gradient of a call; `gradient_call` is one object for one pass backwards."""
        for known, uid in self._gradient_calls:
            if known is gradient_call or known == gradient_call:  # torch numbers its passes
                return f"{name}.{uid}"
        number = self._num_gradient_calls
        self._num_gradient_calls += 1
        uid = f"uid_{number}" if number else "uid"
        self._gradient_calls.append((gradient_call, uid))
        return f"{name}.{uid}"


def run_device_program(
    replica: CurrentReplica, fn: Callable[..., object], /, *args: object, **kwargs: object
) -> object:
    """Call `fn` on the calling thread, where the blocking collectives of `replica` are live.

    Raises:
        TypeError: If `fn` gives a coroutine, which nothing here can await, or a generator.
    """
    blocking: BlockingContext = replica.blocking
    blocking.enter(PLACE.get())
    try:
        result = fn(*args, **kwargs)
    finally:
        blocking.leave()
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"The plain step function {fn!r} returned a coroutine. Declare it with `async def`, "
            "so that run knows it is asynchronous."
        )
    require_finished(result, fn, "run")
    return result


def require_no_loop(name: str) -> None:
    """Check that the calling thread may wait.

    Raises:
        ContextError: If an event loop runs in it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ContextError(
        f"{name} was called on the event loop, which it would block. Call it in a plain function "
        "on a device, `await ctx.run_on_device(fn)`, or in a loss; on the loop use the awaitable "
        "collectives of ar.get_replica_context()."
    )


def _on_the_loop(merge: Callable[..., Any]) -> Callable[..., object]:
    """Make a merge function async, so that the event loop runs it and not a device thread."""

    async def merge_on_the_loop(strategy: object, *args: object) -> object:
        result = merge(strategy, *args)
        return await result if hasattr(result, "__await__") else result

    return merge_on_the_loop
