"""Shrinking: from a schedule that fails to the few constraints that make it fail.

The failing schedule is described as asyncio's own order under a set of holds. Single holds are
tried first, the longest before the others; then delta debugging removes what is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from ._participants import Participant, fifo
from ._schedule import Hold, Key
from ._trace import CALLBACKS_KEY, CLOCK_KEY, Keys, Step, Trace

MAX_RUNS: Final = 200
SINGLES: Final = 60

Fails = Callable[[Sequence[Hold]], bool]
"""Runs asyncio's order under holds; returns whether it fails in the same way."""


@final
class _Trial:
    """Runs sets of holds, each once, within a number of runs."""

    def __init__(self, fails: Fails, max_runs: int) -> None:
        self._fails = fails
        self._seen: dict[frozenset[Hold], bool] = {}
        self._max_runs = max_runs
        self.num_runs = 0

    @property
    def is_spent(self) -> bool:
        return self.num_runs >= self._max_runs

    def __call__(self, holds: Sequence[Hold]) -> bool:
        key = frozenset(holds)
        known = self._seen.get(key)
        if known is None:
            if self.is_spent:
                return False
            self.num_runs += 1
            known = self._seen[key] = self._fails(holds)
        return known


def shrink(
    trace: Trace, fails: Fails, max_runs: int = MAX_RUNS
) -> tuple[tuple[Hold, ...] | None, int]:
    """Find few constraints under which a program fails as it did.

    Args:
        trace: That of the failing schedule.
        fails: Runs the program under constraints.
        max_runs: How often it may be run.

    Returns:
        The constraints, none if the program fails without any, None if none were seen to fail; and
        how many schedules were run.
    """
    trial = _Trial(fails, max_runs)
    if trial(()):
        return (), trial.num_runs
    holds = holds_of(trace.steps, trace.pending)
    for hold in holds[:SINGLES]:
        if trial((hold,)):
            return (_loosen(hold, trial),), trial.num_runs
    if not trial(holds):
        return None, trial.num_runs
    kept = _minimise(holds, trial)
    if len(kept) > 1:
        for hold in stronger(kept, trace.steps):
            if trial((hold,)):
                return (_loosen(hold, trial),), trial.num_runs
    return tuple(kept), trial.num_runs


def _minimise(holds: list[Hold], trial: _Trial) -> list[Hold]:
    """Remove holds while the rest still fails.

    Source:
        Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 2002.
    """
    parts = 2
    while len(holds) >= 2 and not trial.is_spent:
        size = max(1, len(holds) // parts)
        chunks = [holds[i : i + size] for i in range(0, len(holds), size)]
        for chunk in chunks:
            rest = [hold for hold in holds if hold not in chunk]
            if len(chunk) < len(holds) and trial(chunk):
                holds, parts = chunk, 2
                break
            if rest and trial(rest):
                holds, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(holds), parts * 2)
    return holds


def _loosen(hold: Hold, trial: _Trial) -> Hold:
    """Hold no longer than needed: find the earliest step of the other that suffices."""
    low, high = 0, hold.until_nth
    while low < high:
        middle = (low + high) // 2
        looser = Hold(hold.key, hold.nth, hold.until_key, middle)
        if trial((looser,)):
            high = middle
        else:
            low = middle + 1
    return Hold(hold.key, hold.nth, hold.until_key, high)


WINDOW: Final = 2_000  # steps between a hold and its end


@final
class HoldChooser:
    """Chooses as asyncio would, but for what is held.

    A held participant goes nevertheless if no other can.

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
    """Return constraints that make asyncio's own order into the order of a trace.

    A participant that was overtaken by steps that became possible later was held, until the last of
    them. The longest holds come first.

    Args:
        steps: The steps of the trace.
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
        steps: The trace of a schedule under them.
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
