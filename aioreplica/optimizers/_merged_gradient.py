"""The gradient of one variable, merged over the replicas: what to sum, to divide and to clip.

For elementwise rules the sum, the division by weights and loss scale, and clipping wait until the
rule reads the elements, so that none of them needs a pass or an array of its own. Elements are
checked when they are divided: dividing can overflow, too. NumPy's warnings are off meanwhile: a
step checks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any, final

import numpy as np

from ..collectives import (
    BufferPool,
    Dealt,
    Reducer,
    Turn,
    narrowed,
    reduce_across,
    reduce_leaves,
    reduces_to_itself,
    scatter_across,
    widen_halves,
)
from ..errors import NonFiniteError
from ..tree import Array, DType
from ..typing import ReduceOp
from ..values import Division, IndexedSlices, Variable, Weighted
from ._gradient import ScaledGradient, is_part

_ARRAYS = frozenset({np.ndarray})
_CHECKED_BY_DOT = 4096
"""Up to so many elements of a block are checked by the sum of their squares, which takes a third of
the time. Above, BLAS may wake threads for it, which pays for a whole array only."""

LARGEST = {np.dtype(kind): float(np.finfo(kind).max) for kind in ("float32", "float64")}

MEASURED = 32 * 1024
"""Elements whose squares are added up at a time. It is part of the result: partial sums depend on
where they are cut."""


@final
class MergedGradient:
    """The gradient of one variable over all replicas.

    Attributes:
        variable: Whose gradient it is.
        brought: The parts as the replicas brought them, without those of weight 0.
        members: Which replicas brought them.
        parts: What is to be summed, in this order: arrays of the variable's shape that lie in
            rows, or one IndexedSlices with unique ascending indices.
        divisor: What the sum is divided by: total weight, loss scale, number of replicas.
        scale: The loss scale it was computed with, None for none.
        factor: What it is multiplied with after that, to bring its norm down.
        limit: Its elements are brought down to this magnitude, None leaves them.
        is_finite: Whether all elements that were checked are finite.
        is_in_doubt: Whether what was computed from it may not be finite.
        dtype: That of its elements, and of what is computed from them.
        num_bytes: How much has to be read to know them all.
    """

    __slots__ = (
        "brought", "divisor", "dtype", "factor", "is_finite", "is_in_doubt", "limit", "members",
        "num_bytes", "parts", "scale", "variable",
    )  # fmt: skip

    def __init__(
        self,
        variable: Variable,
        brought: Sequence[Any],
        members: Sequence[int],
        divisor: float = 1.0,
        scale: float | None = None,
    ) -> None:
        self.variable = variable
        self.parts = self.brought = brought
        self.members = members
        self.divisor = divisor
        self.scale = scale
        self.factor = 1.0
        self.limit: float | None = None
        self.is_finite = True
        self.is_in_doubt = False
        first = brought[0]
        self.dtype: DType = first.dtype
        self.num_bytes: int = first.nbytes * len(brought)

    @property
    def is_sparse(self) -> bool:
        """True if it has some rows of the variable only."""
        return isinstance(self.parts[0], IndexedSlices)

    @property
    def needs_sum(self) -> bool:
        """True if its parts have to be summed before they are read."""
        for part in self.parts:
            if type(part) is not np.ndarray or part.dtype.char not in "fd":
                return True
            if part.ndim and not part.flags.c_contiguous:
                return True
        return False

    def sum_parts(self) -> None:
        """Replace the parts by their sum.

        Determinism:
            In ascending replica id: bitwise reproducible.
        """
        with np.errstate(all="ignore"):
            if len(self.parts) > 1:
                self.set_sum(reduce_leaves(ReduceOp.SUM, self.parts))
            else:
                self.set_sum(self.parts[0])

    def set_sum(self, whole: Any) -> None:
        """Take what the parts were summed to."""
        if isinstance(whole, IndexedSlices):
            whole = whole.combined()
        elif not whole.flags.c_contiguous:
            whole = np.ascontiguousarray(whole)
        self.parts = [whole]

    def summed(self) -> Any:
        """Return the sum as a whole: an array of the variable's shape, or IndexedSlices."""
        first, *others = self.parts
        if others:
            with np.errstate(all="ignore"):
                for other in others:
                    first = np.asarray(np.add(first, other))  # a scalar, if it has no axes
        return first

    def dense(self) -> Array:
        """Return the gradient as a read-only array of the variable's shape, checked."""
        whole = self.summed()
        if isinstance(whole, IndexedSlices):
            whole = whole.to_dense()
        with np.errstate(all="ignore"):
            is_ready = self.divisor == 1.0 and self.factor == 1.0 and self.limit is None
            result = self.finished(whole, whole if is_ready else np.empty_like(whole)).view()
        result.flags.writeable = False
        return result

    def whole(self) -> Any:
        """Return the gradient, checked: an array of its own kind, or IndexedSlices."""
        whole = self.summed()
        if not isinstance(whole, IndexedSlices):
            return self.dense()
        values = whole.values
        with np.errstate(all="ignore"):
            flat = self.finished(values.reshape(-1), np.empty(values.size, values.dtype))
        return IndexedSlices(flat.reshape(values.shape), whole.indices, whole.dense_shape)

    def finished(self, part: Array, out: Array, scratch: Array | None = None) -> Array:
        """Turn some elements of the sum into those of the gradient, checked, perhaps in `out`."""
        if self.divisor != 1.0:
            part = _divided(part, self.divisor, out)
        if (scratch is None or part.size <= _CHECKED_BY_DOT) and part.dtype.char in "fd":
            flat = part if part.ndim == 1 else part.reshape(-1)
            if not math.isfinite(flat.dot(flat)):  # or the squares are too large
                self.check(part)
        else:
            self.check(part, None if scratch is None else scratch.view(np.bool_)[: part.size])
        if self.limit is not None:
            part = np.clip(part, -self.limit, self.limit, out=out)
        if self.factor != 1.0:
            part = np.multiply(part, self.factor, out=out)
        return part

    def how(self, dtype: DType) -> tuple[float, ...]:
        """Say how `finished` works as `_kernels.gather` does it, which finds the same bits."""
        inverse, divisor = (1.0, self.divisor)
        if _is_power_of_two(divisor):
            inverse, divisor = 1.0 / divisor, 1.0
        limit = math.inf if self.limit is None else self.limit
        return inverse, divisor, self.factor, limit, LARGEST[dtype]

    def check(self, part: Array, mask: Array | None = None) -> None:
        """Look whether some elements are finite; `mask` is memory for that."""
        if not np.isfinite(part, out=mask).all():
            self.is_finite = False  # only ever set to False, so any thread may

    def squares(self) -> float:
        """Check all elements; return the sum of the squares of the gradient before clipping.

        Determinism:
            In parts of a fixed size, one after the other, whatever runs beside it.
        """
        total = 0.0
        for found in self.squares_of_parts():
            total += found
        return total

    def squares_of_parts(self) -> list[float]:
        """Check all elements; return the sums of the squares of `MEASURED` elements at a time."""
        rows = [part.values if isinstance(part, IndexedSlices) else part for part in self.parts]
        first, *others = [row.reshape(-1) for row in rows]
        sums = []
        scratch = np.empty(min(MEASURED, first.size), first.dtype)
        with np.errstate(all="ignore"):
            for begin in range(0, first.size, MEASURED):
                summed = part = first[begin : begin + MEASURED]
                out = scratch[: part.size]
                for other in others:
                    summed = np.add(summed, other[begin : begin + MEASURED], out=out)
                found = _sum_of_squares(_divided(summed, self.divisor, out), out)
                if found is None:
                    for other in others[:1]:
                        summed = np.add(part, other[begin : begin + MEASURED])
                    for other in others[1:]:
                        summed = np.add(summed, other[begin : begin + MEASURED])
                    self.check(_divided(summed, self.divisor, np.empty_like(summed)))
                    wide = summed.astype(np.float64) / self.divisor
                    found = float(np.add.reduce(wide * wide))
                sums.append(found)
        return sums

    def take_part(self, division: Division) -> None:
        """Go on with the elements that this worker updates, as a row."""
        of_part = is_part(self.parts[0], self.variable)
        self.parts = [
            part.reshape(-1) if of_part else division.part_of(part) for part in self.parts
        ]
        self.num_bytes = sum(part.nbytes for part in self.parts)

    def first_non_finite(self) -> tuple[int, float] | None:
        """Return the index and the number of the first element, of a row, that is not finite."""
        with np.errstate(all="ignore"):
            found = _first_non_finite(self._unscaled(self.summed()))
        return None if found is None else (found[0][0], found[1])

    def non_finite_error(self) -> NonFiniteError:
        """Say which replica's gradient is not finite, and where."""
        variable = self.variable
        summed = self.summed()
        replica_id: int | None = None
        where, number = _first_non_finite(self._unscaled(summed)) or ((), float("nan"))
        for member, part in zip(self.members, self.brought, strict=False):
            found = _first_non_finite(part)
            if found is not None:
                replica_id, (where, number) = member, found
                break
        if replica_id is not None:
            who = f"replica {replica_id} brought {number}"
        elif _first_non_finite(summed) is not None:
            who = f"the sum over {len(self.brought)} replicas overflows to {number}"
        else:
            who = f"divided by {self.divisor:g} (weight, loss scale) it overflows to {number}"
        return NonFiniteError(
            f"The gradient of {variable.name!r} is not finite: {who} at index {where}. Nothing was "
            "updated. Look for a division by 0 or a learning rate that is too high, clip "
            'gradients, or pass on_non_finite="skip" to leave out such steps.',
            variable=variable.name,
            replica_id=replica_id,
            index=where,
        )

    def _unscaled(self, summed: Any) -> object:
        rows = summed.values if isinstance(summed, IndexedSlices) else summed
        with np.errstate(all="ignore"):
            rows = _divided(rows, self.divisor, np.empty_like(rows))
        if isinstance(summed, IndexedSlices):
            return IndexedSlices(rows, summed.indices, summed.dense_shape)
        return rows

    def __repr__(self) -> str:
        kind = "sparse" if self.is_sparse else "dense"
        return (
            f"<MergedGradient of {self.variable.name} | {kind}, {len(self.parts)} parts, divided "
            f"by {self.divisor:g}>"
        )


