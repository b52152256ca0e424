"""The collectives that replicas call, among all of them or in a group of some; decisions."""

from __future__ import annotations

import operator
import sys
from abc import ABC
from collections.abc import Callable, Coroutine, Iterable, Sequence
from threading import get_ident
from types import FrameType
from typing import TypeAlias, TypeVar, final, overload

from ..collectives import CommunicationOptions, Turn, no_data, require_axis, require_options
from ..context import PLACE
from ..tree import Array, Tree
from ..typing import OpName, ReduceOp
from ..values import PerReplica, Variable, require_unmasked
from ._exchanges import ALL_GATHER, ALL_TO_ALL, BROADCAST, Along
from ._handle import Handle, start
from ._meeting import Call, CallSite, Collective, Parts, SyncGroup, new_call
from ._meeting_point import MeetingPoint, Waiter
from ._merge_call import MERGE_CALL
from ._reductions import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    STARTED_ALL_REDUCE,
    parse_reduction,
    payload_along,
    payload_of,
    payload_of_numbers,
    read_argument,
)
from ._signature import equal_values, value_text

T = TypeVar("T")
Op: TypeAlias = ReduceOp | OpName
Options: TypeAlias = CommunicationOptions | None
Awaited: TypeAlias = Coroutine[object, None, T]
COUNT_BYTES = 4


