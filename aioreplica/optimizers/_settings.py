"""Settings of an optimizer's step besides its rule: options, counters, slots, memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, final

import numpy as np

from ..collectives import BufferPool
from ..tree import Array, DType
from ..values import DividedVariable, Division, Variable, divided, workers_of
from ._blocks import Scratch, TouchedRows
from ._checks import (
    LearningRate,
    Multipliers,
    checked_learning_rate,
    checked_multipliers,
    checked_number,
)
from ._loss import LossScaling, checked_loss_scale
from ._merged_gradient import MEASURED, Clipping
from ._slots import SlotTable, new_variable, working_dtype
from .schedules import LinearWarmup, ReduceOnPlateau

OnNonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
CHOICES = ("raise", "skip", "ignore")
SHARED = "shared"


class OptimizerOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer passes on to `Optimizer`, which explains them."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    loss_scale: float | LossScaling | None
    on_non_finite: OnNonFinite | None
    loss_reduction: str
    learning_rate_multipliers: Multipliers | None
    measure_norm: bool
    shard_state: bool


@final
@dataclass(slots=True)
class StepSettings:
    """The options of one optimizer, checked, and what it keeps from step to step.

    Attributes:
        learning_rate: A number or a function of the number of updates done before.
        multiplier_of: Gives what the learning rate of a variable is multiplied with.
        clipping: Transformation of gradients before the rule, None for none.
        loss_scaling: What losses are multiplied with, if anything.
        on_non_finite: What happens when gradients are not finite.
        is_mean: Whether gradients without weights are averaged over the replicas.
        slots: The slots of all variables.
        iterations: Counts the updates.
        skipped: Counts the steps left out, None if none ever are.
        norm: The norm of the gradients of the last step, None if it is not measured.
        shard_state: Whether slots are divided among workers.
        scratch: Free memory for blocks.
        buffers: Free memory for what is sent to other workers.
        touched: What sparse updates changed.
        shared: What a rule of another library keeps beside the slots.
        restored: Values of a checkpoint for `shared` before it is made, by number.
        needs_norms: Whether norms have to be known before the first element is updated.
    """

    learning_rate: LearningRate
    multiplier_of: Callable[[Variable], float] | None
    clipping: Clipping | None
    loss_scaling: LossScaling | None
    on_non_finite: OnNonFinite
    is_mean: bool
    slots: SlotTable
    iterations: Variable
    skipped: Variable | None
    norm: Variable | None
    shard_state: bool = False
    scratch: Scratch = field(default_factory=list)
    buffers: BufferPool = field(default_factory=BufferPool)
    touched: TouchedRows = field(default_factory=TouchedRows)
    shared: tuple[Variable, ...] = ()
    restored: dict[str, Any] = field(default_factory=dict)
    needs_norms: bool = field(init=False)

    def __post_init__(self) -> None:
        is_clipped = self.clipping is not None and self.clipping.needs_norms
        self.needs_norms = is_clipped or self.norm is not None

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Everything that is remembered from step to step."""
        counters = (self.iterations, self.skipped, self.norm)
        return (
            *(variable for variable in counters if variable is not None),
            *(() if self.loss_scaling is None else self.loss_scaling.variables),
            *_variables_of(self.learning_rate),
            *self.shared,
            *self.slots.all(),
        )

    def checkpoint_entries(self) -> dict[tuple[Variable | None, str], object]:
        """Return everything that is remembered, by the variable it belongs to and a name.

        What a checkpoint has brought and is not made yet is among it, as arrays.
        """
        scaling, rate = self.loss_scaling, self.learning_rate
        named: dict[str, object] = {"iterations": self.iterations}
        if self.skipped is not None:
            named["skipped_steps"] = self.skipped
        if self.norm is not None:
            named["gradient_norm"] = self.norm
        groups: dict[str, tuple[Variable, ...]] = {
            "loss_scale": () if scaling is None else scaling.variables,
            "learning_rate": _variables_of(rate) if callable(rate) else (),
            SHARED: self.shared,
        }
        for name, members in groups.items():
            named.update({f"{name}.{i}": member for i, member in enumerate(members)})
        found: dict[tuple[Variable | None, str], object] = {
            (None, name): each for name, each in {**named, **self.restored}.items()
        }
        for owner, slots in self.slots.made.items():
            names = self.slots.names_of(owner)
            found.update({(owner, n): s for n, s in zip(names, slots, strict=True)})
        for owner, values in self.slots.restored.items():
            found.update({(owner, name): value for name, value in values.items()})
        return found

    def awaits_entry(self, owner: Variable | None, name: str) -> bool:
        """Tell whether a slot, or shared state, of that name may still be made."""
        if owner is not None:
            return name in self.slots.names_of(owner) and owner not in self.slots.made
        return not self.shared and name.startswith(f"{SHARED}.")

    def division_of(
        self, owner: Variable | None, shape: tuple[int, ...], dtype: DType
    ) -> Division | None:
        """Return how a slot that is still to be made will be divided; None if it will be whole."""
        workers = workers_of(owner) if self.shard_state and owner is not None else None
        if workers is None or owner is None or workers.num_workers == 1:
            return None
        if shape != owner.shape or dtype != working_dtype(dtype):
            return None  # it has to be looked at as a whole
        if isinstance(owner, DividedVariable):
            return owner.division_now().flat()
        return divided(owner.name, shape, workers.rank, workers.num_workers, MEASURED)

    def load_entries(self, entries: Mapping[tuple[Variable | None, str], Any]) -> None:
        """Keep values of a checkpoint until what they belong to is made; others are dropped.

        What will be divided among workers is a variable from now on, of which this worker has its
        part.
        """
        self.restored = {}
        for owner, values in self.slots.restored.items():
            kept = {n: each for n, each in values.items() if isinstance(each, DividedVariable)}
            if kept:  # these have taken what they get
                self.slots.restored[owner] = kept
            else:
                self.slots.restored.pop(owner)
        for (variable, name), value in entries.items():
            if variable is None:
                self.restored[name] = value
                continue
            own = self.slots.restored.get(variable)
            if own is None:
                own = self.slots.restored[variable] = {}
            own[name] = self._in_parts(variable, name, value)

    def _in_parts(self, owner: Variable, name: str, value: Any) -> Any:
        """Return a slot of which this worker has its part, if the value is one that is divided."""
        division = self.division_of(owner, owner.shape, value.dtype)
        if division is None or value.shape not in {owner.shape, division.part_shape}:
            return value
        part = division.part_of(value) if value.shape == owner.shape else value
        return new_variable(owner.store.owner, part, f"{owner.name}/{name}", division)

    def forget_entries(self, owner: Variable) -> None:
        """Forget the slots of a variable: the next step makes them anew."""
        self.slots.made.pop(owner)
        self.slots.restored.pop(owner)


