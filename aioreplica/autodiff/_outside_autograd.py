"""Outside calls in functions that HIPS autograd differentiates.

The call runs on the host once, where it is traced by itself; its pullback is kept, and what the
device program sees is one primitive. Going back through that runs the pullback on the host. Only a
gradient of the gradient has to run the function again.

Traces of several threads keep apart, see `_autograd_traces.py`; that is made sure of here too, for
programs that call autograd by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from autograd.builtins import make_sequence
from autograd.core import VJPNode, backward_pass, vspace
from autograd.extend import defvjp_argnums, primitive
from autograd.tracer import Box, getval, isbox, new_box, trace_stack

from ..tree import flatten, unflatten
from ._autograd_traces import separate_threads
from ._outside import NameGradients, OutsideAdapter, RunOutside, finished

separate_threads()


def is_traced(leaf: Any) -> bool:
    """Tell whether autograd traces a value."""
    return bool(isbox(leaf))


@final
class AutogradOutside(OutsideAdapter):
    """Makes outside calls primitives of autograd."""

    def call(
        self,
        run: RunOutside,
        names: NameGradients,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run the call and return its result, traced where it depends on the arguments."""
        leaves, spec = flatten(list(args))
        positions = [i for i, leaf in enumerate(leaves) if isbox(leaf)]

        def of_traced(*values: Any) -> Any:
            whole = list(leaves)
            for position, value in zip(positions, values, strict=True):
                whole[position] = value
            return fn(*unflatten(spec, whole))

        outside = _AutogradCall(run, names, name, of_traced)
        return outside.at([leaves[i] for i in positions])


@final
class _AutogradCall:
    """One call: its result, and its pullback once it was traced.

    Args:
        run: Does the call.
        names: Names the gradients.
        name: The cluster.
        fn: The function, of traced values only.
        known: Gives the value without running `fn`: the kept pullback of another call.
    """

    def __init__(
        self,
        run: RunOutside,
        names: NameGradients,
        name: str,
        fn: Callable[..., Any],
        *,
        known: Callable[[Any], Any] | None = None,
    ) -> None:
        self._run = run
        self._names = names
        self._name = name
        self._fn = fn
        self._known = known
        self._pullback: Callable[[Any], Any] | None = None
        self._put_back: Callable[[Any], Any] | None = None
        self.value: Any = None

    def at(self, args: Sequence[Any]) -> Any:
        """Run the call outside; the result is traced like the arguments."""
        plain = tuple(map(getval, args))
        self.value = self._run(self._name, self._evaluate, plain)
        if type(self.value) not in Box.type_mappings:
            return self.value  # nothing that has a gradient, such as None
        result = _result(self, *args)
        return result if self._put_back is None else self._put_back(result)

    def gradient(self, cotangent: Any, args: Sequence[Any]) -> Any:
        """Return the cotangents of all arguments; runs outside."""
        name = self._names.gradient_of(self._name, _backward_frame())
        outside = _AutogradCall(
            self._run, self._names, name, _vjp_of(self._fn), known=self._pullback
        )
        return outside.at([cotangent, *args])

    def _evaluate(self, *args: Any) -> Any:
        if self._known is not None:
            return self._known(args[0])
        return _traced(self._fn, args, self._keep)

    def _keep(self, traced: _Traced) -> Any:
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

    value: Any
    pullback: Callable[[Any], Any]
    put_back: Callable[[Any], Any] | None = None


@primitive  # type: ignore[untyped-decorator]  # autograd ships no types
def _result(outside: _AutogradCall, *_args: Any) -> Any:
    return outside.value


def _make_vjp(
    argnums: Sequence[int], _ans: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> Callable[[Any], Any]:
    outside, *rest = args

    def pull_back(cotangent: Any) -> tuple[Any, ...]:
        parts = outside.gradient(cotangent, rest)
        return tuple(parts[i - 1] for i in argnums)

    return pull_back


defvjp_argnums(_result, _make_vjp)


def _vjp_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of (cotangent, *args) that gives the cotangents of the arguments."""

    def pull_back(cotangent: Any, *args: Any) -> Any:
        return _traced(fn, args, lambda traced: traced.pullback(cotangent))

    return pull_back


def _traced(fn: Callable[..., Any], args: tuple[Any, ...], use: Callable[[_Traced], Any]) -> Any:
    """Run a function in a trace of its own; return what `use` makes of that.

    If the function has to be awaited, what is returned has to be too. Traces have numbers of their
    own, so whatever else is traced meanwhile keeps apart.
    """
    root = VJPNode.new_root()
    with trace_stack.new_trace() as trace:
        end = fn(*_unpacked(new_box(args, trace, root)))
    return finished(end, lambda end: use(_result_of(end, trace, args)))


def _result_of(end: Any, trace: int, args: tuple[Any, ...]) -> _Traced:
    if _is_of(end, trace):
        return _Traced(end._value, lambda cotangent: backward_pass(cotangent, end._node))
    leaves, spec = flatten(end)
    positions = [i for i, leaf in enumerate(leaves) if _is_of(leaf, trace)]
    if not positions:  # it does not depend on them
        return _Traced(end, lambda _cotangent: vspace(args).zeros())
    packed = make_sequence(tuple, *[leaves[i] for i in positions])

    def put_back(values: Any) -> Any:
        whole = list(leaves)
        for k, position in enumerate(positions):
            whole[position] = values[k]
        return unflatten(spec, whole)

    return _Traced(
        packed._value, lambda cotangent: backward_pass(cotangent, packed._node), put_back
    )


def _is_of(value: Any, trace: int) -> bool:
    return bool(isbox(value) and value._trace == trace)


def _unpacked(packed: Any) -> list[Any]:
    return [packed[i] for i in range(len(packed))]


def _backward_frame() -> FrameType | None:
    """Return the frame of the pass backwards that is under way: one object for one pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not backward_pass.__code__:
        frame = frame.f_back
    return frame