class Collectives(ABC):  # noqa: B024 - what it lacks is a context
    """Collectives of the replicas of one sync group.

    Args:
        waiter: How this replica waits: as a task, or in a thread.
        group: Whom it meets.
        position: Its index in that group.

    Every member must make the same calls in the same order; anything else is a
    MergeMismatchError at once, raised by `run`. Every call raises ContextError outside its own
    replica, after its run, or while another collective of the replica is awaited; and, apart from
    `start_all_reduce`, on another thread than the event loop's. Distributed values and variables
    in the arguments of collectives on arrays are read in this replica, at the call.

    Cancellation:
        A collective given up before its merge (by a timeout, say) ends the run, because the other
        replicas can never complete it: with the exception that the replica ends with, if it does
        not catch it, else with a MergeMismatchError. Once a run is aborted every await here raises
        CancelledError.

    Determinism:
        Values are combined in ascending replica id, whatever the order of arrival.
    """

    __slots__ = ("_members", "_position", "_waiter")

    def __init__(self, waiter: Waiter, group: SyncGroup, position: int) -> None:
        self._waiter = waiter
        self._members = group
        self._position = position

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica among those who meet, from 0."""
        across = self._members.across
        return self._position if across is None else across.first_replica + self._position

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that meet in a collective."""
        across = self._members.across
        return len(self._members.members) if across is None else across.num_replicas

    def merge_call(
        self,
        merge_fn: Callable[..., object],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Coroutine[object, None, Tree]:
        """Gather every replica's arguments, run `merge_fn` once over them, return my part.

        Args:
            merge_fn: Called as `merge_fn(strategy, *merged, **merged)` in cross-replica context,
                with replica 0's context variables; a plain or an async function. Pass the same
                function on every replica (a lambda or nested `def` counts as the same).
            args: Positional arguments, a tuple or list. Each leaf becomes a PerReplica; strings,
                bytes, enums, functions and classes must be equal everywhere and stay themselves.
            kwargs: Keyword arguments, merged alike.

        Returns:
            This replica's component where the result holds PerReplica or Mirrored values, the
            result itself elsewhere.

        Raises:
            TypeError: If `merge_fn` is not callable.
            ValueError: If `args` is not a tuple or list, or the result holds a PerReplica of the
                wrong length.
            Exception: What `merge_fn` raises is raised in every replica.

        Determinism:
            Arguments are in replica order, whatever the order of arrival.

        Source:
            tf.distribute.ReplicaContext.merge_call.
        """
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call needs a function of (strategy, *args), got {merge_fn!r} "
                f"({type(merge_fn).__name__})."
            )
        if type(args) is not tuple:
            if not isinstance(args, (list, tuple)):
                raise ValueError(
                    f"merge_call takes args as a tuple or list, got {args!r}. "
                    "Write args=(value,) for one argument."
                )
            args = tuple(args)
        return self._call(MERGE_CALL, merge_fn, args, kwargs, sys._getframe(1))

    @overload
    def all_reduce(self, op: Op, value: float, options: Options = ...) -> Awaited[float]: ...
    @overload
    def all_reduce(self, op: Op, value: Variable, options: Options = ...) -> Awaited[Array]: ...
    @overload
    def all_reduce(self, op: Op, value: PerReplica[T], options: Options = ...) -> Awaited[T]: ...
    @overload
    def all_reduce(self, op: Op, value: T, options: Options = ...) -> Awaited[T]: ...
    def all_reduce(
        self, op: ReduceOp | OpName, value: Tree, options: CommunicationOptions | None = None
    ) -> Coroutine[object, None, Tree]:
        """Combine a value over all replicas; every replica gets the result.

        Args:
            op: SUM, MEAN, MIN or MAX, or its name in any case.
            value: Any pytree of arrays, numbers or IndexedSlices, with equal structure, shapes
                and dtypes on all replicas; the rows of IndexedSlices may differ. Totals and
                weights of `Weighted` values are summed apart, so their mean is exact.
            options: How to do it, equal on all replicas; None takes the strategy's options.

        Returns:
            The combined pytree. Arrays are read-only and shared by all replicas; Python numbers
            stay Python numbers. A mean of integers is float64.

        Raises:
            ValueError: If `op` is unknown, or MIN or MAX for an IndexedSlices.
            TypeError: If a leaf is not numeric, or `options` is not a CommunicationOptions.

        Determinism:
            Summed in ascending replica id: bitwise reproducible, and independent of options
            (without compression) and threads. Half precision is accumulated in float32.
        """
        frame = sys._getframe(1)
        if options is not None:
            require_options(options, "all_reduce")
        argument = parse_reduction(op, options)
        args = payload_of_numbers(value, argument.op, "all_reduce", self._waiter.home)
        return self._call(ALL_REDUCE, argument, args, None, frame)

    def start_all_reduce(
        self, op: ReduceOp | OpName, value: Tree, options: CommunicationOptions | None = None
    ) -> Handle:
        """Start an all_reduce without waiting; `await` the handle for its result.

        Several may be in flight, and other collectives may be called meanwhile: replicas match
        calls by the order in which they are made, not by when they are awaited. May be called from
        any thread while a function of `ctx.run_on_device` of this replica runs: then the call is
        numbered on the event loop, in the order of the calls, and before that function's result is
        there. Until then other collectives of the replica are a ContextError.

        Args:
            op: As for `all_reduce`.
            value: As for `all_reduce`. Arrays must not be written until the handle was awaited.
            options: As for `all_reduce`.

        Raises:
            ValueError: As `all_reduce`.
            TypeError: As `all_reduce`.
            ContextError: If called from a thread while no op of the replica runs.

        Cancellation:
            See `Handle`: a cancelled await gives up nothing.
        """
        frame = sys._getframe(1)
        if options is not None:
            require_options(options, "start_all_reduce")
        argument = parse_reduction(op, options)
        args = payload_of_numbers(value, argument.op, "start_all_reduce", self._waiter.home)
        return start(
            self._waiter, STARTED_ALL_REDUCE, argument, args, self._members, self._position, frame
        )

    @overload
    def reduce_scatter(self, op: Op, value: Variable, axis: int = ...) -> Awaited[Array]: ...
    @overload
    def reduce_scatter(self, op: Op, value: PerReplica[T], axis: int = ...) -> Awaited[T]: ...
    @overload
    def reduce_scatter(self, op: Op, value: T, axis: int = ...) -> Awaited[T]: ...
    def reduce_scatter(
        self, op: ReduceOp | OpName, value: Tree, axis: int = 0
    ) -> Coroutine[object, None, Tree]:
        """Combine a value over all replicas; every replica gets its part along `axis`.

        Args:
            op: As for `all_reduce`.
            value: As for `all_reduce`, but arrays only.
            axis: What is divided: contiguous and balanced, earlier replicas get what is left
                over; negative ones count from the end.

        Returns:
            This replica's part, read-only. It may be empty.

        Raises:
            ValueError: If `op` is unknown, a leaf is a scalar or has no such axis.
            TypeError: If a leaf is not numeric, or is an IndexedSlices.
        """
        frame = sys._getframe(1)
        argument = parse_reduction(op, None, axis)
        args = payload_of_numbers(value, argument.op, "reduce_scatter", self._waiter.home)
        for leaf in args[0]:
            require_axis(leaf, axis, "reduce_scatter")
        return self._call(REDUCE_SCATTER, argument, args, None, frame)

    @overload
    def all_gather(self, value: Variable, axis: int, options: Options = ...) -> Awaited[Array]: ...
    @overload
    def all_gather(self, value: PerReplica[T], axis: int, options: Options = ...) -> Awaited[T]: ...
    @overload
    def all_gather(self, value: T, axis: int, options: Options = ...) -> Awaited[T]: ...
    def all_gather(
        self, value: Tree, axis: int, options: CommunicationOptions | None = None
    ) -> Coroutine[object, None, Tree]:
        """Join a value of all replicas along `axis`, in replica order.

        Args:
            value: Any pytree of arrays; sizes along `axis` may differ between replicas.
            axis: The axis to join along; negative ones count from the end.
            options: How to do it, equal on all replicas; None takes the strategy's options.

        Returns:
            The joined pytree, read-only and shared by all replicas.

        Raises:
            ValueError: If a leaf is a scalar or has no such axis.
            TypeError: If a leaf is an IndexedSlices or a masked array, or `options` is not a
                CommunicationOptions.
        """
        frame = sys._getframe(1)
        if options is not None:
            require_options(options, "all_gather")
        args = payload_along(value, axis, "all_gather", self._waiter.home)
        return self._call(ALL_GATHER, Along(axis, options), args, None, frame)

    @overload
    def all_to_all(self, value: Variable, axis: int = ...) -> Awaited[Array]: ...
    @overload
    def all_to_all(self, value: PerReplica[T], axis: int = ...) -> Awaited[T]: ...
    @overload
    def all_to_all(self, value: T, axis: int = ...) -> Awaited[T]: ...
    def all_to_all(self, value: Tree, axis: int = 0) -> Coroutine[object, None, Tree]:
        """Cut every replica's value along `axis`, give the i-th piece of each to replica i.

        Args:
            value: Any pytree of arrays; sizes along `axis` may differ between replicas.
            axis: What is cut: contiguous and balanced, earlier pieces get what is left over;
                negative ones count from the end. The received pieces are joined along it too, in
                replica order.

        Returns:
            The joined pieces, read-only.

        Raises:
            ValueError: If a leaf is a scalar or has no such axis.
            TypeError: If a leaf is an IndexedSlices or a masked array.
        """
        frame = sys._getframe(1)
        args = payload_along(value, axis, "all_to_all", self._waiter.home)
        return self._call(ALL_TO_ALL, Along(axis), args, None, frame)

    @overload
    def broadcast(self, value: Variable, source: int = ...) -> Awaited[Array]: ...
    @overload
    def broadcast(self, value: PerReplica[T], source: int = ...) -> Awaited[T]: ...
    @overload
    def broadcast(self, value: T, source: int = ...) -> Awaited[T]: ...
    def broadcast(self, value: Tree, source: int = 0) -> Coroutine[object, None, Tree]:
        """Give every replica the value of one of them; the others' values are ignored.

        Args:
            value: Any pytree.
            source: Index of the giver among those who meet; in a group of some replicas, that is
                its position in `members`.

        Raises:
            ValueError: If there is no such replica.
            TypeError: If `source` is not an int, or a leaf of the giver is a masked array.
        """
        frame = sys._getframe(1)
        try:
            index = operator.index(source)
        except TypeError:
            raise TypeError(f"broadcast needs an int as its source, got {source!r}.") from None
        if not 0 <= index < self.num_replicas_in_sync:
            raise ValueError(
                f"broadcast got source={source!r}, but replicas are 0 to "
                f"{self.num_replicas_in_sync - 1}."
            )
        args = payload_of(value, "broadcast", self._waiter.home)
        if index == self.replica_id_in_sync_group:
            for leaf in args[0]:
                require_unmasked(leaf, "broadcast")
        return self._call(BROADCAST, index, args, None, frame)

    def barrier(self) -> Coroutine[object, None, None]:
        """Wait until every replica is here."""
        return self._call(BARRIER, None, (None,), None, sys._getframe(1))

    def any(self, flag: object) -> Coroutine[object, None, bool]:
        """Tell every replica whether the flag is true on at least one; for stopping together."""
        return self._call(ANY, None, (self._flag(flag, "any"),), None, sys._getframe(1))

    def all(self, flag: object) -> Coroutine[object, None, bool]:
        """Tell every replica whether the flag is true on all of them."""
        return self._call(ALL, None, (self._flag(flag, "all"),), None, sys._getframe(1))

    @overload
    def agree(self, value: Variable) -> Awaited[Array]: ...
    @overload
    def agree(self, value: PerReplica[T]) -> Awaited[T]: ...
    @overload
    def agree(self, value: T) -> Awaited[T]: ...
    def agree(self, value: Tree) -> Coroutine[object, None, Tree]:
        """Check that all replicas hold equal values, and return the value.

        A different value is a MergeMismatchError that shows both. NaN equals NaN. Arrays are
        compared element by element, with their dtypes and shapes.
        """
        own = read_argument(value, "agree", self._waiter.home)
        return self._call(AGREE, None, (own,), None, sys._getframe(1))

    def _flag(self, flag: object, where: str) -> bool:
        if type(flag) is bool:
            return flag
        return bool(read_argument(flag, where, self._waiter.home))

    def _call(
        self,
        collective: Collective,
        argument: object,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree] | None,
        frame: FrameType | CallSite,
    ) -> Coroutine[object, None, Tree]:
        """Make a call: number it and hand it to the waiter.

        What a waiter gives that blocks is the result, and no coroutine.
        """
        waiter, group = self._waiter, self._members
        call = new_call(collective, argument, args, kwargs, group, self._position, 0, frame)
        if PLACE.get() is not waiter.place or get_ident() != waiter.thread_id:
            return waiter.elsewhere(call)  # type: ignore[no-any-return]  # see above
        replica = waiter.replica
        if group.is_partial:
            call.sequence = replica.next_in(group)
        else:
            call.sequence = replica.sequence = replica.sequence + 1
        tell = waiter.point.observers.call_made
        if tell is not None:
            tell(call)
        result: Coroutine[object, None, Tree] = waiter.meet(call)
        unawaited = waiter.unawaited
        if unawaited is not None:
            unawaited[call] = result
        return result


