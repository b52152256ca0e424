"""Updates in a compiled step: the code of the rule itself, run once on buffers that record it.

`prepare` stays a function of the host: its numbers come in as a table, from which each update takes
the row of its iteration. Between the two, a step does here what `_step` does with NumPy, in the
same order: sum, unscale, check, clip, apply.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from numbers import Integral, Number
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ...context import PLACE
from ...errors import ContextError
from ...optimizers import (
    Block,
    DynamicLossScale,
    LossScale,
    LossScaling,
    Optimizer,
    ScaledGradient,
    StepSettings,
    require_owner,
    working_dtype,
    written,
)
from ...values import IndexedSlices, Variable, Weighted, is_floating
from ._contexts import Across
from ._narrow import Traced, as_traced, require_32_bits

NOT_FINITE, UPDATE_NOT_FINITE, NO_WEIGHT, WRAPPED = 1, 2, 3, 4
"""Codes of steps that fail; times `MAX_VARIABLES`, plus the number of the variable among all that
the optimizers of the step move, of one that has wrapped among those of the program."""
MAX_VARIABLES = 1 << 20


class Recording(Protocol):
    """Interface of the trace of a step.

    Attributes:
        across: Combines arrays of all replicas.
        looks: Whether to check all steps, though a look at the last one would tell.
        applied: How often each optimizer was applied, with the variables it moves.
        since: Which optimizers have made an update in the step that a loss scale counts.
    """

    across: Across
    looks: bool
    applied: dict[Optimizer, tuple[tuple[Variable, ...], int]]
    since: dict[DynamicLossScale, dict[Optimizer, Traced]]

    def read(self, variable: Variable) -> Traced:
        """Return what a variable holds at this point of the step."""

    def write(
        self,
        variable: Variable,
        value: Traced,
        source: Optimizer | None = None,
        count: Traced | None = None,
    ) -> None:
        """Let a variable hold something else from here on."""

    def row(self, optimizer: Optimizer, variables: Sequence[Variable]) -> list[Any]:
        """Return what `prepare` gives for each variable at the optimizer's iteration."""

    def fail(self, code: Traced) -> None:
        """Report a code that is not 0 if the step fails."""


