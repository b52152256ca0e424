"""What a schedule chooses among: anything with a number that can take its next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

CALLBACKS = 0
"""Number of the queue of plain callbacks."""
CLOCK = 1
"""Number of the clock, which may move on while an op is in flight."""
FIRST_INDEX = 2
START_S = 1000.0
"""Where virtual time begins: not at 0, with which programs initialise what they compare to it."""


class Participant(Protocol):
    """A task, the queue of callbacks, a due timer, an op of a pool, or the clock.

    Attributes:
        index: Counts participants in the order of their making, so it is the same in every run
            that made the same choices.
    """

    index: int

    def fire(self) -> None:
        """Take the one step that waits."""


Choose = Callable[[list[Participant]], int]
"""Picks one of two or more options, given in the order in which asyncio would take them."""
