"""The collective `apply_gradients`: its merge is one step of the optimizer.

Over workers the gradients of a worker's replicas are summed first, and the sums then meet.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from .._functions import is_async, require_no_yield
from ..collectives import Reducer, Turn, leaf_bytes, no_data
from ..context import CLOSURE, PLACE, TRACE, Place
from ..devices import run_on_host
from ..errors import ContextError
from ..replica import (
    Call,
    CallSite,
    Collective,
    Parts,
    Pending,
    RunningReplica,
    SyncGroup,
)
from ..tree import Tree
from ..values import DividedVariable, IndexedSlices, Variable, Weighted
from ._checks import replica_on_device, require_owner, written
from ._divided_step import name_the_replica, take_divided_step
from ._gradient import ScaledGradient, checked_pairs, has_parts, is_part
from ._loss import Pairs, differentiate_loss
from ._merged_gradient import merge_gradients, merge_over_workers, scale_of, summand_of
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

    The args of a call are a `Contribution`. Its argument is the accumulator that has the gradients,
    which starts anew behind the step, or None if the replica brings them.
    """

    __slots__ = ()

    def detail(self, argument: object) -> str:
        """Return "": what replicas bring is shown where it differs."""
        return ""

    def num_bytes(self, call: Call) -> int:
        """Add up the gradients."""
        size = 0
        for gradient in call.args[2]:
            size += gradient.nbytes if type(gradient) is np.ndarray else gradient_bytes(gradient)
        return size

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether both apply gradients to the same variables with the same optimizer."""
        ours: Contribution = call.args  # type: ignore[assignment]  # see the class above
        theirs: Contribution = first.args  # type: ignore[assignment]
        if (
            call.argument is not first.argument
            or ours.optimizer is not theirs.optimizer
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
        """Say what differs: accumulators, variables, weights, global steps or optimizers."""
        if self.agrees(first, call):
            return None
        here, there = _of(first), _of(call)
        if first.argument is not call.argument:
            return f"{first.argument!r} here and {call.argument!r} there are two accumulators"
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
        if call.argument is not None:
            return f"{call.argument.text()}{step}"
        text = gradients_text(own.variables, [[gradient] for gradient in own.gradients])
        return f"{optimizer_text(own.optimizer)}, aggregate={not own.is_summed}{step}: {text}"

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Take the step with the gradients of the replicas of all workers, on each of them."""
        own, accumulator = _of(calls[0]), calls[0].argument
        variables, columns = _columns(calls)
        await take_step_across(
            turn, group.reducer, own.optimizer, variables, columns, own.global_step,
            is_summed=own.is_summed,
        )  # fmt: skip
        if accumulator is not None:
            accumulator.discard()
        return [None] * len(calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts | Pending:
        """Take the step in cross-replica context, in replica 0's context variables."""
        accumulator = calls[0].argument
        nothing = [None] * group.num_replicas
        pending = calls[0].context.run(_take_step_of_all, group, calls)

        def ended(*_: object) -> Parts:
            if accumulator is not None:
                accumulator.discard()
            return nothing

        if pending is not None:
            return Pending(pending, ended)
        return nothing if accumulator is None else ended()


APPLY_GRADIENTS = ApplyGradients("apply_gradients")
APPLY_ACCUMULATED = ApplyGradients("apply_accumulated")


def optimizer_text(optimizer: Optimizer) -> str:
    """Name an optimizer by its kind and by the variable that counts its steps."""
    return f"{type(optimizer).__qualname__} {optimizer.iterations.name!r}"


def _of(call: Call) -> Contribution:
    contribution: Contribution = call.args  # type: ignore[assignment]  # see the class above
    return contribution


def _columns(calls: Sequence[Call]) -> tuple[Sequence[Variable], Sequence[Sequence[object]]]:
    """Return the variables, and a part of each gradient per replica, or one that is the sum."""
    _, variables, gradients, global_step, is_summed = calls[0].args
    if calls[0].argument is not None:
        return calls[0].argument.columns(global_step)  # type: ignore[no-any-return]  # see above
    if is_summed or len(calls) == 1:
        return variables, [(gradient,) for gradient in gradients]
    return variables, list(zip(*[call.args[2] for call in calls], strict=True))


def _take_step_of_all(group: SyncGroup, calls: Sequence[Call]) -> Awaitable[None] | None:
    PLACE.set(group.merge_place)
    variables, columns = _columns(calls)
    optimizer, _, _, global_step, is_summed = calls[0].args
    merged = merge_gradients(variables, columns, is_mean=optimizer.settings.is_mean)
    reducer = None if is_summed else group.reducer
    return take_step(optimizer, merged, reducer, global_step, is_blocking=group.is_blocking)


# ---- outside the collective ----------------------------------------------------------------------


async def apply_across(
    optimizer: Optimizer,
    pairs: Sequence[tuple[object, object]],
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    global_step: Variable | None,
) -> None:
    """Sum over workers what has a part per replica; what is a sum already is one of all."""
    strategy = variables[0].store.owner
    assert strategy is not None  # the caller has found its workers
    of_replicas = {variable for gradient, variable in pairs if has_parts(gradient)}
    summed = [variable not in of_replicas for variable in variables]
    if any(summed) and not all(summed):
        raise ValueError(
            "distributed_apply got gradients with a part per replica and others that are sums. "
            "Over several workers bring all of one kind."
        )
    text = f"{optimizer_text(optimizer)}, {summed[0]}: {gradients_text(variables, columns)}"
    async with strategy.workers.operation("distributed_apply", text) as turn:
        await take_step_across(
            turn, strategy.reducer, optimizer, variables, columns, global_step, is_summed=summed[0]
        )


async def take_step_across(
    turn: Turn,
    reducer: Reducer,
    optimizer: Optimizer,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    global_step: Variable | None,
    *,
    is_summed: bool = False,
) -> None:
    """Take one step with the gradients of all workers, on each of them.

    Raises:
        NonFiniteError: As `name_the_replica`.
    """
    if not optimizer.settings.shard_state:
        require_none_divided(optimizer, variables)
    elif turn.num_workers > 1:
        await take_divided_step(
            turn, reducer, optimizer, variables, columns, global_step, is_summed=is_summed
        )
        return
    if is_summed:
        await turn.exchange(b"", no_data)
        merged = merge_gradients(variables, columns, is_mean=False)
    else:
        merged = await merge_over_workers(
            turn, reducer, variables, columns, is_mean=optimizer.settings.is_mean
        )
    take = partial(take_step, optimizer, merged, None, global_step)
    await name_the_replica(turn, variables, columns, take)


def require_none_divided(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Check that the state of an optimizer is where its variables are.

    Raises:
        ValueError: If workers have parts of one.
    """
    for variable in variables:
        if type(variable) is DividedVariable and not variable.is_mirrored:
            raise ValueError(
                f"{optimizer!r} keeps its state whole on each worker, but {variable.name!r} is "
                f"divided among {len(variable.division.ranges)} workers. Make the optimizer with "
                "shard_state=True."
            )


async def take_step_alone(brought: Contribution) -> None:
    """Take the step of one replica that is on its own."""
    optimizer, variables, gradients, global_step, _ = brought
    columns = [(gradient,) for gradient in gradients]
    merged = merge_gradients(variables, columns, is_mean=False)
    pending = take_step(optimizer, merged, None, global_step)
    if pending is not None:
        await pending


# ---- differences ---------------------------------------------------------------------------------


def gradient_bytes(gradient: object) -> int:
    """Return the size of one gradient as a user brings it."""
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


def gradients_text(variables: Sequence[Variable], columns: Sequence[Sequence[object]]) -> str:
    """Describe gradients by what has to be equal on all workers."""
    texts = []
    for variable, column in zip(variables, columns, strict=True):
        first = column[0]
        total = summand_of(first)
        kind = "IndexedSlices of " if isinstance(total, IndexedSlices) else ""
        weight = ", weighted" if isinstance(first, Weighted) else ""
        scale = scale_of(first)
        scaled = "" if scale is None else f", scale {scale:g}"
        shape, part = list(variable.shape), ", of parts" if is_part(total, variable) else ""
        texts.append(f"{variable.name!r}: {kind}{variable.dtype}{shape}{part}{weight}{scaled}")
    return "; ".join(texts)


# ---- calls of replicas ---------------------------------------------------------------------------


def require_loss(loss: object, var_list: object) -> None:
    """Check what is to be differentiated with respect to what.

    Raises:
        TypeError: If `loss` is not a plain function, or `var_list` holds something else than
            variables.
        ValueError: If `var_list` is empty.
    """
    if not callable(loss) or is_async(loss):
        raise TypeError(
            f"The loss must be a plain function without arguments, got {loss!r} "
            f"({type(loss).__name__})."
        )
    require_no_yield(loss, "minimize", "Return the loss.")
    if var_list is None:
        return
    if not isinstance(var_list, (list, tuple)):
        raise TypeError(f"var_list must be a list of variables or None, got {var_list!r}.")
    if not var_list:
        raise ValueError("There are no variables to minimize over: var_list is empty.")
    for variable in var_list:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list must hold variables, got {variable!r} ({type(variable).__name__})."
            )


def sort_by_creation(pairs: Pairs, strategy: Any) -> None:
    """Sort pairs by the order in which a strategy's variables were created.

    So replicas whose losses read them in different orders agree. Not done where the loss runs: the
    process of a device does not know the order.
    """
    if strategy is not None and len(pairs) > 1:
        created = {v: i for i, v in enumerate(strategy.trainable_variables)}
        pairs.sort(key=lambda pair: created.get(pair[1], len(created)))


def require_replica(place: Place, what: str) -> None:
    """Check that a replica runs here, or no strategy is in charge: then the code acts alone.

    Raises:
        ContextError: If the code runs in cross-replica or update context.
    """
    if type(place.replica) is not RunningReplica and place.strategy is not None:
        raise ContextError(
            f"{what} was called in {place.describe()}, but it is a collective of the replicas. "
            f"Call it in the step: `await optimizer.{what}(...)` in an `async def step(...)`, "
            "and run that with `await strategy.run(step, args=(...))`. For gradients that are here "
            "already: `await optimizer.distributed_apply(grads_and_vars)`."
        )


def push_elsewhere(
    optimizer: object, pairs: Sequence[object], global_step: Variable | None
) -> object:
    """Push gradients to parameter servers, if a closure runs here and they are for variables there.

    Returns:
        What may be awaited, and is done; None if they are for variables of this process.
    """
    closure = CLOSURE.get()
    if closure is None or not closure.takes(pairs):
        return None
    return closure.apply_gradients(optimizer, pairs, global_step)


@final
class BlockingOptimizer:
    """An optimizer as plain step functions use it; got as `optimizer.blocking`.

    Each method does what the awaitable one does, bit for bit, and returns when that is done.
    ContextError elsewhere than on the device thread of a replica.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[object, object]],
        global_step: Variable | None = None,
        *,
        aggregate: bool = True,
    ) -> None:
        """Combine the gradients of all replicas and update the variables with them.

        Args:
            grads_and_vars: As for `Optimizer.apply_gradients`.
            global_step: As for `Optimizer.apply_gradients`.
            aggregate: As for `Optimizer.apply_gradients`.

        Raises:
            Exception: As `Optimizer.apply_gradients`.

        Cancellation:
            Leaves everything as it was, or everything updated.
        """
        name = "optimizer.blocking.apply_gradients"
        grads_and_vars = list(grads_and_vars)
        if (trace := TRACE.get()) is not None:
            trace.apply_gradients(self._optimizer, grads_and_vars, global_step, not aggregate)
            return
        if push_elsewhere(self._optimizer, grads_and_vars, global_step) is None:
            self._meet(name, grads_and_vars, global_step, not aggregate, sys._getframe(1))

    def minimize(
        self,
        loss: Callable[[], object],
        var_list: Sequence[Variable] | None = None,
        global_step: Variable | None = None,
        *,
        backend: str = "autograd",
        has_aux: bool = False,
    ) -> Tree:
        """Differentiate a loss here and apply the gradients; return this replica's own loss.

        Args:
            loss: As for `Optimizer.minimize`.
            var_list: As for `Optimizer.minimize`.
            global_step: As for `Optimizer.minimize`.
            backend: As for `Optimizer.minimize`.
            has_aux: As for `Optimizer.minimize`.

        Raises:
            Exception: As `Optimizer.minimize`.
        """
        name = "optimizer.blocking.minimize"
        if (trace := TRACE.get()) is not None:
            return trace.minimize(self._optimizer, loss, var_list, global_step, backend, has_aux)
        if CLOSURE.get() is None:
            replica_on_device(name)
        require_loss(loss, var_list)
        scaling = self._optimizer.loss_scale
        scale = None if scaling is None else scaling.scale
        value, pairs = differentiate_loss(loss, var_list, scale, backend, has_aux)
        if var_list is None:
            sort_by_creation(pairs, PLACE.get().strategy)
        if push_elsewhere(self._optimizer, pairs, global_step) is None:
            self._meet(name, pairs, global_step, False, sys._getframe(1))
        return value

    def _meet(
        self,
        name: str,
        grads_and_vars: Iterable[tuple[object, object]],
        global_step: Variable | None,
        is_summed: bool,
        frame: FrameType,
    ) -> None:
        replica = replica_on_device(name)
        brought = contribution_of(
            self._optimizer, PLACE.get(), grads_and_vars, global_step, is_summed
        )
        replica.blocking.meet(APPLY_GRADIENTS, None, brought, CallSite(frame.f_code, frame.f_lasti))

    def __repr__(self) -> str:
        return f"<BlockingOptimizer of {self._optimizer!r}>"


