"""Optimizers on device threads: the methods that wait there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from ..context import PLACE
from ..errors import ContextError
from ..replica import ReplicaContext, drive
from ..values import Variable

if TYPE_CHECKING:
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
        drive(_replica(name), name, self._optimizer.apply_gradients, grads_and_vars, global_step)

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
    ) -> Any:
        """Differentiate a loss here and apply the gradients; return this replica's own loss.

        Args:
            loss: As for `Optimizer.minimize`.
            var_list: As for `Optimizer.minimize`.
            global_step: As for `Optimizer.minimize`.

        Raises:
            Exception: As `Optimizer.minimize`.
        """
        name = "optimizer.blocking.minimize"
        return drive(_replica(name), name, self._optimizer.minimize, loss, var_list, global_step)

    def __repr__(self) -> str:
        return f"<BlockingOptimizer of {self._optimizer!r}>"


def _replica(name: str) -> ReplicaContext:
    place = PLACE.get()
    if isinstance(place.replica, ReplicaContext):
        return place.replica
    raise ContextError(
        f"{name} was called in {place.describe()}, but it is for plain step functions and "
        f"run_steps. In an `async def` step use `await {name.replace('.blocking', '')}(...)`."
    )
