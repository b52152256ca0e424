"""One step of an optimizer: sum, unscale and check, clip, apply, publish.

`apply_gradients` is a collective whose merge is one step. A step comes in stages, each of which is
complete before the next one is asked for. The calling thread carries them out; if one has much to
read, and the thread is the event loop's, that stage and the others go to several threads. Where no
norm is needed, gradients are summed, unscaled and checked while the rule reads them, and what it
writes is looked at while it is in a core's cache: nothing is published before the outcome is known.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from ..collectives import (
    Job,
    Reducer,
    num_threads,
    run_here,
    run_on_threads,
)
from ..context import INLINE_STEP
from ..errors import NonFiniteError
from ..tree import Array
from ..typing import ReduceOp
from ..values import IndexedSlices, Variable
from ._blocks import BlockRule, Range, block_jobs, fused_rules, run_rows
from ._checks import learning_rate_at
from ._kernels import Kernel
from ._merged_gradient import MergedGradient, merge_gradients
from ._settings import UpdateRule
from ._slots import SlotTable
from ._staged_write import StagedWrite

Groups: TypeAlias = Sequence[tuple[Variable, ...]]  # each variable, or its master, with its slots
_dtype_of = attrgetter("dtype")
Masters: TypeAlias = Sequence[tuple[MergedGradient, Variable]]

INLINE_STEP_BYTES = 12 * 1024 * 1024
"""A step that reads and writes no more than this runs on the event loop, which takes it up to a
millisecond; a thread would have it done 0.2 ms later. `INLINE_STEP` may set another limit."""

STEP_THREAD_BYTES = 64 * 1024 * 1024
"""What a further thread has to read and write to be worth waking: two threads of short NumPy calls
wait for each other's lock, and up to here that costs more than the second core brings."""

FUSED_THREAD_BYTES = 8 * 1024 * 1024
"""The same where the rule is compiled: then a call takes a range of a variable and no lock."""


def take_step(
    optimizer: UpdateRule,
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
    is_fused = fused_rules().find(kernel, gradients[0].parts[0].dtype, ()) is not None
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
    optimizer: UpdateRule,
    gradients: Sequence[MergedGradient],
    reducer: Reducer | None,
    global_step: Variable | None,
) -> Iterator[Sequence[Job]]:
    settings = optimizer.settings
    checks = settings.on_non_finite != "ignore"
    kernel: Kernel | None = getattr(optimizer, "kernel", None)
    if kernel is not None:
        dtypes = fused_rules().missing(kernel, map(_dtype_of, gradients))
        if dtypes:  # takes long, so not on the event loop
            yield [(INLINE_STEP_BYTES + 1, partial(fused_rules().compile, kernel, dtypes))]
    yield sum_gradients(gradients, reducer)
    norm, squares = None, [0.0] * len(gradients)
    if settings.needs_norms:
        yield unscale_and_check(gradients, squares)
        if checks and not all(gradient.is_finite for gradient in gradients):
            yield from refuse(optimizer, gradients)
            return
        norm = math.sqrt(math.fsum(squares))
    if settings.clipping is not None:
        settings.clipping(gradients, squares)
    while True:
        write, prepared, groups, masters, jobs = apply(optimizer, gradients, global_step, norm)
        if masters and (stale := _stale(settings.slots, masters)):
            yield from _begin_anew(settings.slots, stale)
            continue
        yield jobs
        is_finite, is_in_doubt = True, bool(masters) or not optimizer.is_elementwise
        for gradient in gradients:
            is_finite = is_finite and gradient.is_finite
            is_in_doubt = is_in_doubt or gradient.is_in_doubt
        if checks and not is_finite:
            yield from refuse(optimizer, gradients)
            return
        if masters:
            yield [(g.num_bytes, partial(_round, write, g, master)) for g, master in masters]
        if checks and is_in_doubt and (doubtful := _doubtful(optimizer, gradients, groups)):
            found: list[NonFiniteError] = []
            yield [
                (sum(each.num_bytes for each in gradients), partial(_look, write, doubtful, found))
            ]
            if found:
                yield from refuse(optimizer, gradients, found[0])
                return
        if publish(optimizer, write, prepared, gradients, groups):
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


