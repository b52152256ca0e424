"""One cancellation of the main task, after a given step."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ._participant import Participant

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._task import SimTask


@final
class Canceller:
    """Observes a run and cancels its main task once.

    Args:
        step: After how many steps; 0 cancels a main task that has not begun.

    Attributes:
        has_struck: Whether the main task was cancelled before it ended.
    """

    __slots__ = ("_loop", "_main", "_num_steps", "_step", "has_struck")

    def __init__(self, step: int) -> None:
        self._step = step
        self._num_steps = 0
        self.has_struck = False
        self._main: SimTask | None = None

    def begin(self, loop: SimLoop, main: SimTask) -> None:
        """Meet the loop before the first step."""
        self._main = main
        self._strike_if_due()

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Learn who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Count the step."""
        self._num_steps += 1
        self._strike_if_due()

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def _strike_if_due(self) -> None:
        main = self._main
        if self._num_steps == self._step and main is not None and not main.done():
            self.has_struck = main.cancel("art.cancel_everywhere")