def _variables_of(rate: LearningRate) -> tuple[Variable, ...]:
    """Return what a learning rate remembers, or the schedule that its warm-up leads to."""
    if isinstance(rate, LinearWarmup):
        return _variables_of(rate.then)
    return rate.variables if isinstance(rate, ReduceOnPlateau) else ()


class UpdateRule(ABC):
    """Says how gradients change values; computes only, and writes nothing.

    Attributes:
        is_elementwise: Whether the rule is that of an `ElementwiseOptimizer`.
        is_joint: Whether the rule is that of a `JointOptimizer`.
    """

    is_elementwise = False
    is_joint = False

    @property
    @abstractmethod
    def settings(self) -> StepSettings:
        """Settings of a step besides the rule."""

    @property
    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots that every updated variable has."""

    def attributes_of_rule(self, variables: Sequence[Variable]) -> Mapping[str, Any]:
        """Return what the rule keeps in the object, to make another one elsewhere.

        Args:
            variables: Those that it may update. Others stand for them there, with the same names.
        """
        return {name: value for name, value in vars(self).items() if name != "_settings"}

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
        """Return new values of variables that are not slots, if the rule has any; on the loop."""


def require_divisible(rule: UpdateRule, shard_state: bool) -> None:
    """Check that state is only divided where a rule needs no whole variables.

    Raises:
        TypeError: If it needs them.
    """
    if shard_state and not rule.is_elementwise:
        raise TypeError(
            f"{type(rule).__name__.lstrip('_')} got shard_state=True, but its rule needs whole "
            "variables, and each worker would have a part of each. Use one of ar.optimizers, "
            "derive from ElementwiseOptimizer, or leave shard_state out."
        )


def checked_settings(
    strategy: object,  # Any: the strategies layer lies above this one
    learning_rate: LearningRate,
    slot_names: tuple[str, ...],
    clipnorm: float | None,
    clipvalue: float | None,
    global_clipnorm: float | None,
    loss_scale: float | LossScaling | None,
    on_non_finite: OnNonFinite | None,
    loss_reduction: str,
    learning_rate_multipliers: Multipliers | None,
    measure_norm: bool,
    shard_state: bool,
) -> StepSettings:
    """Check the arguments of an optimizer made in `strategy`.

    Raises:
        ValueError: If a choice is unknown, a number out of range, or gradients are clipped in more
            than one way.
        TypeError: If an argument is of the wrong type.
    """
    if not callable(learning_rate):
        learning_rate = checked_learning_rate(learning_rate)
    clipping = _checked_clipping(
        clipnorm=clipnorm, clipvalue=clipvalue, global_clipnorm=global_clipnorm
    )
    if loss_reduction not in ("sum", "mean"):
        raise ValueError(f'loss_reduction must be "sum" or "mean", got {loss_reduction!r}.')
    scaling = checked_loss_scale(loss_scale, strategy)
    usual: OnNonFinite = "skip" if scaling is not None and scaling.skips else "raise"
    if on_non_finite is not None and on_non_finite not in CHOICES:
        raise ValueError(
            f"on_non_finite must be one of {', '.join(CHOICES)}, got {on_non_finite!r}."
        )
    chosen = on_non_finite or usual
    measures = measure_norm or global_clipnorm is not None
    return StepSettings(
        learning_rate,
        checked_multipliers(learning_rate_multipliers),
        clipping,
        scaling,
        chosen,
        loss_reduction == "mean",
        SlotTable(slot_names),
        new_variable(strategy, np.int64(0), "iterations"),
        new_variable(strategy, np.int64(0), "skipped_steps") if chosen == "skip" else None,
        new_variable(strategy, np.float64(0), "gradient_norm") if measures else None,
        bool(shard_state),
    )


def _checked_clipping(**given: float | None) -> Clipping | None:
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        listed = " and ".join(f"{name}={value!r}" for name, value in chosen.items())
        raise ValueError(f"Gradients are clipped in one way at most, got {listed}.")
    for name, value in chosen.items():
        checked_number(name, value, "> 0", lambda number: number > 0)
        return Clipping(name, value)
    return None
