"""Bugs of a given depth: programs that fail if some events of their tasks come in one order."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

STEPS = 6
"""How often every task waits."""
DEPTHS = (1, 2, 3, 4, 5)
TASKS = (2, 3, 5, 8)

Event = tuple[int, int]
"""A task, and how often it has waited."""


def planted_bug(depth: int, tasks: int, seed: int) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a program that fails under an order of `depth` + 1 events, and not in asyncio's own.

    Args:
        depth: How many constraints the order has to meet: each event comes before the next one,
            which is of another task.
        tasks: How many tasks there are.
        seed: Draws the events.
    """
    rng = random.Random(f"{depth} {tasks} {seed}")
    order: list[Event] = []
    while not _is_hard(order):
        order = [(rng.randrange(tasks), rng.randrange(STEPS)) for _ in range(depth + 1)]

    async def main() -> None:
        seen: list[Event] = []

        async def work(task: int) -> None:
            for step in range(STEPS):
                await asyncio.sleep(0)
                if (task, step) in order:
                    seen.append((task, step))

        await asyncio.gather(*map(work, range(tasks)))
        assert seen != order

    return main


def _is_hard(order: list[Event]) -> bool:
    """Tell whether an order is possible, and takes a schedule other than asyncio's own."""
    in_task = all(one[1] < other[1] for one in order for other in order[order.index(one) + 1 :]
                  if one[0] == other[0])  # fmt: skip
    is_own = all((one[1], one[0]) < (other[1], other[0]) for one, other in pairwise(order))
    return in_task and not is_own and all(one[0] != other[0] for one, other in pairwise(order))
