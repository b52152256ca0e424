"""Losses: differentiated where the code runs, and multiplied so that small gradients survive."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final
from weakref import WeakSet

import numpy as np

from ..autodiff import differentiate_variables
from ..context import BESIDE, CLOSURE, PLACE
from ..errors import ContextError
from ..values import Variable, Weighted, local_value
from ._checks import checked_number, require_outside_replicas
from ._gradient import ScaledGradient
from ._slots import new_variable

Pairs = list[tuple[Any, Variable]]


def differentiate_loss(
    loss: Callable[[], Any],
    var_list: Sequence[Variable] | None,
    scale: float | None,
    backend: str,
    has_aux: bool = False,
) -> tuple[Any, Pairs]:
    """Return what a loss returns and its (gradient, variable) pairs; in the calling thread.

    With a scale the gradients are ScaledGradients; the value is that of the loss itself.

    Raises:
        ValueError: If the loss reads no trainable variable.
    """

    def scaled() -> object:
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
    completed = [(_completed(gradient, value, scale), each) for gradient, each in pairs]
    return (value, aux) if has_aux else value, completed


def _completed(gradient: object, value: object, scale: float | None) -> object:
    """Give a gradient the scale and the weight of its loss."""
    if gradient is not None and scale is not None:
        gradient = ScaledGradient(gradient, scale)
    if gradient is not None and isinstance(value, Weighted):
        return Weighted(gradient, value.weight)
    return gradient


def _times(value: Any, factor: float) -> object:
    if isinstance(value, Weighted):
        return Weighted(value.total * factor, value.weight)
    return value * factor


class LossScaling(ABC):
    """Scale that multiplies a loss before differentiation and divides its gradients.

    Several optimizers may share one: gradients carry the scale they were computed with, and a step
    in which each of them updates once counts as one.
    """

    _since: WeakSet[Any] | None = None  # the optimizers that made an update in this step

    @property
    @abstractmethod
    def scale(self) -> float:
        """The number that losses are multiplied with now."""

    @property
    @abstractmethod
    def variables(self) -> tuple[Variable, ...]:
        """Variables that keep its state from step to step."""

    @property
    @abstractmethod
    def skips(self) -> bool:
        """True if gradients that are not finite skip the step instead of failing it."""

    @abstractmethod
    def after(self, is_finite: bool) -> Mapping[Variable, Any]:
        """Return what becomes of `variables` after a step whose gradients were or were not finite.

        Args:
            is_finite: Whether all gradients were.
        """

    def is_next_step_of(self, optimizer: Any) -> bool:
        """Tell whether an update begins a new step: the optimizer's second one, or the first.

        Args:
            optimizer: One of those that share the scale.
        """
        since = self._since
        return not since or optimizer in since

    def applied_by(self, optimizer: Any) -> None:
        """Count an update that was published.

        Args:
            optimizer: Whose update it was.
        """
        if self._since is None or self.is_next_step_of(optimizer):
            self._since = WeakSet()
        self._since.add(optimizer)

    def skipped(self) -> None:
        """Take the next update for that of a new step: the count begins anew, too."""
        self._since = None

    def scaled(self, loss: Any) -> Any:
        """Return a loss, a number or a `Weighted`, times the scale."""
        if isinstance(loss, Weighted):
            return Weighted(loss.total * self.scale, loss.weight)
        return loss * self.scale


@final
class LossScale(LossScaling):
    """A loss scale that stays as it is.

    Args:
        scale: A number above 0; powers of 2 change no digit of a gradient.

    Raises:
        ValueError: If it is not above 0 and finite.
        TypeError: If it is not a number.

    Example:
        >>> LossScale(1024.0).scaled(0.5)
        512.0
    """

    __slots__ = ("_scale",)

    def __init__(self, scale: float) -> None:
        self._scale = checked_number("The loss scale", scale, "> 0", lambda number: number > 0)

    @property
    def scale(self) -> float:
        """The number that losses are multiplied with."""
        return self._scale

    @property
    def variables(self) -> tuple[Variable, ...]:
        """None."""
        return ()

    @property
    def skips(self) -> bool:
        """False: a fixed scale cannot be the reason for long."""
        return False

    def after(self, is_finite: bool) -> Mapping[Variable, Any]:
        """Nothing changes."""
        return {}

    def __repr__(self) -> str:
        return f"<LossScale | {self._scale:g}>"


@final
class ScaleRule(NamedTuple):
    """Rule by which a loss scale follows the steps.

    Attributes:
        growth_interval: After how many finite steps in a row it grows.
        factor: What it grows and shrinks by.
        minimum: Where it stops shrinking.
    """

    growth_interval: int
    factor: float
    minimum: float

    def after(self, scale: float, num_finite: int, is_finite: bool) -> tuple[float, int]:
        """Return the scale, and the number of finite steps since it changed, after one more step.

        Args:
            scale: Before it.
            num_finite: Before it.
            is_finite: Whether its gradients were.
        """
        if not is_finite:
            return max(scale / self.factor, self.minimum), 0
        if num_finite + 1 < self.growth_interval:
            return scale, num_finite + 1
        larger = scale * self.factor
        return (larger if math.isfinite(larger) else scale), 0


@final
class DynamicLossScale(LossScaling):
    """A loss scale that halves when gradients overflow and doubles after a while without.

    Make it in `strategy.scope()`, with the optimizer. Its state is part of the optimizer's write:
    a step that is skipped changes the scale and nothing else, on all replicas. With parameter
    servers it lives on one of them, and closures tell it how their steps went.

    Args:
        initial_scale: Where it starts.
        growth_interval: After how many finite steps in a row it grows.
        factor: What it grows and shrinks by.
        minimum: Where it stops shrinking.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is not a number.
        ContextError: If made inside a replica.

    Example:
        >>> DynamicLossScale(8.0).scaled(0.5)
        4.0

    Source:
        Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
    """

    __slots__ = ("_finite_steps", "_scale", "rule")

    def __init__(
        self,
        initial_scale: float = 2.0**15,
        *,
        growth_interval: int = 2000,
        factor: float = 2.0,
        minimum: float = 1.0,
    ) -> None:
        require_outside_replicas(type(self).__name__)
        start = checked_number("initial_scale", initial_scale, "> 0", lambda number: number > 0)
        if isinstance(growth_interval, bool) or not isinstance(growth_interval, int):
            raise TypeError(f"growth_interval must be an int, got {growth_interval!r}.")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}.")
        self.rule = ScaleRule(
            growth_interval,
            checked_number("factor", factor, "> 1", lambda number: number > 1),
            checked_number(
                "minimum", minimum, f"> 0 and at most initial_scale={start:g}",
                lambda m: 0 < m <= start,
            ),
        )  # fmt: skip
        strategy = PLACE.get().strategy
        self._scale = new_variable(strategy, np.float64(start), "loss_scale")
        token = BESIDE.set(self._scale)  # on the same server, if they live on one
        try:
            self._finite_steps = new_variable(strategy, np.int64(0), "loss_scale_finite_steps")
        finally:
            BESIDE.reset(token)

    @property
    def scale(self) -> float:
        """The number that losses are multiplied with now."""
        if CLOSURE.get() is not None:  # it may live on a parameter server
            return float(local_value(self._scale))
        return float(self._scale.components[0])

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The scale, and how many finite steps there were since it changed."""
        return self._scale, self._finite_steps

    @property
    def skips(self) -> bool:
        """True: a step that overflows is how it finds out that it is too large."""
        return True

    def after(self, is_finite: bool) -> Mapping[Variable, Any]:
        """Return the scale and the count after one more step."""
        old, steps = self.scale, int(self._finite_steps.components[0])
        scale, steps = self.rule.after(old, steps, is_finite)
        changed = {self._finite_steps: steps}
        return changed if steps else {self._scale: scale, **changed}

    def __repr__(self) -> str:
        try:
            return f"<DynamicLossScale | {self.scale:g}>"
        except ContextError:
            return "<DynamicLossScale on a parameter server>"


def checked_loss_scale(value: Any, strategy: Any) -> LossScaling | None:
    """Return what an optimizer was given as its loss scale; a number becomes a fixed one.

    Raises:
        TypeError: If it is something else.
        ValueError: If the number is out of range, or its variables belong to another strategy.
    """
    scaling = value if value is None or isinstance(value, LossScaling) else LossScale(value)
    for variable in () if scaling is None else scaling.variables:
        owner = None if strategy is None or strategy.has_plain_values else strategy
        if variable.store.owner is not owner:
            raise ValueError(
                f"{scaling!r} belongs to {variable.store.owner!r}, but the optimizer to {owner!r}. "
                "Make both in the same strategy.scope()."
            )
    return scaling
