"""Gradients of a loss that was multiplied with a scale, which they carry with them."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..tree import register_node
from ..values import IndexedSlices

Array = npt.NDArray[Any]

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

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
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


def _apply(ufunc: np.ufunc, parts: list[Any]) -> Any:
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