def apply_alone(
    optimizer: Optimizer,
    place: Place,
    grads_and_vars: Iterable[tuple[object, object]],
    global_step: Variable | None,
    is_summed: bool,
) -> Coroutine[object, None, None]:
    """Push gradients from a closure, or return the step of one replica that is on its own."""
    pairs = list(grads_and_vars)
    pushed: Any = push_elsewhere(optimizer, pairs, global_step)
    if pushed is not None:
        return pushed  # type: ignore[no-any-return]  # it is done, and can be awaited
    return take_step_alone(contribution_of(optimizer, place, pairs, global_step, is_summed))


async def minimize(
    optimizer: Optimizer,
    place: Place,
    loss: Callable[[], object],
    var_list: Sequence[Variable] | None,
    global_step: Variable | None,
    backend: str,
    has_aux: bool,
    frame: FrameType,
) -> object:
    value, pairs = await differentiate(optimizer, place, loss, var_list, backend, has_aux)
    if push_elsewhere(optimizer, pairs, global_step) is not None:
        return value
    brought = contribution_of(optimizer, place, pairs, global_step, False)
    if isinstance(place.replica, RunningReplica):
        await place.replica.meet(APPLY_GRADIENTS, None, brought, frame)
    else:
        await take_step_alone(brought)
    return value


async def differentiate(
    optimizer: Optimizer,
    place: Place,
    loss: Callable[[], object],
    var_list: Sequence[Variable] | None,
    backend: str,
    has_aux: bool = False,
) -> tuple[object, Pairs]:
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    replica = place.replica
    if not isinstance(replica, RunningReplica):
        return await run_on_host(differentiate_loss, loss, var_list, scale, backend, has_aux)
    found = await replica.context.run_on_device(
        differentiate_loss, loss, var_list, scale, backend, has_aux
    )
    if var_list is None:
        sort_by_creation(found[1], place.strategy)
    return found


def contribution_of(
    optimizer: Optimizer,
    place: Place,
    grads_and_vars: Iterable[tuple[object, object]],
    global_step: Variable | None,
    is_summed: bool,
) -> Contribution:
    strategy = place.strategy
    owner = None if strategy is None or strategy.has_plain_values else strategy
    gradients, variables = checked_pairs(grads_and_vars)
    for variable in variables:
        if variable.store.owner is not owner:
            require_owner(variables, strategy)
    if global_step is not None:
        require_owner(written([], global_step), strategy)
    return Contribution(optimizer, variables, gradients, global_step, is_summed)