@final
class Buffer(NDArrayOperatorsMixin):
    """An array of a block while its rule is recorded; NumPy's functions may write it as `out`.

    Args:
        array: What it holds at first.
    """

    __slots__ = ("array",)

    def __init__(self, array: Traced) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.array.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.array.shape)

    def __array_ufunc__(
        self,
        ufunc: np.ufunc,
        method: str,
        *inputs: object,
        out: tuple[Any, ...] = (),
        **options: object,
    ) -> Any:
        if method != "__call__" or options.keys() - {"where"} or len(out) > 1:
            raise TypeError(
                f"An update rule used np.{ufunc.__name__} in a way that cannot be compiled "
                f"({method}, {', '.join(options) or 'several outputs'}). Use elementwise functions."
            )
        return self._called(ufunc.__name__, inputs, out[0] if out else None, options)

    def __array_function__(
        self, fn: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options = dict(kwargs)
        if fn is np.copyto:
            target, *inputs = args
            return self._called("positive", inputs, target, options)
        owner = jnp.linalg if fn.__module__ == np.linalg.__name__ else jnp
        return self._called(fn.__name__, args, options.pop("out", None), options, owner)

    def _called(
        self,
        name: str,
        inputs: Sequence[Any],
        target: Buffer | None,
        options: dict[str, Any],
        owner: Any = jnp,
    ) -> Any:
        fn = getattr(owner, name, None)
        if fn is None:
            raise TypeError(f"An update rule used np.{name}, which jax does not have.")
        where = options.pop("where", True)
        result = fn(*(self._plain(each) for each in inputs), **options)
        if target is None:
            return Buffer(result)
        result = jnp.broadcast_to(result, target.shape).astype(target.dtype)
        kept = result if where is True else jnp.where(self._plain(where), result, target.array)
        target.array = kept
        return target

    def _plain(self, part: Any) -> Any:
        """Return a number in this dtype, as NumPy takes Python's, or an array as it is."""
        if isinstance(part, Buffer):
            return part.array
        if isinstance(part, (list, tuple)):
            return type(part)(map(self._plain, part))
        if isinstance(part, jax.Array) and part.ndim == 0 and is_floating(self.dtype):
            return part.astype(self.dtype)
        require_32_bits([part], "An update rule or a constraint")
        return part

    def __getitem__(self, index: object) -> Buffer:
        return Buffer(self.array[index])

    def __setitem__(self, index: object, value: Any) -> None:
        self.array = self.array.at[index].set(self._plain(value))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Buffer]:
        return map(Buffer, self.array)

    # jax says of each of these that the number is not known yet

    def __array__(self, *_: object, **__: object) -> Any:
        return np.asarray(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __index__(self) -> int:
        return operator.index(self.array)

    def __repr__(self) -> str:
        return f"<Buffer | {self.dtype}{list(self.shape)}>"


# ---- one update ----------------------------------------------------------------------------------


def apply_traced(
    trace: Recording,
    optimizer: Optimizer,
    pairs: Sequence[tuple[object, object]],
    global_step: Variable | None,
    *,
    is_summed: bool,
) -> None:
    """Record what `apply_gradients` does.

    Raises:
        ContextError: If the optimizer cannot be compiled, or a variable is another strategy's.
        TypeError: If a gradient is not an array, or a variable not one that is trained.
        ValueError: If a shape does not fit, a variable comes twice, or nothing is left.
    """
    require_compilable(optimizer)
    settings = optimizer.settings
    gradients, variables = _checked(pairs)
    require_owner(written(variables, global_step), PLACE.get().strategy)
    merged, no_weight = _merged(trace, settings, variables, gradients, is_summed=is_summed)
    skips = settings.on_non_finite == "skip"
    is_shown = keeps_infinities(optimizer, variables) and not trace.looks
    looks = skips or (settings.on_non_finite == "raise" and not is_shown)
    finite = [jnp.isfinite(g).all() for g in merged] if looks else []
    changed: dict[Variable, Traced] = {}
    clipped = _clipped(settings, merged, changed)
    _apply_rule(trace, optimizer, variables, clipped, changed)
    of_finite = jnp.stack(finite).all() if looks else None
    after = of_finite
    if looks:
        after = jnp.stack([*finite, *_stay_finite(trace, changed)]).all()
    changed[settings.iterations] = trace.read(settings.iterations) + 1
    if global_step is not None:
        changed[global_step] = trace.read(global_step) + 1
    if no_weight:
        trace.fail(jnp.where(jnp.stack(no_weight).any(), NO_WEIGHT * MAX_VARIABLES, 0))
    if not skips:
        if of_finite is not None and after is not None:
            others = takewhile(lambda other: other is not optimizer, trace.applied)
            begin = sum(len(trace.applied[other][0]) for other in others)
            first = begin + jnp.argmin(jnp.stack(finite))
            code = jnp.where(after, 0, UPDATE_NOT_FINITE * MAX_VARIABLES + begin)
            trace.fail(jnp.where(of_finite, code, NOT_FINITE * MAX_VARIABLES + first))
        for variable, value in changed.items():
            trace.write(variable, value, optimizer)
    else:
        _write_unless_skipped(trace, optimizer, changed, after)
    if isinstance(settings.loss_scaling, DynamicLossScale):
        made = jnp.bool_(True) if after is None or not skips else after
        failed = jnp.bool_(False) if of_finite is None or not skips else ~of_finite
        for used in _scales(gradients):
            failed = failed & (used <= trace.read(settings.loss_scaling.variables[0]))
        _write_scale(trace, optimizer, settings.loss_scaling, made, failed)


def _stay_finite(trace: Recording, changed: Mapping[Variable, Traced]) -> list[Traced]:
    """Tell of each new value whether all of it is finite, but for what was not so before."""
    return [
        (jnp.isfinite(new) | ~jnp.isfinite(trace.read(variable))).all()
        for variable, new in changed.items()
        if is_floating(new.dtype)
    ]


def keeps_infinities(optimizer: Optimizer, variables: Sequence[Variable]) -> bool:
    """Tell whether what is not finite stays so in a value or slot, for all later steps to show.

    True of the rules with a kernel, as each of them adds a multiple of what it read to what it
    writes; not if gradients are cut off at a value, or a constraint bounds what it wrote.
    """
    clipping = optimizer.settings.clipping
    has_kernel = getattr(optimizer, "kernel", None) is not None
    is_bounded = any(variable.constraint is not None for variable in variables)
    return has_kernel and not is_bounded and (clipping is None or clipping.option != "clipvalue")


def require_compilable(optimizer: Optimizer) -> None:
    """Check that an optimizer can be part of a compiled step.

    Raises:
        ContextError: If it updates all variables together, or scales losses in a way of its own.
    """
    if optimizer.is_joint:
        raise ContextError(
            f"{optimizer!r} cannot be compiled, as the rule of another library updates all "
            "variables together. Use one of ar.optimizers, or leave out `compile`."
        )
    scaling = optimizer.settings.loss_scaling
    if scaling is not None and not isinstance(scaling, (LossScale, DynamicLossScale)):
        raise ContextError(
            f"{scaling!r} cannot be compiled: its `after` is Python. Use an ar.optimizers."
            "LossScale or DynamicLossScale, or leave out `compile`."
        )


def traced_scale(trace: Recording, scaling: LossScaling | None) -> Any:
    """Return the loss scale at this point of the step; None for none."""
    if isinstance(scaling, DynamicLossScale):
        return trace.read(scaling.variables[0])
    return None if scaling is None else scaling.scale


def _checked(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Variable]]:
    found: dict[Variable, Any] = {}
    for gradient, variable in pairs:
        if not isinstance(variable, Variable):
            raise TypeError(f"apply_gradients takes (gradient, variable) pairs, got {variable!r}.")
        if gradient is None:
            continue
        if variable in found:
            raise ValueError(f"Variable {variable.name!r} has two gradients.")
        if not variable.trainable or not is_floating(variable.dtype):
            raise ValueError(f"Variable {variable.name!r} is not one that is trained.")
        if variable.dtype.itemsize == 2:
            raise TypeError(
                f"Variable {variable.name!r} is of half precision ({variable.dtype}), whose update "
                "is not compiled. Keep it in float32, and compute in half precision in the loss."
            )
        inner = gradient.total if isinstance(gradient, Weighted) else gradient
        inner = inner.values if isinstance(inner, ScaledGradient) else inner
        if isinstance(inner, IndexedSlices):
            raise TypeError(
                f"The gradient of {variable.name!r} is an IndexedSlices, which a compiled step "
                "does not have. Index `variable.value` in the loss."
            )
        if jnp.shape(inner) != variable.shape:
            raise ValueError(
                f"The gradient of {variable.name!r} has shape {jnp.shape(inner)}, but the variable "
                f"has {variable.shape}."
            )
        found[variable] = gradient
    if not found:
        raise ValueError("apply_gradients got no gradient for any variable.")
    return list(found.values()), list(found)


