"""The adapter over HIPS autograd: plain NumPy code, written with `autograd.numpy`.

A watched array enters the trace as the output of a primitive whose backward pass stores the
gradient that arrives. So inputs can be named while the function runs, and none that is unused
costs anything. Threads do not disturb each other, see `_autograd_traces.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np
from autograd import make_vjp
from autograd.extend import defjvp, defvjp, primitive, vspace
from autograd.tracer import getval, isbox

from ..devices.backends import Array
from ..tree import map_leaves
from ..values import Weighted
from ._adapter import Adapter, Watch, require_floating, require_scalar_loss, split_aux
from ._autograd_traces import separate_threads
from ._linear import LinearCollective


@final
class AutogradAdapter(Adapter):
    """Differentiates functions written with `autograd.numpy`.

    Calls may overlap on several threads; a call inside a call is a higher derivative.
    """

    def __init__(self) -> None:
        separate_threads()

    @property
    def name(self) -> str:
        """The backend's name."""
        return "autograd"

    def differentiate(
        self, fn: Callable[[Watch], Any], *, has_aux: bool = False
    ) -> tuple[Any, list[Array]]:
        """Run `fn` once, then go back through it; see `Adapter.differentiate`."""
        inputs: list[_AutogradInput] = []
        weights: list[Any] = []
        extra: list[Any] = []

        def traced(root: Array) -> Array:
            def watch(array: Array) -> Array:
                watched = _AutogradInput(array)
                inputs.append(watched)
                return _enter(root, watched)

            total, aux = split_aux(fn(watch), has_aux)
            extra.append(map_leaves(partial(_untraced, root), aux))
            if isinstance(total, Weighted):
                weights.append(getval(total.weight))
                total = total.total
            require_scalar_loss(getval(total))
            return total + root  # part of the trace even if it depends on no input

        pullback, total = make_vjp(traced)(0.0)
        pullback(vspace(total).ones())
        value = Weighted(total, weights[0]) if weights else total
        gradients = [watched.gradient() for watched in inputs]
        return (value, extra[0]) if has_aux else value, gradients

    def constant(self, array: Array) -> Array:
        """Return the array: what autograd does not trace is constant."""
        return array

    def perform(self, collective: LinearCollective, value: Array) -> Array:
        """Send a box through a collective."""
        return _perform(collective, value)


@final
class _AutogradInput:
    """A watched array, and the gradient that the backward pass brings to it."""

    __slots__ = ("_gradient", "array")

    def __init__(self, array: Array) -> None:
        require_floating(getval(array))
        self.array = array if isbox(array) else np.asarray(array)
        self._gradient: Array = None

    def receive(self, gradient: Array) -> float:
        """Take the whole gradient; what goes on to the root is nothing."""
        self._gradient = gradient
        return 0.0

    def gradient(self) -> Array:
        """Return the gradient, zeros if none arrived; traced only inside an outer derivative."""
        if self._gradient is None:
            return np.zeros_like(getval(self.array))
        if isbox(self._gradient):
            return self._gradient
        return np.asarray(self._gradient, dtype=getval(self.array).dtype)


def _untraced(root: Array, leaf: Array) -> Array:
    """Take a leaf out of the trace that `root` belongs to."""
    return leaf._value if isbox(leaf) and leaf._trace == root._trace else leaf


@primitive  # type: ignore[untyped-decorator]  # autograd ships no types
def _enter(_root: float, watched: _AutogradInput) -> Array:
    return watched.array


defvjp(_enter, lambda _ans, _root, watched: watched.receive)


@primitive  # type: ignore[untyped-decorator]
def _perform(collective: LinearCollective, value: Array) -> Array:
    return collective.perform(np.asarray(value))


# A collective is linear: its derivative is itself, the way back is its transpose.
defvjp(
    _perform,
    None,
    lambda _ans, collective, _value: lambda g: _perform(collective.transposed(), g),
)
defjvp(_perform, None, lambda g, _ans, collective, _value: _perform(collective.again(), g))
