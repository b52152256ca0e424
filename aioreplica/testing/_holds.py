"""Constraints on a schedule: who is held where, until whom has got how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from ._keys import CALLBACKS_KEY, CLOCK_KEY, Key, Keys
from ._strategies import fifo

if TYPE_CHECKING:
    from ._participant import Participant
    from ._story import Step


WINDOW: Final = 2_000  # steps between a hold and its end


@final
@dataclass(frozen=True, slots=True)
class Hold:
    """One participant is held before one of its steps until another has taken one of its.

    Attributes:
        key: Who is held.
        nth: Before which of its steps, from 0.
        until_key: Who has to go first.
        until_nth: Which of its steps has to be taken, from 0.
    """

    key: Key
    nth: int
    until_key: Key
    until_nth: int


@final
class HoldChooser:
    """Chooses as asyncio would, but for what is held.

    A held participant goes nevertheless when nobody else can.

    Args:
        holds: The constraints.
        keys: Observes the same run.
    """

    __slots__ = ("_holds", "_keys")

    def __init__(self, holds: Sequence[Hold], keys: Keys) -> None:
        self._holds: dict[tuple[Key, int], list[Hold]] = {}
        for hold in holds:
            self._holds.setdefault((hold.key, hold.nth), []).append(hold)
        self._keys = keys

    def __call__(self, options: list[Participant]) -> int:
        free = [i for i, option in enumerate(options) if not self._is_held(option)]
        if not free or len(free) == len(options):
            return fifo(options)
        return free[fifo([options[i] for i in free])]

    def _is_held(self, option: Participant) -> bool:
        key = self._keys.key_of(option)
        counts = self._keys.num_steps
        return any(
            counts.get(hold.until_key, 0) <= hold.until_nth
            for hold in self._holds.get((key, counts.get(key, 0)), ())
        )


def holds_of(steps: Sequence[Step], pending: Sequence[Step]) -> list[Hold]:
    """Return constraints that make asyncio's own order into the order of a story.

    Whoever was overtaken by steps that became possible later was held, until the last of them.
    The longest holds come first.

    Args:
        steps: The steps of the story.
        pending: What had not been taken when it ended.
    """
    found: list[tuple[int, Hold]] = []
    for at, step in [*enumerate(steps), *((len(steps), step) for step in pending)]:
        overtakers = [
            other
            for other in steps[max(0, at - WINDOW) : at]
            if other.since > step.since and other.key != step.key
        ]
        last = _last_task(overtakers, steps)
        num_overtakers = len(overtakers)
        if last is not None:
            found.append((num_overtakers, Hold(step.key, step.nth, last.key, last.nth)))
    found.sort(key=lambda pair: -pair[0])
    return [hold for _, hold in found]


def _last_task(overtakers: Sequence[Step], steps: Sequence[Step]) -> Step | None:
    """Return the last overtaker, rather a task or an op than the step that fails."""
    for step in reversed(overtakers):
        if step.key not in (CALLBACKS_KEY, CLOCK_KEY) and step is not steps[-1]:
            return step
    return overtakers[-1] if overtakers else None


def stronger(holds: Sequence[Hold], steps: Sequence[Step]) -> list[Hold]:
    """Return single constraints that may do what several do: the same holds, but longer ones."""
    last: dict[Key, int] = {}
    for step in steps:
        last[step.key] = step.nth
    return [
        Hold(hold.key, hold.nth, key, nth)
        for hold in holds
        for key, nth in last.items()
        if key != hold.key
    ]


def describe(
    holds: Sequence[Hold], steps: Sequence[Step], known: Sequence[Step]
) -> tuple[str, ...]:
    """Put constraints into words.

    Args:
        holds: The constraints.
        steps: The story of a schedule under them.
        known: Steps of other stories, for the names of what took no step in this one.
    """
    everything = [*steps, *known]
    by_step = {(step.key, step.nth): step for step in reversed(everything)}
    end = steps[-1] if steps else None
    lines = []
    for hold in holds:
        held = by_step.get((hold.key, hold.nth))
        other = by_step.get((hold.until_key, hold.until_nth))
        who = held.who if held is not None else _name(hold.key, everything)
        where = _where(hold, held, everything)
        if other is not None and other is end:
            until = "to the end"
        elif other is not None:
            until = f"until {other.who} {_progress(other)}"
        else:
            name = _name(hold.until_key, everything)
            until = f"until {name} has taken step {hold.until_nth + 1}"
        lines.append(f"{who} is held at {where} {until}")
    return tuple(lines)


def _where(hold: Hold, held: Step | None, steps: Sequence[Step]) -> str:
    """Say at which of its steps a participant is held."""
    if held is None:
        return f"step {hold.nth + 1}"
    own = {each.nth for each in steps if each.key == hold.key and each.at == held.at}
    return held.at if len(own) == 1 else f"{held.at} (step {hold.nth + 1})"


def _progress(step: Step) -> str:
    """Say what a step has brought about."""
    reached = step.reached
    if reached.startswith("its end"):
        return f"has come to {reached}"
    if step.did == reached:  # no task: what it does, not where it stands
        return reached
    if reached == step.at:
        return f"has taken step {step.nth + 1} at {reached}"
    return f"enters {reached}"


def _name(key: Key, steps: Sequence[Step]) -> str:
    return next((step.who for step in steps if step.key == key), "a task")
