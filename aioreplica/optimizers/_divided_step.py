"""One step whose state is divided among workers: each updates its elements, and all get them all.

The order is that of `_step.py`, and so are the bits. Every worker sums up the gradients of its own
elements only, and keeps slots for these. Whether all gradients and updates are finite is agreed on
before the new values travel, so that all workers write, or none.
"""

from __future__ import annotations

import asyncio
import math
import struct
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np

from ..collectives import (
    Dealt,
    Job,
    Reducer,
    Turn,
    gather_bytes,
    gather_parts,
    no_data,
    reduce_across,
)
from ..errors import NonFiniteError
from ..tree import Array
from ..typing import ReduceOp
from ..values import DividedVariable, Division, IndexedSlices, Variable, divided
from ._blocks import Range, block_jobs, fused_rules
from ._kernels import Kernel
from ._merged_gradient import (
    MEASURED,
    MergedGradient,
    merge_gradients,
    merge_over_workers,
    summand_of,
)
from ._settings import UpdateRule
from ._slots import MASTER, working_dtype
from ._staged_write import StagedWrite
from ._step import (
    INLINE_STEP_BYTES,
    begin_write,
    publish,
    refuse,
    run_stages,
    sum_gradients,
)

NOBODY = sys.maxsize
_FOUND = struct.Struct("<Bqqqd")
_GRADIENT, _UPDATE = 1, 2


@final
class Wrong(NamedTuple):
    """An element that is not finite; the smallest one of all workers is the one that is told.

    Attributes:
        kind: Whether it is one of a gradient or of what was computed from it.
        number: Of the variable in this step.
        element: Which one, of the whole as a row.
        member: 0 for a value, else which of the slots, from 1.
        value: What it is.
    """

    kind: int
    number: int
    element: int
    member: int
    value: float


@final
class Moved(NamedTuple):
    """Arrays of one variable that a step moves on this worker.

    Attributes:
        group: The variable, or its master, and its slots.
        old: The part of each here, flat.
        new: Memory for the new ones.
        whole: All new values of the variable, flat; of a divided one only its part is here.
        value: This worker's part of these.
    """

    group: tuple[Variable, ...]
    old: list[Array]
    new: list[Array]
    whole: Array
    value: Array


async def take_divided_step(
    turn: Turn,
    reducer: Reducer,
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    global_step: Variable | None,
    *,
    is_summed: bool,
) -> None:
    """Take one step with the gradients of all workers, of which each updates its part.

    Raises:
        TypeError: If a gradient is an IndexedSlices.
        ValueError: If a variable has different components, or half precision and a constraint.
        ContextError: If slots are divided among another number of workers.
        RuntimeError: If something else has written meanwhile.
        NonFiniteError: As `name_the_replica`.
    """
    settings = optimizer.settings
    checks = settings.on_non_finite != "ignore"
    divisions = _divisions(turn, optimizer, variables, columns)
    gradients = await _merged(turn, reducer, optimizer, variables, columns, divisions, is_summed)
    refusal = partial(_refuse, turn, optimizer, variables, columns, gradients)
    norm, squares = None, [0.0] * len(gradients)
    if settings.needs_norms:
        wrong, squares = await _measure(turn, gradients, divisions)
        if checks and wrong is not None:
            await refusal(wrong)
            return
        norm = math.sqrt(math.fsum(squares))
    if settings.clipping is not None:
        settings.clipping(gradients, squares)
    write, prepared, moved, jobs = _stage(optimizer, gradients, divisions, global_step, norm)
    await _run(jobs)
    pairs = zip(gradients, moved, strict=True)
    await _run([(pair[1].value.nbytes, partial(_round, *pair)) for pair in pairs])
    own = _first_wrong(gradients, moved, divisions) if checks else None
    travels = [not isinstance(variable, DividedVariable) for variable in variables]
    wholes = [each.whole for each in compress(moved, travels)]
    of_wholes = compress(divisions, travels)
    forms = [(each.dtype, d.ranges) for each, d in zip(wholes, of_wholes, strict=True)]
    dealt = Dealt(forms, turn.rank)
    wrong = _unpacked(await gather_parts(turn, dealt, wholes, _packed(own), _are_all_finite))
    if wrong is not None:
        await refusal(wrong)
    elif not publish(optimizer, write, prepared, gradients, [each.group for each in moved]):
        names = ", ".join(variable.name for variable in variables[:8])
        error = RuntimeError(
            f"{optimizer!r} has taken a step with state divided among workers, and {names} or "
            "something else that the step writes was written meanwhile on this worker, so it was "
            "not taken here; other workers have taken it. Write variables between steps, on all "
            "workers."
        )
        variables[0].store.owner.workers.break_off(error)  # workers are a step apart
        raise error


