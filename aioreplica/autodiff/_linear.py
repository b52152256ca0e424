"""Collectives as linear maps: what each does to numbers, and its transpose.

The gradient of a linear map is its transpose, and the transpose of each of these is another of
them. So an adapter needs one differentiable function, which performs a collective and whose way
back performs the transposed one; gradients of gradients follow by themselves.

    all_reduce SUM or MEAN    its own transpose: the gradient of an all-sum is an all-sum
    all_gather                sum over replicas, of which each takes the part that it had brought
    reduce_scatter            all_gather, divided by the replicas for MEAN
    broadcast                 sum over replicas for the source, zeros for the others

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from ..devices.backends import Array, join_arrays
from ..replica import (
    Along,
    Broadcast,
    CallSite,
    Reduction,
    RunningReplica,
    all_gather_named,
    all_reduce_named,
    collective_named,
    payload_along,
    payload_of,
    payload_of_numbers,
    reduce_scatter_named,
)
from ..typing import ReduceOp


@final
@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a differentiable collective, and the line of the call.

    Attributes:
        replica: The replica; None outside every run, where one replica meets itself.
        site: The line of the call, which tables show for the way back too.
        name: What tables call the collective.
    """

    replica: RunningReplica | None
    site: CallSite
    name: str

    def back(self) -> Caller:
        """Return the caller of the transposed collective."""
        return replace(self, name=f"gradient of {self.name.removeprefix('autodiff.')}")

    def sum(self, op: ReduceOp, value: Array) -> Array:
        """Sum or average over the replicas; arrays that can be written are this replica's own."""
        if self.replica is None:
            return _copy(value)
        args = payload_of_numbers(value, op, self.name)
        collective = collective_named(all_reduce_named, self.name)
        return self.replica.blocking.meet(collective, Reduction(op), args, self.site)

    def scatter(self, op: ReduceOp, value: Array, axis: int) -> Array:
        """Sum or average over the replicas and take this one's part along an axis."""
        if self.replica is None:
            return _copy(value)
        payload_along(value, axis, self.name)
        args = payload_of_numbers(value, op, self.name)
        collective = collective_named(reduce_scatter_named, self.name)
        return self.replica.blocking.meet(collective, Reduction(op, None, axis), args, self.site)

    def gather(self, value: Array, axis: int) -> tuple[Array, int]:
        """Join along an axis; tell where in the result this replica's part begins."""
        payload_along(value, axis, self.name)
        if self.replica is None:
            return _copy(value), 0
        along = axis % value.ndim
        size = np.full((1,) * value.ndim, value.shape[along])
        args = payload_along((value, size), axis, self.name)
        collective = collective_named(all_gather_named, self.name)
        joined, sizes = self.replica.blocking.meet(collective, Along(axis), args, self.site)
        before = sizes.reshape(-1)[: self.replica.replica_id_in_sync_group]
        return joined, int(before.sum())

    def broadcast(self, value: Array, source: int) -> Array:
        """Take the value of one replica."""
        if self.replica is None:
            return _copy(value)
        collective = collective_named(Broadcast, self.name)
        return self.replica.blocking.meet(
            collective, source, payload_of(value, self.name), self.site
        )


LinearMap: TypeAlias = Callable[[Caller, Array], tuple[Array, "LinearMap"]]
"""Meets the other replicas with an array; returns a new one of the same library, and its transpose.

The transpose knows what was learned from the replicas' sizes.
"""


@final
class LinearCollective:
    """One call of a linear collective.

    Args:
        caller: Who called it.
        apply: Does it.
    """

    __slots__ = ("_apply", "_back", "caller")

    def __init__(self, caller: Caller, apply: LinearMap) -> None:
        self.caller = caller
        self._apply = apply
        self._back: LinearMap | None = None

    def perform(self, value: Array) -> Array:
        """Meet the other replicas with an array; return a new one, of the same library."""
        result, self._back = self._apply(self.caller, value)
        return result

    def transposed(self) -> LinearCollective:
        """Return a call of the transposed map, once this one was performed."""
        assert self._back is not None  # it was performed
        return LinearCollective(self.caller.back(), self._back)

    def again(self) -> LinearCollective:
        """Return another call of the same map."""
        return LinearCollective(self.caller, self._apply)


def total(op: ReduceOp) -> LinearMap:
    """Return the sum or mean over replicas, for all of them: its own transpose."""

    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        return caller.sum(op, value), apply

    return apply


def joined(axis: int, divisor: int = 1) -> LinearMap:
    """Return the values of all replicas joined along an axis, divided by a number.

    Sizes along the axis may differ. The transpose sums over replicas, and takes the part that was
    brought.
    """

    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        whole, begin = caller.gather(value, axis)
        part = slice(begin, begin + value.shape[axis])
        return whole if divisor == 1 else whole / divisor, _own_part(axis, divisor, part)

    return apply


def _own_part(axis: int, divisor: int, part: slice) -> LinearMap:
    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        whole = caller.sum(ReduceOp.SUM, value)
        own = whole[(slice(None),) * (axis % whole.ndim) + (part,)]
        return own if divisor == 1 else own / divisor, joined(axis, divisor)

    return apply


def scattered(op: ReduceOp, axis: int) -> LinearMap:
    """Return a balanced part of the sum or mean over replicas, along an axis."""

    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        replica = caller.replica
        count = 1 if replica is None else replica.context.num_replicas_in_sync
        back = joined(axis, count if op is ReduceOp.MEAN else 1)
        return caller.scatter(op, value, axis), back

    return apply


def from_source(source: int) -> LinearMap:
    """Return the value of one replica, for all of them.

    The transpose is the sum over replicas for the source, zeros for the others: of the shape that
    they had brought to be ignored.
    """

    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        return caller.broadcast(value, source), _to_source(source, tuple(value.shape))

    return apply


def _to_source(source: int, shape: tuple[int, ...]) -> LinearMap:
    def apply(caller: Caller, value: Array) -> tuple[Array, LinearMap]:
        whole = caller.sum(ReduceOp.SUM, value)
        replica = caller.replica
        if replica is not None and replica.replica_id_in_sync_group != source:
            zeros = array_namespace(whole).zeros
            whole = zeros(shape, dtype=whole.dtype, device=device_of(whole))
        return whole, from_source(source)

    return apply


def _copy(value: Array) -> Array:
    return join_arrays([value[None]], 0)[0]
