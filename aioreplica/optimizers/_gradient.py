"""Gradients as users bring them: scaled ones, and pairs with variables, which are checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from array_api_compat import is_array_api_obj
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..devices.backends import backend_of, trace_of
from ..tree import Array, register_node
from ..values import (
    DistributedValues,
    DividedVariable,
    IndexedSlices,
    Variable,
    Weighted,
    is_floating,
)
from ._slots import working_dtype

_ADDING = (np.add, np.subtract)
_UNARY = (np.negative, np.positive)


@final
class ScaledGradient(NDArrayOperatorsMixin):
    """A gradient that is `scale` times too large; what `compute_gradients` gives with a loss scale.

    An optimizer divides by the scale that the gradient carries, whatever became of the loss scale
    in the meantime. Multiplied or divided by a number or an array, or added to another one, it
    stays a scaled gradient. Everything else that NumPy does with it sees the unscaled values.

    It is a pytree node: a reduction works on the large numbers and keeps the scale.

    Args:
        values: The gradient of the scaled loss: an array, or an IndexedSlices.
        scale: What the loss was multiplied with.

    Example:
        >>> import numpy as np
        >>> gradient = ScaledGradient(np.array([8.0, 16.0]), 8.0)
        >>> np.asarray(gradient)
        array([1., 2.])
        >>> gradient * 2
        <ScaledGradient [16. 32.] | scale 8>
        >>> np.sqrt(gradient + gradient)
        array([1.41421356, 2.        ])
    """

    __slots__ = ("scale", "values")

    def __init__(self, values: Any, scale: float) -> None:
        self.values = values
        self.scale = scale

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the gradient."""
        values = self.values
        return values.dense_shape if isinstance(values, IndexedSlices) else tuple(values.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the gradient."""
        return self.values.dtype

    def unscaled(self) -> Any:
        """Return the gradient itself: an array, or an IndexedSlices.

        Example:
            >>> ScaledGradient(6.0, 2.0).unscaled()
            3.0
        """
        return self.values / self.scale

    def at_scale(self, scale: float) -> ScaledGradient:
        """Return the same gradient with another scale.

        Args:
            scale: The new one.
        """
        if scale == self.scale:
            return self
        return ScaledGradient(self.values * (scale / self.scale), scale)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.unscaled(), dtype=dtype, copy=copy or None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: object) -> Any:
        scaled = [isinstance(part, ScaledGradient) for part in inputs]
        if method == "__call__" and not kwargs:
            if ufunc in _UNARY or (ufunc is np.multiply and not all(scaled)):
                raw = [part.values if s else part for part, s in zip(inputs, scaled, strict=True)]
                return ScaledGradient(_apply(ufunc, raw), self.scale)
            if ufunc is np.divide and scaled == [True, False]:
                return ScaledGradient(inputs[0].values / inputs[1], self.scale)
            if ufunc in _ADDING and all(scaled):
                other = inputs[1].at_scale(inputs[0].scale)
                return ScaledGradient(_apply(ufunc, [inputs[0].values, other.values]), other.scale)
        plain = [np.asarray(p) if isinstance(p, ScaledGradient) else p for p in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, index: Any) -> ScaledGradient:
        return ScaledGradient(self.values[index], self.scale)

    def __len__(self) -> int:
        return self.shape[0]

    def __float__(self) -> float:
        return float(self.unscaled())

    def __repr__(self) -> str:
        return f"<ScaledGradient {self.values} | scale {self.scale:g}>"


def _apply(ufunc: np.ufunc, parts: list[Any]) -> object:
    """Call an operator, by its sign: arrays of other libraries and IndexedSlices know those."""
    if ufunc is np.negative:
        return -parts[0]
    if ufunc is np.positive:
        return parts[0]
    first, second = parts
    if ufunc is np.multiply:
        return first * second
    return first + second if ufunc is np.add else first - second


register_node(
    ScaledGradient,
    lambda gradient: ((gradient.values,), gradient.scale),
    lambda scale, parts: ScaledGradient(next(iter(parts)), scale),
)


def checked_pairs(grads_and_vars: Iterable[tuple[object, Any]]) -> tuple[list[Any], list[Variable]]:
    """Split pairs into gradients and variables that fit; pairs whose gradient is None are dropped.

    Returns:
        Gradients in the dtype of their variables, float32 for those of half precision (arrays,
        IndexedSlices, ScaledGradients or Weighted ones), and the variables.

    Raises:
        TypeError: If something is not a pair, not a variable or not an array of real numbers.
        ValueError: If a shape or weight is wrong, a variable comes twice or is not trainable, or
            nothing is left.
    """
    gradients: list[object] = []
    variables: dict[Variable, None] = {}
    without: list[Variable] = []
    for pair in grads_and_vars:
        if type(pair) is tuple and len(pair) == 2 and isinstance(pair[1], Variable):
            gradient, variable = pair
        else:
            gradient, variable = _checked_pair(pair, "apply_gradients")
        if gradient is None:
            without.append(variable)
            continue
        old = variable.components[0]
        is_trained = variable.trainable and (old.dtype.kind == "f" or is_floating(old.dtype))
        if variable in variables or not is_trained:
            raise _not_to_be_updated(variable, is_known=variable in variables)
        variables[variable] = None
        if (  # the common case: it fits as it is
            type(gradient) is np.ndarray
            and gradient.dtype == old.dtype
            and gradient.shape == old.shape
            and old.dtype.itemsize != 2
        ):
            gradients.append(gradient)
        else:
            gradients.append(_fitting(gradient, variable))
    if not variables:
        raise _no_gradient(without, "apply_gradients")
    return gradients, list(variables)


def merged_pairs(
    grads_and_vars: Iterable[tuple[object, object]],
) -> tuple[list[list[object]], list[Variable]]:
    """Do the same for gradients that hold the parts of all replicas.

    Returns:
        For each gradient a list of its parts, and the variables.

    Raises:
        TypeError: As `checked_pairs`.
        ValueError: As `checked_pairs`; or if a gradient is None on some replicas only, or has
            another number of parts than there are replicas.
    """
    columns: list[list[object]] = []
    variables: dict[Variable, None] = {}
    missing: list[Variable] = []
    for pair in grads_and_vars:
        gradient, variable = _checked_pair(pair, "distributed_apply")
        strategy = variable.store.owner
        num_replicas = 1 if strategy is None else strategy.num_local_replicas
        parts = _parts(gradient, variable, num_replicas)
        without = [i for i, part in enumerate(parts) if part is None]
        if len(without) == len(parts):
            missing.append(variable)
            continue
        if without:
            raise ValueError(
                f"The gradient of {variable.name!r} is None on replicas {without} of "
                f"{num_replicas}. Bring one on all replicas or on none."
            )
        if variable in variables or not variable.trainable or not is_floating(variable.dtype):
            raise _not_to_be_updated(variable, is_known=variable in variables)
        variables[variable] = None
        column = [_fitting(part, variable) for part in parts]
        if len({type(part) is Weighted for part in column}) > 1:
            raise TypeError(
                f"The gradient of {variable.name!r} is Weighted on some replicas only. Bring a "
                "Weighted from every replica, or from none."
            )
        columns.append(column)
    if not variables:
        raise _no_gradient(missing, "distributed_apply")
    return columns, list(variables)


def has_parts(gradient: Any) -> bool:
    """Tell whether a gradient has a part per replica, and is not their sum."""
    if isinstance(gradient, Weighted):
        return has_parts(gradient.total)
    if isinstance(gradient, ScaledGradient):
        return has_parts(gradient.values)
    return isinstance(gradient, DistributedValues) and not gradient.is_mirrored


def _checked_pair(pair: object, what: str) -> tuple[object, Variable]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{what} takes (gradient, variable) pairs, got {pair!r}.")
    gradient, variable = pair
    if not isinstance(variable, Variable):
        raise TypeError(
            f"{what} takes (gradient, variable) pairs, got {variable!r} "
            f"({type(variable).__name__}) as a variable."
        )
    return gradient, variable


def _not_to_be_updated(variable: Variable, *, is_known: bool) -> Exception:
    if is_known:
        return ValueError(
            f"Variable {variable.name!r} has two gradients. Add them up and pass one pair."
        )
    if not variable.trainable:
        return ValueError(
            f"Variable {variable.name!r} is not trainable, so it takes no gradient. Create it with "
            "trainable=True, or leave its pair out."
        )
    return TypeError(
        f"Variable {variable.name!r} has dtype {variable.dtype}, but only floating-point "
        "variables can be trained. Create it with dtype='float32' or 'float64'."
    )


def _no_gradient(without: Sequence[Variable], what: str) -> ValueError:
    names = ", ".join(repr(variable.name) for variable in without)
    got = f"None as the gradient of {names}" if names else "no pair"
    return ValueError(
        f"{what} got no gradient: {got}. Pass at least one pair whose gradient is not None: does "
        "the loss read any trainable variable?"
    )


def _fitting(gradient: Any, variable: Variable) -> object:
    dtype = working_dtype(variable.dtype)
    if type(gradient) is np.ndarray:  # the common case: it fits as it is
        if gradient.dtype == dtype and gradient.shape == variable.shape:
            return gradient
    elif type(gradient) is Weighted:
        total, weight = gradient.total, gradient.weight
        if type(weight) in (int, float) and 0 <= weight < np.inf:
            fitting = _fitting(total, variable)
            return gradient if fitting is total else Weighted(fitting, weight)
    if isinstance(gradient, Weighted):
        weight = np.asarray(gradient.weight)
        if weight.shape != () or weight.dtype.kind not in "fiub" or not 0 <= weight < np.inf:
            raise ValueError(
                f"The weight of the gradient of {variable.name!r} must be a finite number >= 0, "
                f"got {gradient.weight!r}."
            )
        return Weighted(_fitting(gradient.total, variable), weight.item())
    if isinstance(gradient, ScaledGradient):
        fitting = _fitting(gradient.values, variable)
        return gradient if fitting is gradient.values else ScaledGradient(fitting, gradient.scale)
    is_sparse = isinstance(gradient, IndexedSlices)
    if is_array_api_obj(gradient) and not isinstance(gradient, (np.ndarray, np.generic)):
        gradient = _on_host(gradient, variable)
    if not is_sparse and not isinstance(gradient, (np.ndarray, np.generic, int, float)):
        raise TypeError(
            f"The gradient of {variable.name!r} must be an array, got {gradient!r} "
            f"({type(gradient).__name__})."
        )
    array = gradient.values if is_sparse else np.asarray(gradient)
    shape = gradient.dense_shape if is_sparse else array.shape
    is_real = array.dtype.kind in "iu" or is_floating(array.dtype)
    if not is_real or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"The gradient of {variable.name!r} must hold numbers that fit its dtype "
            f"{variable.dtype}, got dtype {array.dtype}."
        )
    if shape != variable.shape and (is_sparse or not is_part(array, variable)):
        raise ValueError(
            f"The gradient of {variable.name!r} has {'dense shape' if is_sparse else 'shape'} "
            f"{shape}, but the variable has shape {variable.shape}."
        )
    if not is_sparse:
        return array.astype(dtype, copy=False)
    if array.dtype == dtype:
        return gradient
    return IndexedSlices(array.astype(dtype), gradient.indices, gradient.dense_shape)


def is_part(gradient: Any, variable: Variable) -> bool:
    """Tell whether a gradient is one of this worker's part of a divided variable only."""
    if not isinstance(variable, DividedVariable) or isinstance(gradient, IndexedSlices):
        return False
    shape: tuple[int, ...] = gradient.shape
    return shape != variable.shape and shape == variable.local.shape


def _on_host(gradient: Any, variable: Variable) -> object:
    """Return an array of another library as a NumPy array, of the same memory if it can be."""
    trace = trace_of(gradient)
    if trace is not None:
        raise TypeError(
            f"The gradient of {variable.name!r} is {trace}. Apply gradients outside the function "
            "that is differentiated; of a tensor, pass `tensor.detach()`."
        )
    return backend_of(gradient).get(gradient)


def _parts(gradient: Any, variable: Variable, num_replicas: int) -> tuple[object, ...]:
    """Take a gradient of all replicas apart; what is not a PerReplica is one part: the sum."""
    if isinstance(gradient, Weighted):
        totals = _parts(gradient.total, variable, num_replicas)
        weights = _parts(gradient.weight, variable, num_replicas)
        if len(totals) != len(weights):
            raise ValueError(
                f"The gradient of {variable.name!r} has {len(totals)} totals but {len(weights)} "
                "weights. Bring one of each from every replica."
            )
        return tuple(map(Weighted, totals, weights))
    if isinstance(gradient, ScaledGradient):
        values = _parts(gradient.values, variable, num_replicas)
        return tuple(ScaledGradient(value, gradient.scale) for value in values)
    if not isinstance(gradient, DistributedValues):
        return (gradient,)
    if len(gradient) != num_replicas:
        raise ValueError(
            f"The gradient of {variable.name!r} has {len(gradient)} parts, but there are "
            f"{num_replicas} replicas."
        )
    return gradient.values[:1] if gradient.is_mirrored else gradient.values