async def _merged(
    turn: Turn,
    reducer: Reducer,
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    divisions: Sequence[Division],
    is_summed: bool,
) -> list[MergedGradient]:
    """Return the gradients of this worker's elements, summed over all workers."""
    settings = optimizer.settings
    if is_summed:
        await turn.exchange(b"", no_data)
        gradients = merge_gradients(variables, columns, is_mean=False)
        for gradient, division in zip(gradients, divisions, strict=True):
            gradient.take_part(division)
    else:
        gradients = await merge_over_workers(
            turn, reducer, variables, columns, is_mean=settings.is_mean,
            divisions=divisions, buffers=settings.buffers,
        )  # fmt: skip
    kernel: Kernel | None = getattr(optimizer, "kernel", None)
    if kernel is not None:
        dtypes = fused_rules().missing(kernel, map(attrgetter("dtype"), gradients))
        if dtypes:
            await _run([(INLINE_STEP_BYTES + 1, partial(fused_rules().compile, kernel, dtypes))])
    await _run(sum_gradients(gradients, None))
    return gradients


def _divisions(
    turn: Turn,
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
) -> list[Division]:
    """Say who updates what; nothing was exchanged yet, so what is refused is refused at once."""
    divisions = []
    for variable, column in zip(variables, columns, strict=True):
        if any(isinstance(summand_of(part), IndexedSlices) for part in column):
            raise TypeError(
                f"The gradient of {variable.name!r} is an IndexedSlices, but {optimizer!r} divides "
                "its state among workers, which takes arrays. Bring `slices.to_dense()`, or update "
                "this variable with an optimizer without shard_state=True."
            )
        if isinstance(variable, DividedVariable):
            variable.require_current(turn.num_workers)
        is_half = working_dtype(variable.dtype) != variable.dtype
        if is_half and getattr(variable, "constraint", None) is not None:
            raise ValueError(
                f"Variable {variable.name!r} is of half precision and has a constraint, which "
                f"takes its whole value in float32, but {optimizer!r} divides that among workers. "
                "Leave out the constraint or shard_state=True."
            )
        if len({*map(id, variable.components)}) > 1:
            raise ValueError(
                f"Variable {variable.name!r} was written for each replica of this worker apart, "
                f"but {optimizer!r} divides its state among workers, whose replicas have one "
                "value. Assign it one (`await variable.assign(variable.value)`)."
            )
        if isinstance(variable, DividedVariable):
            division = variable.division.flat()
        else:
            place = (turn.rank, turn.num_workers)
            division = divided(variable.name, variable.shape, *place, MEASURED)
        for slot in optimizer.settings.slots.made.get(variable) or ():
            if not isinstance(slot, DividedVariable):
                raise ValueError(
                    f"The slot {slot.name!r} was made outside the steps of {turn.num_workers} "
                    "workers, so it is whole. Make it in `strategy.run`."
                )
            slot.require_current(turn.num_workers)
        divisions.append(division)
    return divisions


async def _run(jobs: Sequence[Job]) -> None:
    pending = run_stages(iter([jobs]), is_blocking=False)
    if pending is not None:
        await pending