def apply(
    optimizer: UpdateRule,
    gradients: Sequence[MergedGradient],
    global_step: Variable | None,
    norm: float | None,
) -> tuple[StagedWrite, object, Groups, Masters, list[Job]]:
    """Call the hooks of the rule; what it computes is staged.

    Returns:
        The write, what the rule prepared for the step, what it moves (a variable, or its master,
        with the slots), the masters, and the jobs that fill in the write.
    """
    slots = optimizer.settings.slots
    variables = list(map(attrgetter("variable"), gradients))
    shared = optimizer.start(variables) if optimizer.is_joint else ()  # type: ignore[attr-defined]
    groups, masters, read = [], [], [*shared]
    for gradient, variable in zip(gradients, variables, strict=True):
        own = slots.made.get(variable)
        if own is None:
            own = slots.make(variable, optimizer.new_slot)
        group = (variable, *own)
        read += group
        if len(own) > len(slots.names):
            masters.append((gradient, own[0]))
            group = own  # the master stands for its variable
        groups.append(group)
    write, prepared, of_each = begin_write(optimizer, gradients, read, global_step, norm)
    if optimizer.is_elementwise:
        jobs = _jobs_of_blocks(optimizer, write, groups, gradients, of_each)
        return write, prepared, groups, masters, jobs
    size = sum(gradient.num_bytes for gradient in gradients)
    if optimizer.is_joint:
        if not optimizer.is_warm:  # type: ignore[attr-defined]
            size = INLINE_STEP_BYTES + 1  # what is compiled first takes long
        run = partial(_run_joint_rule, optimizer, write, groups, shared, gradients, of_each)
    else:
        run = partial(_run_rule, optimizer, write, groups, gradients, of_each)
    return write, prepared, groups, masters, [(size, run)]


def begin_write(
    optimizer: UpdateRule,
    gradients: Sequence[MergedGradient],
    read: list[Variable],
    global_step: Variable | None,
    norm: float | None,
) -> tuple[StagedWrite, object, list[object]]:
    """Stage what a step writes besides variables and slots: counters, loss scale, norm.

    Calls `prepare` once for every learning rate.

    Args:
        optimizer: Whose step it is.
        gradients: One for each variable.
        read: What is read before it is written; the counters and the loss scale are added.
        global_step: Counts steps for the user, None if nothing does.
        norm: Of all gradients before clipping, None if it was not measured.

    Returns:
        The write, what the rule prepared for the step, and for each variable.
    """
    settings = optimizer.settings
    iterations, scaling = settings.iterations, settings.loss_scaling
    read.append(iterations)
    if global_step is not None:
        read.append(global_step)
    if scaling is not None:
        read += scaling.variables
    # Before any of them is read: what another run writes from here on is noticed.
    write = StagedWrite(read)
    if scaling is not None:
        for variable, value in scale_after(optimizer, gradients, is_finite=True).items():
            write.replace(variable, value)
    iteration = int(iterations.components[0])
    write.replace(iterations, iteration + 1)
    if global_step is not None:
        write.compute((global_step,), _counted)
    if settings.norm is not None and norm is not None:
        write.replace(settings.norm, norm)
    rate = settings.learning_rate
    if type(rate) is not float:
        rate = learning_rate_at(rate, iteration)
    made = {rate: optimizer.prepare(rate, iteration)}
    if settings.multiplier_of is None:
        return write, made[rate], [made[rate]] * len(gradients)
    rates = [rate * settings.multiplier_of(gradient.variable) for gradient in gradients]
    for each in rates:
        if each not in made:
            made[each] = optimizer.prepare(each, iteration)
    return write, made[rate], [made[each] for each in rates]


def publish(
    optimizer: UpdateRule,
    write: StagedWrite,
    prepared: object,
    gradients: Sequence[MergedGradient],
    groups: Groups,
) -> bool:
    """Finish, then write everything; False if somebody else has written meanwhile."""
    for variable, value in optimizer.finish(prepared).items():
        write.replace(variable, value)
    slots, scaling = optimizer.settings.slots, optimizer.settings.loss_scaling
    for gradient, (moved, *_) in zip(gradients, groups, strict=True):
        constraint = getattr(gradient.variable, "constraint", None)
        if constraint is not None:
            write.change(moved, constraint)
            if moved is not gradient.variable:
                write.round(gradient.variable, moved)
    is_done = write.publish()
    for gradient, (moved, *_) in zip(gradients, groups, strict=True):
        if is_done and moved is not gradient.variable:
            versions = slots.in_step.get(gradient.variable)
            if versions is not None:
                slots.in_step[gradient.variable] = (versions[0] + 1, versions[1] + 1)
    if is_done and scaling is not None:
        scaling.applied_by(optimizer)
    return is_done


