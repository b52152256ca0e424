"""One step of an optimizer: sum, unscale and check, clip, apply, publish.

`apply_gradients` is a collective whose merge is one step. A step comes in stages, each of which is
complete before the next one is asked for. The calling thread carries them out; if one has much to
read, and the thread is the event loop's, that stage and the others go to several threads. Where no
norm is needed, gradients are summed, unscaled and checked while the rule reads them: nothing is
published before the outcome of the check is known.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..collectives import (
    Job,
    Reducer,
    Turn,
    leaf_bytes,
    no_data,
    num_threads,
    run_here,
    run_on_threads,
)
from ..context import INLINE_STEP, PLACE
from ..replica import Call, Collective, Parts, Pending, SyncGroup
from ..typing import ReduceOp
from ..values import IndexedSlices, Variable, Weighted
from ._across import gradients_text, merge_over_workers, name_the_replica
from ._blocks import BlockRule, Range, block_jobs, run_rows
from ._fused import fused_rules
from ._hyperparameter import learning_rate_at
from ._kernels import Kernel
from ._merged_gradient import MergedGradient, merge_gradients
from ._scaled_gradient import ScaledGradient
from ._staged_write import StagedWrite

if TYPE_CHECKING:
    from ._optimizer import Optimizer

Array = npt.NDArray[Any]
Groups: TypeAlias = Sequence[tuple[Variable, ...]]  # each variable with its slots

INLINE_STEP_BYTES = 12 * 1024 * 1024
"""A step that reads and writes no more than this runs on the event loop, which takes it up to a
millisecond; a thread would have it done 0.2 ms later. `INLINE_STEP` may set another limit."""

STEP_THREAD_BYTES = 64 * 1024 * 1024
"""What a further thread has to read and write to be worth waking: two threads of short NumPy calls
wait for each other's lock, and up to here that costs more than the second core brings."""

FUSED_THREAD_BYTES = 8 * 1024 * 1024
"""The same where the rule is compiled: then a call takes a range of a variable and no lock."""

SHOWN = 8
"""So many variables are named in a message; then only the first that differs is."""


# ---- the collective ------------------------------------------------------------------------------


