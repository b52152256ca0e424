"""One line of a benchmark's result: ours, the floor, their ratio, and what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from ._measure import compare


@final
@dataclass(frozen=True, slots=True)
class Target:
    """An upper limit: on the ratio to the floor, on our own value, or on their difference.

    Attributes:
        of: Which of them is limited.
        limit: The largest number that passes.
    """

    of: Literal["ratio", "ours", "difference"]
    limit: float


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, measured on one event loop with one number of replicas.

    Attributes:
        name: What was measured.
        loop: Name of the event loop.
        num_replicas: How many replicas took part.
        unit: Unit of `ours` and `floor`.
        ours: What the library needs, median of the rounds.
        against: What it is compared with.
        floor: What that needs, median of the rounds.
        ratio: Median of the rounds' ratios of ours to the floor.
        lowest: Smallest ratio of a round.
        highest: Largest ratio of a round.
        difference: Median of the rounds' differences of ours and the floor.
        num_rounds: How many rounds there were.
        target: What was promised, or None where nothing was.
    """

    name: str
    loop: str
    num_replicas: int
    unit: str
    ours: float
    against: str
    floor: float
    ratio: float
    lowest: float
    highest: float
    difference: float
    num_rounds: int
    target: Target | None

    @property
    def is_met(self) -> bool | None:
        """Whether the target was met; None without one."""
        if self.target is None:
            return None
        limited: float = getattr(self, self.target.of)
        return limited <= self.target.limit

    def as_json(self) -> dict[str, Any]:  # Any: what the json module takes
        """Return the fields, and whether the target was met."""
        return {**asdict(self), "is_met": self.is_met}


def compared_row(
    name: str,
    loop: str,
    num_replicas: int,
    unit: str,
    *,
    ours: Sequence[float],
    against: str,
    floor: Sequence[float],
    target: Target | None = None,
) -> Row:
    """Make the row of two contenders' samples."""
    result = compare(ours, floor)
    return Row(
        name, loop, num_replicas, unit, result.ours, against, result.floor,
        result.ratio, result.lowest, result.highest, result.difference, len(ours), target,
    )  # fmt: skip
