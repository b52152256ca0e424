"""Clipping: gradients brought down to a norm or a magnitude before they are applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from ._hyperparameter import checked_number
from ._total import Total


@final
class Clipping:
    """What is done to gradients that are too large; one of three ways, or none.

    Args:
        clipnorm: Largest norm of the gradient of one variable.
        clipvalue: Largest magnitude of one element.
        global_clipnorm: Largest norm of all gradients together.

    Raises:
        ValueError: If more than one is given, or one is not above 0.
        TypeError: If one is no number.

    Source:
        The arguments of those names of tf.keras.optimizers.Optimizer, and their formulas.
    """

    __slots__ = ("_each", "_global", "_value")

    def __init__(
        self, clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None
    ) -> None:
        given = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        chosen = {name: value for name, value in given.items() if value is not None}
        if len(chosen) > 1:
            listed = " and ".join(f"{name}={value!r}" for name, value in chosen.items())
            raise ValueError(f"Gradients are clipped in one way at most, got {listed}.")
        for name, value in chosen.items():
            checked_number(name, value, "> 0", lambda number: number > 0)
        self._each, self._value, self._global = clipnorm, clipvalue, global_clipnorm

    @property
    def needs_norms(self) -> bool:
        """Whether norms have to be known before the first element is updated."""
        return self._each is not None or self._global is not None

    def apply(self, totals: Sequence[Total], squares: Sequence[float]) -> None:
        """Tell totals what to multiply with, or where to stop.

        Args:
            totals: All gradients of a step.
            squares: The sum of squares of each, if `needs_norms`.
        """
        if self._value is not None:
            for total in totals:
                total.limit = self._value
        elif self._each is not None:
            for total, square in zip(totals, squares, strict=True):
                total.factor = self._each / max(math.sqrt(square), self._each)
        elif self._global is not None:
            norm = math.sqrt(math.fsum(squares))
            for total in totals:
                total.factor = self._global / max(norm, self._global)

    def __repr__(self) -> str:
        given = {
            "clipnorm": self._each,
            "clipvalue": self._value,
            "global_clipnorm": self._global,
        }
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"<Clipping | {shown or 'none'}>"
