"""One run of a step function that records it: variables, collectives and updates of one replica.

The step is the same function that runs eagerly. While it is recorded, `Place` holds a
`TracedReplica`, variables are read through `OVERRIDES`, and calls that would meet other replicas
find this trace in `TRACE`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import reduce
from types import CodeType
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._functions import UNFINISHED
from ...context import OVERRIDES, PLACE, TRACE, CurrentStrategy, Place
from ...errors import ContextError
from ...optimizers import Optimizer, differentiate_loss, require_loss, sort_by_creation
from ...tree import Array, Tree, flatten, map_leaves, map_nodes, unflatten
from ...typing import OpName, ReduceOp, VariableAggregation
from ...values import IndexedSlices, Variable, Weighted, fitting, is_floating
from ._prepared import Prepared, Which, multipliers_of, prepared_for
from ._untraceable import may_wrap, only_recorded, require_own_dtype
from ._update import MAX_VARIABLES, WRAPPED, apply_traced, halves_of, traced_scale

Traced: TypeAlias = jax.Array
AXIS = "replica"
"""The axis of the mesh: one jax device for each replica."""

REFUSED = (
    "merge_call", "start_all_reduce", "agree", "group", "variable", "update", "run_on_device",
    "rng", "shared_rng", "device", "devices", "call_on_host", "meet", "meet_as", "to_await",
    "op_tracker",
)  # fmt: skip


@final
class StepTrace:
    """Values of variables at one point of a step that is recorded, and what it has written.

    Args:
        strategy: Whose step it is.
        num_replicas: How many replicas the program has.
        values: What variables hold at the beginning, by variable; None takes in every variable
            that the step asks for.
        index: Number of the step in the loop; and that of the loop's first step in the strategy.
        keys: Seeds for `jax_key`, by name; None notes the names.
        table: Numbers that `prepare` gives, with the iteration they begin at and which of its rows
            each variable has, by optimizer.
        looks: Whether to check all updates in every step.
        in_order: Whether a sum of the library is one in the order of the replicas.

    Attributes:
        written: What wrote each variable, for each write; None for an assignment.
        applied: How often each optimizer was applied, with the variables it moves.
        records: What the step recorded by name.
        codes: What fails the step, if it is not 0.
    """

    def __init__(
        self,
        strategy: CurrentStrategy,
        num_replicas: int,
        values: dict[Variable, Traced] | None,
        index: Traced,
        first: Traced,
        keys: Mapping[tuple[str, bool], Traced] | None = None,
        table: Mapping[Optimizer, tuple[Traced, list[Prepared], Tree, Which]] | None = None,
        *,
        looks: bool = False,
        in_order: bool = True,
    ) -> None:
        self.strategy = strategy
        self.num_replicas = num_replicas
        self.is_first = values is None
        self.values: dict[Variable, Traced] = {} if values is None else values
        self.index, self.first_step = index, first
        self.looks = looks
        self.replica = TracedReplica(self)
        self.written: dict[Variable, list[Optimizer | None]] = {}
        self.applied: dict[Optimizer, tuple[tuple[Variable, ...], int]] = {}
        self.records: list[tuple[str, Traced]] = []
        self.codes: list[Traced] = []
        self.key_names: dict[tuple[str, bool], None] = {}
        self._keys = keys
        self._table = table
        self._in_order = in_order

    def run(self, fn: Callable[..., Any], ctx: TracedLoop, inputs: tuple[object, ...]) -> None:
        """Call the step function where this trace is current.

        Raises:
            TypeError: If it gives a coroutine or a generator.
            Exception: What it raises.
        """

        def call() -> object:
            PLACE.set(Place(self.strategy, self.replica))  # type: ignore[arg-type]  # runs no op
            OVERRIDES.set(self)
            TRACE.set(self)
            with only_recorded(self.refusal):
                return fn(ctx, *inputs)

        result = copy_context().run(call)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f"The step function {fn!r} returned a coroutine, which cannot be compiled."
            )
        if type(result) in UNFINISHED:
            raise TypeError(
                f"The step function {fn!r} returned {UNFINISHED[type(result)]}, which cannot be "
                "compiled."
            )

    # ---- variables -----------------------------------------------------------------------

    def read(self, variable: Variable) -> Traced:
        """Return what a variable holds at this point of the step."""
        found = self.values.get(variable)
        if found is not None:
            return found
        if not self.is_first:
            raise ContextError(
                f"The step reads variable {variable.name!r} now, which it did not when it was "
                "recorded first. A compiled step has to do the same each time."
            )
        require_own_dtype(variable)
        found = self.values[variable] = jnp.asarray(variable.components[0])
        return found

    def read_rows(self, variable: Variable, indices: object) -> Traced:
        """Return some rows of a variable."""
        return self.read(variable)[indices]

    def read_bags(self, variable: Variable, bags: object) -> Traced:
        """Refuse: which rows are combined would be recorded with the step.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"embedding_lookup_sparse of {variable.name!r} cannot be compiled. Combine the rows of "
            "embedding_lookup with jax.ops.segment_sum, or leave out `compile`."
        )

    def write(self, variable: Variable, value: Traced, source: Optimizer | None = None) -> None:
        """Let a variable hold something else from here on."""
        old = self.read(variable)
        new = self.values[variable] = jnp.asarray(value).astype(old.dtype)
        if source is not None and may_wrap(variable) and variable is not source.settings.iterations:
            limits = jnp.iinfo(old.dtype)  # a count goes up by 1
            self._fail_if(variable, ((old == limits.max) & (new == limits.min)).any())
        self.written.setdefault(variable, []).append(source)

    def assign(self, variable: Variable, verb: str, value: object) -> Traced:
        """Do what `variable.blocking.assign` and its like do in a replica.

        Raises:
            ValueError: If the shape or dtype does not fit, that of a sum or mean over the replicas
                too, or the variable has no aggregation.
            TypeError: If the value has rows only.
        """
        variable._require_owner_in_charge(PLACE.get())
        if isinstance(value, IndexedSlices) or verb.startswith("scatter"):
            raise TypeError(f"{verb} of {variable.name!r} with IndexedSlices cannot be compiled.")
        given = value.value if isinstance(value, Variable) else value
        array, old = jnp.asarray(given), self.read(variable)
        fitting(variable, given if isinstance(given, int) else _blank(array))
        if may_wrap(variable):
            self._fail_if_wrapped(variable, verb, old, array)
        new = array if array.dtype == jnp.uint32 and may_wrap(variable) else array.astype(old.dtype)
        if variable.is_mirrored and not self.strategy.has_plain_values:
            new = self._aggregated(variable, verb, new)
            if variable.dtype.kind not in "iu":
                fitting(variable, _blank(new))  # booleans have become numbers
        new = new.astype(old.dtype)
        if verb != "assign":
            new = old + new if verb == "assign_add" else old - new
        self.write(variable, new)
        return self.values[variable]

    def _aggregated(self, variable: Variable, verb: str, new: Traced) -> Traced:
        if variable.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {variable.name!r} has aggregation 'none', so replicas cannot {verb} it. "
                "Create it with aggregation='mean', 'sum' or 'only_first_replica'."
            )
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.first([new])[0]
        if variable.aggregation is not VariableAggregation.MEAN:
            return self.sum([new])[0]
        if variable.dtype.kind in "iu":
            return self._whole_mean(new)
        return self.mean([new])[0]

    def _whole_mean(self, part: Traced) -> Traced:
        """Average integers to the nearest one, even between two; exact, and no sum wraps."""
        count = self.num_replicas
        wide = part.astype(jnp.int32) if part.dtype.itemsize < 4 else part
        quotient, rest = self.sum([wide // count, wide % count])
        whole, rest = quotient + rest // count, rest % count
        is_odd = whole % 2 == 1
        return whole + jnp.where(2 * rest + is_odd > count, 1, 0).astype(whole.dtype)

    # ---- other replicas ------------------------------------------------------------------

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

    # ---- updates -------------------------------------------------------------------------

    def minimize(
        self,
        optimizer: Optimizer,
        loss: Callable[[], object],
        var_list: Sequence[Variable] | None,
        global_step: Variable | None,
        backend: str,
        has_aux: bool,
    ) -> object:
        """Record what `optimizer.blocking.minimize` does; jax differentiates."""
        require_loss(loss, var_list)
        if backend == "torch":
            raise ContextError(
                'minimize(backend="torch") cannot be compiled by jax. Write the loss with the '
                "array's own namespace, or jax.numpy."
            )
        scale = traced_scale(self, optimizer.loss_scale)
        value, pairs = differentiate_loss(loss, var_list, scale, "jax", has_aux)
        if var_list is None:
            sort_by_creation(pairs, self.strategy)
        self.apply_gradients(optimizer, pairs, global_step, False)
        return value

    def apply_gradients(
        self,
        optimizer: Optimizer,
        pairs: Sequence[tuple[object, object]],
        global_step: Variable | None,
        is_summed: bool,
    ) -> None:
        """Record what `optimizer.blocking.apply_gradients` does."""
        apply_traced(self, optimizer, pairs, global_step, is_summed=is_summed)

    def row(self, optimizer: Optimizer, variables: Sequence[Variable]) -> list[object]:
        """Return what `prepare` gives for each variable at the optimizer's iteration."""
        known, times = self.applied.get(optimizer, (tuple(variables), 0))
        if known != tuple(variables):
            raise ContextError(
                f"{optimizer!r} is applied twice in a compiled step, to different variables. Use "
                "an optimizer for each."
            )
        self.applied[optimizer] = known, times + 1
        if self._table is None:
            multipliers, which = multipliers_of(optimizer, variables)
            self.read(optimizer.iterations)
            prepared = prepared_for(optimizer, multipliers, 0)
            first = [each.restore([jnp.float32(n) for n in each.numbers]) for each in prepared]
            return [first[i] for i in which]
        base, shapes, columns, which = self._table[optimizer]
        at = self.read(optimizer.iterations) - base
        found = list(
            jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, keepdims=False), columns)
        )
        rows, used = [], 0
        for each in shapes:
            rows.append(each.restore(found[used : used + len(each.numbers)]))
            used += len(each.numbers)
        return [rows[i] for i in which]

    def _fail_if_wrapped(self, variable: Variable, verb: str, old: Traced, array: Traced) -> None:
        """Fail the step if what an assignment gives does not fit; exact, in halves of 16 bits."""
        parts = list(halves_of(array))
        if variable.is_mirrored and not self.strategy.has_plain_values:
            if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                parts = self.first(parts)
            elif variable.aggregation is VariableAggregation.SUM:
                parts = self.sum(parts)
            elif variable.aggregation is VariableAggregation.MEAN:
                parts = list(halves_of(self._whole_mean(array)))
        if verb != "assign":
            sign = 1 if verb == "assign_add" else -1
            parts = [own + sign * part for own, part in zip(halves_of(old), parts, strict=True)]
        high, limits = parts[0] + (parts[1] >> 16), jnp.iinfo(old.dtype)
        self._fail_if(variable, ((high < limits.min >> 16) | (high > limits.max >> 16)).any())

    def _fail_if(self, variable: Variable, is_wrapped: Traced) -> None:
        is_beyond = is_wrapped.astype(jnp.int32)
        if self.num_replicas > 1:
            is_beyond = lax.pmax(is_beyond, AXIS)
        at = next(i for i, each in enumerate(self.values) if each is variable)
        self.fail(is_beyond * (WRAPPED * MAX_VARIABLES + at))

    def fail(self, code: Traced) -> None:
        """Report a code that is not 0 if the step fails."""
        self.codes.append(code.astype(jnp.int32))

    def code(self) -> Traced:
        """Return the first code that is not 0, or 0."""
        found = jnp.int32(0)
        for code in self.codes:
            found = jnp.where(found == 0, code, found)
        return found

    # ---- random numbers, and what is refused ---------------------------------------------

    def jax_key(self, name: str, shared: bool) -> Traced:
        """Return the key that `ar.autodiff.jax_key` gives in this step."""
        self.key_names[name, shared] = None
        seed = jnp.uint32(0) if self._keys is None else self._keys[name, shared]
        return jax.random.key(seed)

    def record(self, name: str, value: object) -> None:
        """Keep a number of the step, for the event log."""
        if isinstance(value, str):
            raise self.refusal("ctx.record of a text")
        self.records.append((name, jnp.asarray(value, jnp.float32).reshape(())))

    def refusal(self, what: str) -> ContextError:
        """Return the error of a call that runs Python in every step."""
        return ContextError(
            f"{what} was called in a step that run_steps compiles: it runs Python in each step, "
            "which a compiled one does not. Do it outside the step, or leave out `compile`."
        )

    def hold(self, owner: object, take: Callable[[], object]) -> NoReturn:
        """Refuse: a module of another library is called."""
        raise self.refusal(f"{type(owner).__name__}")

    def __repr__(self) -> str:
        return f"<StepTrace | {len(self.values)} variables, {len(self.written)} written>"


