"""apply_gradients as a collective: what the replicas bring, and whether it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ..collectives import leaf_bytes
from ..context import PLACE
from ..replica import Call, Collective, Parts, Pending, SyncGroup
from ..values import Variable, Weighted
from ._step import take_step

if TYPE_CHECKING:
    from ._optimizer import Optimizer

SHOWN = 8
"""So many variables are named in a message; then only the first that differs is."""


@final
class Contribution(NamedTuple):
    """What one replica brings.

    Attributes:
        optimizer: Whose step it is.
        variables: Those with a gradient.
        gradients: Arrays, IndexedSlices, or Weighted ones.
        global_step: Counts steps for the user, None if nothing does.
        scale: What the loss was multiplied with, None without a loss scale.
    """

    optimizer: Optimizer
    variables: Sequence[Variable]
    gradients: Sequence[Any]
    global_step: Variable | None
    scale: float | None


@final
class ApplyGradients(Collective):
    """Takes one step with the gradients of all replicas; each gets None.

    The argument of a call is None, its args a `Contribution`.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name of the method."""
        return "apply_gradients"

    def detail(self, argument: Any) -> str:
        """Nothing: what replicas bring is shown where it differs."""
        return ""

    def num_bytes(self, call: Call) -> int:
        """Add up the gradients."""
        return sum(leaf_bytes(_total(gradient)) for gradient in _of(call).gradients)

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether both apply gradients to the same variables with the same optimizer."""
        ours, theirs = _of(call), _of(first)
        return (
            ours.optimizer is theirs.optimizer
            and ours.global_step is theirs.global_step
            and list(map(id, ours.variables)) == list(map(id, theirs.variables))
            and _which_are_weighted(ours) == _which_are_weighted(theirs)
        )

    def difference(self, first: Call, call: Call) -> str | None:
        """Say what differs: variables, weights, global steps or optimizers."""
        if self.agrees(first, call):
            return None
        here, there = _of(first), _of(call)
        if list(map(id, here.variables)) != list(map(id, there.variables)):
            return _other_variables(here.variables, there.variables)
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

    def perform(self, meeting: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Take the step in cross-replica context, in replica 0's context variables."""
        nothing = [None] * meeting.num_replicas
        pending = calls[0].context.run(_step_of_all, meeting, [_of(call) for call in calls])
        return nothing if pending is None else Pending(pending, partial(_return, nothing))


APPLY_GRADIENTS = ApplyGradients()


def _of(call: Call) -> Contribution:
    contribution: Contribution = call.args  # type: ignore[assignment]  # see the class above
    return contribution


def _step_of_all(meeting: SyncGroup, brought: Sequence[Contribution]) -> Any:
    PLACE.set(meeting.merge_place)
    optimizer, variables, _, global_step, scale = brought[0]
    columns = list(zip(*(each.gradients for each in brought), strict=True))
    scales = None if scale is None else [each.scale for each in brought]
    return take_step(
        optimizer,
        meeting.reducer,
        columns,
        variables,
        global_step,
        scales,
        is_blocking=meeting.is_blocking,
    )


def _return(parts: Parts, _result: None) -> Parts:
    return parts


def _total(gradient: Any) -> Any:
    return gradient.total if type(gradient) is Weighted else gradient


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
