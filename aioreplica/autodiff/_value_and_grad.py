"""value_and_grad: the value of a function of arrays together with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._find import find_adapter


def value_and_grad(
    fn: Callable[[Any], Any], backend: str = "autograd", *, has_aux: bool = False
) -> Callable[[Sequence[Any]], tuple[Any, list[Any]]]:
    """Make a function that returns the value of `fn` and its gradients.

    Args:
        fn: Takes a list (or tuple) of arrays and returns a scalar, or a `Weighted(total, weight)`
            whose total is differentiated and whose weight is not. Write it with the backend's own
            functions, such as `autograd.numpy`.
        backend: The library that differentiates: "autograd", "torch" or "jax".
        has_aux: Whether `fn` returns a pair `(value, aux)`: any pytree may go with the value,
            and is not differentiated.

    Returns:
        A function of the same list that gives `(value, gradients)`; with `has_aux` it gives
        `((value, aux), gradients)`, where `aux` holds the backend's arrays without a trace. Arrays
        may be NumPy's or the backend's own, and each gradient is of the kind of its array; so is
        the value, NumPy's if all arrays are.

    Raises:
        ValueError: If `backend` is unknown.
        ImportError: If its library is not installed.
        TypeError: From the returned function: if an array is not of floating point, or `fn` does
            not return a number, or with `has_aux` no pair.
        ValueError: From the returned function: if `fn` does not return a scalar.

    Shapes:
        gradients[i]: that of arrays[i].

    Example:
        >>> import autograd.numpy as np
        >>> square = value_and_grad(lambda arrays: np.sum(arrays[0] ** 2))
        >>> value, gradients = square([np.array([1.0, 2.0])])
        >>> print(value, gradients)
        5.0 [array([2., 4.])]
    """
    adapter = find_adapter(backend)

    def call(arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        container = tuple if isinstance(arrays, tuple) else list
        return adapter.differentiate(
            lambda watch: fn(container(map(watch, arrays))), has_aux=has_aux
        )

    return call
