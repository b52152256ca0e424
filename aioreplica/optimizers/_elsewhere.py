"""Optimizers whose variables live elsewhere: what travels, and the part of a step done here.

Where gradients are computed they are unscaled, checked and clipped; where the variables are a copy
of the optimizer applies its rule to them, one variable at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..values import IndexedSlices, Variable, Weighted
from ._blocks import TouchedRows
from ._checks import LearningRate
from ._gradient import ScaledGradient
from ._loss import DynamicLossScale
from ._merged_gradient import MergedGradient, merge_gradients
from ._optimizer import Optimizer
from ._settings import StepSettings
from ._slots import SlotTable, new_variable
from ._step import clip, unscale_and_check
from .schedules import ReduceOnPlateau


@final
@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """Recipe of an optimizer without its state; it can be pickled.

    Attributes:
        kind: Its class.
        attributes: What the rule keeps in the object.
        learning_rate: A number or a function of the number of updates done before.
        multipliers: What the learning rate is multiplied with, by name of the variable.
        clipnorm: As `Optimizer` takes it, and so are the next ones.
        clipvalue: See there.
        global_clipnorm: See there.
        loss_scale: See there.
        on_non_finite: See there.
        is_mean: Whether gradients without weights are averaged.
        slot_names: Names of what is remembered for each variable.
    """

    kind: type[Optimizer]
    attributes: Mapping[str, Any]
    learning_rate: LearningRate
    multipliers: Mapping[str, float]
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    loss_scale: Any
    on_non_finite: Any
    is_mean: bool
    slot_names: tuple[str, ...]

    def rebuilt(
        self, iterations: Variable, skipped: Variable | None, norm: Variable | None
    ) -> Optimizer:
        """Return an optimizer with these counters, and without slots."""
        optimizer = self.kind.__new__(self.kind)
        vars(optimizer).update(self.attributes)
        multipliers = self.multipliers
        optimizer._settings = StepSettings(
            self.learning_rate,
            (lambda variable: multipliers.get(variable.name, 1.0)) if multipliers else None,
            self.clipnorm,
            self.clipvalue,
            self.global_clipnorm,
            self.loss_scale,
            self.on_non_finite,
            self.is_mean,
            SlotTable(self.slot_names),
            iterations,
            skipped,
            norm,
            [],
            TouchedRows(),
        )
        return optimizer

    def applying(self, *, clips_values: bool) -> Optimizer:
        """Return a copy that applies gradients which were checked and clipped before.

        Args:
            clips_values: Whether single elements were not.
        """
        copy = self.rebuilt(new_variable(None, np.int64(0), "iterations"), None, None)
        settings = copy.settings
        settings.clipnorm = settings.global_clipnorm = None
        settings.loss_scaling = None
        settings.on_non_finite = "ignore"
        settings.is_mean = False
        if not clips_values:
            settings.clipvalue = None
        return copy


def recipe_of(optimizer: Optimizer, variables: Sequence[Variable]) -> OptimizerRecipe:
    """Return what an optimizer is made of.

    Args:
        optimizer: Which one.
        variables: Those that it may update.

    Raises:
        TypeError: If its rule needs all variables at once, or state that changes with every step.
    """
    settings = optimizer.settings
    what = f"{type(optimizer).__name__} {settings.iterations.name!r}"
    if optimizer.is_joint:
        raise TypeError(
            f"{what} updates all variables together, but on parameter servers each is updated "
            "where it lives. Use one of ar.optimizers, or derive one from ElementwiseOptimizer."
        )
    if isinstance(settings.loss_scaling, DynamicLossScale):
        raise TypeError(
            f"{what} has a DynamicLossScale, which follows every step. On parameter servers use a "
            "LossScale."
        )
    if isinstance(settings.learning_rate, ReduceOnPlateau):
        raise TypeError(
            f"{what} has the schedule ReduceOnPlateau, which keeps variables of its own. On "
            "parameter servers set optimizer.learning_rate instead."
        )
    of = settings.multiplier_of
    return OptimizerRecipe(
        type(optimizer),
        {name: value for name, value in vars(optimizer).items() if name != "_settings"},
        settings.learning_rate,
        {} if of is None else {variable.name: of(variable) for variable in variables},
        settings.clipnorm,
        settings.clipvalue,
        settings.global_clipnorm,
        settings.loss_scaling,
        settings.on_non_finite,
        settings.is_mean,
        settings.slots.names,
    )


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """Gradients that are ready to be applied.

    Attributes:
        gradients: One per variable; None if the step is to be skipped.
        norm: That of all of them before clipping, if it was measured.
    """

    gradients: Sequence[Any] | None
    norm: float | None = None


def finished_gradients(
    optimizer: Optimizer, variables: Sequence[Variable], gradients: Sequence[Any]
) -> Finished:
    """Sum rows, unscale, check and clip gradients.

    Args:
        optimizer: Whose options count.
        variables: Whose gradients they are.
        gradients: As `checked_pairs` gives them.

    Raises:
        NonFiniteError: If one is not finite, unless such steps are skipped.
        ValueError: If one has weight 0.
    """
    settings = optimizer.settings
    checks = settings.on_non_finite != "ignore"
    merged = merge_gradients(variables, [(each,) for each in gradients], is_mean=False)
    for each in merged:
        if each.needs_sum:
            each.sum_parts()
    norm = None
    if settings.needs_norms:
        squares = [0.0] * len(merged)
        for _, measure in unscale_and_check(merged, squares):
            measure()
        if checks and not all(each.is_finite for each in merged):
            return _refused(settings, merged)
        norm = clip(optimizer, merged, squares)
    elif settings.clipvalue is not None:
        for each in merged:
            each.limit = settings.clipvalue
    with np.errstate(all="ignore"):
        finished = [_finished(each) for each in merged]
    if checks and not all(each.is_finite for each in merged):
        return _refused(settings, merged)
    return Finished(finished, norm)


def weighed_gradients(
    optimizer: Optimizer, variables: Sequence[Variable], gradients: Sequence[Any]
) -> Finished:
    """Unscale and check gradients that are summed elsewhere, before they are clipped.

    Weights are kept, because totals and weights are summed apart.

    Raises:
        NonFiniteError: If one is not finite, unless such steps are skipped.
    """
    settings = optimizer.settings
    found: list[Any] = []
    for variable, gradient in zip(variables, gradients, strict=True):
        weight = gradient.weight if isinstance(gradient, Weighted) else None
        part = gradient.total if isinstance(gradient, Weighted) else gradient
        if weight == 0:
            rows = part.values if isinstance(part, ScaledGradient) else part
            found.append(Weighted(_zeros(rows), 0.0))
            continue
        [merged] = merge_gradients([variable], [(part,)], is_mean=False)
        if merged.needs_sum:
            merged.sum_parts()
        with np.errstate(all="ignore"):
            whole = _finished(merged)
        if settings.on_non_finite != "ignore" and not merged.is_finite:
            return _refused(settings, [merged])
        found.append(whole if weight is None else Weighted(whole, weight))
    return Finished(found)


def _zeros(part: Any) -> Any:
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values[:0], part.indices[:0], part.dense_shape)
    return np.zeros_like(part)


def _finished(gradient: MergedGradient) -> Any:
    whole = gradient.summed()
    if isinstance(whole, IndexedSlices):
        values = whole.values
        flat = gradient.finished(values.reshape(-1), np.empty(values.size, values.dtype))
        return IndexedSlices(flat.reshape(values.shape), whole.indices, whole.dense_shape)
    return gradient.dense()


def _refused(settings: StepSettings, gradients: Sequence[MergedGradient]) -> Finished:
    if settings.skipped is None:
        raise next(each for each in gradients if not each.is_finite).non_finite_error()
    return Finished(None)