async def _measure(
    turn: Turn, gradients: Sequence[MergedGradient], divisions: Sequence[Division]
) -> tuple[Wrong | None, list[float]]:
    """Return what is not finite, and the sum of the squares of each gradient, in their order."""
    parts: list[list[float]] = [[] for _ in gradients]

    def measure(number: int) -> None:
        parts[number] = gradients[number].squares_of_parts()

    await _run([(each.num_bytes, partial(measure, i)) for i, each in enumerate(gradients)])
    own = _packed(_first_wrong(gradients, None, divisions))
    mine = np.array([each for part in parts for each in part], np.float64).tobytes()

    async def carry(wire: Any, slots: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        return slots, await gather_bytes(wire, mine)

    exchanging: asyncio.Future[tuple[list[bytes], list[bytes]]] = turn.exchange(
        own, carry, what="norms"
    )
    slots, told = await exchanging
    rows = [iter(np.frombuffer(each, np.float64).tolist()) for each in told]
    squares = []
    for division in divisions:
        total = 0.0
        for row, (begin, end) in zip(rows, division.ranges, strict=True):
            for _ in range(-(-(end - begin) // MEASURED)):
                total += next(row)
        squares.append(total)
    return _unpacked(slots), squares


def _stage(
    optimizer: UpdateRule,
    gradients: Sequence[MergedGradient],
    divisions: Sequence[Division],
    global_step: Variable | None,
    norm: float | None,
) -> tuple[StagedWrite, object, list[Moved], list[Job]]:
    """Do what `_step.apply` does, for the elements of this worker."""
    settings = optimizer.settings
    slots = settings.slots
    variables = [gradient.variable for gradient in gradients]
    made = []
    for variable, division in zip(variables, divisions, strict=True):
        own = slots.made.get(variable)
        made.append(slots.make(variable, optimizer.new_slot, division) if own is None else own)
    _follow_written(optimizer, variables, made, divisions)
    read = [*variables, *(slot for own in made for slot in own)]
    write, prepared, of_each = begin_write(optimizer, gradients, read, global_step, norm)
    moved: list[Moved] = []
    ranges: list[Range] = []
    for i, (variable, own, division) in enumerate(zip(variables, made, divisions, strict=True)):
        moved.append(_moved(write, variable, own, division, len(slots.names)))
        each = moved[-1]
        if each.value.size:
            ranges.append((gradients[i], of_each[i], each.old, each.new, 0, each.value.size))
    rule: Any = optimizer  # its `is_elementwise` says so
    return write, prepared, moved, list(block_jobs(rule, ranges, settings.scratch))


def _moved(
    write: StagedWrite,
    variable: Variable,
    own: Sequence[Variable],
    division: Division,
    num_slots: int,
) -> Moved:
    [(old_values, new_values)] = write.begin((variable,))
    [(old, new)] = write.begin(own) if own else [((), ())]
    value = _part(variable, division, new_values[0])
    if len(own) > num_slots:  # the master stands for its variable
        return Moved(tuple(own), [*old], [*new], new_values[0].reshape(-1), value)
    before = _part(variable, division, old_values[0])
    group = (variable, *own)
    return Moved(group, [before, *old], [value, *new], new_values[0].reshape(-1), value)


def _part(variable: Variable, division: Division, component: Array) -> Array:
    """Return this worker's elements of a component, flat."""
    if isinstance(variable, DividedVariable):
        return component.reshape(-1)
    return division.part_of(component)


def _follow_written(
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    made: Sequence[Sequence[Variable]],
    divisions: Sequence[Division],
) -> None:
    """Make masters what variables are, where these are not their rounding: somebody has written."""
    slots = optimizer.settings.slots
    for variable, own, division in zip(variables, made, divisions, strict=True):
        if len(own) == len(slots.names):
            continue
        master = own[0]
        if slots.in_step.get(variable) != (variable.version, master.version):
            value, old = _part(variable, division, variable.components[0]), master.components[0]
            with np.errstate(over="ignore"):
                new = np.where(old.astype(value.dtype) == value, old, value.astype(old.dtype))
            write = StagedWrite([master])
            write.replace(master, new)
            write.publish()
            slots.in_step[variable] = (variable.version, master.version)


def _round(gradient: MergedGradient, moved: Moved) -> None:
    if moved.value is not moved.new[0]:  # a master stands for the variable
        with np.errstate(over="ignore"):
            np.copyto(moved.value, moved.new[0], casting="unsafe")
        if not np.isfinite(moved.value).all():
            gradient.is_in_doubt = True


# ---- what is not finite --------------------------------------------------------------------------


def _first_wrong(
    gradients: Sequence[MergedGradient],
    moved: Sequence[Moved] | None,
    divisions: Sequence[Division],
) -> Wrong | None:
    for number, (gradient, division) in enumerate(zip(gradients, divisions, strict=True)):
        if not gradient.is_finite:
            begin = division.ranges[division.rank][0]
            index, value = gradient.first_non_finite() or (0, math.nan)
            return Wrong(_GRADIENT, number, begin + index, 0, value)
    for number, (gradient, division) in enumerate(zip(gradients, divisions, strict=True)):
        if moved is None or not gradient.is_in_doubt:
            continue
        each, begin = moved[number], division.ranges[division.rank][0]
        pairs = list(zip(each.old, each.new, strict=True))
        order = [*range(1, len(pairs)), 0]
        if each.value is not each.new[0]:
            pairs.append((each.old[0].astype(each.value.dtype), each.value))
            order.append(len(pairs) - 1)
        for member in order:
            old, new = pairs[member]
            is_wrong = ~np.isfinite(new) & np.isfinite(old)
            if is_wrong.any():
                index = int(np.argmax(is_wrong))
                return Wrong(_UPDATE, number, begin + index, member, float(new[index]))
    return None


def _packed(wrong: Wrong | None) -> bytes:
    return b"" if wrong is None else _FOUND.pack(*wrong)


def _unpacked(slots: Sequence[bytes]) -> Wrong | None:
    """Return the first of all workers, which is the same on all of them."""
    found = [Wrong(*_FOUND.unpack(slot[: _FOUND.size])) for slot in slots if any(slot)]
    return min(found, default=None, key=lambda wrong: wrong[:4])


def _are_all_finite(slots: Sequence[bytes]) -> bool:
    return _unpacked(slots) is None


async def _refuse(
    turn: Turn,
    optimizer: UpdateRule,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    gradients: Sequence[MergedGradient],
    wrong: Wrong,
) -> None:
    """Raise on all workers, or skip the step on all of them."""
    variable = variables[wrong.number]
    where = tuple(map(int, np.unravel_index(wrong.element, variable.shape)))
    if wrong.kind == _GRADIENT:
        text = (
            f"The gradient of {variable.name!r} is not finite: the sum over all workers, divided "
            f"by {gradients[wrong.number].divisor:g} (weight, loss scale), is {wrong.value} at "
            f"index {where}. Nothing was updated. Look for a division by 0 or a learning rate that "
            'is too high, clip gradients, or pass on_non_finite="skip" to leave out such steps.'
        )
    else:
        own = optimizer.settings.slots.names_of(variable)
        # A variable in half precision is what its master is rounded to, at the end.
        names = (*own, "") if own[:1] == (MASTER,) else ("", *own)
        slot = names[wrong.member] if len(names) > wrong.member else ""
        which = f"{variable.name}/{slot}" if slot else variable.name
        text = (
            f"The update of {variable.name!r} is not finite: {which!r} would be {wrong.value} at "
            f"index {where}, though the gradient is finite. Nothing was updated. Look for a "
            "gradient or a learning rate that is too large, clip gradients, or pass "
            'on_non_finite="skip" to leave out such steps.'
        )
    error = NonFiniteError(text, variable=variable.name, replica_id=None, index=where)
    if optimizer.settings.skipped is not None:
        for jobs in refuse(optimizer, gradients, None if wrong.kind == _GRADIENT else error):
            await _run(jobs)
        return

    def fail() -> None:
        raise error

    if wrong.kind == _UPDATE:
        raise error
    await name_the_replica(turn, variables, columns, fail)


async def name_the_replica(
    turn: Turn,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    take: Callable[[], Awaitable[None] | None],
) -> None:
    """Take a step; if a gradient is not finite, find the replica that has brought it.

    All workers have the same sums, so all find the same gradient, and ask each other.

    Raises:
        NonFiniteError: With the id of the replica among those of all workers, on all of them.
    """
    try:
        pending = take()
        if pending is not None:
            await pending
        return
    except NonFiniteError as error:
        wrong = error
    own = NOBODY
    for variable, column in zip(variables, columns, strict=True):
        if variable.name == wrong.variable:
            for replica_id, part in enumerate(column):
                total = summand_of(part)
                values = total.values if isinstance(total, IndexedSlices) else total
                if not np.isfinite(values).all():
                    own = turn.rank * turn.num_local_replicas + replica_id
                    break
    [first] = await reduce_across(turn, ReduceOp.MIN, [own], what="finite check")
    if first == NOBODY:
        raise wrong
    worker = first // turn.num_local_replicas
    raise NonFiniteError(
        f"The gradient of {wrong.variable!r} is not finite: replica {first}, of worker {worker}, "
        f"brought it. The sum over all workers is not finite at index {wrong.index}. Nothing was "
        "updated. Look for a division by 0 or a learning rate that is too high, clip gradients, or "
        'pass on_non_finite="skip" to leave out such steps.',
        variable=wrong.variable,
        replica_id=first,
        index=wrong.index,
    )