def _merged(
    trace: Recording,
    settings: StepSettings,
    variables: Sequence[Variable],
    gradients: Sequence[Any],
    *,
    is_summed: bool,
) -> tuple[list[Traced], list[Traced]]:
    """Sum gradients over the replicas and divide them; tell where no replica had any weight."""
    parts: list[Any] = []
    weights: list[Any] = []
    scales: list[Any] = []
    for variable, gradient in zip(variables, gradients, strict=True):
        weight = gradient.weight if isinstance(gradient, Weighted) else None
        inner = gradient.total if isinstance(gradient, Weighted) else gradient
        scales.append(inner.scale if isinstance(inner, ScaledGradient) else None)
        inner = inner.values if isinstance(inner, ScaledGradient) else inner
        part = jnp.asarray(inner).astype(working_dtype(variable.dtype))
        if weight is not None:  # what has no weight may hold anything
            part = jnp.where(jnp.asarray(weight == 0), 0, part)
        parts.append(part)
        weights.append(weight)
    found = [_wide(w) for w in weights if w is not None and not isinstance(w, Number)]
    combined = (trace.across.first if is_summed else trace.across.sum)([*parts, *found])
    sums, left = combined[: len(parts)], iter(combined[len(parts) :])
    is_mean = settings.is_mean and not is_summed
    merged, no_weight = [], []
    for total, weight, scale in zip(sums, weights, scales, strict=True):
        divisor: Any = float(trace.across.num_replicas) if is_mean else 1.0
        if weight is not None:
            divisor = (
                next(left)
                if not isinstance(weight, Number)
                else _sum_of_equal(weight, 1 if is_summed else trace.across.num_replicas)
            )
            no_weight.append(jnp.asarray(divisor == 0))
            divisor = divisor.astype(total.dtype)
        if scale is not None:
            divisor = divisor * scale
        is_one = isinstance(divisor, float) and divisor == 1.0
        merged.append(total if is_one else total / jnp.asarray(divisor, total.dtype))
    return merged, no_weight


