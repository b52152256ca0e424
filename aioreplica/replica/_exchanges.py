"""all_gather, all_to_all and broadcast: values handed from replica to replica unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
from array_api_compat import is_array_api_obj

from ..collectives import (
    CommunicationOptions,
    Turn,
    broadcast_tree,
    concatenate,
    gather_across,
    gather_difference,
    leaf_bytes,
    no_data,
    pieces,
    share,
)
from ..devices import INLINE_BYTES, run_together
from ..devices.backends import join_arrays
from ..tree import flatten, unflatten
from ._meeting import Call, Collective, Parts, SyncGroup
from ._pending import Pending
from ._reductions import payload_bytes, payload_difference
from ._signature import joined_text, payload_signature


@final
@dataclass(frozen=True, slots=True)
class Along:
    """Decisive argument of a call that works along an axis.

    Attributes:
        axis: Which axis.
        options: Of the call; None for those of the strategy.
    """

    axis: int
    options: CommunicationOptions | None = None


@final
class Concatenating(Collective):
    """Joins leaves, or pieces of them, along an axis; sizes may differ.

    Args:
        name: What users call it.
        exchange: Makes what each replica gets of one leaf of all.
    """

    __slots__ = ("_exchange",)
    is_uneven = True

    def __init__(
        self, name: str, exchange: Callable[[Sequence[object], int], list[object]]
    ) -> None:
        super().__init__(name)
        self._exchange = exchange

    def detail(self, argument: Along) -> str:
        """Name the axis, and options that are not the strategy's."""
        return f"axis {argument.axis}" + (f", {argument.options}" if argument.options else "")

    def options(self, argument: Along) -> CommunicationOptions | None:
        """Return the options of the call."""
        return argument.options

    def num_bytes(self, call: Call) -> int:
        """Add up the leaves."""
        return payload_bytes(call)

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether axes, structures, dtypes and the other dimensions are equal."""
        return self.difference(first, call) is None

    def difference(self, first: Call, call: Call) -> str | None:
        """Say how axes or values differ."""
        ours: Along = first.argument
        theirs: Along = call.argument
        axis = ours.axis
        if axis != theirs.axis:
            return f"axes {axis} and {theirs.axis} differ"
        if ours.options != theirs.options:
            return f"options {ours.options} and {theirs.options} differ"
        return payload_difference(first, call, lambda a, b: gather_difference(a, b, axis))

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Copy leaf by leaf; off the event loop if there is much to copy."""
        spec, axis = calls[0].args[1], calls[0].argument.axis
        columns = list(zip(*(call.args[0] for call in calls), strict=True))

        def exchange_all() -> Parts:
            rows = zip(*(self._exchange(column, axis) for column in columns), strict=True)
            return [unflatten(spec, row) for row in rows] if columns else self._empty(calls)

        return _inline_or_not(group, sum(map(payload_bytes, calls)), exchange_all)

    def signature(self, call: Call) -> str:
        """Describe axis, options, structure, dtypes and the other dimensions."""
        leaves, spec, _ = call.args
        axis = call.argument.axis
        texts = payload_signature(leaves, spec, partial(joined_text, axis=axis))
        return f"{self.detail(call.argument)}; {texts}"

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Gather the leaves of every replica of every worker, then do the same as on one."""
        spec, axis = calls[0].args[1], calls[0].argument.axis
        num_leaves, count = len(calls[0].args[0]), len(calls)
        if not num_leaves:
            await turn.exchange(b"", no_data)
            return self._empty(calls)
        mine = [leaf for call in calls for leaf in call.args[0]]
        found = await gather_across(turn, mine, axis)  # by own leaf, then by worker
        first = turn.rank * count
        columns = []
        for index in range(num_leaves):
            of_replicas = [found[i * num_leaves + index] for i in range(count)]
            column = [row[rank] for rank in range(turn.num_workers) for row in of_replicas]
            columns.append(self._exchange(column, axis)[first : first + count])
        return [unflatten(spec, row) for row in zip(*columns, strict=True)]

    def _empty(self, calls: Sequence[Call]) -> Parts:
        return [unflatten(call.args[1], []) for call in calls]


def _gathered(column: Sequence[object], axis: int) -> list[object]:
    """Join along the axis, in replica order; every replica gets all of it."""
    return share(concatenate(column, axis), column)


def _exchanged(column: Sequence[object], axis: int) -> list[object]:
    """Cut every replica's leaf along the axis; join the i-th pieces for replica i."""
    cut = [pieces(_array(leaf), len(column), axis) for leaf in column]
    rows = zip(*cut, strict=True)
    return [concatenate(row, axis, own) for row, own in zip(rows, column, strict=True)]


@final
class Broadcast(Collective):
    """Gives every replica the value of one of them; what the others passed is ignored."""

    __slots__ = ()
    is_uneven = True

    def detail(self, argument: int) -> str:
        """Name the source."""
        return f"source {argument}"

    def num_bytes(self, call: Call) -> int:
        """Add up the source's leaves; the other replicas bring nothing."""
        return payload_bytes(call) if call.position == call.argument else 0

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether the sources are equal."""
        return bool(first.argument == call.argument)

    def difference(self, first: Call, call: Call) -> str | None:
        """Say how sources differ."""
        if first.argument == call.argument:
            return None
        return f"sources {first.argument} and {call.argument} differ"

    def signature(self, call: Call) -> str:
        """Name the source."""
        return self.detail(call.argument)

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Send the source's value to all workers: arrays, numbers and text, in containers."""
        root, position = divmod(calls[0].argument, len(calls))
        value = None
        if root == turn.rank:
            leaves, spec, _ = calls[position].args
            value = unflatten(spec, leaves)
        leaves, spec = flatten(await broadcast_tree(turn, value, root))
        return [unflatten(spec, leaves) for _ in calls]

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Share the source's value; arrays are copied, so that later writes stay its own."""
        source = calls[calls[0].argument]
        leaves, spec, _ = source.args

        def hand_out() -> Parts:
            columns = [_copies(leaf, len(calls)) for leaf in leaves]
            return [unflatten(spec, [column[i] for column in columns]) for i in range(len(calls))]

        return _inline_or_not(group, sum(map(leaf_bytes, leaves)), hand_out)


def _inline_or_not(group: SyncGroup, num_bytes: int, work: Callable[[], Parts]) -> Parts | Pending:
    if group.is_blocking or num_bytes <= INLINE_BYTES:
        return work()
    return Pending(run_together([work]), lambda _calls, results: results[0])


def _copies(leaf: Any, count: int) -> list[object]:
    if isinstance(leaf, np.ndarray):
        copy = np.array(leaf, order="C", subok=True)  # in memory, a memmap too
        copy.flags.writeable = False
        return [copy] * count
    if isinstance(leaf, np.generic) or not is_array_api_obj(leaf):
        return [leaf] * count
    return share(join_arrays([leaf[None]], 0)[0], [leaf] * count)


def _array(leaf: object) -> object:
    return leaf if is_array_api_obj(leaf) else np.asarray(leaf)


all_gather_named = partial(Concatenating, exchange=_gathered)
ALL_GATHER = all_gather_named("all_gather")
ALL_TO_ALL = Concatenating("all_to_all", _exchanged)
BROADCAST = Broadcast("broadcast")
