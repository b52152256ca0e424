"""ReplicaContext: what a step function calls to meet the other replicas."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar, final

import numpy as np

from .._functions import YIELDS, is_async, require_no_yield
from ..context import PLACE, CurrentStrategy
from ..devices import HOST, CompletionQueue, Device, Lane, Op, OpTracker, lane_table, require_loop
from ..tree import Tree
from ..values import Variable
from ._blocking import BlockingContext
from ._collectives import Collectives, group_of
from ._errors import foreign_error, misuse_error
from ._group import ReplicaGroup
from ._meeting import Call, Collective, new_call
from ._meeting_point import TaskWaiter
from ._merge_call import create_variable, merge_call_named, update_variable
from ._process_context import ProcessContext
from ._replica import Replica, random_stream
from ._sending import receive, send

_RUNS_NOTHING = inspect.CO_COROUTINE | YIELDS  # when it is called
P = ParamSpec("P")
T = TypeVar("T")


@final
class ReplicaContext(Collectives):
    """One replica of one run: who it is, and the collectives it takes part in.

    Got from `ar.get_replica_context()` inside a step function. Every collective must be called by
    every replica in the same order; anything else is a MergeMismatchError at once, raised by
    `run`. A context is of no use to another replica or after its run (ContextError).

    Cancellation:
        A collective given up before its merge (by a timeout, say) ends the run, because the other
        replicas can never complete it: with the exception that the replica ends with, if it does
        not catch it, else with a MergeMismatchError. Once a run is aborted every await here raises
        CancelledError.
    """

    __slots__ = ("_own",)

    def __init__(self, own: RunningReplica) -> None:
        point = own.group.point
        super().__init__(own.waiter, point.everyone, own.local_replica_id)
        self._own = own

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._own.runtime.facade

    @property
    def device(self) -> Device | None:
        """The device of this replica, None under the default strategy."""
        return self._own.device

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this replica: its one device, or none."""
        device = self._own.device
        return () if device is None else (device,)

    @property
    def blocking(self) -> BlockingContext:
        """The same collectives for plain functions: they wait on the device thread."""
        return self._own.blocking

    def group(self, members: Iterable[int]) -> GroupContext:
        """Return the collectives among some of the replicas, which this one must be one of.

        Args:
            members: Ids of the replicas, in any order; every member has to name the same.

        Raises:
            TypeError: If they are not ints.
            ValueError: If there is none, one is repeated or is not a replica, this one is left
                out, or they are more replicas of one worker than of another.
            ContextError: If called outside this replica.

        Cancellation:
            Making a group is no collective. A run that fails on one worker ends on those who wait
            for it in a group, too; the next run can use the same groups.

        Example:
            >>> import asyncio
            >>> import aioreplica as ar
            >>> async def step():
            ...     ctx = ar.get_replica_context()
            ...     me = ctx.replica_id_in_sync_group
            ...     pair = ctx.group([0, 1] if me < 2 else [2, 3])
            ...     return await pair.all_reduce("sum", me)
            >>> async def main():
            ...     ar.set_logical_devices("cpu", 4)
            ...     async with ar.MirroredStrategy() as strategy:
            ...         return await strategy.run(step)
            >>> asyncio.run(main()).values  # doctest: +SKIP
            (1, 1, 5, 5)

        Source:
            MPI_Comm_split and torch's `new_group`, which all have to call; here members alone do.
        """
        if not self._waiter.is_here:
            raise self._misuse("group")
        own = self._own.local_replica_id
        group = group_of(members, own, self._waiter.point)
        return GroupContext(self._waiter, group, group.members.index(own))

    def variable(
        self, initial_value: object, **options: object
    ) -> Coroutine[object, None, Variable]:
        """Create one distributed variable, the same object on every replica; a collective.

        Args:
            initial_value: As for `ar.Variable`; replica 0's is taken.
            **options: As for `ar.Variable`; equal on all replicas.

        Raises:
            Exception: As `ar.Variable`, and as `merge_call`.
        """
        merge, args = create_variable(initial_value, options)
        return self._call(merge_call_named("variable"), merge, args, None, sys._getframe(1))

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Coroutine[object, None, Tree]:
        """Run replica 0's `fn(var, *args)` once per component, each with its replica's arguments.

        A collective. Different arguments put a mirrored variable out of sync. All components are
        computed first and swapped in together.

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
        return self._call(merge_call_named("update"), merge, merged, None, sys._getframe(1))

    def send(self, value: object, to: int, tag: Hashable = None) -> Coroutine[object, None, None]:
        """Hand a value to one other replica, which gets it with `receive`; not a collective.

        Waits only while two values (`RunOptions.send_bound`) of this way and tag have not been
        received. Values arrive in the order in which they were sent.

        Args:
            value: Any pytree; distributed values and variables are read in this replica, at the
                call. Arrays are handed over and not copied: do not write to them afterwards.
            to: Id of a replica of this worker.
            tag: Tells several ways between the same two replicas apart; hashable. What is kept for
                each way stays until the end of the run, so take few: no numbers of steps.

        Raises:
            TypeError: If `to` is not an int, or `tag` not hashable.
            ValueError: If there is no such replica, it is this one, or another worker's.
            ContextError: If called outside this replica.

        Cancellation:
            A send that waits is not made. The run ends at once with a MergeMismatchError if the
            other replica returns without receiving the value, or waits for this one in a circle.

        Example:
            >>> import asyncio
            >>> import aioreplica as ar
            >>> async def step():
            ...     ctx = ar.get_replica_context()
            ...     if ctx.replica_id_in_sync_group == 0:
            ...         return await ctx.send("hello", to=1)
            ...     return await ctx.receive(from_=0)
            >>> async def main():
            ...     async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            ...         return await strategy.run(step)
            >>> asyncio.run(main()).values
            (None, 'hello')
        """
        own: Coroutine[object, None, None] = send(
            self._waiter, self._members, value, to, tag, sys._getframe(1)
        )
        return own

    def receive(self, from_: int, tag: Hashable = None) -> Coroutine[object, None, Tree]:
        """Take the next value that another replica sends with `send`; waits until there is one.

        Args:
            from_: Id of a replica of this worker.
            tag: The same as that of the send.

        Returns:
            The value. NumPy arrays in it are read-only.

        Raises:
            TypeError: If `from_` is not an int, or `tag` not hashable.
            ValueError: If there is no such replica, it is this one, or another worker's.
            ContextError: If called outside this replica.

        Cancellation:
            A receive that is given up has taken nothing: the next one gets the value. The run ends
            at once with a MergeMismatchError if the other replica returns without sending, or
            waits for this one in a circle.
        """
        return receive(  # type: ignore[no-any-return]  # as a task waits
            self._waiter, self._members, from_, tag, sys._getframe(1)
        )

    def run_on_device(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Op[T]:
        """Run a plain function on this replica's device, off the event loop.

        Args:
            fn: A plain function; it sees this replica's context variables.
            *args: Passed on. Do not change arrays among them until the call returns.
            **kwargs: Passed on.

        Raises:
            TypeError: If `fn` is not a plain function.
            ContextError: If called outside this replica.
            Exception: Whatever `fn` raises.

        Cancellation:
            A queued call is taken back. A started one is waited for, so no buffer is reused under
            it, and the cancellation continues after that.

        Determinism:
            Ops of one device run one at a time, in the order of their calls.
        """
        if PLACE.get() is not self._waiter.home:
            raise self._misuse("run_on_device")
        if type(fn) is not BuiltinFunctionType and type(fn) is not np.ufunc:
            _require_plain(fn)
        own = self._own
        if own.group.is_aborted:
            raise asyncio.CancelledError
        lane, completions = own.lane, own.completions
        if lane is None or completions is None:
            lane, completions = own.find_lane()
        return Op(completions, fn, args, kwargs, lane, own.group.ops)

    def rng(self, name: str) -> np.random.Generator:
        """Return this replica's random stream of this name for this step.

        Raises:
            TypeError: If `name` is not a str.
            ContextError: If called in another replica, or after the run.

        Determinism:
            Keyed by (seed, step, replica id, name): asking twice gives the same numbers, so use
            one name per purpose.
        """
        self._require_own("rng")
        return self._own.rng(name)

    def shared_rng(self, name: str) -> np.random.Generator:
        """Return a random stream that is the same on every replica: keyed by seed, step, name.

        Raises:
            TypeError: If `name` is not a str.
            ContextError: If called in another replica, or after the run.
        """
        self._require_own("shared_rng")
        return random_stream(self._own.seed, self._own.step, None, name)

    def record(self, name: str, value: float | str) -> None:
        """Record a number or a line of text in `strategy.events`; replica 0's only are kept.

        Args:
            name: What it is, such as "loss".
            value: A number (or an array of one) or a text.

        Raises:
            TypeError: If it is neither.
            ContextError: If called outside this replica.
        """
        own = self._own
        if PLACE.get().replica is not own or own.state.is_over:
            raise self._misuse("record")
        if self.replica_id_in_sync_group == 0:
            own.runtime.events.add_scalar(own.step, 0, name, value)

    def _require_own(self, name: str) -> None:
        """Check that the calling code is no other replica's, and the run goes on.

        It may be nobody's: a merge function, the value of a new variable, a thread of a pool.
        """
        own, other = self._own, PLACE.get().replica
        # In a host function that a device program waits for, another object stands for it.
        is_other = other is not None and getattr(other, "state", None) is not own.state
        if own.state.is_over or is_other:
            raise foreign_error(name, own.state, own.group.step)

    def _misuse(self, name: str) -> Exception:
        return self._own.misuse(name)

    def __repr__(self) -> str:
        own = self._own
        who = f"{self.replica_id_in_sync_group}/{self.num_replicas_in_sync}"
        state = "closed" if self._waiter.home is None else "open"
        return (
            f"<ReplicaContext {who} on {own.device} | "
            f"step {own.group.step}, {own.state.sequence} collectives, {state}>"
        )


@final
class RunningReplica:
    """One replica of a run: where its ops go, and how it meets the others.

    `Place` holds it; a `ReplicaContext` is the facade over it, made when the step asks for one.

    Args:
        runtime: The strategy.
        group: The run.
        state: What its group keeps of it.
        device: Its device; None under the default strategy.
        completions: Brings results of ops to the event loop; None outside every run.
        seed: Of the run.
        is_on_host: Whether its ops go to the host, as device threads wait for the code: in
            outside_compilation, and under a merge function of plain replicas.

    Attributes:
        local_replica_id: Index among the replicas of this process, and so of its component of a
            value.
        waiter: How it waits as a task.
        lane: Where its ops go; None before the first one, and outside every run.
    """

    __slots__ = (
        "_blocking", "_context", "completions", "device", "group", "is_on_host", "lane",
        "local_replica_id", "runtime", "seed", "state", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        runtime: CurrentStrategy,
        group: ReplicaGroup,
        state: Replica,
        device: Device | None,
        completions: CompletionQueue | None,
        seed: int,
        is_on_host: bool = False,
    ) -> None:
        self.runtime = runtime
        self.group = group
        self.state = state
        self.device = device
        self.completions = completions
        self.seed = seed
        self.is_on_host = is_on_host
        self.local_replica_id = state.replica_id
        self.waiter = TaskWaiter(group.point, state, completions, group.ops)
        self.lane: Lane | None = None
        self._blocking: BlockingContext | None = None
        self._context: ReplicaContext | None = None

    @property
    def context(self) -> ReplicaContext:
        """The context that the step sees."""
        context = self._context
        if context is None:
            context = self._context = ReplicaContext(self)
        return context

    def close(self) -> None:
        """Refuse everything from now on, and form no circle."""
        self.waiter.close()
        self._context = None

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica among those of all workers."""
        return self.group.point.everyone.global_id(self.local_replica_id)

    @property
    def device_name(self) -> str | None:
        """Name of the device where ops go, or None for the host."""
        return None if self.device is None or self.is_on_host else str(self.device)

    @property
    def step(self) -> int:
        """Number of the step under way, in its strategy."""
        return self.group.step + self.state.steps_done

    @property
    def blocking(self) -> BlockingContext:
        """The same collectives for plain functions: they wait on the device thread."""
        if self._blocking is None:
            self._blocking = BlockingContext(self.state, self.group)
        return self._blocking

    @property
    def op_tracker(self) -> OpTracker:
        """Tracker of the ops of this run that are in flight."""
        return self.group.ops

    def find_lane(self) -> tuple[Lane, CompletionQueue]:
        """Find where its ops go, at the first one, and what brings their results back."""
        lane = lane_table().lane(self.device_name or HOST)
        if self.completions is None:  # outside every run, in one event loop after another
            return lane, CompletionQueue.of_running_loop()
        self.lane = lane
        return lane, self.completions

    def rng(self, name: str) -> np.random.Generator:
        """Return its random stream of this name for this step."""
        return random_stream(self.seed, self.step, self.replica_id_in_sync_group, name)

    def ongoing_rng(self, name: str, owner: object) -> np.random.Generator:
        """Return that stream, one generator for all that an owner draws in a step of this run."""
        return self.state.stream(self.step, owner, lambda: self.rng(name))

    def check_running(self) -> None:
        """Raise CancelledError if the run was aborted."""
        if self.group.is_aborted:
            raise asyncio.CancelledError

    def op_abandoned(self) -> None:
        """Close the strategy: an interrupt left one of its ops to the device thread."""
        self.runtime.abandon()

    def meet(
        self, collective: Collective, argument: object, args: tuple[object, ...], frame: FrameType
    ) -> Coroutine[object, None, Tree]:
        """Make a call among all replicas, called at `frame`."""
        return self.context._call(collective, argument, args, None, frame)

    def meet_as(
        self, name: str, merge_fn: Callable[..., object], args: tuple[object, ...], frame: FrameType
    ) -> Coroutine[object, None, Tree]:
        """Do a merge_call that tables show as `name`, called at `frame`."""
        return self.meet(merge_call_named(name), merge_fn, args, frame)

    def to_await(
        self, name: str, fn: Callable[..., Coroutine[object, None, T]], args: tuple[object, ...],
        frame: FrameType,
    ) -> Coroutine[object, None, T]:  # fmt: skip
        """Return the coroutine of `fn(*args)`, called `name` at `frame`.

        If it is never awaited that fails the run, as for a collective, which this is not.

        Raises:
            ContextError: If nothing can be awaited here.
        """
        if not self.waiter.is_here:
            raise self.misuse(name)
        everyone, position = self.group.point.everyone, self.local_replica_id
        call = new_call(merge_call_named(name), None, (), None, everyone, position, 0, frame)
        coroutine = self.state.unawaited[call] = self._begun(call, fn, args)
        return coroutine

    async def _begun(self, call: Call, fn: Callable[..., Any], args: tuple[object, ...]) -> Any:
        loop = self.group.point.loop
        if loop is not None:
            require_loop(loop, call.collective.name)
        self.state.unawaited.pop(call, None)
        return await fn(*args)

    def outside(self) -> RunningReplica:
        """Return the replica that a host function sees while the device program waits for it."""
        twin = RunningReplica(
            self.runtime, self.group, self.state, self.device, self.completions, self.seed, True
        )
        twin._blocking = self.blocking
        return twin

    def stand_in(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what ops in a device process get in its place: a call, and its arguments."""
        across = self.group.point.everyone.across
        num_replicas = self.group.num_replicas if across is None else across.num_replicas
        told = (
            self.replica_id_in_sync_group, self.local_replica_id, num_replicas, str(self.device),
            self.seed, self.step,
        )  # fmt: skip
        return ProcessContext, told

    def misuse(self, name: str) -> Exception:
        """Return the error of a call made elsewhere than in the replica."""
        return misuse_error(name, self.state, self.group.step, self.waiter.home)


@final
class GroupContext(Collectives):
    """One replica's place in a group of some replicas; got from `ctx.group(members)`.

    The group's collectives concern its members only and are numbered on their own. Among
    themselves and with those of other groups, members must keep one order: two groups that wait
    for each other are a MergeMismatchError at once, and a StallError after the timeout if it is
    workers that wait.
    """

    __slots__ = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the replicas in the group, ascending."""
        return self._members.global_members

    def __repr__(self) -> str:
        return f"<GroupContext {self.members} | position {self._position}>"


def _require_plain(fn: object) -> None:
    if type(fn) is FunctionType and not fn.__code__.co_flags & _RUNS_NOTHING:
        return
    if not callable(fn) or is_async(fn):
        raise TypeError(f"run_on_device needs a plain function, got {fn!r}. Await async ones.")
    require_no_yield(fn, "run_on_device")