@final
class Contribution(NamedTuple):
    """What one replica brings.

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


# ---- the step ------------------------------------------------------------------------------------


def take_step(
    optimizer: Optimizer,
    gradients: Sequence[MergedGradient],
    reducer: Reducer | None,
    global_step: Variable | None,
    *,
    is_blocking: bool = False,
) -> Awaitable[None] | None:
    """Apply gradients, once for all replicas; return what to await if it takes long.

    Args:
        optimizer: Whose step it is.
        gradients: One for each variable.
        reducer: Compresses sums, if the strategy asks for that; None outside every strategy.
        global_step: Counts steps for the user, None if nothing does.
        is_blocking: Whether to do everything in the calling thread, however long it takes.

    Cancellation:
        Of the awaitable: what has started ends first; nothing is written.
    """
    stages = _stages(optimizer, gradients, reducer, global_step)
    kernel: Kernel | None = getattr(optimizer, "kernel", None)
    is_fused = fused_rules().has(kernel, gradients[0].variable.dtype)
    thread_bytes = FUSED_THREAD_BYTES if is_fused else STEP_THREAD_BYTES
    limit = INLINE_STEP.get()
    if limit is not None and not is_blocking and sum(each.num_bytes for each in gradients) > limit:
        return _go_on_in_threads((), stages, thread_bytes, limit)  # the loop has its turn first
    return run_stages(stages, is_blocking=is_blocking, thread_bytes=thread_bytes)


def run_stages(
    stages: Iterator[Sequence[Job]], *, is_blocking: bool, thread_bytes: int = STEP_THREAD_BYTES
) -> Awaitable[None] | None:
    """Run all jobs of all stages; return what to await if one has much to read.

    Args:
        stages: Each is complete before the next one is asked for.
        is_blocking: Whether to do everything in the calling thread.
        thread_bytes: What a further thread has to read and write to be worth waking.
    """
    limit = INLINE_STEP.get()
    if limit is None:
        limit = INLINE_STEP_BYTES
    for jobs in stages:
        if not is_blocking and sum([size for size, _ in jobs]) > limit:
            return _go_on_in_threads(jobs, stages, thread_bytes, limit)
        for _, run in jobs:
            run()
    return None


def _stages(
    optimizer: Optimizer,
    gradients: Sequence[MergedGradient],
    reducer: Reducer | None,
    global_step: Variable | None,
) -> Iterator[Sequence[Job]]:
    settings = optimizer.settings
    checks = settings.on_non_finite != "ignore"
    kernel: Kernel | None = getattr(optimizer, "kernel", None)
    if kernel is not None:
        dtypes = fused_rules().missing(kernel, (each.variable.dtype for each in gradients))
        if dtypes:  # takes long, so not on the event loop
            yield [(INLINE_STEP_BYTES + 1, partial(fused_rules().compile, kernel, dtypes))]
    yield sum_gradients(gradients, reducer)
    norm = None
    if settings.needs_norms:
        squares = [0.0] * len(gradients)
        yield unscale_and_check(gradients, squares)
        if checks and not all(gradient.is_finite for gradient in gradients):
            yield from _refuse(optimizer, gradients)
            return
        norm = clip(optimizer, gradients, squares)
    elif settings.clipvalue is not None:
        for gradient in gradients:
            gradient.limit = settings.clipvalue
    while True:
        write, prepared, jobs = apply(optimizer, gradients, global_step, norm)
        yield jobs
        if checks and not all(gradient.is_finite for gradient in gradients):
            yield from _refuse(optimizer, gradients)
            return
        if publish(optimizer, write, prepared, gradients):
            return  # else another run has written: build on that


def sum_gradients(gradients: Sequence[MergedGradient], reducer: Reducer | None) -> list[Job]:
    """Sum what cannot be summed as it is read: in code, sparse, of half precision, or strided."""
    if reducer is not None and reducer.options.compression is not None:
        size = sum(gradient.num_bytes for gradient in gradients)
        return [(2 * size + INLINE_STEP_BYTES, partial(_sum_in_code, gradients, reducer))]
    return [
        (gradient.num_bytes, gradient.sum_parts) for gradient in gradients if gradient.needs_sum
    ]


def unscale_and_check(gradients: Sequence[MergedGradient], squares: list[float]) -> list[Job]:
    """Look at all elements before the first one is used; fill in the sums of their squares."""

    def measure(index: int) -> None:
        squares[index] = gradients[index].squares()

    return [(gradient.num_bytes, partial(measure, i)) for i, gradient in enumerate(gradients)]


def clip(
    optimizer: Optimizer, gradients: Sequence[MergedGradient], squares: Sequence[float]
) -> float:
    """Say what to multiply with, or where to stop; return the norm of all gradients together."""
    settings = optimizer.settings
    norm = math.sqrt(math.fsum(squares))
    for gradient, square in zip(gradients, squares, strict=True):
        gradient.limit = settings.clipvalue
        if settings.clipnorm is not None:
            gradient.factor = settings.clipnorm / max(math.sqrt(square), settings.clipnorm)
        elif settings.global_clipnorm is not None:
            gradient.factor = settings.global_clipnorm / max(norm, settings.global_clipnorm)
    return norm


def apply(
    optimizer: Optimizer,
    gradients: Sequence[MergedGradient],
    global_step: Variable | None,
    norm: float | None,
) -> tuple[StagedWrite, Any, list[Job]]:
    """Call the hooks of the rule; what it computes is staged.

    Returns:
        The write, what the rule prepared for the step, and the jobs that fill in the write.
    """
    settings = optimizer.settings
    slots, iterations = settings.slots, settings.iterations
    variables = [gradient.variable for gradient in gradients]
    shared = optimizer.start(variables) if optimizer.is_joint else ()  # type: ignore[attr-defined]
    made = [slots.made.get(variable) for variable in variables]
    groups = [
        (variable, *(slots.make(variable, optimizer.new_slot) if own is None else own))
        for variable, own in zip(variables, made, strict=True)
    ]
    read = [*shared, iterations]
    if global_step is not None:
        read.append(global_step)
    scaling = settings.loss_scaling
    if scaling is not None:
        read += scaling.variables
    # Before any of them is read: what another run writes from here on is noticed.
    write = StagedWrite([*[each for group in groups for each in group], *read])
    if scaling is not None:
        for variable, value in _scale_after(optimizer, gradients, is_finite=True).items():
            write.replace(variable, value)
    iteration = int(iterations.components[0])
    write.replace(iterations, iteration + 1)
    if global_step is not None:
        write.compute((global_step,), _counted)
    if settings.norm is not None and norm is not None:
        write.replace(settings.norm, norm)
    prepared, of_each = _prepared(optimizer, variables, iteration)
    if optimizer.is_elementwise:
        return write, prepared, _jobs_of_blocks(optimizer, write, groups, gradients, of_each)
    size = sum(gradient.num_bytes for gradient in gradients)
    if optimizer.is_joint:
        if not optimizer.is_warm:  # type: ignore[attr-defined]
            size = INLINE_STEP_BYTES + 1  # what is compiled first takes long
        run = partial(_run_joint_rule, optimizer, write, groups, shared, gradients, of_each)
    else:
        run = partial(_run_rule, optimizer, write, groups, gradients, of_each)
    return write, prepared, [(size, run)]


def publish(
    optimizer: Optimizer,
    write: StagedWrite,
    prepared: Any,
    gradients: Sequence[MergedGradient],
) -> bool:
    """Finish, then write everything; False if somebody else has written meanwhile."""
    for variable, value in optimizer.finish(prepared).items():
        write.replace(variable, value)
    for gradient in gradients:
        constraint = getattr(gradient.variable, "constraint", None)
        if constraint is not None:
            write.change(gradient.variable, constraint)
    is_done = write.publish()
    scaling = optimizer.settings.loss_scaling
    if is_done and scaling is not None:
        scaling.applied_by(optimizer)
    return is_done


# ---- parts of these ------------------------------------------------------------------------------


async def _go_on_in_threads(
    jobs: Sequence[Job] | None, stages: Iterator[Sequence[Job]], thread_bytes: int, limit: int
) -> None:
    while jobs is not None:
        size = sum(size for size, _ in jobs)
        if size > limit:
            await run_on_threads(jobs, num_threads(size, thread_bytes))
        else:
            run_here(jobs)
        jobs = next(stages, None)


def _refuse(optimizer: Optimizer, gradients: Sequence[MergedGradient]) -> Iterator[Sequence[Job]]:
    """Raise, or skip the step: only the loss scale and the count of skipped steps change."""
    settings = optimizer.settings
    if settings.skipped is None:
        found: list[BaseException] = []
        wrong = next(gradient for gradient in gradients if not gradient.is_finite)
        yield [(wrong.num_bytes, lambda: found.append(wrong.non_finite_error()))]
        raise found[0]
    scaling = settings.loss_scaling
    while True:
        write = StagedWrite([settings.skipped, *(() if scaling is None else scaling.variables)])
        write.replace(settings.skipped, settings.skipped.components[0] + 1)
        for variable, value in _scale_after(optimizer, gradients, is_finite=False).items():
            write.replace(variable, value)
        if write.publish():
            return


def _scale_after(
    optimizer: Optimizer, gradients: Sequence[MergedGradient], *, is_finite: bool
) -> dict[Variable, Any]:
    """Return what becomes of the loss scale's variables after a step."""
    scaling = optimizer.settings.loss_scaling
    if scaling is None:
        return {}
    if is_finite:
        return dict(scaling.after(is_finite)) if scaling.is_next_step_of(optimizer) else {}
    used = max((each.scale for each in gradients if each.scale is not None), default=None)
    if used is not None and used > scaling.scale:
        return {}  # another step has found out already that it was too large
    return dict(scaling.after(is_finite))


