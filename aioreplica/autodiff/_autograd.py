"""The adapter over HIPS autograd: plain NumPy code, written with `autograd.numpy`.

A watched array enters the trace as the output of a primitive whose backward pass stores the
gradient that arrives. So inputs can be named while the function runs, and none that is unused
costs anything.

A call outside runs on the host once, where it is traced by itself; its pullback is kept, and what
the device program sees is one primitive. Going back through that runs the pullback on the host.
Only a gradient of the gradient has to run the function again.

Threads do not disturb each other, see `unique_traces`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, final

import numpy as np
from autograd import make_vjp, tracer
from autograd.builtins import make_sequence
from autograd.core import VJPNode, backward_pass
from autograd.extend import defjvp, defvjp, defvjp_argnums, primitive, vspace
from autograd.tracer import Box, getval, isbox, new_box, trace_stack

from ..context import REGISTRY
from ..devices.backends import Array
from ..tree import Tree, flatten, map_leaves, unflatten
from ..values import Weighted
from ._adapter import (
    Adapter,
    NameGradient,
    RunOutside,
    Watch,
    finished,
    require_floating,
    require_scalar_loss,
    split_aux,
)
from ._linear import LinearCollective

FIRST = 1 << 32  # above every depth that a trace begun before may have


@final
class AutogradAdapter(Adapter):
    """Differentiates functions written with `autograd.numpy`.

    Calls may overlap on several threads; a call inside a call is a higher derivative.
    """

    @property
    def name(self) -> str:
        """The backend's name."""
        return "autograd"

    def differentiate(
        self, fn: Callable[[Watch], Tree], *, has_aux: bool = False
    ) -> tuple[Tree, list[Array]]:
        """Run `fn` once, then go back through it; see `Adapter.differentiate`."""
        inputs: list[_AutogradInput] = []
        weights: list[object] = []
        extra: list[object] = []

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


def is_traced(leaf: object) -> bool:
    """Tell whether autograd traces a value."""
    return bool(isbox(leaf))


@final
class AutogradCall:
    """One call: its result, and its pullback once it was traced.

    Args:
        run: Does the call.
        gradient_of: Names the gradients.
        name: The cluster.
        fn: The function, of traced values only.
        known: Gives the value without running `fn`: the kept pullback of another call.
    """

    def __init__(
        self,
        run: RunOutside,
        gradient_of: NameGradient,
        name: str,
        fn: Callable[..., object],
        *,
        known: Callable[[object], object] | None = None,
    ) -> None:
        self._run = run
        self._gradient_of = gradient_of
        self._name = name
        self._fn = fn
        self._known = known
        self._pullback: Callable[[object], object] | None = None
        self._put_back: Callable[[object], object] | None = None
        self.value: Tree = None

    def at(self, args: Sequence[Tree]) -> Tree:
        """Run the call outside; the result is traced like the arguments."""
        plain = tuple(map(getval, args))
        self.value = self._run(self._name, self._evaluate, plain)
        if type(self.value) not in Box.type_mappings:
            return self.value  # nothing that has a gradient, such as None
        result = _result(self, *args)
        return result if self._put_back is None else self._put_back(result)

    def gradient(self, cotangent: Tree, args: Sequence[object]) -> object:
        """Return the cotangents of all arguments; runs outside."""
        name = self._gradient_of(self._name, _backward_frame())
        outside = AutogradCall(
            self._run, self._gradient_of, name, _vjp_of(self._fn), known=self._pullback
        )
        return outside.at([cotangent, *args])

    def _evaluate(self, *args: object) -> object:
        if self._known is not None:
            return self._known(args[0])
        return _traced(self._fn, args, self._keep)

    def _keep(self, traced: _Traced) -> object:
        self._pullback, self._put_back = traced.pullback, traced.put_back
        return traced.value


@final
@dataclass(frozen=True, slots=True)
class _Traced:
    """Result of a traced function.

    Attributes:
        value: Its value; of a tree the tuple of those leaves that depend on the arguments.
        pullback: Takes the cotangent of the value to those of the arguments.
        put_back: Makes the tree of such a tuple; None if the value is what the function returned.
    """

    value: Tree
    pullback: Callable[[object], object]
    put_back: Callable[[object], object] | None = None