@final
@dataclass(frozen=True, slots=True)
class Clipping:
    """Transformation that brings merged gradients down to a limit, when the rule reads them.

    Attributes:
        option: The option of `Optimizer` that asks for it.
        limit: Largest magnitude of an element, or largest norm.

    Source:
        The arguments of these names of tf.keras.optimizers.Optimizer, and their formulas.
    """

    option: str
    limit: float

    @property
    def needs_norms(self) -> bool:
        """True if norms have to be known before the first element is updated."""
        return self.option != "clipvalue"

    def __call__(self, gradients: Sequence[MergedGradient], squares: Sequence[float]) -> None:
        """Tell gradients where their elements stop, or what to multiply them with.

        Args:
            gradients: All of a step.
            squares: The sum of the squares of each, if norms are needed.
        """
        limit = self.limit
        if self.option == "clipvalue":
            for gradient in gradients:
                gradient.limit = limit
            return
        together = math.sqrt(math.fsum(squares))
        for gradient, square in zip(gradients, squares, strict=True):
            norm = math.sqrt(square) if self.option == "clipnorm" else together
            gradient.factor = limit / max(norm, limit)


def merge_gradients(
    variables: Sequence[Variable], columns: Sequence[Sequence[object]], *, is_mean: bool
) -> list[MergedGradient]:
    """Put the parts of all replicas together.

    Args:
        variables: Whose gradients they are.
        columns: The parts of each, one per replica in their order: arrays, IndexedSlices or
            ScaledGradients of one, or all of them `Weighted`. One part where there are several
            replicas is the total already.
        is_mean: Whether gradients without weights are averaged over the replicas.

    Raises:
        ValueError: If all weights of a gradient are 0.
        TypeError: If a gradient is sparse on one replica and dense on another.
    """
    everyone = range(len(columns[0]))
    merged = []
    for variable, column in zip(variables, columns, strict=True):
        if _ARRAYS.issuperset(map(type, column)):
            divisor = float(len(column)) if is_mean else 1.0
            merged.append(MergedGradient(variable, column, everyone, divisor))
        else:
            merged.append(_merge_one(variable, column, is_mean=is_mean))
    return merged