@final
class TracedLoop:
    """The context of a loop while its step is recorded, in place of a `MultiStepContext`.

    Args:
        trace: The trace.
        outputs: Values to begin with.

    Attributes:
        last_step_outputs: By name: the value that the last step has set.
        ops: How outputs are reduced.
        sites: Where they were set.
    """

    def __init__(self, trace: StepTrace, outputs: dict[str, object]) -> None:
        self._trace = trace
        self.last_step_outputs = outputs
        self.ops: dict[str, ReduceOp | None] = {}
        self.sites: dict[str, tuple[CodeType, int]] = {}

    @property
    def steps_run(self) -> Traced:
        """Number of complete steps."""
        return self._trace.index

    def set_last_step_output(
        self, name: str, value: object, reduce_op: ReduceOp | OpName | None = None
    ) -> None:
        """Set an output; see `MultiStepContext`."""
        if type(name) is not str:
            raise TypeError(f"The name of an output must be a str, got {name!r}.")
        frame = sys._getframe(1)
        self.sites[name] = (frame.f_code, frame.f_lasti)
        self.ops[name] = None if reduce_op is None else ReduceOp.parse(reduce_op)
        self.last_step_outputs[name] = map_leaves(_as_array, value)

    def set_non_tensor_output(self, name: str, value: object) -> None:
        """Refuse: it is any object of Python."""
        raise self._trace.refusal("ctx.set_non_tensor_output")

    def record(self, name: str, value: object) -> None:
        """Record a number; see `MultiStepContext`."""
        self._trace.record(name, value)

    def __repr__(self) -> str:
        return f"<TracedLoop | {', '.join(self.last_step_outputs) or 'no outputs'}>"


