"""Keys of participants: the same participant has the same key in other schedules too.

Numbers are given in the order of making, and two schedules of one program may make the same tasks
in different orders. A key says who made the participant, who made that one, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ._participant import CALLBACKS, CLOCK, FIRST_INDEX, Participant

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._task import SimTask

Key = tuple[int, ...]
CALLBACKS_KEY: Key = (CALLBACKS,)
CLOCK_KEY: Key = (CLOCK,)
MAIN_KEY: Key = (FIRST_INDEX,)


@final
class Keys:
    """Gives keys, and counts the steps of each participant; an observer of a run.

    Attributes:
        by_number: The key of each participant so far, by its number.
        num_steps: How many steps each has taken, by key.
    """

    __slots__ = ("_loop", "_made", "by_number", "num_steps")

    def __init__(self) -> None:
        self.by_number: list[Key] = [CALLBACKS_KEY, CLOCK_KEY]
        self.num_steps: dict[Key, int] = {}
        self._made: dict[Key, int] = {}
        self._loop: SimLoop = None  # type: ignore[assignment]  # set by begin

    def begin(self, loop: SimLoop, main: SimTask) -> None:
        """Meet the loop before the first step."""
        self._loop = loop
        self.by_number.append(MAIN_KEY)

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Learn who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Give keys to what the step has made."""
        keys = self.by_number
        maker = keys[chosen.index]
        self.num_steps[maker] = self.num_steps.get(maker, 0) + 1
        for _ in range(len(keys), self._loop.num_indices):
            count = self._made.get(maker, 0)
            self._made[maker] = count + 1
            keys.append((*maker, count))

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is left to do."""

    def key_of(self, participant: Any) -> Key:
        """Return the key of a participant."""
        index: int = participant.index
        return self.by_number[index]
