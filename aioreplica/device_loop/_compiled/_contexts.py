"""Contexts of a step that is recorded: that of its loop, and that of its replica.

The collectives of a replica are operations of jax, so gradients go through them by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from types import CodeType
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...collectives import CommunicationOptions, require_options
from ...context import CurrentStrategy
from ...errors import ContextError
from ...tree import Tree, flatten, map_leaves, map_nodes, unflatten
from ...typing import OpName, ReduceOp
from ...values import Variable, Weighted, is_floating
from ._narrow import Traced, as_traced
from ._untraceable import recording, refusal, require_recorded_in

AXIS = "replica"
"""The axis of the mesh: one jax device for each replica."""

REFUSED = (
    "merge_call", "start_all_reduce", "agree", "group", "variable", "update", "run_on_device",
    "rng", "shared_rng", "device", "devices", "call_on_host", "meet", "meet_as", "to_await",
    "op_tracker",
)  # fmt: skip


@final
class TracedLoop:
    """The context of a loop while its step is recorded, in place of a `MultiStepContext`.

    Args:
        replica: The replica in it.
        steps_run: Number of complete steps.
        outputs: Values to begin with.

    Attributes:
        steps_run: Number of complete steps.
        last_step_outputs: By name: the value that the last step has set.
        ops: How outputs are reduced.
        sites: Where they were set.
    """

    def __init__(
        self, replica: TracedReplica, steps_run: Traced, outputs: dict[str, object]
    ) -> None:
        self._replica = replica
        self.steps_run = steps_run
        self.last_step_outputs = outputs
        self.ops: dict[str, ReduceOp | None] = {}
        self.sites: dict[str, tuple[CodeType, int]] = {}

    def set_last_step_output(
        self, name: str, value: object, reduce_op: ReduceOp | OpName | None = None
    ) -> None:
        """Set an output; see `MultiStepContext`."""
        if type(name) is not str:
            raise TypeError(f"The name of an output must be a str, got {name!r}.")
        require_recorded_in(self._replica.recording, f"ctx.set_last_step_output({name!r})")
        frame = sys._getframe(1)
        self.sites[name] = (frame.f_code, frame.f_lasti)
        self.ops[name] = None if reduce_op is None else ReduceOp.parse(reduce_op)
        self.last_step_outputs[name] = map_leaves(_as_array, value)

    def set_non_tensor_output(self, name: str, value: object) -> None:
        """Refuse: it is any object of Python."""
        raise refusal("ctx.set_non_tensor_output")

    def record(self, name: str, value: object) -> None:
        """Record a number; see `MultiStepContext`."""
        self._replica.record(name, value)

    def __repr__(self) -> str:
        return f"<TracedLoop | {', '.join(self.last_step_outputs) or 'no outputs'}>"


@final
class Across:
    """Combines arrays of all replicas.

    Args:
        num_replicas: How many the program has.
        in_order: Whether a sum of the library is one in the order of the replicas.
    """

    def __init__(self, num_replicas: int, *, in_order: bool) -> None:
        self.num_replicas = num_replicas
        self._in_order = in_order

    def sum(self, parts: Sequence[Traced]) -> list[Traced]:
        """Sum arrays over the replicas, in their order; half precision in float32.

        Of booleans it is how many are true.
        """
        parts = [p.astype(jnp.int32) if p.dtype == jnp.bool_ else p for p in parts]
        if self.num_replicas == 1:
            return parts
        wide = [p.astype(jnp.float32) if _is_half(p) else p for p in parts]
        if self._in_order:
            sums = list(lax.psum(tuple(wide), AXIS))
        else:
            sums = [reduce(jnp.add, lax.all_gather(part, AXIS)) for part in wide]
        return [total.astype(part.dtype) for total, part in zip(sums, parts, strict=True)]

    def mean(self, parts: Sequence[Traced]) -> list[Traced]:
        """Average arrays over the replicas; integers as floats, whose sum does not wrap."""
        floating = jax.dtypes.canonicalize_dtype(np.float64)
        floats = [p.astype(floating) if p.dtype.kind in "iub" else p for p in parts]
        return [total / self.num_replicas for total in self.sum(floats)]

    def first(self, parts: Sequence[Traced]) -> list[Traced]:
        """Take arrays of replica 0."""
        return [self.from_source(part, 0) for part in parts]

    def from_source(self, part: Traced, source: int) -> Traced:
        """Take an array of one replica; its gradient is the sum of all replicas' gradients."""
        if self.num_replicas == 1:
            return part
        is_source = lax.axis_index(AXIS) == source
        number = part.astype(jnp.int32) if part.dtype == jnp.bool_ else part
        taken = lax.psum(jnp.where(is_source, number, jnp.zeros_like(number)), AXIS)
        return taken.astype(part.dtype)

    def whole_mean(self, part: Traced) -> Traced:
        """Average integers to the nearest one, even between two; exact, and no sum wraps."""
        count = self.num_replicas
        wide = part.astype(jnp.int32) if part.dtype.itemsize < 4 else part
        quotient, rest = self.sum([wide // count, wide % count])
        whole, rest = quotient + rest // count, rest % count
        is_odd = whole % 2 == 1
        return whole + jnp.where(2 * rest + is_odd > count, 1, 0).astype(whole.dtype)

    def extreme(self, array: Traced, fn: Callable[..., Traced]) -> Traced:
        """Take the least or the largest of each element, by an operation of jax."""
        found: Traced = array if self.num_replicas == 1 else fn(array, AXIS)
        return found

    def __repr__(self) -> str:
        return f"<Across | {self.num_replicas} replicas>"


@final
class TracedReplica:
    """A replica of a step that is recorded: what `ar.get_replica_context()` gives there.

    Its collectives are operations of jax, so gradients go through them by themselves.

    Args:
        strategy: Whose step it is.
        across: Combines arrays of its replicas.
        step: Number of the step in the strategy.

    Attributes:
        num_replicas_in_sync: Number of replicas that meet in a collective.
        step: Number of the step in its strategy.
        recording: Tells where jax records the step, and not a function in it.
        records: What the step recorded by name.
    """

    def __init__(self, strategy: CurrentStrategy, across: Across, step: Traced) -> None:
        self._strategy, self._across = strategy, across
        self.num_replicas_in_sync = across.num_replicas
        self.step = step
        self.recording = recording()
        self.records: list[tuple[str, Traced]] = []

    @property
    def context(self) -> TracedReplica:
        """The same."""
        return self

    @property
    def blocking(self) -> TracedReplica:
        """The same: nothing waits here."""
        return self

    @property
    def strategy(self) -> object:
        """The strategy that runs the step."""
        return self._strategy.facade

    @property
    def device_name(self) -> None:
        """None: one program is recorded for all devices."""
        return None

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Index of the replica, which is not known yet."""
        return 0 if self.num_replicas_in_sync == 1 else lax.axis_index(AXIS)

    local_replica_id = replica_id_in_sync_group

    def check_running(self) -> None:
        """Do nothing: a compiled program runs to its end."""

    def all_reduce(self, op: ReduceOp | OpName, value: Tree, options: object = None) -> Tree:
        """Combine a value over all replicas.

        Raises:
            ContextError: If it is to be compressed.
            TypeError: If `options` is not a CommunicationOptions.
        """
        require_options(options, "all_reduce")
        if isinstance(options, CommunicationOptions) and options.compression is not None:
            raise ContextError(
                f"all_reduce was called with compression={options.compression!r} in a step that "
                "run_steps compiles, and a compiled program sums arrays as they are. Leave out "
                "the compression, or `compile`."
            )
        return self._reduced(ReduceOp.parse(op), value, lambda leaf: leaf)

    def reduce_scatter(self, op: ReduceOp | OpName, value: Tree, axis: int = 0) -> Tree:
        """Combine a value over all replicas and take this one's part along an axis."""
        count = self.num_replicas_in_sync

        def own_part(whole: Traced) -> Traced:
            size = _size_along(whole, axis, "reduce_scatter")
            if size % count:
                raise ValueError(
                    f"reduce_scatter of {size} elements among {count} replicas: in a compiled "
                    "step all parts have to be equally long."
                )
            start = self.replica_id_in_sync_group * (size // count)
            return lax.dynamic_slice_in_dim(whole, start, size // count, axis % whole.ndim)

        return self._reduced(ReduceOp.parse(op), value, own_part)

    def all_gather(self, value: Tree, axis: int, options: object = None) -> Tree:
        """Join a value of all replicas along an axis."""
        require_options(options, "all_gather")

        def gathered(leaf: object) -> Traced:
            array = as_traced(leaf)
            _size_along(array, axis, "all_gather")
            if self.num_replicas_in_sync == 1:
                return array
            return lax.all_gather(array, AXIS, axis=axis % array.ndim, tiled=True)

        return map_leaves(gathered, value)

    def all_to_all(self, value: Tree, axis: int = 0) -> Tree:
        """Give the i-th piece along an axis to replica i."""
        count = self.num_replicas_in_sync

        def swapped(leaf: object) -> Traced:
            array = as_traced(leaf)
            if _size_along(array, axis, "all_to_all") % count:
                raise ValueError("all_to_all in a compiled step needs pieces of one size.")
            along = axis % array.ndim
            return array if count == 1 else lax.all_to_all(array, AXIS, along, along, tiled=True)

        return map_leaves(swapped, value)

    def broadcast(self, value: Tree, source: int = 0) -> Tree:
        """Give every replica the value of one of them."""
        count = self.num_replicas_in_sync
        if not 0 <= source < count:
            raise ValueError(f"broadcast got source={source!r}, but replicas are 0 to {count - 1}.")
        return map_leaves(lambda leaf: self._across.from_source(as_traced(leaf), source), value)

    def barrier(self) -> None:
        """Do nothing: the replicas of one program are in the same step."""

    def any(self, flag: Any) -> Traced:
        """Tell every replica whether the flag is true on at least one."""
        return self._across.extreme(jnp.asarray(flag, bool).astype(jnp.int32), lax.pmax) != 0

    def all(self, flag: object) -> Traced:
        """Tell every replica whether the flag is true on all of them."""
        return self._across.extreme(jnp.asarray(flag, bool).astype(jnp.int32), lax.pmin) != 0

    def record(self, name: str, value: Any) -> None:
        """Keep a number of the step, for the event log; see `ReplicaContext`."""
        if not isinstance(name, str):
            raise TypeError(f"The name of an event must be a str, got {name!r}.")
        if isinstance(value, str):
            raise refusal("ctx.record of a text")
        require_recorded_in(self.recording, f"ctx.record({name!r})")
        self.records.append((name, jnp.asarray(value, jnp.float32).reshape(())))

    def _reduced(self, op: ReduceOp, value: Tree, then: Callable[[Traced], Traced]) -> object:
        value = map_nodes(Weighted, _empty_as_zero, value)
        leaves, spec = flatten(value)
        arrays = [as_traced(leaf) for leaf in leaves]
        if op is ReduceOp.MIN or op is ReduceOp.MAX:
            fn = lax.pmin if op is ReduceOp.MIN else lax.pmax
            found = [self._across.extreme(array, fn) for array in arrays]
        elif op is ReduceOp.MEAN:
            found = self._across.mean(arrays)
        else:
            found = self._across.sum(arrays)
        return unflatten(spec, [then(each) for each in found])

    def __repr__(self) -> str:
        return f"<TracedReplica | {self.num_replicas_in_sync} replicas>"


def _refuse(name: str) -> property:
    def refuse(self: TracedReplica) -> NoReturn:
        raise refusal(f"ctx.{name}")

    return property(refuse, doc="Refused in a compiled step.")


for _name in REFUSED:
    setattr(TracedReplica, _name, _refuse(_name))


def _as_array(leaf: object) -> Traced:
    if isinstance(leaf, Variable):
        leaf = leaf.value
    return as_traced(leaf)


def _is_half(array: Traced) -> bool:
    return array.dtype.itemsize == 2 and is_floating(array.dtype)


def _empty_as_zero(part: Weighted) -> Weighted:
    total, weight = as_traced(part.total), as_traced(part.weight)
    return Weighted(jnp.where(weight == 0, jnp.zeros_like(total), total), weight)


def _size_along(array: Traced, axis: int, name: str) -> int:
    if array.ndim == 0 or not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{name} got an array of shape {array.shape}, which has no axis {axis}.")
    size: int = array.shape[axis]
    return size