def _wide(weight: Any) -> Traced:
    """Return a weight, of integers in a dtype in which a sum of them does not wrap.

    Where jax has no wider integers, those of 32 bits become float32: what is summed is rounded to
    the dtype of a gradient in any case.
    """
    found = as_traced(weight)
    if found.dtype.kind not in "iub" or found.dtype.itemsize > 4:
        return found
    if found.dtype.itemsize < 4:
        return found.astype(jnp.int32)
    wide = jax.dtypes.canonicalize_dtype(np.int64)
    return found.astype(wide if wide.itemsize == 8 else jnp.float32)


def _sum_of_equal(weight: Any, count: int) -> np.number[Any]:
    """Sum a weight that is a plain number, the same on all replicas, in their order."""
    if isinstance(weight, Integral):
        return np.float64(int(weight) * count)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(weight).dtype)
    total: np.number[Any] = np.add.accumulate(np.full(count, weight, dtype), dtype=dtype)[-1]
    return total


def _clipped(
    settings: StepSettings, merged: list[Traced], changed: dict[Variable, Traced]
) -> list[Traced]:
    clipping = settings.clipping
    norms = [_norm(g) for g in merged] if settings.needs_norms else []
    together = _norm(jnp.stack(norms)) if norms else None
    if settings.norm is not None and together is not None:
        changed[settings.norm] = together
    if clipping is None:
        return merged
    limit = clipping.limit
    if clipping.option == "clipvalue":
        return [jnp.clip(g, -limit, limit) for g in merged]
    if clipping.option == "global_clipnorm":
        assert together is not None  # it needs norms
        norms = [together] * len(merged)
    return [
        g * (limit / jnp.maximum(norm, limit)).astype(g.dtype)
        for g, norm in zip(merged, norms, strict=True)
    ]


def _norm(array: Traced) -> Traced:
    """Return the norm, of numbers whose squares overflow, too; NaN if one is not finite."""
    largest = jnp.max(jnp.abs(array), initial=0)
    safe = jnp.where(largest == 0, 1, largest)
    return largest * jnp.sqrt(jnp.sum(jnp.square(array / safe)))


