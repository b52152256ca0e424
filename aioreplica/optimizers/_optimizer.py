"""The optimizer interface: differentiate, aggregate over replicas, update everything at once.

The order of one step is fixed: aggregate, unscale, check, clip, apply. All of it happens in one
merge of all replicas; `_step.py` has the order, `_application.py` the last part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import FrameType
from typing import Any, TypedDict

import numpy as np

from ..context import PLACE
from ..values import Variable
from ._application import Application
from ._apply import APPLY_GRADIENTS, Contribution
from ._block import BLOCK_BYTES
from ._blocking import BlockingOptimizer
from ._clipping import Clipping
from ._finite import OnNonFinite
from ._gradient import checked_pairs, merged_pairs
from ._hyperparameter import (
    LearningRate,
    Multipliers,
    checked_learning_rate,
    checked_multipliers,
    learning_rate_at,
)
from ._loss import Pairs, differentiate_loss
from ._loss_scale import LossScaling
from ._rule import UpdateRule
from ._scratch import ScratchPool
from ._slots import SlotTable, new_variable
from ._step import take_step
from ._total import Total
from ._touched import TouchedRows
from ._treatment import Treatment, checked_treatment
from ._update import Update
from ._whereabouts import (
    require_cross_replica_context,
    require_outside_replicas,
    require_owner,
    require_replica_context,
)


class OptimizerOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer passes on to `Optimizer`, which explains them."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    loss_scale: float | LossScaling | None
    on_non_finite: OnNonFinite | None
    loss_reduction: str
    learning_rate_multipliers: Multipliers | None


class Optimizer(UpdateRule):
    """Updates variables from the gradients of all replicas.

    Make one outside the step, in `strategy.scope()`, and use it inside. A subclass supplies the
    rule in four hooks, called in this order: `new_slot` for each slot of a new variable, `prepare`
    once (for every learning rate that some variable has), `update` for each variable, `finish`
    once. Hooks compute; the optimizer writes. All writes of one step (variables, slots,
    `iterations`, the global step) happen together at the end. `ElementwiseOptimizer` is for rules
    that treat every element by itself: it needs no new arrays.

    Args:
        learning_rate: A number, or a function of the number of updates done before, such as those
            of `ar.optimizers.schedules`.
        slot_names: Names of what is remembered for each variable.
        clipnorm: Largest norm of the gradient of one variable; larger ones are scaled down.
        clipvalue: Largest magnitude of an element of a gradient.
        global_clipnorm: Largest norm of all gradients of a step together.
        loss_scale: A number, a `LossScale` or a `DynamicLossScale`: `minimize` and
            `compute_gradients` multiply the loss with it, `apply_gradients` divides by it.
        on_non_finite: What to do when the sum of the gradients holds NaN or infinity: "raise" a
            NonFiniteError, "skip" the step on all replicas, or "ignore" it. None raises, but skips
            with a `DynamicLossScale`.
        loss_reduction: "sum" adds up the gradients of the replicas, "mean" divides by their number
            too. `Weighted` gradients are divided by their weights either way.
        learning_rate_multipliers: What the learning rate is multiplied with for some variables: a
            dict, or a function of the variable.

    Raises:
        ValueError: If a number is negative or not finite, more than one way of clipping is given,
            or a choice is unknown.
        TypeError: If the learning rate is neither a number nor a function, or another argument is
            of the wrong type.
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

    def __init__(
        self,
        learning_rate: LearningRate,
        slot_names: tuple[str, ...],
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        loss_scale: float | LossScaling | None = None,
        on_non_finite: OnNonFinite | None = None,
        loss_reduction: str = "sum",
        learning_rate_multipliers: Multipliers | None = None,
    ) -> None:
        require_outside_replicas(type(self).__name__)
        if not callable(learning_rate):
            checked_learning_rate(learning_rate)
        clipping = Clipping(clipnorm, clipvalue, global_clipnorm)
        strategy = PLACE.get().strategy
        self._treatment = checked_treatment(
            strategy, clipping, loss_scale, on_non_finite, loss_reduction
        )
        self._learning_rate = learning_rate
        self._multiplier_of = checked_multipliers(learning_rate_multipliers)
        self._slots = SlotTable(slot_names)
        self._touched = TouchedRows() if self.is_elementwise else None
        self._scratch = ScratchPool(BLOCK_BYTES)
        self._iterations = new_variable(strategy, np.int64(0), "iterations")

    # ---- training ------------------------------------------------------------------------

    async def compute_gradients(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        *,
        backend: str = "autograd",
    ) -> Pairs:
        """Differentiate a loss on this replica's device, or on the host outside every replica.

        Args:
            loss: A plain function without arguments that returns a scalar, or a
                `Weighted(total, weight)`; written in the backend's library, reading variables
                through `variable.value`.
            var_list: The variables to differentiate with respect to; None means the trainable
                ones that the loss reads.
            backend: The library that differentiates: "autograd", "torch" or "jax".

        Returns:
            `(gradient, variable)` pairs; for a weighted loss `Weighted(gradient of the total,
            weight)`. A variable of `var_list` that the loss did not read has gradient None.

        Raises:
            TypeError: If `loss` is not a plain function or returns no number, or an entry of
                `var_list` is not a floating-point variable.
            ValueError: If there are no variables, or the loss does not return a scalar.
            ImportError: If the backend is not installed.

        Cancellation:
            As for a device op.
        """
        return (await differentiate_loss(loss, var_list, self._scale, backend))[1]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Variable | None = None
    ) -> Coroutine[Any, Any, None]:
        """Combine the gradients of all replicas and update the variables with them.

        A collective: every replica calls it, with the same variables in the same order. Gradients
        are summed over the replicas; totals and weights of Weighted ones are summed apart and
        divided once, so unequal batches are exact and an empty one contributes nothing. Then, in
        this order: unscale, check that all are finite, clip, apply.

        Args:
            grads_and_vars: `(gradient, variable)` pairs; those with gradient None are dropped. A
                gradient is an array (of torch, jax or cupy too), an `IndexedSlices`, or a
                `Weighted` of one.
            global_step: A variable that is advanced by 1; not by a step that is skipped.

        Raises:
            ContextError: If called in cross-replica context (use `distributed_apply` there), or
                with variables of another strategy.
            TypeError: If a gradient is no array, sparse on some replicas only, or `global_step` no
                variable.
            ValueError: If a gradient has another shape than its variable, a variable comes twice
                or is not trainable, no gradient is left, or all weights are 0.
            NonFiniteError: If a gradient is not finite, unless such steps are skipped.
            MergeMismatchError: If replicas have gradients for different variables.

        Cancellation:
            Leaves everything as it was, or everything updated.

        Determinism:
            Summed in ascending replica id: bitwise reproducible.
        """
        return self._meet(grads_and_vars, global_step, self._scale, sys._getframe(1))

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
        *,
        backend: str = "autograd",
    ) -> Coroutine[Any, Any, Any]:
        """Do `compute_gradients` and `apply_gradients`; return this replica's own loss.

        Args:
            loss: As for `compute_gradients`.
            var_list: As for `compute_gradients`.
            global_step: As for `apply_gradients`.
            backend: As for `compute_gradients`.

        Returns:
            What the loss returned before the update, with plain numbers.

        Raises:
            Exception: As for `compute_gradients` and `apply_gradients`.

        Cancellation:
            As for `apply_gradients`.
        """
        require_replica_context("minimize")
        return self._minimize(loss, var_list, global_step, sys._getframe(1), backend)

    async def distributed_apply(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Variable | None = None
    ) -> None:
        """Do what `apply_gradients` does, in cross-replica context.

        For merge functions of your own, and for gradients that `strategy.run` returned.

        Args:
            grads_and_vars: `(gradient, variable)` pairs. The parts of a PerReplica are summed, and
                those of a `Weighted` of two PerReplica divided once; a Mirrored or a plain value
                is taken as the sum. Pairs whose gradient is None, on all replicas, are dropped.
            global_step: As for `apply_gradients`.

        Raises:
            ContextError: If called inside a replica (use `apply_gradients`), or with variables of
                another strategy.
            ValueError: As `apply_gradients`; or if a gradient is None on some replicas only, or
                has another number of parts than there are replicas.
            Exception: As `apply_gradients`.

        Cancellation:
            As for `apply_gradients`.

        Example:
            >>> import asyncio
            >>> import numpy as np
            >>> import aioreplica as ar
            >>> async def main():
            ...     async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            ...         with strategy.scope():
            ...             w, sgd = ar.Variable([1.0, 2.0]), ar.optimizers.SGD(0.5)
            ...         parts = ar.PerReplica([np.array([1.0, 0.0]), np.array([1.0, 2.0])])
            ...         await sgd.distributed_apply([(parts, w)])
            ...         return w.value
            >>> asyncio.run(main())
            array([0., 1.])

        Source:
            `_distributed_apply` of tf.compat.v1.train.Optimizer.
        """
        require_cross_replica_context()
        columns, variables = merged_pairs(grads_and_vars)
        strategy = variables[0].strategy
        require_owner(_written(variables, global_step), strategy)
        reducer = None
        if strategy is not None:
            strategy.open()
            reducer = strategy.reducer
        scales = None if self._scale is None else [self._scale]
        pending = take_step(self, reducer, columns, variables, global_step, scales)
        if pending is not None:
            await pending

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

    @property
    def learning_rate(self) -> LearningRate:
        """The number or the function that gives the learning rate."""
        return self._learning_rate

    @property
    def loss_scale(self) -> LossScaling | None:
        """What losses are multiplied with, None if with nothing."""
        return self._treatment.loss_scaling

    @property
    def skipped_steps(self) -> Variable | None:
        """How many steps were left out because of gradients that were not finite.

        None if such steps are not skipped.
        """
        return self._treatment.skipped

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Everything it remembers: iterations, what belongs to the loss scale, all slots."""
        scaling, skipped = self._treatment.loss_scaling, self._treatment.skipped
        return (
            self._iterations,
            *(() if skipped is None else (skipped,)),
            *(() if scaling is None else scaling.variables),
            *self._slots.all(),
        )

    @property
    def treatment(self) -> Treatment:
        """What is done to gradients before they are applied."""
        return self._treatment

    def __repr__(self) -> str:
        done, size = self._iterations.components[0], len(self._slots)
        return f"<{type(self).__name__} | {done} iterations, slots of {size} variables>"

    # ---- one step ------------------------------------------------------------------------

    @property
    def _scale(self) -> float | None:
        return None if self.loss_scale is None else self.loss_scale.scale

    async def _minimize(
        self,
        loss: Callable[[], Any],
        var_list: Sequence[Variable] | None,
        global_step: Variable | None,
        frame: FrameType,
        backend: str,
    ) -> Any:
        scale = self._scale
        value, pairs = await differentiate_loss(loss, var_list, scale, backend)
        await self._meet(pairs, global_step, scale, frame)
        return value

    def _meet(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Variable | None,
        scale: float | None,
        frame: FrameType,
    ) -> Coroutine[Any, Any, None]:
        replica = require_replica_context("apply_gradients")
        gradients, variables = checked_pairs(grads_and_vars)
        require_owner(_written(variables, global_step))
        brought = Contribution(self, variables, gradients, global_step, scale)
        if replica is None:
            return _take(brought)
        return replica.meet(APPLY_GRADIENTS, None, brought, frame)

    def new_application(self, totals: Sequence[Total], global_step: Variable | None) -> Application:
        """Return the application of some totals to the newest values; called by a step."""
        groups = [
            (total.variable, *self._slots.of(total.variable, self.new_slot)) for total in totals
        ]
        counters = [self._iterations] if global_step is None else [self._iterations, global_step]
        scales = self._treatment.scale_variables
        # Before any of them is read: what another run writes from here on is noticed.
        update = Update([*(each for group in groups for each in group), *counters, *scales])
        extra = self._treatment.scale_after(is_finite=True)
        rate = learning_rate_at(self._learning_rate, int(self._iterations.components[0]))
        rates = [rate * self._multiplier_of(total.variable) for total in totals]
        memory = (self._touched, self._scratch)
        return Application(self, *memory, update, rate, rates, groups, totals, counters, extra)


def _written(variables: Sequence[Variable], global_step: Any) -> list[Variable]:
    if global_step is None:
        return [*variables]
    if not isinstance(global_step, Variable):
        raise TypeError(f"global_step must be an ar.Variable or None, got {global_step!r}.")
    return [*variables, global_step]


async def _take(brought: Contribution) -> None:
    """Take the step of one replica that is on its own."""
    scales = None if brought.scale is None else [brought.scale]
    columns = [[gradient] for gradient in brought.gradients]
    pending = take_step(
        brought.optimizer, None, columns, brought.variables, brought.global_step, scales
    )
    if pending is not None:
        await pending