async def merge_over_workers(
    turn: Turn,
    reducer: Reducer,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[object]],
    *,
    is_mean: bool,
    divisions: Sequence[Division] | None = None,
    buffers: BufferPool | None = None,
) -> list[MergedGradient]:
    """Do what `merge_gradients` does, over the replicas of all workers.

    Args:
        turn: Of the collective.
        reducer: Sums what this worker's replicas have brought.
        variables: Whose gradients they are.
        columns: One part per replica of this worker.
        is_mean: Whether gradients without weights are averaged over the replicas.
        divisions: Which elements of each variable a worker gets the sums of; None gives all to all.
        buffers: Memory for sending those.

    Raises:
        ValueError: If all weights of a gradient are 0.
    """
    sums, weights, halves, are_lent = await _sum_here(reducer, columns)
    if divisions is None:
        found = await reduce_across(
            turn, ReduceOp.SUM, [*sums, *weights], halves=halves, are_lent=are_lent
        )
        totals, weights = found[: len(sums)], found[len(sums) :]
    else:
        pool = buffers or BufferPool()
        totals, weights = await _scatter(
            turn, sums, variables, divisions, weights, pool, are_lent=are_lent
        )
        for i, dtype in halves.items():
            totals[i] = narrowed(totals[i], dtype)
    left = iter(weights)
    parts = []
    for column, total in zip(columns, totals, strict=True):
        first = column[0]
        part: object = total
        scale = scale_of(first)
        if scale is not None:
            part = ScaledGradient(part, scale)
        if isinstance(first, Weighted):
            part = Weighted(part, next(left))
        parts.append([part])
    merged = merge_gradients(variables, parts, is_mean=False)
    if is_mean:
        count = turn.num_workers * turn.num_local_replicas
        for gradient, column in zip(merged, columns, strict=True):
            if not isinstance(column[0], Weighted):
                gradient.divisor *= count
    return merged


