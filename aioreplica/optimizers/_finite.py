"""What to do about gradients that are not finite, and finding where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import NonFiniteError
from ..values import IndexedSlices
from ._aggregate import Aggregation
from ._total import Total

OnNonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
CHOICES = ("raise", "skip", "ignore")


def checked_choice(value: Any) -> OnNonFinite:
    """Return what to do about gradients that are not finite.

    Raises:
        ValueError: If it is none of the choices.
    """
    if value not in CHOICES:
        raise ValueError(f"on_non_finite must be one of {', '.join(CHOICES)}, got {value!r}.")
    chosen: OnNonFinite = value
    return chosen


def non_finite_error(aggregation: Aggregation, totals: Sequence[Total]) -> NonFiniteError:
    """Say which replica's gradient of which variable is not finite, and where.

    Args:
        aggregation: What the replicas brought.
        totals: The sums, at least one of them not finite.
    """
    index = next(i for i, total in enumerate(totals) if not total.is_finite)
    variable = totals[index].variable
    replica_id: int | None = None
    where, number = _first(totals[index].unscaled) or ((), float("nan"))
    for member, row in zip(aggregation.members, aggregation.rows, strict=True):
        found = _first(row[index])
        if found is not None:
            replica_id, (where, number) = member, found
            break
    if replica_id is not None:
        who = f"replica {replica_id} brought {number}"
    elif _first(totals[index].summed) is not None:
        who = f"the sum over {len(aggregation.rows)} replicas overflows to {number}"
    else:
        who = f"divided by {totals[index].divisor:g} (weight, loss scale) it overflows to {number}"
    return NonFiniteError(
        f"The gradient of {variable.name!r} is not finite: {who} at index {where}. Nothing was "
        "updated. Look for a division by 0 or a learning rate that is too high, clip gradients, or "
        'pass on_non_finite="skip" to leave out such steps.',
        variable=variable.name,
        replica_id=replica_id,
        index=where,
    )


def _first(leaf: Any) -> tuple[tuple[int, ...], float] | None:
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
