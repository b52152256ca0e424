"""Gradients of a loss with respect to the variables it reads.

While the loss runs, a `VariableReads` stands in `context.OVERRIDES`: `variable.value` asks it, gets
a traced array, and has been recorded. One pass gives the value, the list of variables and the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from ..context import OVERRIDES
from ..values import Variable
from ._adapter import Watch
from ._find import find_adapter


@final
class VariableReads:
    """Gives a loss traced values for its variables, and remembers which it read.

    Args:
        chosen: The variables to trace; None traces every trainable floating-point one.

    Invariants:
        * A variable is traced once; its position in `variables` is that of its gradient.
        * Other variables read as they do outside the loss: for the gradient they are constants.
    """

    __slots__ = ("_chosen", "_outer", "_traced", "_watch")

    def __init__(self, chosen: Sequence[Variable] | None = None) -> None:
        self._chosen = None if chosen is None else frozenset(chosen)
        self._traced: dict[Variable, Any] = {}
        self._watch: Watch | None = None
        self._outer: Any = None  # Any: whatever stood in for variables before

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The traced variables, in order of their first read."""
        return tuple(self._traced)

    def trace(self, loss: Callable[[], Any], watch: Watch) -> Any:
        """Run a loss with this object standing in for its variables; `watch` traces an array."""
        self._watch, self._outer = watch, OVERRIDES.get()
        token = OVERRIDES.set(self)
        try:
            return loss()
        finally:
            OVERRIDES.reset(token)

    def read(self, variable: Variable) -> Any:
        """Return what `variable.value` is inside the loss."""
        if variable in self._traced:
            return self._traced[variable]
        value = variable.local_value() if self._outer is None else self._outer.read(variable)
        if self._watch is None or not self._is_chosen(variable):
            return value
        self._traced[variable] = traced = self._watch(value)
        return traced

    def _is_chosen(self, variable: Variable) -> bool:
        if self._chosen is not None:
            return variable in self._chosen
        return variable.trainable and variable.dtype.kind == "f"

    def __repr__(self) -> str:
        return f"<VariableReads | {len(self._traced)} traced>"


def differentiate_variables(
    loss: Callable[[], Any],
    variables: Sequence[Variable] | None = None,
    backend: str = "autograd",
) -> tuple[Any, list[tuple[Any, Variable]]]:
    """Run a loss once and return its value and its gradients.

    Args:
        loss: Takes no arguments and returns a scalar or a `Weighted(total, weight)`; what it reads
            through `variable.value` counts.
        variables: Those to differentiate with respect to; None means the trainable
            floating-point ones that the loss reads.
        backend: The library that differentiates: "autograd", "torch" or "jax".

    Returns:
        The value of the loss, and `(gradient, variable)` pairs: in the order of `variables`, with
        None as the gradient of one that was not read; or in the order of reading.

    Raises:
        TypeError: If a variable is not of floating point, or the loss returns no number.
        ValueError: If the loss does not return a scalar, or `backend` is unknown.
        ImportError: If the library is not installed.

    Example:
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> value, pairs = differentiate_variables(lambda: w.value**2)
        >>> print(value, pairs[0][0], pairs[0][1].name)
        9.0 6.0 w
    """
    reads = VariableReads(variables)
    value, gradients = find_adapter(backend).differentiate(partial(reads.trace, loss))
    found = dict(zip(reads.variables, gradients, strict=True))
    chosen = found if variables is None else variables
    return value, [(found.get(variable), variable) for variable in chosen]
