"""Shrinking: from a schedule that fails to the few constraints that make it fail.

The failing schedule is told as asyncio's own order under a set of holds. Single holds are tried
first, the longest before the others; then delta debugging removes whatever is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from ._holds import Hold, holds_of, stronger
from ._story import Story

MAX_RUNS: Final = 200
SINGLES: Final = 60

Fails = Callable[[Sequence[Hold]], bool]
"""Runs asyncio's order under holds; tells whether it fails in the same way."""


@final
@dataclass(frozen=True, slots=True)
class Shrunk:
    """What shrinking found.

    Attributes:
        holds: The constraints; empty if the program fails without any, or if none are certain.
        num_runs: How many schedules were run.
        is_certain: Whether these constraints were seen to fail.
    """

    holds: tuple[Hold, ...]
    num_runs: int
    is_certain: bool


@final
class _Trial:
    """Runs sets of holds, each once, within a number of runs."""

    def __init__(self, fails: Fails, max_runs: int) -> None:
        self._fails = fails
        self._seen: dict[frozenset[Hold], bool] = {}
        self._max_runs = max_runs
        self.num_runs = 0

    @property
    def is_spent(self) -> bool:
        return self.num_runs >= self._max_runs

    def __call__(self, holds: Sequence[Hold]) -> bool:
        key = frozenset(holds)
        known = self._seen.get(key)
        if known is None:
            if self.is_spent:
                return False
            self.num_runs += 1
            known = self._seen[key] = self._fails(holds)
        return known


def shrink(story: Story, fails: Fails, max_runs: int = MAX_RUNS) -> Shrunk:
    """Find few constraints under which a program fails as it did.

    Args:
        story: That of the failing schedule.
        fails: Runs the program under constraints.
        max_runs: How often it may be run.
    """
    trial = _Trial(fails, max_runs)
    if trial(()):
        return Shrunk((), trial.num_runs, is_certain=True)
    holds = holds_of(story.steps, story.pending)
    for hold in holds[:SINGLES]:
        if trial((hold,)):
            return Shrunk((_loosen(hold, trial),), trial.num_runs, is_certain=True)
    if not trial(holds):
        return Shrunk((), trial.num_runs, is_certain=False)
    kept = _minimise(holds, trial)
    if len(kept) > 1:
        for hold in stronger(kept, story.steps):
            if trial((hold,)):
                return Shrunk((_loosen(hold, trial),), trial.num_runs, is_certain=True)
    return Shrunk(tuple(kept), trial.num_runs, is_certain=True)


def _minimise(holds: list[Hold], trial: _Trial) -> list[Hold]:
    """Remove holds while the rest still fails.

    Source:
        Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 2002.
    """
    parts = 2
    while len(holds) >= 2 and not trial.is_spent:
        size = max(1, len(holds) // parts)
        chunks = [holds[i : i + size] for i in range(0, len(holds), size)]
        for chunk in chunks:
            rest = [hold for hold in holds if hold not in chunk]
            if len(chunk) < len(holds) and trial(chunk):
                holds, parts = chunk, 2
                break
            if rest and trial(rest):
                holds, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(holds), parts * 2)
    return holds


def _loosen(hold: Hold, trial: _Trial) -> Hold:
    """Hold no longer than needed: find the earliest step of the other that suffices."""
    low, high = 0, hold.until_nth
    while low < high:
        middle = (low + high) // 2
        looser = Hold(hold.key, hold.nth, hold.until_key, middle)
        if trial((looser,)):
            high = middle
        else:
            low = middle + 1
    return Hold(hold.key, hold.nth, hold.until_key, high)