def group_of(members: Iterable[int], own: int, point: MeetingPoint) -> SyncGroup:
    """Return the group of some replicas.

    Args:
        members: Ids among the replicas of all workers.
        own: Who asks, among those of this process.
        point: Where those meet.

    Raises:
        TypeError: If they are not ints.
        ValueError: As `require_members`; or if they are more replicas of one worker than of
            another.
    """
    run = point.everyone
    across = run.across
    if across is None:
        return point.sub_group(require_members(members, own, len(run.members)))
    first, count = across.first_replica, len(run.members)
    ids = require_members(members, first + own, across.num_replicas)
    if len(ids) == across.num_replicas:
        return run
    mine = tuple(i - first for i in ids if first <= i < first + count)
    return point.sub_group(mine, ids if len(mine) < len(ids) else ())


def require_members(members: Iterable[int], own: int, num_replicas: int) -> tuple[int, ...]:
    """Return the ids of a group in ascending order.

    Raises:
        TypeError: If they are not ints.
        ValueError: If there is none, one is given twice or is not a replica, or the caller is not
            among them.
    """
    shown = members
    try:
        ids = tuple(operator.index(member) for member in members)
    except TypeError:
        raise TypeError(f"group needs a sequence of replica ids, got {shown!r}.") from None
    if not ids:
        raise ValueError("group needs at least one replica id, got none.")
    outside = [i for i in ids if not 0 <= i < num_replicas]
    if outside:
        raise ValueError(
            f"group got {list(ids)}, but there is no replica {outside[0]}: ids are 0 to "
            f"{num_replicas - 1}."
        )
    if len(set(ids)) < len(ids):
        raise ValueError(f"group got {list(ids)}, where an id is repeated. Name each once.")
    if own not in ids:
        raise ValueError(
            f"group got {list(ids)}, which leaves out the replica that asks. Only members can "
            "call it: guard it with `if ctx.replica_id_in_sync_group in ids:`."
        )
    return tuple(sorted(ids))