def _sum_in_code(gradients: Sequence[MergedGradient], reducer: Reducer) -> None:
    """Sum with the compression of the strategy, which remembers what each replica lost."""
    members = sorted({member for gradient in gradients for member in gradient.members})
    rows = [[_part_of(gradient, member) for gradient in gradients] for member in members]
    with np.errstate(all="ignore"):
        sums = reducer.reduce_here(ReduceOp.SUM, rows, members=members)
    for gradient, whole in zip(gradients, sums, strict=True):
        gradient.set_sum(whole)


def _part_of(gradient: MergedGradient, member: int) -> Any:
    """Return what a replica brought, or zeros."""
    if member in gradient.members:
        return gradient.brought[gradient.members.index(member)]
    part = gradient.brought[0]
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values[:0], part.indices[:0], part.dense_shape)
    return np.broadcast_to(np.zeros((), part.dtype), part.shape)


def _prepared(
    optimizer: Optimizer, variables: Sequence[Variable], iteration: int
) -> tuple[Any, list[Any]]:
    """Call `prepare` once for every learning rate; return what it gave for the step and each."""
    settings = optimizer.settings
    rate = settings.learning_rate
    if type(rate) is not float:
        rate = learning_rate_at(rate, iteration)
    made = {rate: optimizer.prepare(rate, iteration)}
    if settings.multiplier_of is None:
        return made[rate], [made[rate]] * len(variables)
    rates = [rate * settings.multiplier_of(variable) for variable in variables]
    for each in rates:
        if each not in made:
            made[each] = optimizer.prepare(each, iteration)
    return made[rate], [made[each] for each in rates]


