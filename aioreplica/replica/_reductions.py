"""all_reduce, in one go or started, and reduce_scatter: values combined over replicas.

Also what replicas bring to any collective on arrays: the leaves of a pytree (`Payload`), which are
compared leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeAlias, final

import numpy as np

from ..collectives import (
    CommunicationOptions,
    Summands,
    Turn,
    form_text,
    leaf_bytes,
    leaf_difference,
    pieces,
    reduce_summands,
    reduces_to_itself,
    require_axis,
    require_reducible,
    share,
    share_cut,
    widen_halves,
)
from ..context import PLACE, Place
from ..tree import LEAF_SPEC, TreeSpec, flatten, flatten_arrays, paths, unflatten
from ..typing import ReduceOp
from ..values import flatten_summands, read_at
from ._meeting import Call, Collective, Parts, SyncGroup
from ._pending import Pending
from ._signature import payload_signature, summand_text

Payload: TypeAlias = tuple[list[Any], TreeSpec, Any]
HandOut: TypeAlias = Callable[[Sequence[Call], Sequence[Any]], Parts]
"""The `args` of such a call: leaves, structure, and what `are_like` compares, or None."""


def payload_of(value: object, where: str, place: Place | None = None) -> Payload:
    """Take a pytree apart, whose distributed values are read where the replica runs."""
    leaves, spec = flatten(read_argument(value, where, place))
    return leaves, spec, None


def payload_of_numbers(
    value: object, op: ReduceOp, where: str, place: Place | None = None
) -> Payload:
    """Take a tree of numbers apart, whose distributed values are read where the replica runs.

    Args:
        value: The tree.
        op: The operator.
        where: Names the call in errors.
        place: Where the replica runs; None takes the current place.

    Raises:
        TypeError: If a leaf is not numeric.
        ValueError: If a leaf does not go with the operator.
    """
    if type(value) is np.ndarray and value.dtype.kind in _NUMERIC:
        return [value], LEAF_SPEC, None
    known = flatten_arrays(value)
    leaves, spec = flatten_summands(read_argument(value, where, place)) if known is None else known
    if known is not None or (len(leaves) > 1 and set(map(type, leaves)) == _ARRAYS):
        dtypes = list(map(_dtype_of, leaves))
        few = dtypes[:1] if dtypes.count(dtypes[0]) == len(dtypes) else set(dtypes)
        if all(dtype.kind in _NUMERIC for dtype in few):
            return leaves, spec, (dtypes, list(map(_shape_of, leaves)))
    for leaf in leaves:
        require_reducible(leaf, where, op)
    return leaves, spec, None


def payload_along(value: object, axis: int, where: str, place: Place | None = None) -> Payload:
    """Take a tree of arrays that have an axis apart; distributed values in it are read.

    Raises:
        TypeError: If a leaf is sparse.
        ValueError: If a leaf has no such axis.
    """
    leaves, spec = flatten(read_argument(value, where, place))
    for leaf in leaves:
        require_axis(leaf, axis, where)
    return leaves, spec, None


def read_argument(value: object, where: str, place: Place | None) -> object:
    """Read distributed values; in no place, and in no replica, the call will be refused anyway."""
    if place is None and (place := PLACE.get()).replica is None:
        return value
    return read_at(value, place, where)


def payload_bytes(call: Call) -> int:
    """Return the size of a call's leaves, in bytes."""
    leaves, _, signature = call.args
    if len(leaves) == 1:
        return leaf_bytes(leaves[0])
    return sum(map(leaf_bytes if signature is None else _nbytes_of, leaves))


def are_like(ours: Payload, theirs: Payload) -> bool:
    """Tell quickly whether two calls brought arrays of the same structure, shapes and dtypes.

    False says nothing: the leaves have to be compared one by one.
    """
    leaves, spec, signature = ours
    others, other_spec, other_signature = theirs
    if spec is not other_spec and spec != other_spec:
        return False
    if signature is not None:
        return bool(signature == other_signature)
    if len(leaves) != 1 or len(others) != 1:
        return False
    a, b = leaves[0], others[0]
    if type(a) is np.ndarray and type(b) is np.ndarray:
        return (a.dtype is b.dtype or bool(a.dtype == b.dtype)) and a.shape == b.shape
    return type(a) is type(b) and type(a) in _NUMBERS


