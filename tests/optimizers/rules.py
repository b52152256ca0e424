"""The simplest optimizer there is, for tests that look at everything but the rule."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import aioreplica as ar
from aioreplica.optimizers._step import INLINE_STEP_BYTES


class Descent(ar.optimizers.Optimizer):
    """value - learning_rate * gradient, with a slot that counts; notes which hooks were called."""

    def __init__(
        self,
        learning_rate: Any = 1.0,
        *,
        in_update: Callable[[], None] = lambda: None,
        finish_with: Mapping[ar.Variable, Any] | None = None,
    ) -> None:
        super().__init__(learning_rate, slot_names=("count",))
        self.hooks: list[str] = []
        self.rates: list[float] = []
        self.in_update = in_update
        self.finish_with = finish_with or {}

    def new_slot(self, name: str, variable: ar.Variable) -> Any:
        self.hooks.append(f"new_slot {name} of {variable.name}")
        return np.zeros((), np.int64)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        self.hooks.append(f"prepare {iteration}")
        self.rates.append(learning_rate)
        return learning_rate

    def update(self, prepared: float, value: Any, gradient: Any, slots: Any) -> Any:
        self.hooks.append("update")
        self.in_update()
        return value - prepared * gradient, {"count": slots["count"] + 1}

    def finish(self, prepared: float) -> Mapping[ar.Variable, Any]:
        self.hooks.append("finish")
        return self.finish_with


LARGE = INLINE_STEP_BYTES // 8 + 1  # elements of a float64 gradient that is merged off the loop


def made(strategy: ar.Strategy, value: Any = 0.0, name: str = "w") -> ar.Variable:
    """Make a variable in the scope of a strategy."""
    with strategy.scope():
        return ar.Variable(value, name=None if strategy._runtime.variable_table.has(name) else name)
