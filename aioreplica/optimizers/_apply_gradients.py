"""The collective `apply_gradients`: its merge is one step of the optimizer."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ..collectives import Turn, leaf_bytes, no_data
from ..context import PLACE
from ..replica import Call, Collective, Parts, Pending, SyncGroup
from ..values import Variable, Weighted
from ._across import gradients_text, merge_over_workers, name_the_replica
from ._gradient import has_parts
from ._merged_gradient import merge_gradients
from ._scaled_gradient import ScaledGradient
from ._step import take_step

if TYPE_CHECKING:
    from ._optimizer import Optimizer

SHOWN = 8
"""So many variables are named in a message; then only the first that differs is."""


@final
class Contribution(NamedTuple):
    """Contribution of one replica.

    Attributes:
        optimizer: Whose step it is.
        variables: Those with a gradient.
        gradients: Arrays, IndexedSlices or ScaledGradients of them, or Weighted ones.
        global_step: Counts steps for the user, None if nothing does.
        is_summed: Whether every replica brings the sum over all replicas.
    """

    optimizer: Optimizer
    variables: Sequence[Variable]
    gradients: Sequence[Any]
    global_step: Variable | None
    is_summed: bool = False


@final
class ApplyGradients(Collective):
    """Takes one step with the gradients of all replicas; each gets None.

    The argument of a call is None, its args a `Contribution`.
    """

    __slots__ = ()

    def detail(self, argument: Any) -> str:
        """Return "": what replicas bring is shown where it differs."""
        return ""

    def num_bytes(self, call: Call) -> int:
        """Add up the gradients."""
        size = 0
        for gradient in call.args[2]:
            size += gradient.nbytes if type(gradient) is np.ndarray else _num_bytes(gradient)
        return size

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether both apply gradients to the same variables with the same optimizer."""
        ours: Contribution = call.args  # type: ignore[assignment]  # see the class above
        theirs: Contribution = first.args  # type: ignore[assignment]
        if (
            ours.optimizer is not theirs.optimizer
            or ours.global_step is not theirs.global_step
            or ours.is_summed is not theirs.is_summed
            or list(map(id, ours.variables)) != list(map(id, theirs.variables))
        ):
            return False
        for own, other in zip(ours.gradients, theirs.gradients, strict=True):
            if (type(own) is Weighted) is not (type(other) is Weighted):
                return False
        return True

    def difference(self, first: Call, call: Call) -> str | None:
        """Say what differs: variables, weights, global steps or optimizers."""
        if self.agrees(first, call):
            return None
        here, there = _of(first), _of(call)
        if list(map(id, here.variables)) != list(map(id, there.variables)):
            return _other_variables(here.variables, there.variables)
        if here.is_summed is not there.is_summed:
            return f"aggregate is {not here.is_summed} here and {not there.is_summed} there"
        if here.global_step is not there.global_step:
            return f"global_step is {here.global_step!r} here and {there.global_step!r} there"
        if here.optimizer is not there.optimizer:
            return (
                f"{here.optimizer!r} here and {there.optimizer!r} there are two optimizers, which "
                "count their iterations apart"
            )
        kinds = zip(_which_are_weighted(here), _which_are_weighted(there), strict=True)
        index = next(i for i, (a, b) in enumerate(kinds) if a != b)
        with_weight, without = ("here", "there") if _which_are_weighted(here)[index] else (
            "there", "here"
        )  # fmt: skip
        return (
            f"the gradient of {here.variables[index].name!r} is Weighted {with_weight} and has no "
            f"weight {without}"
        )

    def signature(self, call: Call) -> str:
        """Describe the optimizer, its variables and what their gradients are."""
        own = _of(call)
        step = "" if own.global_step is None else f", global step {own.global_step.name!r}"
        text = gradients_text(own.variables, [[gradient] for gradient in own.gradients])
        return f"{optimizer_text(own.optimizer)}, aggregate={not own.is_summed}{step}: {text}"

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Take the step with the gradients of the replicas of all workers, on each of them."""
        own = _of(calls[0])
        optimizer, variables = own.optimizer, own.variables
        is_mean = optimizer.settings.is_mean
        if own.is_summed:
            columns: list[list[Any]] = [[gradient] for gradient in own.gradients]
            await turn.exchange(b"", no_data)
            merged = merge_gradients(variables, columns, is_mean=False)
        else:
            columns = [list(each) for each in zip(*[_of(c).gradients for c in calls], strict=True)]
            merged = await merge_over_workers(
                turn, group.reducer, variables, columns, is_mean=is_mean
            )
        take = partial(take_step, optimizer, merged, None, own.global_step)
        await name_the_replica(turn, variables, columns, take)
        return [None] * len(calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Take the step in cross-replica context, in replica 0's context variables."""
        nothing = [None] * group.num_replicas
        pending = calls[0].context.run(_take_step_of_all, group, calls)
        return nothing if pending is None else Pending(pending, lambda _: nothing)


