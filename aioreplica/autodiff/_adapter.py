"""The contract of a differentiation adapter, here and for calls outside, and of a loss.

Inputs are named while the function runs, not before: which variables a loss reads is known only
then, and one pass is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from ..devices.backends import Array
from ..tree import Tree
from ..values import Weighted, is_floating
from ._linear import LinearCollective

Watch: TypeAlias = Callable[[Array], Array]
"""Takes an array and gives the stand-in that the library traces."""

RunOutside: TypeAlias = Callable[[str, Callable[..., object], tuple[Tree, ...]], Tree]
"""Runs a function on the host, in the cluster of that name, and waits; an async one is awaited."""

NameGradient: TypeAlias = Callable[[str, object], str]
"""Names the gradient of the call in a cluster, in one pass backwards."""


class Adapter(ABC):
    """Differentiates functions written in one library."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the backend, such as "autograd"."""

    @abstractmethod
    def differentiate(
        self, fn: Callable[[Watch], Tree], *, has_aux: bool = False
    ) -> tuple[Tree, list[Array]]:
        """Run `fn` once, then go back through it.

        Args:
            fn: Called as `fn(watch)`; `watch(array)` gives the stand-in that the gradient is taken
                with respect to. Returns a scalar or a `Weighted` with a scalar total.
            has_aux: Whether `fn` returns a pair of that and of any pytree, which is not
                differentiated.

        Returns:
            What `fn` returned, without a trace; and one gradient per watched array, in order of
            watching and of the same library and dtype. An array that the result does not depend on
            has a gradient of zeros. The value is NumPy's unless an array of the library was
            watched; the auxiliary output has the library's arrays. A sparse gradient of a watched
            NumPy array is an `IndexedSlices`.

        Raises:
            TypeError: If a watched array is not of floating point, the result is not a number, or
                it is not a pair where one is due.
            ValueError: If the result is not a scalar.

        Shapes:
            gradients[i]: that of the watched array.
        """

    @abstractmethod
    def constant(self, array: Array) -> Array:
        """Return an array as the library's own, without a gradient.

        Writing into the result does not change `array`.
        """

    @abstractmethod
    def perform(self, collective: LinearCollective, value: Array) -> Array:
        """Send a traced array through a collective, so that gradients go back through it."""


def split_aux(result: object, has_aux: bool) -> tuple[Tree, Tree]:
    """Take what a differentiated function returned apart: the loss, and its auxiliary output.

    Raises:
        TypeError: If `has_aux` and it is not a pair.
    """
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"With has_aux=True a loss returns (loss, aux), got {result!r} "
            f"({type(result).__name__})."
        )
    return result


def require_floating(array: Array, *, takes_bfloat16: bool = False) -> None:
    """Check that a gradient with respect to an array exists.

    Args:
        array: The array.
        takes_bfloat16: Whether the library that differentiates takes that of NumPy.

    Raises:
        TypeError: If its dtype is not of floating point, or none of that library.
    """
    if isinstance(array, np.ndarray) and array.dtype.kind == "f":
        return  # looking for the array's library takes longer than tracing it
    array = array if is_array_api_obj(array) else np.asarray(array)
    if not isinstance(array, (np.ndarray, np.generic)):
        is_float = array_namespace(array).isdtype(array.dtype, "real floating")
    else:  # NumPy's own isdtype raises at dtypes of others
        is_float = is_floating(array.dtype)
        if is_float and array.dtype.kind != "f" and not takes_bfloat16:
            raise TypeError(
                f"A gradient with respect to an array of {array.dtype} needs backend='jax'; "
                "autograd and torch cannot take it from NumPy. Or cast it with .astype('float32')."
            )
    if not is_float:
        raise TypeError(
            f"A gradient needs a floating-point array, got dtype {array.dtype}. Cast it with "
            ".astype('float64')."
        )


def require_scalar_loss(total: Array) -> None:
    """Check what a loss returned, stripped of any trace.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is an array of several.
    """
    array = total if is_array_api_obj(total) else np.asarray(total)
    if isinstance(total, Weighted) or not _is_real(array):
        raise TypeError(
            f"A loss returns a real number or ar.Weighted(total, weight), got {total!r} "
            f"({type(total).__name__})."
        )
    if tuple(array.shape) != ():
        raise ValueError(
            f"A loss returns a scalar, got shape {tuple(array.shape)}. Sum it, or return "
            "ar.Weighted(sum, number of examples)."
        )


def _is_real(array: Array) -> bool:
    if isinstance(array, (np.ndarray, np.generic)):
        return array.dtype.kind in "fiub"
    kinds = ("real floating", "integral", "bool")
    return bool(array_namespace(array).isdtype(array.dtype, kinds))


def finished(value: object, use: Callable[[object], object]) -> Tree:
    """Return `use(value)`; if the value has to be awaited, an awaitable of that."""
    if not isinstance(value, Awaitable):
        return use(value)

    async def later() -> object:
        return use(await value)

    return later()
