"""When a program counts as endless: a number of steps; and help for those that wait for time."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ._loop import SimLoop

MAX_STEPS = 100_000
SPIN_STEPS = 10_000


@final
class Budget:
    """Decides when a run has taken too many steps.

    Virtual time stands still while anything can run, so a program that spins until some time has
    passed would spin for ever. After `SPIN_STEPS` steps at one instant the clock moves on, to the
    next timer or by a doubling number of seconds.

    Args:
        max_steps: Steps after which a run is endless.
    """

    __slots__ = ("_jump_s", "_last_now", "max_steps")

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.max_steps = max_steps
        self._last_now = 0.0
        self._jump_s = 1.0

    @property
    def first_check(self) -> int:
        """Number of steps at which to ask first."""
        return min(SPIN_STEPS, self.max_steps)

    def check(self, loop: SimLoop) -> int:
        """Return the number of steps at which to ask again; 0 when the run is endless."""
        steps = len(loop.order)
        if steps >= self.max_steps:
            return 0
        if loop.now == self._last_now:
            when = loop.next_when()
            if when is None:
                when = loop.now + self._jump_s
                self._jump_s *= 2
            loop.jump(when)
        self._last_now = loop.now
        return min(steps + SPIN_STEPS, self.max_steps)