APPLY_GRADIENTS = ApplyGradients("apply_gradients")


def optimizer_text(optimizer: Optimizer) -> str:
    """Name an optimizer by its kind and by the variable that counts its steps."""
    return f"{type(optimizer).__qualname__} {optimizer.iterations.name!r}"


def _of(call: Call) -> Contribution:
    contribution: Contribution = call.args  # type: ignore[assignment]  # see the class above
    return contribution


def _take_step_of_all(group: SyncGroup, calls: Sequence[Call]) -> Awaitable[None] | None:
    PLACE.set(group.merge_place)
    optimizer, variables, gradients, global_step, is_summed = calls[0].args
    if is_summed or len(calls) == 1:
        columns: Sequence[Sequence[Any]] = [(gradient,) for gradient in gradients]
    else:
        columns = list(zip(*[call.args[2] for call in calls], strict=True))
    merged = merge_gradients(variables, columns, is_mean=optimizer.settings.is_mean)
    reducer = None if is_summed else group.reducer
    return take_step(optimizer, merged, reducer, global_step, is_blocking=group.is_blocking)


# ---- outside the collective ----------------------------------------------------------------------


async def apply_across(
    optimizer: Optimizer,
    pairs: Sequence[tuple[Any, Any]],
    variables: Sequence[Variable],
    columns: Sequence[Sequence[Any]],
    global_step: Variable | None,
) -> None:
    """Sum over workers what has a part per replica; what is a sum already is one of all."""
    strategy = variables[0].strategy
    of_replicas = {variable for gradient, variable in pairs if has_parts(gradient)}
    summed = [variable not in of_replicas for variable in variables]
    if any(summed) and not all(summed):
        raise ValueError(
            "distributed_apply got gradients with a part per replica and others that are sums. "
            "Over several workers bring all of one kind."
        )
    text = f"{optimizer_text(optimizer)}, {summed[0]}: {gradients_text(variables, columns)}"
    is_mean = optimizer.settings.is_mean
    async with strategy.workers.operation("distributed_apply", text) as turn:
        if summed[0]:
            await turn.exchange(b"", no_data)
            merged = merge_gradients(variables, columns, is_mean=is_mean)
        else:
            merged = await merge_over_workers(
                turn, strategy.reducer, variables, columns, is_mean=is_mean
            )
        take = partial(take_step, optimizer, merged, None, global_step)
        await name_the_replica(turn, variables, columns, take)


async def take_step_alone(brought: Contribution) -> None:
    """Take the step of one replica that is on its own."""
    optimizer, variables, gradients, global_step, _ = brought
    columns = [(gradient,) for gradient in gradients]
    merged = merge_gradients(variables, columns, is_mean=False)
    pending = take_step(optimizer, merged, None, global_step)
    if pending is not None:
        await pending


def written(variables: Sequence[Variable], global_step: Any) -> list[Variable]:
    """Return what a step writes for the user; TypeError if the global step is not a variable."""
    if global_step is None:
        return [*variables]
    if not isinstance(global_step, Variable):
        raise TypeError(f"global_step must be an ar.Variable or None, got {global_step!r}.")
    return [*variables, global_step]


# ---- differences ---------------------------------------------------------------------------------


def _num_bytes(gradient: Any) -> int:
    if type(gradient) is Weighted:
        gradient = gradient.total
    return leaf_bytes(gradient.values if type(gradient) is ScaledGradient else gradient)


def _which_are_weighted(contribution: Contribution) -> list[bool]:
    return [type(gradient) is Weighted for gradient in contribution.gradients]


def _other_variables(here: Sequence[Variable], there: Sequence[Variable]) -> str:
    if len(here) <= SHOWN and len(there) <= SHOWN:
        names = [", ".join(variable.name for variable in each) for each in (here, there)]
        return f"gradients for {names[0]} here and gradients for {names[1]} there"
    pairs = zip(here, there, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a is not b), None)
    text = f"gradients for {len(here)} variables here and for {len(there)} there"
    if index is None:  # one begins like the other and ends earlier
        more, where = (here, "here") if len(here) > len(there) else (there, "there")
        index = min(len(here), len(there))
        return f"{text}; number {index} is {more[index].name!r} and comes only {where}"
    return f"{text}; number {index} is {here[index].name!r} here and {there[index].name!r} there"
