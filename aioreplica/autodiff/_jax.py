"""The adapter over JAX: functions written with `jax.numpy`.

A watched array enters the trace through a function whose backward pass stores the gradient that
arrives, as in the autograd adapter. JAX keeps the state of its traces per thread, so threads do
not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from ..values import Weighted
from ._adapter import Adapter, Watch, require_floating, require_scalar_loss
from ._linear import LinearCollective


@final
class JaxAdapter(Adapter):
    """Differentiates functions of JAX arrays; a call inside a call is a higher derivative.

    What the loss computes may be compiled with `jax.jit`; what it watches (the variables it reads)
    is passed to compiled functions as arguments, because those are traced once and for all.
    """

    @property
    def name(self) -> str:
        """The backend's name."""
        return "jax"

    def differentiate(self, fn: Callable[[Watch], Any]) -> tuple[Any, list[Any]]:
        """Run `fn` once, then go back through it; see `Adapter.differentiate`."""
        inputs: list[_Input] = []
        weights: list[Any] = []
        was_compiling = _is_compiling()

        def traced(root: Any) -> Any:
            def watch(array: Any) -> Any:
                if _is_compiling() and not was_compiling:
                    raise TypeError(_COMPILED)
                watched = _Input(array)
                inputs.append(watched)
                return _enter(watched, root, watched.start())

            total = fn(watch)
            if isinstance(total, Weighted):
                weights.append(total.weight)
                total = total.total
            require_scalar_loss(total)
            total = jnp.asarray(total, dtype=None if _is_floating(total) else root.dtype)
            return total + root.astype(total.dtype)  # traced even if it depends on no input

        total, pullback = jax.vjp(traced, jnp.zeros(()))
        pullback(jnp.ones_like(total))
        is_numpy = not any(isinstance(watched.array, jax.Array) for watched in inputs)
        value = _number(total, is_numpy)
        if weights:
            value = Weighted(value, _number(weights[0], is_numpy))
        return value, [watched.gradient() for watched in inputs]

    def perform(self, collective: LinearCollective, value: Any) -> Any:
        """Send an array or a tracer of one through a collective."""
        return _perform(collective, value)


@final
class _Input:
    """A watched array, and the gradient that the backward pass brings to it."""

    __slots__ = ("_gradient", "array")

    def __init__(self, array: Any) -> None:
        require_floating(array)
        self.array = array
        self._gradient: Any = None

    def start(self) -> Any:
        """Return the array as jax computes with it: of 32 bits unless it may use 64."""
        if isinstance(self.array, jax.Array):
            return self.array
        array = np.asarray(self.array)
        return jnp.asarray(array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False))

    def receive(self, gradient: Any) -> None:
        """Add what one part of the backward pass brings."""
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def gradient(self) -> Any:
        """Return the gradient as what was watched, zeros if none arrived."""
        if self._gradient is None:
            zeros = jnp.zeros_like if isinstance(self.array, jax.Array) else np.zeros_like
            return zeros(self.array)
        if isinstance(self.array, jax.Array) or isinstance(self._gradient, jax.core.Tracer):
            return self._gradient
        return np.asarray(self._gradient, dtype=np.asarray(self.array).dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(_watched: _Input, _root: Any, array: Any) -> Any:
    return array


def _enter_forward(_watched: _Input, root: Any, array: Any) -> tuple[Any, Any]:
    return array, root


def _enter_backward(watched: _Input, root: Any, gradient: Any) -> tuple[Any, Any]:
    watched.receive(gradient)
    return jnp.zeros_like(root), gradient


_enter.defvjp(_enter_forward, _enter_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _perform(collective: LinearCollective, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{collective.title} was reached by jax.jit, jax.vmap or the like, which run a "
            "function once to record it, before there are numbers to send. Compile the parts "
            "before and after the collective, and call it between them."
        )
    return collective.perform(value)


def _perform_forward(collective: LinearCollective, value: Any) -> tuple[Any, None]:
    return _perform(collective, value), None


def _perform_backward(collective: LinearCollective, _residual: None, gradient: Any) -> tuple[Any]:
    return (_perform(collective.transposed(), gradient),)


_perform.defvjp(_perform_forward, _perform_backward)


def _is_compiling() -> bool:
    """Tell whether jax records what runs here, so that even a constant has no number yet."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_floating(total: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(total), jnp.floating))


def _number(total: Any, is_numpy: bool) -> Any:
    if not isinstance(total, jax.Array) or isinstance(total, jax.core.Tracer) or not is_numpy:
        return total
    return np.asarray(total)[()]


_COMPILED = (
    "A variable was read, or an array watched, inside a function compiled by jax.jit. Read it "
    "outside and pass it as an argument: a compiled function would also keep its first value for "
    "ever."
)
