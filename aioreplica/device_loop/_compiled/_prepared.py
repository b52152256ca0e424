"""Numbers that `prepare` of an optimizer gives on the host: a table with a row for each update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, TypeAlias, final

import jax
import numpy as np
import numpy.typing as npt

from ...errors import ContextError
from ...optimizers import AdamW, Optimizer, learning_rate_at
from ...tree import flatten, unflatten
from ...values import Variable
from ._narrow import require_32_bits

Columns: TypeAlias = npt.NDArray[Any] | list[npt.NDArray[Any]]
"""A row for each update; an array for each number where they are of several dtypes."""


Which: TypeAlias = tuple[int, ...]
"""Which of the different multipliers of the learning rate each variable has."""


@final
@dataclass(frozen=True, slots=True)
class Prepared:
    """Numbers that `prepare` gave, and how to put others in their places.

    Attributes:
        numbers: The floats and ints, in order.
        restore: Returns the object with as many other numbers.
        kinds: What is not a number; equal for all steps.
        names: Names of the numbers, if they are all the fields of a dataclass.
    """

    numbers: tuple[float, ...]
    restore: Callable[[Sequence[Any]], Any]
    kinds: tuple[Any, ...]
    names: tuple[str, ...] | None = None


def taken_apart(prepared: object) -> Prepared:
    """Find the numbers in what `prepare` gave: in a dataclass, a pytree, or one by itself.

    Raises:
        TypeError: If there is something else in it that a compiled step cannot take.
    """
    if is_dataclass(prepared) and not isinstance(prepared, type):
        names = [field.name for field in fields(prepared)]
        inner = taken_apart([getattr(prepared, name) for name in names])
        are_floats = all(type(getattr(prepared, name)) is float for name in names)
        return Prepared(
            inner.numbers,
            lambda found: replace(prepared, **dict(zip(names, inner.restore(found), strict=True))),
            (type(prepared), *inner.kinds),
            tuple(names) if are_floats else None,
        )
    leaves, spec = flatten(prepared)
    where = [i for i, leaf in enumerate(leaves) if _is_number(leaf)]
    for leaf in leaves:
        if not _is_number(leaf) and not isinstance(leaf, (bool, str, type(None))):
            raise TypeError(
                f"prepare gave {leaf!r} ({type(leaf).__name__}), but a compiled step takes "
                "numbers, in a dataclass or a pytree, from it."
            )
    rest = tuple(leaf for leaf in leaves if not _is_number(leaf))

    def restore(found: Sequence[object]) -> object:
        new = list(leaves)
        for i, number in zip(where, found, strict=True):
            new[i] = number
        return unflatten(spec, new)

    return Prepared(tuple(leaves[i] for i in where), restore, (spec, *rest))


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, (int, float, np.number)) and not isinstance(leaf, bool)


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """Answers of the functions of an optimizer that tell variables apart, before a chunk.

    Attributes:
        multipliers: The different ones of the learning rate.
        which: Which of them each variable has.
        decays: For which variables the weights decay; empty if the rule asks for none.
    """

    multipliers: tuple[float, ...]
    which: Which
    decays: tuple[bool, ...]


def asked_of(optimizer: Optimizer, variables: Sequence[Variable]) -> Asked:
    """Ask an optimizer about its variables; on the host."""
    decays = map(optimizer._decays, variables) if isinstance(optimizer, AdamW) else ()
    return Asked(*multipliers_of(optimizer, variables), tuple(decays))


def multipliers_of(
    optimizer: Optimizer, variables: Sequence[Variable]
) -> tuple[tuple[float, ...], Which]:
    """Return the different multipliers of the learning rate, and which one each variable has."""
    of = optimizer.settings.multiplier_of
    if of is None:
        return (1.0,), (0,) * len(variables)
    each = [of(variable) for variable in variables]
    found = tuple(dict.fromkeys(each))
    return found, tuple(map(found.index, each))


def prepared_for(
    optimizer: Optimizer, multipliers: Sequence[float], iteration: int
) -> list[Prepared]:
    """Call `prepare` for each multiplier of the learning rate at an iteration; on the host."""
    with jax.ensure_compile_time_eval():  # a schedule may be one of jax, and a step be recorded
        rate = learning_rate_at(optimizer.settings.learning_rate, iteration)
        return [taken_apart(optimizer.prepare(rate * each, iteration)) for each in multipliers]


def columns_for(
    optimizer: Optimizer,
    multipliers: Sequence[float],
    iteration: int,
    count: int,
    first: Sequence[Prepared],
) -> Columns:
    """Call `prepare` for so many iterations; return an array with a row for each.

    Args:
        optimizer: Whose.
        multipliers: The different ones of the learning rate.
        iteration: The first one.
        count: How many iterations.
        first: What `prepared_for` gave at iteration 0.

    Raises:
        ContextError: If it gives numbers in another structure than at iteration 0.
        OverflowError: If jax would cut an integer.
    """
    rate = optimizer.settings.learning_rate
    numbers = range(iteration, iteration + count)
    columns: list[Sequence[float]] = []
    prepared = [  # step by step, as steps that are not compiled do
        optimizer.prepare(at * each, number)
        for number in numbers
        for at in (rate if isinstance(rate, float) else learning_rate_at(rate, number),)
        for each in multipliers
    ]
    for i, like in enumerate(first):
        rows = prepared[i :: len(first)]
        names = like.names if set(map(type, rows)) == {like.kinds[0]} else None
        is_alike = names is not None  # if all are floats again, which is looked at below
        if names is None:
            is_alike = len(set(map(type, rows))) == 1 and taken_apart(rows[0]).kinds == like.kinds
        found = [list(map(attrgetter(name), rows)) for name in names] if names else [rows]
        if not is_alike or any(set(map(type, each)) != {float} for each in found):
            taken = list(map(taken_apart, rows))
            for number, each in zip(numbers, taken, strict=True):
                if each.kinds != like.kinds:
                    raise ContextError(
                        f"prepare of {optimizer!r} gives another structure at iteration {number} "
                        "than at the first, which cannot be compiled."
                    )
            found = [list(column) for column in zip(*(each.numbers for each in taken), strict=True)]
        columns += found
    arrays = [np.array(column) for column in columns]
    require_32_bits(arrays, f"What prepare of {optimizer!r} gave")
    narrow = [each.astype(jax.dtypes.canonicalize_dtype(each.dtype)) for each in arrays]
    is_one_kind = len({each.dtype for each in narrow}) == 1
    return np.stack(narrow, axis=1) if is_one_kind else narrow  # one input costs less than many


def padded(columns: Columns, count: int) -> Columns:
    """Return columns of so many rows: no step reads those behind the last, which are like it."""

    def longer(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.empty((count, *column.shape[1:]), column.dtype)
        found[: len(column)] = column
        found[len(column) :] = column[-1:]
        return found

    return list(map(longer, columns)) if isinstance(columns, list) else longer(columns)


def require_nothing_finished(optimizer: Optimizer, prepared: object) -> None:
    """Check that an update writes values and slots only.

    Raises:
        ContextError: If `finish` gives values of other variables.
    """
    found = optimizer.finish(prepared)
    if found:
        names = ", ".join(repr(variable.name) for variable in found)
        raise ContextError(
            f"{optimizer!r} cannot be compiled: its `finish` writes {names} behind an update, "
            "which runs Python in each step. Keep what it writes in a slot, assign it in the step, "
            "or leave out `compile`."
        )


def require_nothing_finished_after(optimizer: Optimizer, iteration: int) -> None:
    """Check the same of the update before `iteration`; on the host."""
    rate = learning_rate_at(optimizer.settings.learning_rate, iteration - 1)
    require_nothing_finished(optimizer, optimizer.prepare(rate, iteration - 1))
