"""ReplicaContext: what a step function calls to meet the other replicas."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar, final

import numpy as np

from .._functions import YIELDS, is_async, require_no_yield
from ..context import PLACE, CurrentStrategy, Place
from ..devices import HOST, CompletionQueue, Device, Lane, Op, OpTracker, lane_table, require_loop
from ..values import Variable
from ._blocking import BlockingContext
from ._collectives import Collectives, group_of
from ._group import ReplicaGroup
from ._meeting import Call, Collective, new_call
from ._meeting_point import TaskWaiter
from ._merge_call import merge_call_named
from ._misuse import misuse_error
from ._random import random_stream
from ._replica import Replica
from ._variables import create_variable, update_variable
from ._worker_context import WorkerContext

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

    __slots__ = (
        "_blocking", "_completions", "_device", "_group", "_is_on_host", "_lane",
        "_replica", "_runtime", "_seed",
    )  # fmt: skip

    def __init__(
        self,
        runtime: CurrentStrategy,
        group: ReplicaGroup,
        replica: Replica,
        device: Device | None,
        completions: CompletionQueue | None,
        seed: int,
        is_on_host: bool = False,
    ) -> None:
        point = group.point
        self._waiter = TaskWaiter(point, replica, completions, group.ops)
        self._members = point.everyone
        self._position = replica.replica_id
        self._runtime = runtime
        self._group = group
        self._replica = replica
        self._device = device
        self._completions = completions
        self._seed = seed
        self._lane: Lane | None = None
        self._blocking: BlockingContext | None = None
        self._is_on_host = is_on_host

    def open(self, place: Place) -> None:
        """Allow collectives where `place` is current, in this thread; called by the strategy."""
        self._waiter.open(place)

    def close(self) -> None:
        """Refuse everything from now on; called by the strategy."""
        self._waiter.close()

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._runtime.facade

    @property
    def device(self) -> Device | None:
        """The device of this replica, None under the default strategy."""
        return self._device

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this replica: its one device, or none."""
        return () if self._device is None else (self._device,)

    @property
    def device_name(self) -> str | None:
        """Name of the device where ops go, or None for the host.

        It is the host where device threads wait for the code: in outside_compilation, and under
        a merge function of plain replicas.
        """
        return None if self._device is None or self._is_on_host else str(self._device)

    @property
    def blocking(self) -> BlockingContext:
        """The same collectives for plain functions: they wait on the device thread."""
        if self._blocking is None:
            self._blocking = BlockingContext(self._replica, self._group)
        return self._blocking

    def to_await(
        self, name: str, fn: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...],
        frame: FrameType,
    ) -> Coroutine[Any, Any, T]:  # fmt: skip
        """Return the coroutine of `fn(*args)`, called `name` at `frame`; for the library.

        If it is never awaited that fails the run, as for a collective, which this is not.

        Raises:
            ContextError: If nothing can be awaited here.
        """
        if not self._waiter.is_here:
            raise self._misuse(name)
        call = new_call(
            merge_call_named(name), None, (), None, self._members, self._position, 0, frame
        )
        coroutine = self._replica.unawaited[call] = self._begun(call, fn, args)
        return coroutine

    async def _begun(self, call: Call, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        loop = self._group.point.loop
        if loop is not None:
            require_loop(loop, call.collective.name)
        self._replica.unawaited.pop(call, None)
        return await fn(*args)

    def outside(self) -> ReplicaContext:
        """Return the context that a host function sees while the device program waits for it."""
        twin = ReplicaContext(
            self._runtime, self._group, self._replica, self._device, self._completions,
            self._seed, True,
        )  # fmt: skip
        twin._blocking = self.blocking
        return twin

    @property
    def op_tracker(self) -> OpTracker:
        """Tracker of the ops of this run that are in flight."""
        return self._group.ops

    def stand_in(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return what ops in a worker process get in its place: a call, and its arguments."""
        replica, group = self._replica, self._group
        step = group.step + replica.steps_done
        told = replica.replica_id, group.num_replicas, str(self._device), self._seed, step
        return WorkerContext, told

    def check_running(self) -> None:
        """Raise CancelledError if the run was aborted."""
        if self._group.is_aborted:
            raise asyncio.CancelledError

    def op_abandoned(self) -> None:
        """Close the strategy: an interrupt left one of its ops to the device thread."""
        self._runtime.abandon()

    def meet_as(
        self, name: str, merge_fn: Callable[..., Any], args: tuple[Any, ...], frame: FrameType
    ) -> Coroutine[Any, Any, Any]:
        """Do a merge_call that tables show as `name`, called at `frame`; for the library."""
        return self.meet(merge_call_named(name), merge_fn, args, frame)

    def meet(
        self, collective: Collective, argument: Any, args: tuple[Any, ...], frame: FrameType
    ) -> Coroutine[Any, Any, Any]:
        """Make a call among all replicas, called at `frame`; for the library."""
        return self._call(collective, argument, args, None, frame)

    def group(self, members: Iterable[int]) -> GroupContext:
        """Return the collectives among some of the replicas, which this one must be one of.

        Args:
            members: Ids of the replicas, in any order; every member has to name the same.

        Raises:
            TypeError: If they are not ints.
            ValueError: If there is none, one is repeated or is not a replica, this one is left
                out, or they are some of the replicas of several workers.
            ContextError: If called outside this replica.

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
        """
        if not self._waiter.is_here:
            raise self._misuse("group")
        own = self._replica.replica_id
        group = group_of(members, own, self._group.point)
        return GroupContext(self._waiter, group, group.members.index(own))

    def variable(self, initial_value: Any, **options: Any) -> Coroutine[Any, Any, Variable]:
        """Create one distributed variable, the same object on every replica; a collective.

        Args:
            initial_value: As for `ar.Variable`; replica 0's is taken.
            **options: As for `ar.Variable`; equal on all replicas.

        Raises:
            Exception: As `ar.Variable`, and as `merge_call`.
        """
        merge, args = create_variable(initial_value, options)
        return self.meet_as("variable", merge, args, sys._getframe(1))

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Coroutine[Any, Any, Any]:
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
        return self.meet_as("update", merge, merged, sys._getframe(1))

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
        if self._group.is_aborted:
            raise asyncio.CancelledError
        lane = self._lane or self._find_lane()
        assert self._completions is not None  # _find_lane sets it
        return Op(self._completions, fn, args, kwargs, lane, self._group.ops)

    def _find_lane(self) -> Lane:
        if self._completions is None:
            self._completions = CompletionQueue.of_running_loop()
        self._lane = lane_table().lane(self.device_name or HOST)
        return self._lane

    def rng(self, name: str) -> np.random.Generator:
        """Return this replica's random stream of this name for this step.

        Determinism:
            Keyed by (seed, step, replica id, name): asking twice gives the same numbers, so use
            one name per purpose.
        """
        replica = self._replica
        step = self._group.step + replica.steps_done
        return random_stream(self._seed, step, self.replica_id_in_sync_group, name)

    def shared_rng(self, name: str) -> np.random.Generator:
        """Return a random stream that is the same on every replica: keyed by seed, step, name."""
        return random_stream(self._seed, self._group.step + self._replica.steps_done, None, name)

    def record(self, name: str, value: float | str) -> None:
        """Record a number or a line of text in `strategy.events`; replica 0's only are kept.

        Args:
            name: What it is, such as "loss".
            value: A number (or an array of one) or a text.

        Raises:
            TypeError: If it is neither.
            ContextError: If called outside this replica.
        """
        if PLACE.get().replica is not self or self._replica.is_over:
            raise self._misuse("record")
        if self.replica_id_in_sync_group == 0:
            step = self._group.step + self._replica.steps_done
            self._runtime.events.add_scalar(step, 0, name, value)

    def _misuse(self, name: str) -> Exception:
        return misuse_error(name, self._replica, self._group.step, self._waiter.home)

    def __repr__(self) -> str:
        replica, group = self._replica, self._group
        who = f"{self.replica_id_in_sync_group}/{self.num_replicas_in_sync}"
        state = "closed" if self._waiter.home is None else "open"
        return (
            f"<ReplicaContext {who} on {self._device} | "
            f"step {group.step}, {replica.sequence} collectives, {state}>"
        )


@final
class GroupContext(Collectives):
    """One replica's place in a group of some replicas; got from `ctx.group(members)`.

    The group's collectives concern its members only and are numbered on their own. Among
    themselves and with those of other groups, members must keep one order: two groups that wait
    for each other are a MergeMismatchError at once.
    """

    __slots__ = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the replicas in the group, ascending."""
        return self._members.global_members

    def __repr__(self) -> str:
        return f"<GroupContext {self.members} | position {self._position}>"


def _require_plain(fn: Any) -> None:
    if type(fn) is FunctionType and not fn.__code__.co_flags & _RUNS_NOTHING:
        return
    if not callable(fn) or is_async(fn):
        raise TypeError(f"run_on_device needs a plain function, got {fn!r}. Await async ones.")
    require_no_yield(fn, "run_on_device")