def _jobs_of_blocks(
    optimizer: Optimizer,
    write: StagedWrite,
    groups: Groups,
    gradients: Sequence[MergedGradient],
    prepared: Sequence[Any],
) -> list[Job]:
    rule: BlockRule = optimizer  # type: ignore[assignment]  # its `is_elementwise` says so
    settings = optimizer.settings
    jobs: list[Job] = []
    ranges: list[Range] = []
    for group, gradient, of_one in zip(groups, gradients, prepared, strict=True):
        for old, new in write.begin(group):
            if isinstance(gradient.parts[0], IndexedSlices):
                memory = (settings.scratch, settings.touched)
                run = partial(run_rows, rule, of_one, gradient, group, old, new, *memory)
                jobs.append((gradient.num_bytes * 2 * len(group), run))
            else:
                ranges.append((gradient, of_one, old, new, 0, old[0].size))
    if ranges:
        jobs += block_jobs(rule, ranges, settings.scratch)
    return jobs


def _run_rule(
    optimizer: Optimizer,
    write: StagedWrite,
    groups: Groups,
    gradients: Sequence[MergedGradient],
    prepared: Sequence[Any],
) -> None:
    names = optimizer.slot_names
    for group, gradient, of_one in zip(groups, gradients, prepared, strict=True):
        dense = gradient.dense()
        if not gradient.is_finite and optimizer.settings.on_non_finite != "ignore":
            return  # nothing will be written, and the rule may fail at such numbers

        def update(old: tuple[Array, ...], of_one: Any = of_one, dense: Array = dense) -> Any:
            slots = dict(zip(names, old[1:], strict=True))
            value, new_slots = optimizer.update(of_one, old[0], dense, slots)
            new = (value, *[new_slots[name] for name in names])
            return [_apart(each, dense) for each in new]

        write.compute(group, update)


def _run_joint_rule(
    optimizer: Optimizer,
    write: StagedWrite,
    groups: Groups,
    shared: Sequence[Variable],
    gradients: Sequence[MergedGradient],
    prepared: Sequence[Any],
) -> None:
    dense = [gradient.dense() for gradient in gradients]
    checks = optimizer.settings.on_non_finite != "ignore"
    if not checks or all(gradient.is_finite for gradient in gradients):
        optimizer.update_all(prepared, groups, shared, dense, write)  # type: ignore[attr-defined]


def _apart(new: Any, gradient: Array) -> Any:
    """Copy what a rule returned if it is the gradient, which the user may change later."""
    if isinstance(new, np.ndarray) and np.may_share_memory(new, gradient):
        return new.copy()
    return new


def _counted(old: tuple[Array, ...]) -> tuple[Array, ...]:
    return (np.add(old[0], 1, dtype=old[0].dtype),)


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
