"""The optimizer interface: differentiate, aggregate over replicas, update everything at once.

The order of one step is fixed: aggregate, then apply. Both happen in one merge of all replicas.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..context import PLACE
from ..devices import INLINE_BYTES, run_on_host
from ..values import Variable
from ._application import Application
from ._blocking import BlockingOptimizer
from ._gradient import checked_pairs, gradient_bytes
from ._hyperparameter import LearningRate, checked_learning_rate, learning_rate_at
from ._loss import Pairs, differentiate_loss
from ._slots import SlotTable, new_variable
from ._whereabouts import require_outside_replicas, require_owner, require_replica_context

Array = npt.NDArray[Any]


class Optimizer(ABC):
    """Updates variables from the gradients of all replicas.

    Make one outside the step, in `strategy.scope()`, and use it inside. A subclass supplies the
    rule in four hooks, called in this order: `new_slot` for each slot of a new variable, `prepare`
    once, `update` for each variable, `finish` once. Hooks compute; the optimizer writes. All
    writes of one step (variables, slots, `iterations`, the global step) happen together at the
    end.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        slot_names: Names of what is remembered for each variable.

    Raises:
        ValueError: If the learning rate is negative or not finite.
        TypeError: If it is neither a number nor a function.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> import numpy as np
        >>> from aioreplica import Variable
        >>> class Descent(Optimizer):
        ...     def __init__(self, learning_rate):
        ...         super().__init__(learning_rate, slot_names=())
        ...
        ...     def new_slot(self, name, variable):
        ...         raise AssertionError("there are no slots")
        ...
        ...     def prepare(self, learning_rate, iteration):
        ...         return learning_rate
        ...
        ...     def update(self, prepared, value, gradient, slots):
        ...         return value - prepared * gradient, {}
        ...
        ...     def finish(self, prepared):
        ...         return {}
        >>> w = Variable([1.0, 2.0])
        >>> asyncio.run(Descent(0.5).apply_gradients([(np.array([2.0, 0.0]), w)]))
        >>> w.value
        array([0., 2.])

    Source:
        tf.distribute's use of tf.train.Optimizer.
    """

    def __init__(self, learning_rate: LearningRate, slot_names: tuple[str, ...]) -> None:
        require_outside_replicas(type(self).__name__)
        if not callable(learning_rate):
            checked_learning_rate(learning_rate)
        self._learning_rate = learning_rate
        self._slots = SlotTable(slot_names)
        self._iterations = new_variable(PLACE.get().strategy, np.int64(0), "iterations")

    # ---- hooks ---------------------------------------------------------------------------

    @abstractmethod
    def new_slot(self, name: str, variable: Variable) -> Array:
        """Return the initial value of a variable's slot."""

    @abstractmethod
    def prepare(self, learning_rate: float, iteration: int) -> Any:
        """Return what `update` needs to know of this step.

        Args:
            learning_rate: That of this step.
            iteration: How many updates were done before.
        """

    @abstractmethod
    def update(
        self, prepared: Any, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return the new value and the new slots of one component of one variable.

        Called on a host thread if the variables are large; the arrays given are read-only.

        Shapes:
            gradient and the new value: that of the value.
        """

    @abstractmethod
    def finish(self, prepared: Any) -> Mapping[Variable, Array]:
        """Return new values of variables that are no slots, if the rule has any; on the loop."""

    # ---- training ------------------------------------------------------------------------

    async def compute_gradients(
        self, loss: Callable[[], Any], var_list: Sequence[Variable] | None = None
    ) -> Pairs:
        """Differentiate a loss on this replica's device, or on the host outside every replica.

        Args:
            loss: A plain function without arguments that returns a scalar, or a
                `Weighted(total, weight)`; written with `autograd.numpy`, reading variables through
                `variable.value`.
            var_list: The variables to differentiate with respect to; None means the trainable
                ones that the loss reads.

        Returns:
            `(gradient, variable)` pairs; for a weighted loss `Weighted(gradient of the total,
            weight)`. A variable of `var_list` that the loss did not read has gradient None.

        Raises:
            TypeError: If `loss` is not a plain function or returns no number, or an entry of
                `var_list` is not a floating-point variable.
            ValueError: If there are no variables, or the loss does not return a scalar.
            ImportError: If autograd is not installed.

        Cancellation:
            As for a device op.
        """
        return (await differentiate_loss(loss, var_list))[1]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Variable | None = None
    ) -> Coroutine[Any, Any, None]:
        """Combine the gradients of all replicas and update the variables with them.

        A collective: every replica calls it, with the same variables in the same order. Gradients
        are summed over the replicas; totals and weights of Weighted ones are summed apart and
        divided once, so unequal batches are exact and an empty one contributes nothing.

        Args:
            grads_and_vars: `(gradient, variable)` pairs; those with gradient None are dropped.
            global_step: A variable that is advanced by 1.

        Raises:
            ContextError: If called in cross-replica context, or with variables of another
                strategy.
            TypeError: If a gradient is no array, or `global_step` no variable.
            ValueError: If a gradient has another shape than its variable, a variable comes twice,
                or no gradient is left.

        Cancellation:
            Leaves everything as it was, or everything updated.

        Determinism:
            Summed in ascending replica id: bitwise reproducible.
        """
        return self._meet(grads_and_vars, global_step, sys._getframe(1))

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Do `compute_gradients` and `apply_gradients`; return this replica's own loss.

        Args:
            loss: As for `compute_gradients`.
            var_list: As for `compute_gradients`.
            global_step: As for `apply_gradients`.

        Returns:
            What the loss returned before the update, with plain numbers.

        Raises:
            Exception: As for `compute_gradients` and `apply_gradients`.

        Cancellation:
            As for `apply_gradients`.
        """
        require_replica_context("minimize")
        return self._minimize(loss, var_list, global_step, sys._getframe(1))

    @property
    def blocking(self) -> BlockingOptimizer:
        """The same methods for plain step functions: they wait on the device thread."""
        return BlockingOptimizer(self)

    # ---- state ---------------------------------------------------------------------------

    @property
    def iterations(self) -> Variable:
        """How many updates were done, a variable."""
        return self._iterations

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots that every updated variable has."""
        return self._slots.names

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a variable's slot, or None before the variable's first update.

        Raises:
            ValueError: If this optimizer has no slot of that name.
        """
        return self._slots.find(var, name)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} | {self._iterations.components[0]} iterations, slots of "
            f"{len(self._slots)} variables>"
        )

    # ---- one step ------------------------------------------------------------------------

    async def _minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None,
        global_step: Variable | None,
        frame: FrameType,
    ) -> Any:
        value, pairs = await differentiate_loss(loss, var_list)
        await self._meet(pairs, global_step, frame)
        return value

    def _meet(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Variable | None,
        frame: FrameType,
    ) -> Coroutine[Any, Any, None]:
        replica = require_replica_context("apply_gradients")
        gradients, variables = checked_pairs(grads_and_vars)
        written = list(variables)
        if global_step is not None:
            if not isinstance(global_step, Variable):
                raise TypeError(f"global_step must be an ar.Variable or None, got {global_step!r}.")
            written.append(global_step)
        require_owner(written)
        if replica is None:
            return self._apply_alone(gradients, variables, global_step)
        # Variables must be equal on all replicas, so `iterations` tells optimizers apart.
        args = (gradients, variables, global_step, self._iterations)
        return replica.meet_as("apply_gradients", self._merge, args, frame)

    async def _apply_alone(
        self, gradients: list[Any], variables: list[Variable], global_step: Variable | None
    ) -> None:
        pending = self._merge(None, gradients, variables, global_step, self._iterations)
        if pending is not None:
            await pending

    def _merge(
        self,
        _strategy: object,
        gradients: list[Any],
        variables: list[Variable],
        global_step: Variable | None,
        _iterations: Variable,
    ) -> Coroutine[Any, Any, None] | None:
        """Aggregate and apply, once for all replicas; off the event loop if that takes long."""
        if gradient_bytes(gradients) >= INLINE_BYTES:
            return self._merge_on_host(gradients, variables, global_step)
        while True:
            application = self._begin(variables, global_step)
            application.compute(gradients)
            if application.commit_if_current():  # else a device thread has written: build on that
                return None

    async def _merge_on_host(
        self, gradients: list[Any], variables: list[Variable], global_step: Variable | None
    ) -> None:
        while True:
            application = self._begin(variables, global_step)
            await run_on_host(application.compute, gradients)
            if application.commit_if_current():  # else another run has written: build on that
                return

    def _begin(self, variables: list[Variable], global_step: Variable | None) -> Application:
        groups = [(variable, *self._slots.of(variable, self.new_slot)) for variable in variables]
        iteration = int(self._iterations.components[0])
        rate = learning_rate_at(self._learning_rate, iteration)
        return Application(self, rate, groups, self._iterations, global_step)