def _apply_rule(
    trace: Recording,
    optimizer: Optimizer,
    variables: Sequence[Variable],
    gradients: Sequence[Traced],
    changed: dict[Variable, Traced],
) -> None:
    slots = optimizer.settings.slots
    rows = trace.row(optimizer, variables)
    for variable, gradient, prepared in zip(variables, gradients, rows, strict=True):
        own = slots.made.get(variable)
        if own is None:
            own = slots.make(variable, optimizer.new_slot)
        group = (variable, *own)
        old = [Buffer(trace.read(each)) for each in group]
        if optimizer.is_elementwise:
            new = [Buffer(jnp.empty_like(each.array)) for each in old]
            scratch = Buffer(jnp.empty_like(gradient))
            block = Block(variable, old, new, Buffer(gradient), scratch)  # type: ignore[arg-type]
            optimizer.update_block(prepared, block)  # type: ignore[attr-defined]
            results: list[Any] = list(new)
        else:
            of_slots: object = dict(zip(optimizer.slot_names, old[1:], strict=True))
            value, found = optimizer.update(prepared, old[0], Buffer(gradient), of_slots)  # type: ignore[arg-type]
            results = [value, *(found[name] for name in optimizer.slot_names)]
        if variable.constraint is not None:
            results[0] = _constrained(variable.constraint, results[0])
        for each, before, after in zip(group, old, results, strict=True):
            plain = after.array if isinstance(after, Buffer) else as_traced(after)
            if plain.shape != each.shape:
                raise ValueError(
                    f"The update of {each.name!r} has shape {plain.shape}, but the variable has "
                    f"shape {each.shape}."
                )
            changed[each] = plain.astype(before.dtype)


def _constrained(constraint: Callable[[Any], Any], value: Any) -> Any:
    """Call a constraint, which is written with NumPy's functions or those of jax."""
    array = value.array if isinstance(value, Buffer) else value
    try:
        return constraint(Buffer(array))
    except Exception as error:  # noqa: BLE001 - raised below if this does not help
        try:
            return constraint(array)
        except Exception:
            if isinstance(error, jax.errors.JAXTypeError):  # the one that names the reason
                raise error from None
            raise


def _write_unless_skipped(
    trace: Recording,
    optimizer: Optimizer,
    changed: Mapping[Variable, Traced],
    after: Traced | None,
) -> None:
    """Write all of it, or count a step left out."""
    settings = optimizer.settings
    assert settings.skipped is not None  # it skips
    assert after is not None  # and looks
    old = [trace.read(variable) for variable in changed]
    new = [value.astype(o.dtype) for value, o in zip(changed.values(), old, strict=True)]
    for variable, value, before in zip(changed, new, old, strict=True):
        trace.write(variable, jnp.where(after, value, before), optimizer)
    skipped = trace.read(settings.skipped)
    trace.write(settings.skipped, skipped + jnp.where(after, 0, 1).astype(skipped.dtype), optimizer)


def _scales(gradients: Sequence[Any]) -> list[Any]:
    """Return the different scales that gradients were computed with."""
    inner = [each.total if isinstance(each, Weighted) else each for each in gradients]
    found = [each.scale for each in inner if isinstance(each, ScaledGradient)]
    return list({id(scale): scale for scale in found}.values())


def _write_scale(
    trace: Recording,
    optimizer: Optimizer,
    scaling: DynamicLossScale,
    made: Traced,
    failed: Traced,
) -> None:
    """Write what `DynamicLossScale.after` gives, of numbers that are not known yet.

    Args:
        trace: The trace.
        optimizer: Whose update it was.
        scaling: The scale, which it may share with others.
        made: Whether the update was made.
        failed: Whether it was not as the scale is too large.
    """
    since = trace.since.setdefault(scaling, {})  # an update of each optimizer, in one step of ours
    is_next = ~reduce(jnp.logical_or, since.values(), jnp.bool_(False))
    begins = made & (is_next | since.get(optimizer, False))
    for other, is_made in since.items():
        since[other] = is_made & ~begins
    since[optimizer] = since.get(optimizer, False) | made
    of_scale, of_steps = scaling.variables
    scale, steps = trace.read(of_scale), trace.read(of_steps) + 1
    grows = begins & (steps >= scaling.rule.growth_interval)
    larger = scale * scaling.rule.factor
    smaller = jnp.maximum(scale / scaling.rule.factor, scaling.rule.minimum)
    new = jnp.where(failed, smaller, jnp.where(grows & jnp.isfinite(larger), larger, scale))
    is_written = begins | failed
    count = jnp.where(grows | failed, 0, jnp.where(begins, steps, steps - 1))
    trace.write(of_scale, new, optimizer, (grows | failed).astype(jnp.int32))
    trace.write(of_steps, count, optimizer, is_written.astype(jnp.int32))