@final
class TracedReplica:
    """A replica of a step that is recorded: what `ar.get_replica_context()` gives there.

    Its collectives are operations of jax, so gradients go through them by themselves.

    Args:
        trace: The trace.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

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
        return self._trace.strategy.facade

    @property
    def device_name(self) -> None:
        """None: one program is recorded for all devices."""
        return None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that meet in a collective."""
        return self._trace.num_replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Index of the replica, which is not known yet."""
        return 0 if self._trace.num_replicas == 1 else lax.axis_index(AXIS)

    local_replica_id = replica_id_in_sync_group

    @property
    def step(self) -> Traced:
        """Number of the step in its strategy."""
        return self._trace.first_step + self._trace.index

    def check_running(self) -> None:
        """Do nothing: a compiled program runs to its end."""

    def all_reduce(self, op: ReduceOp | OpName, value: Tree, options: object = None) -> Tree:
        """Combine a value over all replicas."""
        parsed = ReduceOp.parse(op)
        return self._reduced(parsed, value, lambda leaf: leaf)

    def reduce_scatter(self, op: ReduceOp | OpName, value: Tree, axis: int = 0) -> Tree:
        """Combine a value over all replicas and take this one's part along an axis."""
        count = self._trace.num_replicas

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

        def gathered(leaf: object) -> Traced:
            array = jnp.asarray(leaf)
            _size_along(array, axis, "all_gather")
            if self._trace.num_replicas == 1:
                return array
            return lax.all_gather(array, AXIS, axis=axis % array.ndim, tiled=True)

        return map_leaves(gathered, value)

    def all_to_all(self, value: Tree, axis: int = 0) -> Tree:
        """Give the i-th piece along an axis to replica i."""
        count = self._trace.num_replicas

        def swapped(leaf: object) -> Traced:
            array = jnp.asarray(leaf)
            if _size_along(array, axis, "all_to_all") % count:
                raise ValueError("all_to_all in a compiled step needs pieces of one size.")
            along = axis % array.ndim
            return array if count == 1 else lax.all_to_all(array, AXIS, along, along, tiled=True)

        return map_leaves(swapped, value)

    def broadcast(self, value: Tree, source: int = 0) -> Tree:
        """Give every replica the value of one of them."""
        count = self._trace.num_replicas
        if not 0 <= source < count:
            raise ValueError(f"broadcast got source={source!r}, but replicas are 0 to {count - 1}.")
        return map_leaves(lambda leaf: self._trace.from_source(jnp.asarray(leaf), source), value)

    def barrier(self) -> None:
        """Do nothing: the replicas of one program are in the same step."""

    def any(self, flag: Any) -> Traced:
        """Tell every replica whether the flag is true on at least one."""
        return self._extreme(jnp.asarray(flag).astype(bool).astype(jnp.int32), lax.pmax) != 0

    def all(self, flag: object) -> Traced:
        """Tell every replica whether the flag is true on all of them."""
        return self._extreme(jnp.asarray(flag).astype(bool).astype(jnp.int32), lax.pmin) != 0

    def record(self, name: str, value: Any) -> None:
        """Record a number; see `ReplicaContext`."""
        self._trace.record(name, value)

    def _reduced(self, op: ReduceOp, value: Tree, then: Callable[[Traced], Traced]) -> object:
        value = map_nodes(Weighted, _empty_as_zero, value)
        leaves, spec = flatten(value)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        if op is ReduceOp.MIN or op is ReduceOp.MAX:
            fn = lax.pmin if op is ReduceOp.MIN else lax.pmax
            found = [self._extreme(array, fn) for array in arrays]
        elif op is ReduceOp.MEAN:
            found = self._trace.mean(arrays)
        else:
            found = self._trace.sum(arrays)
        return unflatten(spec, [then(each) for each in found])

    def _extreme(self, array: Traced, fn: Callable[..., Traced]) -> Traced:
        found: Traced = array if self._trace.num_replicas == 1 else fn(array, AXIS)
        return found

    def __repr__(self) -> str:
        return f"<TracedReplica | {self._trace.num_replicas} replicas>"


def _refuse(name: str) -> property:
    def refuse(self: TracedReplica) -> NoReturn:
        raise self._trace.refusal(f"ctx.{name}")

    return property(refuse, doc="Refused in a compiled step.")


for _name in REFUSED:
    setattr(TracedReplica, _name, _refuse(_name))


def _as_array(leaf: object) -> Traced:
    if isinstance(leaf, Variable):
        leaf = leaf.value
    return jnp.asarray(leaf)


def _blank(array: Traced) -> Array:
    """Return an array of NumPy of the same shape and dtype, of zeros that take no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _is_half(array: Traced) -> bool:
    return array.dtype.itemsize == 2 and is_floating(array.dtype)


def _empty_as_zero(part: Weighted) -> Weighted:
    total, weight = jnp.asarray(part.total), jnp.asarray(part.weight)
    return Weighted(jnp.where(weight == 0, jnp.zeros_like(total), total), weight)


def _size_along(array: Traced, axis: int, name: str) -> int:
    if array.ndim == 0 or not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{name} got an array of shape {array.shape}, which has no axis {axis}.")
    size: int = array.shape[axis]
    return size
