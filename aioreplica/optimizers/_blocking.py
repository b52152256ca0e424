"""Optimizers and accumulators on device threads: the methods that wait there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..context import PLACE
from ..errors import ContextError
from ..replica import ReplicaContext, drive
from ..values import Variable

if TYPE_CHECKING:
    from ._accumulator import GradientAccumulator
    from ._optimizer import Optimizer


@final
class BlockingOptimizer:
    """An optimizer as plain step functions use it; got as `optimizer.blocking`.

    Each method does what its awaitable twin does, bit for bit, and returns when that is done.
    ContextError elsewhere than on the device thread of a replica.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Variable | None = None
    ) -> None:
        """Combine the gradients of all replicas and update the variables with them.

        Args:
            grads_and_vars: As for `Optimizer.apply_gradients`.
            global_step: As for `Optimizer.apply_gradients`.

        Raises:
            Exception: As `Optimizer.apply_gradients`.

        Cancellation:
            Leaves everything as it was, or everything updated.
        """
        name = "optimizer.blocking.apply_gradients"
        make = self._optimizer.apply_gradients
        drive(_replica(name), name, sys._getframe(1), make, grads_and_vars, global_step)

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
        *,
        backend: str = "autograd",
    ) -> Any:
        """Differentiate a loss here and apply the gradients; return this replica's own loss.

        Args:
            loss: As for `Optimizer.minimize`.
            var_list: As for `Optimizer.minimize`.
            global_step: As for `Optimizer.minimize`.
            backend: As for `Optimizer.minimize`.

        Raises:
            Exception: As `Optimizer.minimize`.
        """
        name = "optimizer.blocking.minimize"
        make = partial(self._optimizer.minimize, backend=backend)
        return drive(_replica(name), name, sys._getframe(1), make, loss, var_list, global_step)

    def __repr__(self) -> str:
        return f"<BlockingOptimizer of {self._optimizer!r}>"


@final
class BlockingAccumulator:
    """A gradient accumulator as plain step functions use it; got as `accumulator.blocking`.

    ContextError elsewhere than on the device thread of a replica.
    """

    __slots__ = ("_accumulator",)

    def __init__(self, accumulator: GradientAccumulator) -> None:
        self._accumulator = accumulator

    def add(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Add gradients of one batch to this replica's sums.

        Args:
            grads_and_vars: As for `GradientAccumulator.add`.

        Raises:
            Exception: As `GradientAccumulator.add`.
        """
        name = "accumulator.blocking.add"
        drive(_replica(name), name, sys._getframe(1), self._accumulator.add, grads_and_vars)

    def apply(self, global_step: Variable | None = None) -> None:
        """Apply what all replicas have added since the last time, and start anew.

        Args:
            global_step: As for `GradientAccumulator.apply`.

        Raises:
            Exception: As `GradientAccumulator.apply`.

        Cancellation:
            As for `GradientAccumulator.apply`.
        """
        name = "accumulator.blocking.apply"
        drive(_replica(name), name, sys._getframe(1), self._accumulator.apply, global_step)

    def __repr__(self) -> str:
        return f"<BlockingAccumulator of {self._accumulator!r}>"


def _replica(name: str) -> ReplicaContext:
    place = PLACE.get()
    if isinstance(place.replica, ReplicaContext):
        return place.replica
    raise ContextError(
        f"{name} was called in {place.describe()}, but it is for plain step functions and "
        f"run_steps. In an `async def` step use `await {name.replace('.blocking', '')}(...)`."
    )
