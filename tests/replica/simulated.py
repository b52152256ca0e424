"""Runs of a step on simulated devices: virtual time, a hang is a DeadlockError."""

from collections.abc import Awaitable, Callable
from typing import Any

import aioreplica as ar
import aioreplica.testing as art

Main = Callable[[], Awaitable[tuple[Any, ...]]]


def program(size: int, step: Callable[[], Any], **options: Any) -> Main:
    """Return a program that runs a step once on mirrored replicas, for `art.explore`."""

    async def main() -> tuple[Any, ...]:
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(size)]) as strategy:
            result = await strategy.run(step, options=ar.RunOptions(**options))
            return tuple(strategy.local_results(result))

    return main


def simulate(size: int, step: Callable[[], Any], **options: Any) -> tuple[Any, ...]:
    """Run a step once in asyncio's own order; return each replica's result."""
    results: tuple[Any, ...] = art.run(program(size, step, **options))
    return results
