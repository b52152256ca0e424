"""Collectives as linear maps: what each does to numbers, and its transpose.

The gradient of a linear map is its transpose, and the transpose of each of these is another of
them. So an adapter needs one differentiable function, which performs a collective and whose way
back performs the transposed one; gradients of gradients follow by themselves.

    all_reduce SUM or MEAN    its own transpose: the gradient of an all-sum is an all-sum
    all_gather                sum over replicas, of which each takes the part that it had brought
    reduce_scatter            all_gather, divided by the replicas for MEAN
    broadcast                 sum over replicas for the source, zeros for the others

Each object is one call: what it learned from the replicas' sizes belongs to its transpose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from array_api_compat import array_namespace

from ..devices.backends import Array, join_arrays
from ..replica import (
    AllGather,
    AllReduce,
    Along,
    Broadcast,
    CallSite,
    ReduceScatter,
    Reduction,
    RunningReplica,
    collective_named,
    payload_along,
    payload_of,
    payload_of_numbers,
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
        collective = collective_named(AllReduce, self.name)
        return self.replica.blocking.meet(collective, Reduction(op), args, self.site)

    def scatter(self, op: ReduceOp, value: Array, axis: int) -> Array:
        """Sum or average over the replicas and take this one's part along an axis."""
        if self.replica is None:
            return _copy(value)
        payload_along(value, axis, self.name)
        args = payload_of_numbers(value, op, self.name)
        collective = collective_named(ReduceScatter, self.name)
        return self.replica.blocking.meet(collective, Reduction(op, None, axis), args, self.site)

    def gather(self, value: Array, axis: int) -> tuple[Array, int]:
        """Join along an axis; tell where in the result this replica's part begins."""
        payload_along(value, axis, self.name)
        if self.replica is None:
            return _copy(value), 0
        along = axis % value.ndim
        size = np.full((1,) * value.ndim, value.shape[along])
        args = payload_along((value, size), axis, self.name)
        collective = collective_named(AllGather, self.name)
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


class LinearCollective(ABC):
    """One call of a linear collective.

    Args:
        caller: Who called it.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    @property
    def title(self) -> str:
        """Name for messages."""
        return self.caller.name

    @abstractmethod
    def perform(self, value: Array) -> Array:
        """Meet the other replicas with an array; return a new one, of the same library."""

    @abstractmethod
    def transposed(self) -> LinearCollective:
        """Return a call of the transposed map, once this one was performed."""

    @abstractmethod
    def again(self) -> LinearCollective:
        """Return another call of the same map."""


@final
class Total(LinearCollective):
    """The sum or mean over replicas, for all of them: its own transpose."""

    def __init__(self, caller: Caller, op: ReduceOp) -> None:
        super().__init__(caller)
        self._op = op

    def perform(self, value: Array) -> Array:
        """Combine."""
        return self.caller.sum(self._op, value)

    def transposed(self) -> LinearCollective:
        """The gradient of an all-sum is an all-sum."""
        return Total(self.caller.back(), self._op)

    def again(self) -> LinearCollective:
        """Another one."""
        return Total(self.caller, self._op)


@final
class Joined(LinearCollective):
    """The values of all replicas joined along an axis, divided by a number."""

    def __init__(self, caller: Caller, axis: int, divisor: int = 1) -> None:
        super().__init__(caller)
        self._axis = axis
        self._divisor = divisor
        self._begin = self._size = 0

    def perform(self, value: Array) -> Array:
        """Join; sizes along the axis may differ."""
        joined, self._begin = self.caller.gather(value, self._axis)
        self._size = value.shape[self._axis]
        return joined if self._divisor == 1 else joined / self._divisor

    def transposed(self) -> LinearCollective:
        """Sum over replicas, and take the part that was brought."""
        part = slice(self._begin, self._begin + self._size)
        return OwnPart(self.caller.back(), self._axis, self._divisor, part)

    def again(self) -> LinearCollective:
        """Another one."""
        return Joined(self.caller, self._axis, self._divisor)


@final
class OwnPart(LinearCollective):
    """A part of the sum over replicas, divided by a number: the transpose of `Joined`."""

    def __init__(self, caller: Caller, axis: int, divisor: int, part: slice) -> None:
        super().__init__(caller)
        self._axis = axis
        self._divisor = divisor
        self._part = part

    def perform(self, value: Array) -> Array:
        """Sum and cut."""
        total = self.caller.sum(ReduceOp.SUM, value)
        part = total[(slice(None),) * (self._axis % total.ndim) + (self._part,)]
        return part if self._divisor == 1 else part / self._divisor

    def transposed(self) -> LinearCollective:
        """Join again."""
        return Joined(self.caller.back(), self._axis, self._divisor)

    def again(self) -> LinearCollective:
        """Another one."""
        return OwnPart(self.caller, self._axis, self._divisor, self._part)


@final
class Scattered(LinearCollective):
    """A balanced part of the sum or mean over replicas, along an axis."""

    def __init__(self, caller: Caller, op: ReduceOp, axis: int) -> None:
        super().__init__(caller)
        self._op = op
        self._axis = axis

    def perform(self, value: Array) -> Array:
        """Combine and cut."""
        return self.caller.scatter(self._op, value, self._axis)

    def transposed(self) -> LinearCollective:
        """Join the parts."""
        replica = self.caller.replica
        count = 1 if replica is None else replica.context.num_replicas_in_sync
        return Joined(self.caller.back(), self._axis, count if self._op is ReduceOp.MEAN else 1)

    def again(self) -> LinearCollective:
        """Another one."""
        return Scattered(self.caller, self._op, self._axis)


@final
class FromSource(LinearCollective):
    """The value of one replica, for all of them."""

    def __init__(self, caller: Caller, source: int) -> None:
        super().__init__(caller)
        self._source = source
        self._shape: tuple[int, ...] = ()

    def perform(self, value: Array) -> Array:
        """Take the source's value."""
        self._shape = tuple(value.shape)
        return self.caller.broadcast(value, self._source)

    def transposed(self) -> LinearCollective:
        """Sum over replicas, for the source."""
        return ToSource(self.caller.back(), self._source, self._shape)

    def again(self) -> LinearCollective:
        """Another one."""
        return FromSource(self.caller, self._source)


@final
class ToSource(LinearCollective):
    """The sum over replicas for one of them, zeros for the others: the transpose of `FromSource`.

    The zeros have the shape that the replica had brought to be ignored.
    """

    def __init__(self, caller: Caller, source: int, shape: tuple[int, ...]) -> None:
        super().__init__(caller)
        self._source = source
        self._shape = shape

    def perform(self, value: Array) -> Array:
        """Sum, and keep it or not."""
        total = self.caller.sum(ReduceOp.SUM, value)
        replica = self.caller.replica
        if replica is None or replica.replica_id_in_sync_group == self._source:
            return total
        return array_namespace(total).zeros(self._shape, dtype=total.dtype)

    def transposed(self) -> LinearCollective:
        """Hand out again."""
        return FromSource(self.caller.back(), self._source)

    def again(self) -> LinearCollective:
        """Another one."""
        return ToSource(self.caller, self._source, self._shape)


def _copy(value: Array) -> Array:
    return join_arrays([value[None]], 0)[0]