def payload_difference(
    first: Call, call: Call, compare: Callable[[object, object], str | None]
) -> str | None:
    """Say how structures or leaves differ, by the caller's measure; None if they do not."""
    leaves, spec, _ = first.args
    others, other_spec, _ = call.args
    if spec != other_spec:
        names, other_names = _paths(first), _paths(call)
        return f"structures differ: leaves {_short(names)} here, {_short(other_names)} there"
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        difference = compare(a, b)
        if difference is not None:
            return f"{difference} at {_paths(first)[index]}"
    return None


def _paths(call: Call) -> list[str]:
    leaves, spec, _ = call.args
    return paths(unflatten(spec, leaves))


def _short(names: Sequence[str]) -> str:
    if len(names) <= 8:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(names[:8])} and {len(names) - 8} more]"


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """Decisive argument of a reducing call: the operation and its options.

    Attributes:
        op: The operator.
        options: Of the call; None for those of the strategy.
        axis: Along which a reduce_scatter hands out its result.
        text: Names the operator, the axis, and options that are not the strategy's.
    """

    op: ReduceOp
    options: CommunicationOptions | None = None
    axis: int | None = None
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axis = "" if self.axis is None else f", axis {self.axis}"
        options = "" if self.options is None else f", {self.options}"
        object.__setattr__(self, "text", f"{self.op.name}{axis}{options}")


def parse_reduction(
    op: ReduceOp | str, options: CommunicationOptions | None, axis: int | None = None
) -> Reduction:
    """Return the argument for an operator as users write it, quickly for the usual ones.

    Raises:
        ValueError: If the operator is unknown.
        TypeError: If it is none.
    """
    if options is None and axis is None and type(op) is str and op in _USUAL:
        return _USUAL[op]
    return Reduction(ReduceOp.parse(op), options, axis)


_USUAL = {name: Reduction(op) for op in ReduceOp for name in (op.name, op.name.lower())}


@final
class Reducing(Collective):
    """Combines equal-shaped leaves over replicas.

    Args:
        name: What users call it.
        hand_out: Makes the parts of the replicas here of the reduced leaves.

    Attributes:
        hand_out: The same.
    """

    __slots__ = ("hand_out",)
    is_reduction = True

    def __init__(self, name: str, hand_out: HandOut) -> None:
        super().__init__(name)
        self.hand_out = hand_out

    def detail(self, argument: Reduction) -> str:
        """Name the operator, the axis, and options that are not the strategy's."""
        return argument.text

    def options(self, argument: Reduction) -> CommunicationOptions | None:
        """Return the options of the call."""
        return argument.options

    def num_bytes(self, call: Call) -> int:
        """Add up the leaves."""
        leaf = call.args[0][0] if len(call.args[0]) == 1 else None
        return leaf.nbytes if type(leaf) is np.ndarray else payload_bytes(call)

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether operators, options, structures, dtypes and shapes are equal."""
        ours, theirs = first.argument, call.argument
        if (ours is theirs or ours == theirs) and are_like(first.args, call.args):
            return True
        return self.difference(first, call) is None

    def difference(self, first: Call, call: Call) -> str | None:
        """Say how operators, options or values differ."""
        ours: Reduction = first.argument
        theirs: Reduction = call.argument
        if ours.op is not theirs.op:
            return f"reduce ops {ours.op.name} and {theirs.op.name} differ"
        if ours.axis != theirs.axis:
            return f"axes {ours.axis} and {theirs.axis} differ"
        if ours.options != theirs.options:
            return f"options {ours.options} and {theirs.options} differ"
        return payload_difference(first, call, leaf_difference)

    def signature(self, call: Call) -> str:
        """Describe the operator, options, structure, dtypes and shapes."""
        leaves, spec, _ = call.args
        if spec is LEAF_SPEC and type(leaf := leaves[0]) is np.ndarray:
            return f"{call.argument.text}; {form_text(leaf.dtype, leaf.shape)}"
        return f"{call.argument.text}; {payload_signature(leaves, spec, summand_text)}"

    def combine(
        self, group: SyncGroup, calls: Sequence[Call]
    ) -> Summands | Coroutine[object, None, Summands]:
        """Reduce all leaves here; return what is to be reduced over the workers."""
        argument: Reduction = calls[0].argument
        op, options = argument.op, argument.options
        if len(calls) == 1 and (options is None or options.compression is None):
            leaves = calls[0].args[0]
            if all(map(reduces_to_itself, leaves, repeat(op))):
                return Summands(op, leaves, are_lent=True)
        rows = [call.args[0] for call in calls]
        wide, halves = widen_halves(op, rows)
        forms = None if halves else calls[0].args[2]
        local = group.reducer.reduce(op, wide, options, group.members, forms)
        if not isinstance(local, list):
            return _summands_of(op, local, halves)
        return Summands(op, local, halves, are_lent=False)

    async def across_later(
        self,
        local: Summands | Awaitable[Summands],
        group: SyncGroup,
        calls: Sequence[Call],
        turn: Turn,
    ) -> Parts:
        """Reduce what `combine` gives over the workers, in a turn of its own."""
        summands = local if isinstance(local, Summands) else await local
        return self.hand_out(calls, await reduce_summands(turn, summands, is_last=True))

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Reduce all leaves; off the event loop if there is much to read."""
        argument: Reduction = calls[0].argument
        rows = [call.args[0] for call in calls]
        signature = calls[0].args[2]
        if group.is_blocking:
            here = group.reducer.reduce_here(
                argument.op, rows, argument.options, group.members, signature
            )
            return self.hand_out(calls, here)
        reduced = group.reducer.reduce(
            argument.op, rows, argument.options, group.members, signature
        )
        if isinstance(reduced, list):
            return self.hand_out(calls, reduced)
        return Pending(reduced, self.hand_out)