async def _scatter(
    turn: Turn,
    sums: Sequence[object],
    variables: Sequence[Variable],
    divisions: Sequence[Division],
    weights: list[float],
    pool: BufferPool,
    *,
    are_lent: bool,
) -> tuple[list[Any], list[float]]:
    """Sum over workers so that each gets its elements, flat; what is of its part is that already.

    Weights are summed with them.
    """
    wholes = [not is_part(*pair) for pair in zip(sums, variables, strict=True)]
    flat = [np.asarray(each).reshape(-1) for each in compress(sums, wholes)]
    ranges = [division.ranges for division in compress(divisions, wholes)]
    forms = [(each.dtype, cuts) for each, cuts in zip(flat, ranges, strict=True)]
    dealt = Dealt(forms, turn.rank)
    packed = await dealt.packed(flat, pool, are_lent=are_lent)
    found, weights = await scatter_across(turn, dealt, packed, weights)
    scattered = iter(found)
    totals = [
        next(scattered) if is_whole else np.array(each).reshape(-1)  # which may be lent
        for each, is_whole in zip(sums, wholes, strict=True)
    ]
    return totals, weights


async def _sum_here(
    reducer: Reducer, columns: Sequence[Sequence[Any]]
) -> tuple[Sequence[object], list[float], Mapping[int, object], bool]:
    """Sum parts without weight 0 over this worker's replicas, and the weights.

    Half precision is summed to float32; which sums that is comes with them. A single replica's
    are taken as they are, which the last of the results tells.
    """
    weights = [
        float(sum(part.weight for part in column))
        for column in columns
        if isinstance(column[0], Weighted)
    ]
    rows = [[summand_of(part) for part in row] for row in zip(*columns, strict=True)]
    if len(rows) == 1 and all(map(reduces_to_itself, rows[0], repeat(ReduceOp.SUM))):
        return rows[0], weights, {}, True
    wide, halves = widen_halves(ReduceOp.SUM, rows)
    with np.errstate(all="ignore"):
        done = reducer.reduce(ReduceOp.SUM, wide, None, None, None)
        return (done if isinstance(done, list) else await done), weights, halves, False


