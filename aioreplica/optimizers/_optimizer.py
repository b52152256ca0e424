"""The optimizer interface: differentiate, aggregate over replicas, update everything at once.

The order of one step is fixed: sum, unscale and check, clip, apply, publish. All of it happens in
one merge of all replicas, which `_step.py` has.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np

from ..context import PLACE
from ..replica import RunningReplica
from ..tree import Array, Tree
from ..typing import ReduceOp
from ..values import Variable
from ._apply_gradients import (
    APPLY_GRADIENTS,
    BlockingOptimizer,
    apply_across,
    apply_alone,
    contribution_of,
    differentiate,
    minimize,
    push_elsewhere,
    require_loss,
    require_replica,
)
from ._checks import (
    LearningRate,
    Multipliers,
    checked_learning_rate,
    require_cross_replica_context,
    require_outside_replicas,
    require_owner,
    written,
)
from ._gradient import merged_pairs
from ._loss import LossScaling, Pairs
from ._merged_gradient import merge_gradients
from ._settings import OnNonFinite, StepSettings, UpdateRule, checked_settings, require_divisible
from ._slots import SlotTable, new_variable
from ._staged_write import StagedWrite
from ._step import take_step
from .schedules import LinearWarmup, ReduceOnPlateau


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
        on_non_finite: What to do when the sum of the gradients holds NaN or infinity, or a value or
            slot would for the first time: "raise" a NonFiniteError, "skip" the step on all
            replicas, or "ignore" it. None raises, but skips with a `DynamicLossScale`.
        loss_reduction: "sum" adds up the gradients of the replicas, "mean" divides by their number
            too. `Weighted` gradients are divided by their weights either way.
        learning_rate_multipliers: What the learning rate is multiplied with for some variables: a
            dict, or a function of the variable.
        measure_norm: Whether to keep the norm of the gradients of each step in `gradient_norm`,
            which `global_clipnorm` does anyway.
        shard_state: Whether each of several workers keeps, and updates by, a part of the slots
            only (ZeRO), with the same results. In one process replicas share one copy of the
            slots, so there it changes nothing.

    Raises:
        ValueError: If a number is negative or not finite, more than one way of clipping is given,
            or a choice is unknown.
        TypeError: If the learning rate is neither a number nor a function, another argument is of
            the wrong type, or state is to be sharded whose rule is not elementwise.
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
        measure_norm: bool = False,
        shard_state: bool = False,
    ) -> None:
        require_outside_replicas(type(self).__name__)
        require_divisible(self, shard_state)
        self._settings = checked_settings(
            PLACE.get().strategy, learning_rate, slot_names, clipnorm, clipvalue, global_clipnorm,
            loss_scale, on_non_finite, loss_reduction, learning_rate_multipliers, measure_norm,
            shard_state,
        )  # fmt: skip

    # ---- training ------------------------------------------------------------------------

    async def compute_gradients(
        self,
        loss: Callable[[], object],
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
            weight)`. With a loss scale the gradients are `ScaledGradient`s, which know it. A
            variable of `var_list` that the loss did not read has gradient None.

        Raises:
            TypeError: If `loss` is not a plain function or returns no number, or an entry of
                `var_list` is not a floating-point variable.
            ValueError: If there are no variables, or the loss does not return a scalar.
            ImportError: If the backend is not installed.

        Cancellation:
            As for a device op.
        """
        require_loss(loss, var_list)
        return (await differentiate(self, PLACE.get(), loss, var_list, backend))[1]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[object, object]],
        global_step: Variable | None = None,
        *,
        aggregate: bool = True,
    ) -> Coroutine[object, None, None]:
        """Combine the gradients of all replicas and update the variables with them.

        A collective: every replica calls it, with the same variables in the same order. Gradients
        are summed over the replicas; totals and weights of Weighted ones are summed apart and
        divided once, so unequal batches are exact and an empty one contributes nothing. Then, in
        this order: unscale, check that all are finite, clip, apply.

        Args:
            grads_and_vars: `(gradient, variable)` pairs; those with gradient None are dropped. A
                gradient is an array (of torch, jax or cupy too), an `IndexedSlices`, a
                `ScaledGradient` of these, or a `Weighted` of one.
            global_step: A variable that is advanced by 1; not by a step that is skipped.
            aggregate: False if the gradients are sums over all replicas already, equal on all of
                them: those of replica 0 are applied.

        Raises:
            ContextError: If called in cross-replica context (use `distributed_apply` there), or
                with variables of another strategy.
            TypeError: If a gradient is not an array, sparse on some replicas only, or `global_step`
                not a variable.
            ValueError: If a gradient has another shape than its variable, a variable comes twice
                or is not trainable, no gradient is left, or all weights are 0.
            NonFiniteError: If a gradient or an update is not finite, unless such steps are skipped.
            MergeMismatchError: If replicas have gradients for different variables.

        Cancellation:
            Leaves everything as it was, or everything updated.

        Determinism:
            Summed in ascending replica id: bitwise reproducible.
        """
        place = PLACE.get()
        replica = place.replica
        if type(replica) is not RunningReplica:
            require_replica(place, "apply_gradients")
            return apply_alone(self, place, grads_and_vars, global_step, not aggregate)
        brought = contribution_of(self, place, grads_and_vars, global_step, not aggregate)
        return replica.meet(APPLY_GRADIENTS, None, brought, sys._getframe(1))

    def minimize(
        self,
        loss: Callable[[], object],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
        *,
        backend: str = "autograd",
        has_aux: bool = False,
    ) -> Coroutine[object, None, Tree]:
        """Do `compute_gradients` and `apply_gradients`; return this replica's own loss.

        Args:
            loss: As for `compute_gradients`.
            var_list: As for `compute_gradients`.
            global_step: As for `apply_gradients`.
            backend: As for `compute_gradients`.
            has_aux: Whether the loss returns a pair: the loss, and what comes with it, such as
                predictions, which is not differentiated.

        Returns:
            What the loss returned before the update, with plain numbers; with `has_aux` the pair.

        Raises:
            Exception: As for `compute_gradients` and `apply_gradients`.

        Cancellation:
            As for `apply_gradients`.
        """
        place = PLACE.get()
        require_replica(place, "minimize")
        require_loss(loss, var_list)
        frame = sys._getframe(1)
        args = (self, place, loss, var_list, global_step, backend, has_aux, frame)
        if isinstance(place.replica, RunningReplica):
            return place.replica.to_await("minimize", minimize, args, frame)
        return minimize(*args)

    async def distributed_apply(
        self, grads_and_vars: Iterable[tuple[object, object]], global_step: Variable | None = None
    ) -> None:
        """Do what `apply_gradients` does, in cross-replica context.

        For merge functions of your own, gradients that `strategy.run` returned, and closures.

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
        require_cross_replica_context(
            "distributed_apply", "Use `await optimizer.apply_gradients(grads_and_vars)` there."
        )
        pairs = list(grads_and_vars)
        if push_elsewhere(self, pairs, global_step) is not None:
            return
        columns, variables = merged_pairs(pairs)
        reducer, strategy = None, variables[0].store.owner
        require_owner(written(variables, global_step), PLACE.get().strategy or strategy)
        if strategy is not None:
            strategy.open()
            reducer = strategy.reducer
            if strategy.workers is not None:
                await apply_across(self, pairs, variables, columns, global_step)
                return
        gradients = merge_gradients(variables, columns, is_mean=self._settings.is_mean)
        pending = take_step(self, gradients, reducer, global_step)
        if pending is not None:
            await pending

    @property
    def blocking(self) -> BlockingOptimizer:
        """The same methods for plain step functions: they wait on the device thread."""
        return BlockingOptimizer(self)

    # ---- state ---------------------------------------------------------------------------

    @property
    def iterations(self) -> Variable:
        """Number of updates so far, a variable."""
        return self._settings.iterations

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots that every updated variable has."""
        return self._settings.slots.names

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot, "master" too of half precision; None if there is none, or none so far."""
        return self._settings.slots.find(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of `slot_names` as a list, as optimizers of TensorFlow do."""
        return list(self.slot_names)

    def get_loss_reduction(self) -> ReduceOp:
        """Return how the gradients of the replicas' losses are combined: SUM or MEAN."""
        return ReduceOp.MEAN if self._settings.is_mean else ReduceOp.SUM

    @property
    def learning_rate(self) -> LearningRate:
        """The number or the function that gives the learning rate; the next step uses a new one.

        Raises:
            ValueError: When set to a number that is negative or not finite.
            TypeError: When set to what is neither a number nor a function.
        """
        return self._settings.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._settings.learning_rate = value if callable(value) else checked_learning_rate(value)

    @property
    def loss_scale(self) -> LossScaling | None:
        """Multiplier of the loss; None for no scaling."""
        return self._settings.loss_scaling

    @property
    def skipped_steps(self) -> Variable | None:
        """Number of steps skipped for gradients that were not finite; None if none ever are."""
        return self._settings.skipped

    @property
    def gradient_norm(self) -> Variable | None:
        """The norm of all gradients of the last step together, before clipping; a variable.

        None unless made with `global_clipnorm` or `measure_norm=True`.
        """
        return self._settings.norm

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Everything it remembers: iterations, what belongs to the loss scale, all slots."""
        return self._settings.variables

    @property
    def checkpoint_parts(self) -> StepSettings:
        """Named parts that a checkpoint keeps, slots included."""
        return self._settings

    @property
    def settings(self) -> StepSettings:
        """Settings of a step besides the rule; for the library."""
        return self._settings

    def __repr__(self) -> str:
        settings = self._settings
        done, size = settings.iterations._cell.components[0], len(settings.slots)
        where = f", {settings.slots.where()}" if settings.shard_state else ""
        return f"<{type(self).__name__} | {done} iterations, slots of {size} variables{where}>"


class JointOptimizer(Optimizer):
    """Updates all variables of a step together; `prepare` gives what stands for each of them.

    Attributes:
        is_warm: Whether an update was made, so that the next one compiles nothing.
        takes_each_alone: Whether each variable is updated as if it were the only one.
    """

    is_joint = True
    takes_each_alone = False
    is_warm = False

    @abstractmethod
    def start(self, variables: Sequence[Variable]) -> Sequence[Variable]:
        """Get ready for these variables; return state of the optimizer that is not a slot.

        Called before `new_slot`, at every step.

        Args:
            variables: Those with a gradient.
        """

    @abstractmethod
    def update_all(
        self,
        prepared: Sequence[Any],
        variables: Sequence[Variable],
        groups: Sequence[tuple[Variable, ...]],
        shared: Sequence[Variable],
        gradients: Sequence[Array],
        write: StagedWrite,
    ) -> None:
        """Stage new values of all variables, slots and shared state; on any thread.

        Args:
            prepared: For each variable what `prepare` gave for its learning rate.
            variables: Those with a gradient.
            groups: Each variable, or its master, with its slots.
            shared: What `start` returned.
            gradients: Of each variable; do not write.
            write: Where the new values go.
        """

    def update(
        self, prepared: Any, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Refuse: there is no rule for one variable.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"{self!r} updates all variables together. Use `apply_gradients`.")

    def finish(self, prepared: Any) -> Mapping[Variable, Array]:
        """Return {}: `update_all` has staged everything."""
        return {}


@final
@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """Recipe of an optimizer without its state; it can be pickled.

    Attributes:
        kind: Its class.
        attributes: What the rule keeps in the object.
        options: Those of its `StepSettings`.
        slot_names: Names of what is remembered for each variable.
    """

    kind: type[Optimizer]
    attributes: Mapping[str, Any]
    options: Mapping[str, Any]
    slot_names: tuple[str, ...]

    def rebuilt(
        self, iterations: Variable, skipped: Variable | None, norm: Variable | None
    ) -> Optimizer:
        """Return an optimizer with these counters, and without slots."""
        optimizer = self.kind.__new__(self.kind)
        vars(optimizer).update(self.attributes)
        slots = SlotTable(self.slot_names)
        optimizer._settings = StepSettings(
            **self.options, slots=slots, iterations=iterations, skipped=skipped, norm=norm
        )
        return optimizer

    def applying(self) -> Optimizer:
        """Return a copy that applies gradients which were checked and clipped before."""
        changed = {
            "clipping": None, "loss_scaling": None, "on_non_finite": "ignore", "is_mean": False
        }  # fmt: skip
        bare = replace(self, options={**self.options, **changed})
        return bare.rebuilt(new_variable(None, np.int64(0), "iterations"), None, None)


def recipe_of(optimizer: Optimizer, variables: Sequence[Variable]) -> OptimizerRecipe:
    """Return what an optimizer is made of.

    Args:
        optimizer: Which one.
        variables: Those that it may update.

    Raises:
        TypeError: If its rule needs all variables at once.
    """
    settings = optimizer.settings
    what = f"{type(optimizer).__name__} {settings.iterations.name!r}"
    if isinstance(optimizer, JointOptimizer) and not optimizer.takes_each_alone:
        raise TypeError(
            f"{what} updates all variables together, but on parameter servers each is updated "
            "where it lives, when a gradient comes. Use one of ar.optimizers or from_torch, whose "
            "rules take each variable by itself, or derive one from ElementwiseOptimizer."
        )
    names = ("learning_rate", "clipping", "loss_scaling", "on_non_finite", "is_mean")
    options = {name: getattr(settings, name) for name in names}
    options["learning_rate"] = _rate_now(settings.learning_rate)
    of = settings.multiplier_of
    known = {} if of is None else {variable.name: of(variable) for variable in variables}
    options["multiplier_of"] = partial(_multiplier_by_name, known) if known else None
    return OptimizerRecipe(
        type(optimizer), optimizer.attributes_of_rule(variables), options, settings.slots.names
    )


def _rate_now(rate: LearningRate) -> LearningRate:
    """Return a learning rate without state: that of a plateau is a number now."""
    if isinstance(rate, LinearWarmup):
        then = _rate_now(rate.then)
        return rate if then is rate.then else replace(rate, then=then)
    return rate(0) if isinstance(rate, ReduceOnPlateau) else rate


def _multiplier_by_name(known: Mapping[str, float], variable: Variable) -> float:
    return known.get(variable.name, 1.0)
