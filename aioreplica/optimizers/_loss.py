"""Differentiating a loss where the code runs: on the replica's device, or on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..autodiff import differentiate_variables
from ..context import PLACE
from ..devices import run_on_host
from ..replica import ReplicaContext
from ..values import Variable, Weighted

Pairs = list[tuple[Any, Variable]]


async def differentiate_loss(
    loss: Callable[[], Any],
    var_list: Sequence[Variable] | None,
    scale: float | None,
    backend: str = "autograd",
) -> tuple[Any, Pairs]:
    """Return the value of a loss and its (gradient, variable) pairs.

    Without `var_list` the pairs come in the order in which the variables were created, so that
    replicas whose losses read them in different orders agree. The gradients are those of the loss
    times `scale`, the value is that of the loss itself.

    Raises:
        TypeError: If `loss` is not a plain function, or `var_list` holds something else than
            variables.
        ValueError: If there are no variables.
    """
    if not callable(loss) or inspect.iscoroutinefunction(loss):
        raise TypeError(
            f"The loss must be a plain function without arguments, got {loss!r} "
            f"({type(loss).__name__})."
        )
    if var_list is not None:
        _require_variables(var_list)
    place = PLACE.get()
    scaled = loss if scale is None else partial(_scaled, loss, scale)
    if isinstance(place.replica, ReplicaContext):
        value, pairs = await place.replica.run_on_device(
            differentiate_variables, scaled, var_list, backend
        )
    else:
        value, pairs = await run_on_host(differentiate_variables, scaled, var_list, backend)
    if scale is not None:
        value = _times(value, 1 / scale)
    if not pairs:
        raise ValueError(
            "There are no variables to minimize over: the loss read no trainable variable through "
            "`variable.value`. Read one, or pass var_list."
        )
    if var_list is None and place.strategy is not None:
        created = {v: i for i, v in enumerate(place.strategy.trainable_variables)}
        pairs.sort(key=lambda pair: created.get(pair[1], len(created)))
    if isinstance(value, Weighted):
        pairs = [
            (None if gradient is None else Weighted(gradient, value.weight), variable)
            for gradient, variable in pairs
        ]
    return value, pairs


def _scaled(loss: Callable[[], Any], scale: float) -> Any:
    value = loss()
    try:
        return _times(value, scale)
    except TypeError:
        return value  # no number at all, which the adapter tells better


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, Weighted):
        return Weighted(value.total * factor, value.weight)
    return value * factor


def _require_variables(var_list: Sequence[Variable]) -> None:
    if not isinstance(var_list, (list, tuple)):
        raise TypeError(f"var_list must be a list of variables or None, got {var_list!r}.")
    if not var_list:
        raise ValueError("There are no variables to minimize over: var_list is empty.")
    for variable in var_list:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list must hold variables, got {variable!r} ({type(variable).__name__})."
            )
