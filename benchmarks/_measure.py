"""Measuring side by side: contenders take turns, and each round yields one ratio.

A machine that others use too changes speed from second to second. Contenders that run directly
after one another see the same machine, so the ratio within a round is steady where the times are
not. The median over the rounds drops those in which something else woke up in between.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import final

Contender = Callable[[], Awaitable[float]]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What the rounds say about two contenders.

    Attributes:
        ours: Median of the first one's samples.
        floor: Median of the second one's samples.
        ratio: Median of the ratios of the rounds, which need not be the ratio of the medians.
        lowest: Smallest ratio of a round.
        highest: Largest ratio of a round.
        difference: Median of the differences of the rounds, ours minus the floor.
    """

    ours: float
    floor: float
    ratio: float
    lowest: float
    highest: float
    difference: float


async def take_turns(
    contenders: Mapping[str, Contender], *, num_rounds: int
) -> dict[str, list[float]]:
    """Sample every contender once per round (A B C A B C ...), after one round that is dropped.

    Garbage is collected before each sample, so that none pays for another; the collector
    stays on, as it is for users. What is there after the first round is left out of that: with
    the modules of large libraries, each collection would take a quarter of a second.

    Args:
        contenders: Each measures itself once when awaited and returns the sample, in any unit.
        num_rounds: Samples to take of each.

    Returns:
        The samples of each contender, in the order of the rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for round_id in range(num_rounds + 1):
            for name, contender in contenders.items():
                gc.collect()
                sample = await contender()
                if round_id > 0:  # the first round warms caches and starts threads
                    samples[name].append(sample)
            if round_id == 0:
                gc.freeze()
    finally:
        gc.unfreeze()
    return samples


def compare(ours: Sequence[float], floor: Sequence[float]) -> Comparison:
    """Compare the samples of two contenders, round by round.

    Raises:
        ValueError: If there are no rounds, or not equally many.

    Example:
        >>> compare([2.0, 6.0, 9.0], [1.0, 2.0, 2.0]).ratio
        3.0
    """
    if not ours or len(ours) != len(floor):
        raise ValueError(f"Need one sample of each per round, got {len(ours)} and {len(floor)}.")
    pairs = list(zip(ours, floor, strict=True))
    ratios = [mine / theirs for mine, theirs in pairs]
    difference = median(mine - theirs for mine, theirs in pairs)
    return Comparison(
        median(ours), median(floor), median(ratios), min(ratios), max(ratios), difference
    )


def timed(action: Callable[[], Awaitable[object]], *, num_units: int) -> Contender:
    """Return a contender that awaits `action` once and gives its microseconds per unit of work."""

    async def sample() -> float:
        start = perf_counter()
        await action()
        return (perf_counter() - start) / num_units * 1e6

    return sample