@primitive  # type: ignore[untyped-decorator]  # autograd ships no types
def _result(outside: AutogradCall, *_args: object) -> object:
    return outside.value


def _make_vjp(
    argnums: Sequence[int], _ans: object, args: tuple[Any, ...], _kwargs: dict[str, object]
) -> Callable[[object], object]:
    outside, *rest = args

    def pull_back(cotangent: object) -> tuple[object, ...]:
        parts = outside.gradient(cotangent, rest)
        return tuple(parts[i - 1] for i in argnums)

    return pull_back


defvjp_argnums(_result, _make_vjp)


def _vjp_of(fn: Callable[..., object]) -> Callable[..., object]:
    """Return the function of (cotangent, *args) that gives the cotangents of the arguments."""

    def pull_back(cotangent: object, *args: object) -> object:
        return _traced(fn, args, lambda traced: traced.pullback(cotangent))

    return pull_back


def _traced(
    fn: Callable[..., object], args: tuple[object, ...], use: Callable[[_Traced], object]
) -> object:
    """Run a function in a trace of its own; return what `use` makes of that.

    If the function has to be awaited, what is returned has to be too. Traces have numbers of their
    own, so whatever else is traced meanwhile keeps apart.
    """
    root = VJPNode.new_root()
    with trace_stack.new_trace() as trace:
        end = fn(*_unpacked(new_box(args, trace, root)))
    return finished(end, lambda end: use(_result_of(end, trace, args)))


def _result_of(end: Any, trace: int, args: tuple[object, ...]) -> _Traced:
    if _is_of(end, trace):
        return _Traced(end._value, lambda cotangent: backward_pass(cotangent, end._node))
    leaves, spec = flatten(end)
    positions = [i for i, leaf in enumerate(leaves) if _is_of(leaf, trace)]
    if not positions:  # it does not depend on them
        return _Traced(end, lambda _cotangent: vspace(args).zeros())
    packed = make_sequence(tuple, *[leaves[i] for i in positions])

    def put_back(values: Any) -> object:
        whole = list(leaves)
        for k, position in enumerate(positions):
            whole[position] = values[k]
        return unflatten(spec, whole)

    return _Traced(
        packed._value, lambda cotangent: backward_pass(cotangent, packed._node), put_back
    )


def _is_of(value: Tree, trace: int) -> bool:
    return bool(isbox(value) and value._trace == trace)


def _unpacked(packed: Any) -> list[Any]:
    return [packed[i] for i in range(len(packed))]


def _backward_frame() -> FrameType | None:
    """Return the frame of the pass backwards that is under way: one object for one pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not backward_pass.__code__:
        frame = frame.f_back
    return frame


def unique_traces() -> Callable[[], AbstractContextManager[int]]:
    """Return what numbers traces so that no two are ever equal and later ones are higher.

    autograd tells the boxes of nested traces apart by the depth at which they were made, counted in
    a module global. Two threads that differentiate at the same time both move that counter: a trace
    can end up with the number of the one around it, and derivatives of derivatives are then
    silently wrong.

    What autograd needs of these numbers is that an inner trace has a higher one than those around
    it, and that no two live traces share one. Numbers that only ever grow have both properties, on
    any number of threads, and even where a box crosses from one thread to another. Nothing else in
    autograd is shared and written while a function is traced: a node belongs to its trace, and the
    tables of derivative rules are filled when modules are imported.
    """
    numbers, lock = count(FIRST + 1), threading.Lock()

    @contextmanager
    def new_trace() -> Iterator[int]:
        with lock:
            number = next(numbers)
        yield number

    return new_trace


def separate_threads() -> None:
    """Let autograd number its traces this way from now on, in the whole process.

    Whatever else in the process uses autograd gets the same numbers, which differ from its own
    only in being unique. Idempotent.
    """
    tracer.trace_stack.new_trace = REGISTRY.once("autograd_traces", unique_traces)


separate_threads()  # also for programs that call autograd by themselves
