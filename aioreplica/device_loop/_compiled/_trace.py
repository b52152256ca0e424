"""One run of a step function that records it: its variables, and updates of them.

The step is the same function that runs eagerly. While it is recorded, `Place` holds a
`TracedReplica`, variables are read through `OVERRIDES`, and calls that would meet other replicas
find this trace in `TRACE`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._functions import UNFINISHED
from ...context import OVERRIDES, PLACE, TRACE, CurrentStrategy, Place
from ...errors import ContextError
from ...optimizers import (
    DynamicLossScale,
    Optimizer,
    differentiate_loss,
    require_loss,
    sort_by_creation,
)
from ...tree import Array, Tree
from ...typing import VariableAggregation
from ...values import IndexedSlices, Variable, fitting
from ._contexts import Across, TracedLoop, TracedReplica
from ._narrow import Traced, as_traced, halves_of, is_beyond, may_wrap, require_own_dtype
from ._prepared import (
    Prepared,
    Which,
    multipliers_of,
    prepared_for,
    require_nothing_finished,
)
from ._untraceable import line_here, only_recorded, recording, refusal, require_recorded_in
from ._update import MAX_VARIABLES, WRAPPED, apply_traced, traced_scale


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
        across: Combines arrays of all replicas.
        replica: The replica that the step finds itself in.
        written: What wrote each variable, for each write; None for an assignment.
        applied: How often each optimizer was applied, with the variables it moves.
        within: Where variables were read in functions that jax transforms, the first time.
        since: Which optimizers have made an update in the step that a loss scale counts.
        counts: How often a variable was written, where that depends on values.
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
        self.across = Across(num_replicas, in_order=in_order)
        self.replica = TracedReplica(strategy, self.across, first + index)
        self.is_first = values is None
        self.values: dict[Variable, Traced | None] = {}
        self.values.update(values or {})
        self._index = index
        self.looks = looks
        self.written: dict[Variable, list[Optimizer | None]] = {}
        self.applied: dict[Optimizer, tuple[tuple[Variable, ...], int]] = {}
        self.within: dict[Variable, str] = {}
        self.since: dict[DynamicLossScale, dict[Optimizer, Traced]] = {}
        self.counts: dict[Variable, Traced] = {}
        self.codes: list[Traced] = []
        self.key_names: dict[tuple[str, bool], None] = {}
        self._keys = keys
        self._table = table

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
            with only_recorded(fn):
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
        if variable not in self.values:
            require_own_dtype(variable)
            self.values[variable] = None
        if recording() != self.replica.recording:
            self.within[variable] = line_here()
        # Only its look counts, but it is one of this step: a function under jax.jit that is kept
        # for later steps must not take it for a constant.
        dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
        return jnp.full(variable.shape, self._index, dtype)

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

    def write(
        self,
        variable: Variable,
        value: Traced,
        source: Optimizer | None = None,
        count: Traced | None = None,
    ) -> None:
        """Let a variable hold something else from here on.

        Args:
            variable: Which one.
            value: What it holds.
            source: The optimizer that writes it; None for an assignment.
            count: How many writes this is, if that depends on values.
        """
        old = self.read(variable)
        if count is not None:
            before = self.counts.get(variable)
            self.counts[variable] = count if before is None else before + count
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
        self._require_here(f"{verb} of {variable.name!r}")
        if isinstance(value, IndexedSlices) or verb.startswith("scatter"):
            raise TypeError(f"{verb} of {variable.name!r} with IndexedSlices cannot be compiled.")
        given = value.value if isinstance(value, Variable) else value
        if isinstance(given, int):
            fitting(variable, given)  # before jax refuses it for a reason of its own
        array, old = as_traced(given), self.read(variable)
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
        return self.read(variable)

    def _aggregated(self, variable: Variable, verb: str, new: Traced) -> Traced:
        if variable.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {variable.name!r} has aggregation 'none', so replicas cannot {verb} it. "
                "Create it with aggregation='mean', 'sum' or 'only_first_replica'."
            )
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.across.first([new])[0]
        if variable.aggregation is not VariableAggregation.MEAN:
            return self.across.sum([new])[0]
        if variable.dtype.kind in "iu":
            return self.across.whole_mean(new)
        return self.across.mean([new])[0]

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
        self._require_here("minimize")
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
        self._require_here("apply_gradients")
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
            require_nothing_finished(optimizer, prepared[0].restore(prepared[0].numbers))
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
                parts = self.across.first(parts)
            elif variable.aggregation is VariableAggregation.SUM:
                parts = self.across.sum(parts)
            elif variable.aggregation is VariableAggregation.MEAN:
                parts = list(halves_of(self.across.whole_mean(array)))
        if verb != "assign":
            sign = 1 if verb == "assign_add" else -1
            parts = [own + sign * part for own, part in zip(halves_of(old), parts, strict=True)]
        self._fail_if(variable, is_beyond(old.dtype, parts))

    def _fail_if(self, variable: Variable, is_wrapped: Traced) -> None:
        anywhere = self.across.extreme(is_wrapped.astype(jnp.int32), lax.pmax)
        at = next(i for i, each in enumerate(self.values) if each is variable)
        self.fail(anywhere * (WRAPPED * MAX_VARIABLES + at))

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
        seed = self._index.astype(jnp.uint32) if self._keys is None else self._keys[name, shared]
        return jax.random.key(seed)

    def _require_here(self, what: str) -> None:
        require_recorded_in(self.replica.recording, what)

    refusal = staticmethod(refusal)

    def hold(self, owner: object, take: Callable[[], object]) -> NoReturn:
        """Refuse: a module of another library is called."""
        raise refusal(f"{type(owner).__name__}")

    def __repr__(self) -> str:
        return f"<StepTrace | {len(self.values)} variables, {len(self.written)} written>"


def _blank(array: Traced) -> Array:
    """Return an array of NumPy of the same shape and dtype, of zeros that take no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
