"""The event loops that benchmarks run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

LOOP_NAMES = ("asyncio", "uvloop")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def find_loop_factory(name: str) -> LoopFactory | None:
    """Return what makes a loop of this name, or None if it is not installed."""
    if name == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        return None
    factory: LoopFactory = uvloop.new_event_loop
    return factory


def open_runners(names: Sequence[str]) -> Iterator[tuple[str, asyncio.Runner]]:
    """Yield a runner on each loop, open until the next one is asked for.

    Says which loop is measured, and which one is not installed.
    """
    for name in names:
        factory = find_loop_factory(name)
        if factory is None:
            print(f"{name}: skipped, not installed.")
            continue
        print(f"{name}: measuring.", flush=True)
        with asyncio.Runner(loop_factory=factory) as runner:
            yield name, runner
