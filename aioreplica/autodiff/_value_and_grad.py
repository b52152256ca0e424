"""Values of functions of arrays with their gradients, by the adapter of a library.

The library of an adapter is imported when the adapter is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..devices.backends import Array
from ..tree import Tree, flatten, unflatten
from ._adapter import Adapter, NameGradient, RunOutside

BACKENDS = ("autograd", "torch", "jax")


def value_and_grad(
    fn: Callable[[Any], Tree], backend: str = "autograd", *, has_aux: bool = False
) -> Callable[[Sequence[Array]], tuple[Tree, list[Array]]]:
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

    def call(arrays: Sequence[Array]) -> tuple[Tree, list[Array]]:
        container = tuple if isinstance(arrays, tuple) else list
        return adapter.differentiate(
            lambda watch: fn(container(map(watch, arrays))), has_aux=has_aux
        )

    return call


def find_adapter(backend: str) -> Adapter:
    """Return the adapter called `backend`.

    Raises:
        ValueError: If there is no such backend.
        ImportError: If its library is not installed.

    Example:
        >>> find_adapter("autograd").name
        'autograd'
    """
    if backend not in BACKENDS:
        legal = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"Unknown autodiff backend {backend!r}. Use one of {legal}.")
    try:
        return _new_adapter(backend)
    except ModuleNotFoundError as missing:
        if missing.name not in (backend, f"{backend}lib"):
            raise
        raise ImportError(
            f"Gradients with the {backend!r} backend need the {backend} package, which is not "
            f'installed. Run: pip install "aioreplica[{backend}]"',
            name=backend,
        ) from missing


def _new_adapter(backend: str) -> Adapter:
    if backend == "torch":
        from ._torch import TorchAdapter

        return TorchAdapter()
    if backend == "jax":
        from ._jax import JaxAdapter

        return JaxAdapter()
    from ._autograd import AutogradAdapter

    return AutogradAdapter()


def run_outside(
    run: RunOutside,
    gradient_of: NameGradient,
    name: str,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """Run a function on the host for a device program, as part of what a library differentiates.

    If a library traces a leaf of the arguments, the gradient of the call will run outside too.

    Args:
        run: Does the call.
        gradient_of: Names the clusters of gradients.
        name: Cluster of the call.
        fn: A plain or async function.
        args: Its arguments.
        kwargs: Those by name.
    """
    leaves, spec = flatten([args, dict(kwargs)])
    positions, new_call = _traced(leaves)
    if new_call is None:
        return run(name, partial(fn, **kwargs) if kwargs else fn, args)

    def of_traced(*values: object) -> object:
        whole = list(leaves)
        for position, value in zip(positions, values, strict=True):
            whole[position] = value
        given, named = unflatten(spec, whole)
        return fn(*given, **named)

    return new_call(run, gradient_of, name, of_traced).at([leaves[i] for i in positions])


def _traced(leaves: Sequence[object]) -> tuple[list[int], Any]:  # Any: a class of either library
    """Return which leaves a library traces, and the class of its outside calls.

    A library that was not imported traces nothing, so nothing is imported here.
    """
    if "autograd" in sys.modules:
        from ._autograd import AutogradCall, is_traced

        if found := [i for i, leaf in enumerate(leaves) if is_traced(leaf)]:
            return found, AutogradCall
    if "torch" in sys.modules:
        from ._torch import TorchCall, needs_gradient

        if found := [i for i, leaf in enumerate(leaves) if needs_gradient(leaf)]:
            return found, TorchCall
    return [], None