def summand_of(part: object) -> Any:
    """Return what is summed: an array or IndexedSlices; nothing of what has no weight."""
    total = part.total if isinstance(part, Weighted) else part
    if isinstance(total, ScaledGradient):
        total = total.values
    if not isinstance(part, Weighted) or part.weight:
        return total
    if isinstance(total, IndexedSlices):  # what has no weight may hold anything
        return IndexedSlices(total.values[:0], total.indices[:0], total.dense_shape)
    return np.zeros_like(total)


def scale_of(part: object) -> float | None:
    total = part.total if isinstance(part, Weighted) else part
    return total.scale if isinstance(total, ScaledGradient) else None


def _merge_one(variable: Variable, column: Sequence[Any], *, is_mean: bool) -> MergedGradient:
    members: Sequence[int] = range(len(column))
    divisor = float(len(column)) if is_mean else 1.0
    weights: list[float] | None = None
    if type(column[0]) is Weighted:
        weights = [part.weight for part in column]
        column = [part.total for part in column]
        divisor = sum(weights)
        if divisor == 0:
            raise ValueError(
                f"The gradient of {variable.name!r} has total weight 0: the replicas brought "
                f"weights {weights}, so there is no mean over any example. Leave out steps whose "
                "global batch is empty."
            )
    scale: float | None = None
    scaled = [part for part in column if type(part) is ScaledGradient]
    if scaled:
        scale = scaled[0].scale
        divisor *= scale
        with np.errstate(
            all="ignore"
        ):  # another run may have changed the scale while this one was on
            column = [_values_at(part, scale) for part in column]
    if not _ARRAYS.issuperset(map(type, column)):
        _require_one_kind(variable, column)
    if weights is not None and not all(weights):  # what has no weight may hold anything
        members = [i for i in members if weights[i]]
        column = [column[i] for i in members]
    return MergedGradient(variable, column, members, divisor, scale)


def _values_at(part: Any, scale: float) -> object:
    if type(part) is ScaledGradient:
        return part.at_scale(scale).values
    return part * scale


def _require_one_kind(variable: Variable, column: Sequence[object]) -> None:
    ids: dict[bool, list[int]] = {True: [], False: []}
    for replica_id, part in enumerate(column):
        ids[type(part) is IndexedSlices].append(replica_id)
    if ids[True] and ids[False]:
        raise TypeError(
            f"The gradient of {variable.name!r} is an IndexedSlices on replicas {ids[True]} and an "
            f"array on replicas {ids[False]}. Bring one kind everywhere; `.to_dense()` makes an "
            "array of the first."
        )


def _divided(part: Array, divisor: float, out: Array) -> Array:
    """Divide; by a power of two with a multiplication, which is faster and has the same bits."""
    if _is_power_of_two(divisor):
        return np.multiply(part, 1.0 / divisor, out=out)
    return np.divide(part, divisor, out=out)


def _is_power_of_two(divisor: float) -> bool:
    return math.frexp(divisor)[0] == 0.5 and 2.0**-100 < divisor < 2.0**100


def _sum_of_squares(part: Array, out: Array) -> float | None:
    """Square elements and add them up; None if that left the range of their dtype."""
    found = float(np.add.reduce(np.multiply(part, part, out=out)))
    return found if math.isfinite(found) and found > 1e-30 else None


def _first_non_finite(leaf: Any) -> tuple[tuple[int, ...], float] | None:
    """Return the index and the number of the first element that is not finite."""
    values = leaf.values if isinstance(leaf, IndexedSlices) else leaf
    is_finite = np.isfinite(values)
    if is_finite.all():
        return None
    where = tuple(map(int, np.unravel_index(int(np.argmin(is_finite)), values.shape)))
    number = float(values[where])
    if isinstance(leaf, IndexedSlices):
        where = (int(leaf.indices[where[0]]), *where[1:])
    return where, number
