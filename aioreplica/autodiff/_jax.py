"""The adapter over JAX: functions written with `jax.numpy`.

A watched array enters the trace through a function whose backward pass stores the gradient that
arrives, as in the autograd adapter. JAX keeps the state of its traces per thread, so threads do
not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from ..context import TRACE
from ..devices.backends import Array
from ..tree import Tree, flatten, unflatten
from ..values import Weighted
from ._adapter import Adapter, Watch, require_floating, require_scalar_loss, split_aux
from ._linear import LinearCollective

Pair: TypeAlias = tuple[jax.Array, jax.Array]


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

    def differentiate(
        self, fn: Callable[[Watch], Tree], *, has_aux: bool = False
    ) -> tuple[Tree, list[Array]]:
        """Run `fn` once, then go back through it; see `Adapter.differentiate`."""
        inputs: list[_JaxInput] = []
        extra: list[_Extra] = []
        was_compiling = _is_compiling()

        def traced(root: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            def watch(array: Array) -> jax.Array:
                if _is_compiling() and not was_compiling:
                    raise TypeError(_COMPILED)
                watched = _JaxInput(array)
                inputs.append(watched)
                return _enter(watched, root, watched.start())

            total, aux = split_aux(fn(watch), has_aux)
            weight = None
            if isinstance(total, Weighted):
                total, weight = total.total, total.weight
            require_scalar_loss(total)
            total = jnp.asarray(total, dtype=None if _is_floating(total) else root.dtype)
            extra.append(_Extra((weight, aux)))
            # traced even if it depends on no input
            return total + root.astype(total.dtype), extra[0].arrays

        total, pullback, arrays = jax.vjp(traced, jnp.zeros(()), has_aux=True)
        pullback(jnp.ones_like(total))
        is_numpy = not any(isinstance(watched.array, jax.Array) for watched in inputs)
        value = _number(total, is_numpy)
        weight, aux = extra[0].of(arrays)
        if weight is not None:
            value = Weighted(value, _number(weight, is_numpy))
        gradients = [watched.gradient() for watched in inputs]
        return (value, aux) if has_aux else value, gradients

    def constant(self, array: Array) -> jax.Array:
        """Return an array of jax.

        Raises:
            TypeError: Inside a function that jax compiles, which would keep its first value.
        """
        require_not_compiling()
        return as_jax(array)

    def perform(self, collective: LinearCollective, value: jax.Array) -> jax.Array:
        """Send an array or a tracer of one through a collective."""
        return _perform(collective, value)


@final
class _Extra:
    """Additional result of a function; jax takes its arrays out of the trace."""

    __slots__ = ("_inner", "_leaves", "_positions", "_spec", "arrays")

    def __init__(self, tree: object) -> None:
        ours, self._spec = flatten(tree)  # and in its leaves what only jax can open
        self._leaves, self._inner = jax.tree_util.tree_flatten(ours)
        self._positions = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, jax.Array)]
        self.arrays = [self._leaves[i] for i in self._positions]

    def of(self, arrays: Sequence[jax.Array]) -> Any:
        """Return the tree with other arrays in their places."""
        for i, array in zip(self._positions, arrays, strict=True):
            self._leaves[i] = array
        return unflatten(self._spec, jax.tree_util.tree_unflatten(self._inner, self._leaves))


@final
class _JaxInput:
    """A watched array, and the gradient that the backward pass brings to it."""

    __slots__ = ("_gradient", "array")

    def __init__(self, array: Array) -> None:
        require_floating(array, takes_bfloat16=True)
        self.array = array
        self._gradient: jax.Array | None = None

    def start(self) -> jax.Array:
        """Return the array as jax computes with it: of 32 bits unless it may use 64."""
        return as_jax(self.array)

    def receive(self, gradient: jax.Array) -> None:
        """Add what one part of the backward pass brings."""
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def gradient(self) -> Array:
        """Return the gradient as what was watched, zeros if none arrived."""
        if self._gradient is None:
            zeros = jnp.zeros_like if isinstance(self.array, jax.Array) else np.zeros_like
            return zeros(self.array)
        if isinstance(self.array, jax.Array) or isinstance(self._gradient, jax.core.Tracer):
            return self._gradient
        return np.asarray(self._gradient, dtype=np.asarray(self.array).dtype)


def as_jax(array: Array) -> jax.Array:
    """Return an array of jax, of 32 bits unless jax may use 64."""
    if isinstance(array, jax.Array):
        return array
    found = np.asarray(array)
    return jnp.asarray(found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(_watched: _JaxInput, _root: jax.Array, array: jax.Array) -> jax.Array:
    return array


def _enter_forward(_watched: _JaxInput, root: jax.Array, array: jax.Array) -> Pair:
    return array, root


def _enter_backward(watched: _JaxInput, root: jax.Array, gradient: jax.Array) -> Pair:
    watched.receive(gradient)
    return jnp.zeros_like(root), gradient


_enter.defvjp(_enter_forward, _enter_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _perform(collective: LinearCollective, value: jax.Array) -> jax.Array:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{collective.caller.name} was reached by jax.jit, jax.vmap or the like, which run a "
            "function once to record it, before there are numbers to send. Compile the parts "
            "before and after the collective, and call it between them."
        )
    return collective.perform(value)


def _perform_forward(collective: LinearCollective, value: jax.Array) -> tuple[jax.Array, None]:
    return _perform(collective, value), None


def _perform_backward(
    collective: LinearCollective, _residual: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (_perform(collective.transposed(), gradient),)


_perform.defvjp(_perform_forward, _perform_backward)


def require_not_compiling() -> None:
    """Check that numbers can be read here.

    Raises:
        TypeError: Inside a function that jax compiles, unless it is the step that `run_steps` does.
    """
    if _is_compiling() and TRACE.get() is None:
        raise TypeError(_COMPILED)


def _is_compiling() -> bool:
    """Tell whether jax records what runs here, so that even a constant has no number yet."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_floating(total: Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(total), jnp.floating))


def _number(total: Array, is_numpy: bool) -> Array:
    if not isinstance(total, jax.Array) or isinstance(total, jax.core.Tracer) or not is_numpy:
        return total
    return np.asarray(total)[()]


_COMPILED = (
    "A variable was read, or an array watched, inside a function compiled by jax.jit. Read it "
    "outside and pass it as an argument: a compiled function would also keep its first value for "
    "ever."
)
