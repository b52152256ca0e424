"""Collectives for functions that are differentiated: gradients go back through them.

They are called by plain functions on device threads, such as a loss, wait there for the other
replicas, and do so again on the way back. Outside every run one replica meets itself.
"""

from __future__ import annotations

import operator
import sys
from types import FrameType

import numpy as np
from array_api_compat import is_jax_array, is_torch_array

from ..collectives import require_dense
from ..context import PLACE, TRACE
from ..devices.backends import Array
from ..errors import ContextError
from ..replica import CallSite, ProcessContext, RunningReplica
from ..tree import Tree, map_leaves
from ..typing import OpName, ReduceOp
from ._linear import Caller, LinearCollective, LinearMap, from_source, joined, scattered, total
from ._value_and_grad import find_adapter


def all_reduce(op: ReduceOp | OpName, value: Tree) -> Tree:
    """Sum or average a value over all replicas, differentiably.

    Args:
        op: SUM or MEAN, or its name in any case.
        value: Any pytree of arrays, traced ones of autograd, torch or jax included, with equal
            structure, shapes and dtypes on all replicas. Each leaf is one collective.

    Returns:
        The combined pytree, for every replica.

    Raises:
        ValueError: If `op` is another one: MIN and MAX are not linear.
        TypeError: If a leaf is not numeric, or is reached by a compiler such as jax.jit.
        ContextError: If called on the event loop, or in cross-replica context.

    Cancellation:
        CancelledError wakes the thread once the run is aborted.

    Determinism:
        As `ctx.all_reduce`, on the way back too.

    Example:
        >>> import autograd.numpy as np
        >>> from aioreplica.autodiff import value_and_grad
        >>> square_of_sum = value_and_grad(lambda xs: all_reduce("sum", xs[0]) ** 2)
        >>> print(*square_of_sum([np.array(3.0)]))  # one replica, as nothing runs
        9.0 [array(6.)]
    """
    parsed = _linear_op(op, "all_reduce")
    if (trace := TRACE.get()) is not None:
        return trace.replica.all_reduce(parsed, value)
    return _send(value, "all_reduce", sys._getframe(1), total(parsed))


def all_gather(value: Tree, axis: int) -> Tree:
    """Join a value of all replicas along `axis`, in replica order, differentiably.

    Args:
        value: Any pytree of arrays; sizes along `axis` may differ between replicas.
        axis: The axis to join along; negative ones count from the end.

    Raises:
        ValueError: If a leaf is a scalar or has no such axis.
        TypeError: As `all_reduce`.
        ContextError: As `all_reduce`.
    """
    if (trace := TRACE.get()) is not None:
        return trace.replica.all_gather(value, axis)
    return _send(value, "all_gather", sys._getframe(1), joined(axis))


def reduce_scatter(op: ReduceOp | OpName, value: Tree, axis: int = 0) -> Tree:
    """Sum or average a value over all replicas and take this one's part, differentiably.

    Args:
        op: As for `all_reduce`.
        value: As for `all_reduce`.
        axis: What is divided: contiguous and balanced, as by `ctx.reduce_scatter`.

    Raises:
        ValueError: As `all_reduce`, or if a leaf is a scalar or has no such axis.
        TypeError: As `all_reduce`.
        ContextError: As `all_reduce`.
    """
    parsed = _linear_op(op, "reduce_scatter")
    if (trace := TRACE.get()) is not None:
        return trace.replica.reduce_scatter(parsed, value, axis)
    return _send(value, "reduce_scatter", sys._getframe(1), scattered(parsed, axis))


def broadcast(value: Tree, source: int = 0) -> Tree:
    """Give every replica the value of one of them, differentiably.

    Args:
        value: Any pytree of arrays, equal in structure; the others' numbers are ignored, and have
            a gradient of zeros.
        source: Whose value.

    Raises:
        ValueError: If there is no such replica.
        TypeError: As `all_reduce`, or if `source` is not an int.
        ContextError: As `all_reduce`.
    """
    index = operator.index(source)
    if (trace := TRACE.get()) is not None:
        return trace.replica.broadcast(value, index)
    replica = _current_replica("broadcast")
    count = 1 if replica is None else replica.context.num_replicas_in_sync
    if not 0 <= index < count:
        raise ValueError(f"broadcast got source={source!r}, but replicas are 0 to {count - 1}.")
    return _send(value, "broadcast", sys._getframe(1), from_source(index))


def _linear_op(op: ReduceOp | str, name: str) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    if parsed is not ReduceOp.SUM and parsed is not ReduceOp.MEAN:
        raise ValueError(
            f"ar.autodiff.{name} takes SUM or MEAN, got {parsed.name}, which has no gradient here. "
            "Gather the values and take the extreme of those, or use ctx.all_reduce for a number "
            "that needs no gradient."
        )
    return parsed


def _current_replica(name: str) -> RunningReplica | None:
    place = PLACE.get()
    if isinstance(place.replica, RunningReplica):
        return place.replica
    if isinstance(place.replica, ProcessContext):
        raise place.replica.refusal(f"ar.autodiff.{name}")
    if place.strategy is not None:
        raise ContextError(
            f"ar.autodiff.{name} was called in {place.describe()}, but it is a collective of the "
            "replicas. Call it in the loss of a step."
        )
    return None


def _send(value: Tree, name: str, frame: FrameType, apply: LinearMap) -> Tree:
    """Send each leaf through a collective of its own."""
    caller = Caller(_current_replica(name), CallSite.of(frame), f"autodiff.{name}")

    def send_leaf(leaf: Array) -> Array:
        require_dense(leaf, f"ar.autodiff.{name}")
        backend = _backend_of(leaf)
        if backend is None:
            return apply(caller, np.asarray(leaf))[0]
        return find_adapter(backend).perform(LinearCollective(caller, apply), leaf)

    return map_leaves(send_leaf, value)


def _backend_of(leaf: object) -> str | None:
    """Return the name of the backend that a leaf may be traced by, None for plain NumPy."""
    if is_torch_array(leaf):
        return "torch"
    if is_jax_array(leaf):
        return "jax"
    return "autograd" if type(leaf).__module__.startswith("autograd.") else None
