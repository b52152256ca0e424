"""all_reduce, in one go or started, and reduce_scatter: values combined over replicas."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from ..collectives import CommunicationOptions, leaf_difference, pieces, share
from ..tree import LEAF_SPEC, unflatten
from ..typing import ReduceOp
from ._meeting import Call, Collective, Parts, Pending, SyncGroup
from ._payload import are_like, payload_bytes, payload_difference


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """How to reduce: the decisive argument of a reducing call.

    Attributes:
        op: The operator.
        options: Of the call; None for those of the strategy.
        axis: Along which a reduce_scatter hands out its result.
    """

    op: ReduceOp
    options: CommunicationOptions | None = None
    axis: int | None = None


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


class Reducing(Collective):
    """What all reductions have in common.

    Args:
        name: What users call it.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Name for tables."""
        return self._name

    def detail(self, argument: Reduction) -> str:
        """Name the operator, the axis, and options that are not the strategy's."""
        axis = "" if argument.axis is None else f", axis {argument.axis}"
        options = "" if argument.options is None else f", {argument.options}"
        return f"{argument.op.name}{axis}{options}"

    def options(self, argument: Reduction) -> CommunicationOptions | None:
        """Return the options of the call."""
        return argument.options

    def op_name(self, argument: Reduction) -> str:
        """Name the operator."""
        return argument.op.name

    def num_bytes(self, call: Call) -> int:
        """Add up the leaves."""
        return payload_bytes(call)

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether operators, options, structures, dtypes and shapes are equal."""
        ours, theirs = first.argument, call.argument
        if (ours is theirs or ours == theirs) and are_like(first, call):
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
        return Pending(reduced, partial(self.hand_out, calls))

    @abstractmethod
    def hand_out(self, calls: Sequence[Call], reduced: Sequence[Any]) -> Parts:
        """Return each replica's part of the reduced leaves."""


@final
class AllReduce(Reducing):
    """Combines equal-shaped leaves over replicas; every replica gets the same result."""

    __slots__ = ()

    def hand_out(self, calls: Sequence[Call], reduced: Sequence[Any]) -> Parts:
        """Share the leaves; every replica has containers of its own."""
        spec = calls[0].args[1]
        if _UNWRITABLE.issuperset(map(type, reduced)):
            if spec is LEAF_SPEC:
                return [reduced[0]] * len(calls)
            return [unflatten(spec, reduced) for _ in calls]
        inputs = zip(*(call.args[0] for call in calls), strict=True)
        columns = [share(leaf, own) for leaf, own in zip(reduced, inputs, strict=True)]
        return [unflatten(spec, [column[i] for column in columns]) for i in range(len(calls))]


@final
class ReduceScatter(Reducing):
    """Combines equal-shaped leaves over replicas; every replica gets its part of the result."""

    __slots__ = ()

    def hand_out(self, calls: Sequence[Call], reduced: Sequence[Any]) -> Parts:
        """Cut every leaf along the axis."""
        spec, axis = calls[0].args[1], calls[0].argument.axis
        columns = [pieces(leaf, len(calls), axis) for leaf in reduced]
        if not columns:
            return [unflatten(spec, []) for _ in calls]
        return [unflatten(spec, row) for row in zip(*columns, strict=True)]


_UNWRITABLE = {np.ndarray, float, int, complex}  # arrays of NumPy come out read-only

ALL_REDUCE = AllReduce("all_reduce")
STARTED_ALL_REDUCE = AllReduce("start_all_reduce")
REDUCE_SCATTER = ReduceScatter("reduce_scatter")