@final
class FinishedGradients(NamedTuple):
    """Gradients that are ready for the rule.

    Attributes:
        gradients: By variable; None if the step is to be skipped.
        norm: Of all of them before clipping; None if it was not measured.
        scale: Of the loss, if the step is to be skipped and there was one.
    """

    gradients: list[Any] | None
    norm: float | None
    scale: float | None = None


def finish_gradients(
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    gradients: Sequence[object],
) -> FinishedGradients:
    """Sum rows, unscale, check and clip, where the rule is applied elsewhere.

    Args:
        optimizer: Whose options count.
        variables: Whose gradients they are.
        gradients: As `checked_pairs` gives them.

    Returns:
        What is to be applied, and what was found out about it.

    Raises:
        NonFiniteError: If one is not finite, unless such steps are skipped.
        ValueError: If one has weight 0.
    """
    settings = optimizer.settings
    merged = merge_gradients(variables, [(each,) for each in gradients], is_mean=False)
    run_here(sum_gradients(merged, None))
    norm, squares = None, [0.0] * len(merged)
    if settings.needs_norms:
        run_here(unscale_and_check(merged, squares))
        norm = math.sqrt(math.fsum(squares))
    if settings.clipping is not None:
        settings.clipping(merged, squares)
    finished = [each.whole() for each in merged]
    if settings.on_non_finite != "ignore" and not all(each.is_finite for each in merged):
        if settings.skipped is None:
            raise next(each for each in merged if not each.is_finite).non_finite_error()
        used = max((each.scale for each in merged if each.scale is not None), default=None)
        return FinishedGradients(None, None, used)
    return FinishedGradients(finished, norm)


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


def refuse(
    optimizer: UpdateRule,
    gradients: Sequence[MergedGradient],
    error: NonFiniteError | None = None,
) -> Iterator[Sequence[Job]]:
    """Raise, or skip the step: only the loss scale and the count of skipped steps change.

    Args:
        optimizer: Whose step it is.
        gradients: One of which is not finite; else the scale is not to blame, and stays.
        error: Says that what was computed from them is not.
    """
    settings = optimizer.settings
    if settings.skipped is None:
        found: list[BaseException] = [] if error is None else [error]
        if error is None:
            wrong = next(gradient for gradient in gradients if not gradient.is_finite)
            yield [(wrong.num_bytes, lambda: found.append(wrong.non_finite_error()))]
        raise found[0]
    scaling = settings.loss_scaling if error is None else None
    while True:
        write = StagedWrite([settings.skipped, *(() if scaling is None else scaling.variables)])
        write.replace(settings.skipped, settings.skipped.components[0] + 1)
        after = {} if scaling is None else scale_after(optimizer, gradients, is_finite=False)
        for variable, value in after.items():
            write.replace(variable, value)
        if write.publish():
            if scaling is not None and after:
                scaling.skipped()
            return


def _doubtful(
    optimizer: UpdateRule, gradients: Sequence[MergedGradient], groups: Groups
) -> list[tuple[Variable, ...]]:
    """Return what is to be looked at before it is published: slots, and what they belong to.

    Blocks are looked at when they are computed, which tells of nearly all that they are finite. The
    slots of another library's optimizer are its own affair.
    """
    found: list[tuple[Variable, ...]] = []
    for gradient, (moved, *slots) in zip(gradients, groups, strict=True):
        if gradient.is_in_doubt or not optimizer.is_elementwise:
            found.append((*(() if optimizer.is_joint else slots), moved, gradient.variable))
    return found


def _look(
    write: StagedWrite, groups: Sequence[Sequence[Variable]], found: list[NonFiniteError]
) -> None:
    """Look for an element that was finite and no longer is; append the error."""
    for group in groups:
        place = write.find_non_finite(group)
        if place is not None:
            which, where, number = place
            owner = group[-1].name
            found.append(NonFiniteError(
                f"The update of {owner!r} is not finite: {which.name!r} would be {number} at index "
                f"{where}, though the gradient is finite. Nothing was updated. Look for a gradient "
                "or a learning rate that is too large, clip gradients, or pass "
                'on_non_finite="skip" to leave out such steps.',
                variable=owner,
                index=where,
            ))  # fmt: skip
            return


