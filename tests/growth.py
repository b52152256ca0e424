"""Counting what a scenario leaves behind if it is repeated: descriptors, memory, tasks, objects."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

Scenario = Callable[[int], Awaitable[object]]

WARM_UP = 3
TIMES = 50
SETTLE_S = 30.0


async def assert_nothing_grows(scenario: Scenario, folder: Path, *, times: int = TIMES) -> None:
    """Repeat a scenario, and fail if it leaves something behind each time.

    Args:
        scenario: Called with the number of the repetition.
        folder: Where it makes its files.
        times: How often it is repeated, after a few calls that fill caches.
    """
    for number in range(WARM_UP):
        await scenario(number)
    before = await settled(folder)
    for number in range(WARM_UP, WARM_UP + times):
        await scenario(number)
    deadline = monotonic() + SETTLE_S
    while grown := await settled(folder) - before:
        if all(name not in EXACT and count < times // 2 for name, count in grown.items()):
            return  # a pool or a cache has filled
        if monotonic() > deadline:
            raise AssertionError(f"{times} repetitions leave behind: {dict(grown)}")
        await asyncio.sleep(0.005)  # threads end some time after they were told to


EXACT = {"descriptors", "bytes of shared memory", "timers", "tasks", "files"}


async def settled(folder: Path) -> Counter[str]:
    """Count what there is, once callbacks that are due have run and garbage is collected."""
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    return counted(folder)


def counted(folder: Path) -> Counter[str]:
    """Count what a process holds; with each type of the library, how many objects of it live."""
    descriptors = [*map(link_of, Path("/proc/self/fd").iterdir())]
    memory = [found for found in descriptors if found[0].startswith("/memfd:aioreplica")]
    loop = asyncio.get_running_loop()
    timers = [timer for timer in getattr(loop, "_scheduled", ()) if not timer.cancelled()]
    found = Counter({
        "descriptors": len(descriptors),
        "bytes of shared memory": sum(size for _, size in memory),
        "timers": len(timers),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": sum(1 for _ in folder.rglob("*")),
    })  # fmt: skip
    for thing in gc.get_objects():
        kind = type(thing)
        if str(kind.__module__).startswith("aioreplica"):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


def link_of(descriptor: Path) -> tuple[str, int]:
    """Return what a descriptor stands for, and its size; nothing if it is closed meanwhile."""
    try:
        return str(descriptor.readlink()), descriptor.stat().st_size
    except OSError:
        return "", 0
