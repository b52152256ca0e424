"""Virtual time for code that reads the clock through the `time` module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ._sandbox import Sandbox

EPOCH_S: Final = 1_700_000_000.0 - 1000.0
"""What `time.time()` shows when virtual time is 0."""


def clock_functions(sandbox: Sandbox, real: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return stand-ins for the functions of `time`; other threads go on seeing the real ones.

    Inside a simulated op time goes on by what the op has slept so far.
    """
    here = sandbox.is_here

    def elapsed() -> float:
        loop = sandbox.loop
        return float(loop.now + loop.pools.slept_s)

    def monotonic() -> float:
        return elapsed() if here() else real["monotonic"]()

    def perf_counter() -> float:
        return elapsed() if here() else real["perf_counter"]()

    def time() -> float:
        return EPOCH_S + elapsed() if here() else real["time"]()

    def monotonic_ns() -> int:
        return round(elapsed() * 1e9) if here() else real["monotonic_ns"]()

    def perf_counter_ns() -> int:
        return round(elapsed() * 1e9) if here() else real["perf_counter_ns"]()

    def time_ns() -> int:
        return round((EPOCH_S + elapsed()) * 1e9) if here() else real["time_ns"]()

    def sleep(seconds: float) -> None:
        if not here():
            real["sleep"](seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        loop = sandbox.loop
        op = loop.pools.current_op
        if op is not None:
            loop.pools.sleep(op, seconds)
        else:  # the program keeps the loop from everything else for that long
            loop.jump(loop.now + seconds)

    return {
        "time": time,
        "time_ns": time_ns,
        "monotonic": monotonic,
        "monotonic_ns": monotonic_ns,
        "perf_counter": perf_counter,
        "perf_counter_ns": perf_counter_ns,
        "sleep": sleep,
    }