def _stale(slots: SlotTable, masters: Masters) -> list[tuple[Variable, Variable]]:
    """Return variables with masters of which they may not be the rounding: somebody has written."""
    pairs = [(gradient.variable, master) for gradient, master in masters]
    return [(v, m) for v, m in pairs if slots.in_step.get(v) != (v.version, m.version)]


def _begin_anew(
    slots: SlotTable, pairs: Sequence[tuple[Variable, Variable]]
) -> Iterator[Sequence[Job]]:
    """Make masters what variables are, where these are not their rounding."""
    write = StagedWrite([each for pair in pairs for each in pair])
    versions = [(variable.version, master.version + 1) for variable, master in pairs]
    yield [
        (3 * master.components[0].nbytes, job)
        for variable, master in pairs
        for job in write.follow(master, variable, _follow)
    ]
    if write.publish():
        for (variable, _), both in zip(pairs, versions, strict=True):
            slots.in_step[variable] = both


def _follow(master: Array, value: Array, new: Array) -> None:
    np.copyto(new, value, casting="unsafe")
    with np.errstate(over="ignore"):
        np.copyto(new, master, where=master.astype(value.dtype) == value)


def _round(write: StagedWrite, gradient: MergedGradient, master: Variable) -> None:
    if not write.round(gradient.variable, master):
        gradient.is_in_doubt = True


def scale_after(
    optimizer: UpdateRule, gradients: Sequence[MergedGradient], *, is_finite: bool
) -> dict[Variable, object]:
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
    """Sum with the compression of the strategy, which remembers what each replica lost of each."""
    members = sorted({member for gradient in gradients for member in gradient.members})
    rows = [[_part_of(gradient, member) for gradient in gradients] for member in members]
    names = [(each.variable.name, each.variable.shape) for each in gradients]
    with np.errstate(all="ignore"):
        sums = reducer.reduce_here(ReduceOp.SUM, rows, members=members, names=names)
    for gradient, whole in zip(gradients, sums, strict=True):
        gradient.set_sum(whole)


def _part_of(gradient: MergedGradient, member: int) -> object:
    """Return what a replica brought, or zeros."""
    if member in gradient.members:
        return gradient.brought[gradient.members.index(member)]
    part = gradient.brought[0]
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values[:0], part.indices[:0], part.dense_shape)
    return np.broadcast_to(np.zeros((), part.dtype), part.shape)


def _jobs_of_blocks(
    optimizer: UpdateRule,
    write: StagedWrite,
    groups: Groups,
    gradients: Sequence[MergedGradient],
    prepared: Sequence[object],
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
    optimizer: UpdateRule,
    write: StagedWrite,
    groups: Groups,
    gradients: Sequence[MergedGradient],
    prepared: Sequence[object],
) -> None:
    names = optimizer.slot_names
    for group, gradient, of_one in zip(groups, gradients, prepared, strict=True):
        dense = gradient.dense()
        if not gradient.is_finite and optimizer.settings.on_non_finite != "ignore":
            return  # nothing will be written, and the rule may fail at such numbers

        def update(old: tuple[Array, ...], of_one: object = of_one, dense: Array = dense) -> Any:
            slots = dict(zip(names, old[1:], strict=True))
            with np.errstate(over="ignore"):  # it is looked at before it is published
                value, new_slots = optimizer.update(of_one, old[0], dense, slots)
            new = (value, *[new_slots[name] for name in names])
            return [_apart(each, dense) for each in new]

        write.compute(group, update)


def _run_joint_rule(
    optimizer: UpdateRule,
    write: StagedWrite,
    groups: Groups,
    shared: Sequence[Variable],
    gradients: Sequence[MergedGradient],
    prepared: Sequence[object],
) -> None:
    dense = [gradient.dense() for gradient in gradients]
    checks = optimizer.settings.on_non_finite != "ignore"
    if not checks or all(gradient.is_finite for gradient in gradients):
        variables = [gradient.variable for gradient in gradients]
        optimizer.update_all(prepared, variables, groups, shared, dense, write)  # type: ignore[attr-defined]


def _apart(new: object, gradient: Array) -> object:
    """Copy what a rule returned if it is the gradient, which the user may change later."""
    if isinstance(new, np.ndarray) and np.may_share_memory(new, gradient):
        return new.copy()
    return new


def _counted(old: tuple[Array, ...]) -> tuple[Array, ...]:
    return (np.add(old[0], 1, dtype=old[0].dtype),)
