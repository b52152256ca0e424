"""Differentiating a loss where the code runs: on the replica's device, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._functions import is_async, require_no_yield
from ..autodiff import differentiate_variables
from ..context import PLACE
from ..values import Variable, Weighted
from ._scaled_gradient import ScaledGradient

Pairs = list[tuple[Any, Variable]]


def require_loss(loss: Any, var_list: Any) -> None:
    """Check what is to be differentiated with respect to what.

    Raises:
        TypeError: If `loss` is not a plain function, or `var_list` holds something else than
            variables.
        ValueError: If `var_list` is empty.
    """
    if not callable(loss) or is_async(loss):
        raise TypeError(
            f"The loss must be a plain function without arguments, got {loss!r} "
            f"({type(loss).__name__})."
        )
    require_no_yield(loss, "minimize", "Return the loss.")
    if var_list is None:
        return
    if not isinstance(var_list, (list, tuple)):
        raise TypeError(f"var_list must be a list of variables or None, got {var_list!r}.")
    if not var_list:
        raise ValueError("There are no variables to minimize over: var_list is empty.")
    for variable in var_list:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list must hold variables, got {variable!r} ({type(variable).__name__})."
            )


def differentiate_loss(
    loss: Callable[[], Any],
    var_list: Sequence[Variable] | None,
    scale: float | None,
    backend: str,
    has_aux: bool = False,
) -> tuple[Any, Pairs]:
    """Return what a loss returns and its (gradient, variable) pairs; in the calling thread.

    Without `var_list` the pairs come in the order in which the variables were created, so that
    replicas whose losses read them in different orders agree. With a scale the gradients are
    ScaledGradients; the value is that of the loss itself.

    Raises:
        ValueError: If the loss reads no trainable variable.
    """

    def scaled() -> Any:
        found = loss()
        if scale is None:
            return found
        try:
            if has_aux:
                value, aux = found
                return _times(value, scale), aux
            return _times(found, scale)
        except (TypeError, ValueError):
            return found  # no number at all, or no pair, which the adapter tells better

    found, pairs = differentiate_variables(scaled, var_list, backend, has_aux=has_aux)
    value, aux = found if has_aux else (found, None)
    if not pairs:
        raise ValueError(
            "There are no variables to minimize over: the loss read no trainable variable through "
            "`variable.value`. Read one, or pass var_list."
        )
    if scale is not None:
        value = _times(value, 1 / scale)
    if var_list is None:
        sort_by_creation(pairs, PLACE.get().strategy)
    completed = [(_completed(gradient, value, scale), each) for gradient, each in pairs]
    return (value, aux) if has_aux else value, completed


def sort_by_creation(pairs: Pairs, strategy: Any) -> None:
    """Sort pairs by the order in which a strategy's variables were created."""
    if strategy is not None:
        created = {v: i for i, v in enumerate(strategy.trainable_variables)}
        pairs.sort(key=lambda pair: created.get(pair[1], len(created)))


def _completed(gradient: Any, value: Any, scale: float | None) -> Any:
    """Give a gradient the scale and the weight of its loss."""
    if gradient is not None and scale is not None:
        gradient = ScaledGradient(gradient, scale)
    if gradient is not None and isinstance(value, Weighted):
        return Weighted(gradient, value.weight)
    return gradient


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, Weighted):
        return Weighted(value.total * factor, value.weight)
    return value * factor
