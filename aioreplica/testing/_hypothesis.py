"""Schedules as a Hypothesis strategy: Hypothesis chooses and shrinks, this kit only runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._schedule import CHOICES, Schedule

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MAX_RANK = 7


def schedules(*, max_decisions: int = 100) -> SearchStrategy[Schedule]:
    """Return a Hypothesis strategy of schedules for `art.run(main, schedule=...)`.

    A drawn schedule says which of the options goes at each of the first decisions; afterwards, and
    in the simplest schedule, no task is preempted. Hypothesis shrinks a failing one; the kit's own
    shrinking stays out of it.

    Args:
        max_decisions: How many decisions to draw at most.

    Raises:
        ValueError: If `max_decisions` is below 1.

    Example:
        >>> from hypothesis import given, settings
        >>> import asyncio, aioreplica.testing as art
        >>> @settings(max_examples=5, database=None)
        ... @given(schedule=art.schedules())
        ... def test(schedule):
        ...     art.run(lambda: asyncio.sleep(1), schedule=schedule)
        >>> test()
    """
    from hypothesis import strategies

    if max_decisions < 1:
        raise ValueError(f"max_decisions must be at least 1, got {max_decisions}.")
    ranks = strategies.lists(strategies.integers(0, MAX_RANK), max_size=max_decisions)
    return ranks.map(_schedule)


def _schedule(ranks: list[int]) -> Schedule:
    choices = tuple((decision, rank) for decision, rank in enumerate(ranks) if rank)
    return Schedule(CHOICES, choices=choices)