async def _summands_of(
    op: ReduceOp, local: Awaitable[list[object]], halves: Mapping[int, object]
) -> Summands:
    return Summands(op, await local, halves, are_lent=False)


def _share_out(calls: Sequence[Call], reduced: Sequence[Any]) -> Parts:
    """Share the leaves; every replica has containers of its own."""
    spec = calls[0].args[1]
    if spec is LEAF_SPEC and type(reduced[0]) in _UNWRITABLE:
        return [reduced[0]] * len(calls)
    if _UNWRITABLE.issuperset(map(type, reduced)):
        return [unflatten(spec, reduced) for _ in calls]
    inputs = zip(*(call.args[0] for call in calls), strict=True)
    columns = [share(leaf, own) for leaf, own in zip(reduced, inputs, strict=True)]
    return [unflatten(spec, [column[i] for column in columns]) for i in range(len(calls))]


def _cut_out(calls: Sequence[Call], reduced: Sequence[Any]) -> Parts:
    """Cut every leaf along the axis, a part per replica of all workers; take the own ones."""
    spec, axis, here = calls[0].args[1], calls[0].argument.axis, len(calls)
    across = calls[0].group.across
    first, count = (0, here) if across is None else (across.first_replica, across.num_replicas)
    inputs = zip(*(call.args[0] for call in calls), strict=True)
    columns = [
        share_cut(pieces(leaf, count, axis)[first : first + here], own)
        for leaf, own in zip(reduced, inputs, strict=True)
    ]
    return [unflatten(spec, [column[i] for column in columns]) for i in range(here)]


_ARRAYS = {np.ndarray}
_NUMERIC = frozenset("fiubc")
_NUMBERS = {float, int, bool, complex}
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_nbytes_of = attrgetter("nbytes")
_UNWRITABLE = {np.ndarray, float, int, complex}  # arrays of NumPy come out read-only

all_reduce_named = partial(Reducing, hand_out=_share_out)
reduce_scatter_named = partial(Reducing, hand_out=_cut_out)
ALL_REDUCE = all_reduce_named("all_reduce")
STARTED_ALL_REDUCE = all_reduce_named("start_all_reduce")
REDUCE_SCATTER = reduce_scatter_named("reduce_scatter")