@final
class Agree(Collective):
    """Returns the value that all replicas hold; different ones cannot meet."""

    __slots__ = ()

    def detail(self, argument: object) -> str:
        """Return nothing: the value is shown where it differs."""
        return ""

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether the values are equal; NaN equals NaN."""
        return equal_values(first.args[0], call.args[0])

    def difference(self, first: Call, call: Call) -> str | None:
        """Show both values."""
        if self.agrees(first, call):
            return None
        return f"values {first.args[0]!r} and {call.args[0]!r} differ"

    def signature(self, call: Call) -> str:
        """Describe the value, which has to be equal."""
        return value_text(call.args[0])

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Give each replica its own value back if all workers hold equal ones."""
        await turn.exchange(b"", no_data)
        return self.perform(group, calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts:
        """Give each replica its own, equal value back."""
        return [call.args[0] for call in calls]


@final
class Decision(Collective):
    """Combines a flag or small count per replica: `any`, `all`, the least; for `barrier` nothing.

    What a call has for an argument, a text, has to be equal on all replicas.
    """

    __slots__ = ("_decide",)

    def __init__(self, name: str, decide: Callable[[list[int]], int | None]) -> None:
        super().__init__(name)
        self._decide = decide

    def detail(self, argument: str | None) -> str:
        """Return the argument."""
        return argument or ""

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether the arguments are equal: what is combined may differ."""
        return bool(first.argument == call.argument)

    def difference(self, first: Call, call: Call) -> str | None:
        """Show both arguments if they differ."""
        if self.agrees(first, call):
            return None
        return f"{first.argument} and {call.argument} differ"

    def signature(self, call: Call) -> str:
        """Return the argument: what is combined may differ."""
        return self.detail(call.argument)

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Decide here, then over the decisions of all workers."""
        own = int(self._decide([call.args[0] for call in calls]) or 0)
        slots = await turn.exchange(own.to_bytes(COUNT_BYTES, "little"), no_data)
        return [self._decide([int.from_bytes(slot, "little") for slot in slots])] * len(calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts:
        """Decide once for all."""
        return [self._decide([call.args[0] for call in calls])] * len(calls)


AGREE = Agree("agree")
BARRIER = Decision("barrier", lambda _flags: None)
ANY = Decision("any", any)
ALL = Decision("all", all)
INFEED = Decision("infeed", min)
"""How many more steps of a device loop all replicas have the inputs of; 0 ends it."""
