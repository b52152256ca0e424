"""What is done to gradients between their sum and their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..values import Variable
from ._clipping import Clipping
from ._finite import OnNonFinite, checked_choice
from ._loss_scale import LossScaling, checked_loss_scale
from ._slots import new_variable


@final
@dataclass(frozen=True, slots=True)
class Treatment:
    """The choices of one optimizer.

    Attributes:
        clipping: How they are brought down.
        loss_scaling: What losses were multiplied with, if anything.
        on_non_finite: What happens when they are not finite.
        skipped: Counts the steps left out, None if none ever are.
        is_mean: Whether gradients without weights are averaged over the replicas.
    """

    clipping: Clipping
    loss_scaling: LossScaling | None
    on_non_finite: OnNonFinite
    skipped: Variable | None
    is_mean: bool

    @property
    def scale_variables(self) -> tuple[Variable, ...]:
        """What the loss scale remembers from step to step."""
        return () if self.loss_scaling is None else self.loss_scaling.variables

    def scale_after(self, is_finite: bool) -> Mapping[Variable, Any]:
        """Return what becomes of those after a step whose gradients were or were not finite."""
        return {} if self.loss_scaling is None else self.loss_scaling.after(is_finite)


def checked_treatment(
    strategy: Any,  # Any: the strategies layer lies above this one
    clipping: Clipping,
    loss_scale: Any,
    on_non_finite: Any,
    loss_reduction: Any,
) -> Treatment:
    """Return what the arguments of an optimizer made in `strategy` come to.

    Raises:
        ValueError: If a choice is unknown, or a number out of range.
        TypeError: If the loss scale is none.
    """
    if loss_reduction not in ("sum", "mean"):
        raise ValueError(f'loss_reduction must be "sum" or "mean", got {loss_reduction!r}.')
    scaling = checked_loss_scale(loss_scale, strategy)
    usual: OnNonFinite = "skip" if scaling is not None and scaling.skips else "raise"
    chosen = usual if on_non_finite is None else checked_choice(on_non_finite)
    skipped = None
    if chosen == "skip":
        skipped = new_variable(strategy, np.int64(0), "skipped_steps")
    return Treatment(clipping, scaling, chosen, skipped, loss_reduction == "mean")
