"""One schedule, described by a few numbers, enough to run it again; and a strategy of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, final

from ._participants import CLOCK, Choose, KitStep, Participant, fifo
from ._strategies import FIFO, MAKERS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from ._faults import Faults

FIDELITIES: Final = ("asyncio", "reorder", "adversarial")
SPIN: Final = 64
"""After so many decisions in a row for one task, another one goes."""
CHOICES: Final = 30
CANCELLED: Final = 29
HELD: Final = 28
"""Makers that are not strategies: explicit choices; asyncio's order, cancelled once or held."""


Key = tuple[int, ...]
"""Who a participant is, in every schedule of a program; see `Keys`."""


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
@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions that determine one run.

    Attributes:
        maker: Number of the strategy, `CHOICES`, `CANCELLED` or `HELD`.
        seed: Seeds the strategy, the faults, and `random` inside the program.
        length: How many decisions the strategy expects.
        fidelity: What may vary.
        choices: For `CHOICES`, what is not the default: pairs of decision and option.
        cancel_step: For `CANCELLED`, after which step a task is cancelled.
        cancel_task: For `CANCELLED`, which task, in the order of their making; 0 is the main one.
        order: For `CANCELLED`, the number of the strategy that orders the steps.
        holds: For `HELD`, the constraints.
        faults: What may go wrong, or None.
        own_uuids: Whether each run of it has uuids of its own; else the seed decides them.
        max_steps: When to call a run of it endless; None for the usual number.
    """

    maker: int = FIFO
    seed: int = 0
    length: int = 0
    fidelity: str = "reorder"
    choices: tuple[tuple[int, int], ...] = ()
    cancel_step: int = 0
    cancel_task: int = 0
    order: int = FIFO
    holds: tuple[Hold, ...] = ()
    faults: Faults | None = None
    own_uuids: bool = False
    max_steps: int | None = None

    def chooser(self) -> Choose:
        """Return a fresh function that chooses."""
        if self.maker == CHOICES:
            return ChoiceList(self.choices)
        maker = self.order if self.maker == CANCELLED else self.maker
        return MAKERS[maker](self.seed, self.length)


@final
class Ranks:
    """Ranks options by who is preempted: rank 0 preempts no task.

    The task that went last goes on as long as it can; then the one asyncio would take. A task that
    could go on but has gone on for `SPIN` decisions steps back once: it may wait for another.

    Attributes:
        last: Number of the task that went last, also where nobody else could: as far as it matters,
            which is where a task is an option.
    """

    __slots__ = ("_in_a_row", "last")

    def __init__(self) -> None:
        self.last = -1
        self._in_a_row = 0

    @property
    def is_spinning(self) -> bool:
        """True if the last task has to step back."""
        return self._in_a_row > SPIN

    def rank(self, options: list[Participant]) -> list[int]:
        """Return the positions of the options by rank."""
        last = next((last_task(each) for each in options if is_preemptible(each)), self.last)
        if last != self.last:  # it went when there was nothing to choose
            self.last, self._in_a_row = last, 0
        default = next((i for i, option in enumerate(options) if option.index == self.last), None)
        if default is None:
            default = fifo(options)
        ranked = [default, *(i for i in range(len(options)) if i != default)]
        return ranked[1:] + ranked[:1] if self.is_spinning else ranked

    def took(self, option: Participant) -> None:
        """Record who goes."""
        if is_preemptible(option):
            self._in_a_row = self._in_a_row + 1 if option.index == self.last else 0
            self.last = option.index


@final
class ChoiceList:
    """Chooses by a list of decisions; where that says nothing, no task is preempted.

    Args:
        choices: Pairs of a decision's number and a rank among its options.
    """

    __slots__ = ("_choices", "_decision", "_ranks")

    def __init__(self, choices: tuple[tuple[int, int], ...]) -> None:
        self._choices = dict(choices)
        self._decision = 0
        self._ranks = Ranks()

    def __call__(self, options: list[Participant]) -> int:
        ranked = self._ranks.rank(options)
        wanted = self._choices.get(self._decision, 0)
        self._decision += 1
        at = ranked[wanted % len(ranked)]
        self._ranks.took(options[at])
        return at


def is_preemptible(option: Participant) -> bool:
    """Tell whether this is a task: holding it though it could run is a preemption."""
    return hasattr(option, "number")


def last_task(task: Participant) -> int:
    """Return the number of the task that went last in the run of a task; -1 before the first."""
    number: int = task._loop.sim_tasks.last  # type: ignore[attr-defined]  # it is a task
    return number


def is_outside(option: Participant) -> bool:
    """Tell whether this is an op or the clock, which go on while the loop has nothing to do."""
    return option.index == CLOCK or hasattr(option, "deadline")


def kit_step(option: Participant) -> KitStep | None:
    """Return an option whose next step no program can see; None for any other."""
    return None if getattr(option, "scope", None) is None else cast("KitStep", option)


# ---- for Hypothesis -----------------------------------------------------------------------------

MAX_RANK: Final = 7


def schedules(*, max_decisions: int = 100) -> SearchStrategy[Schedule]:
    """Return a Hypothesis strategy of schedules for `art.run(main, schedule=...)`.

    A drawn schedule says which of the options goes at each of the first decisions; afterwards, and
    in the simplest schedule, no task is preempted. Hypothesis shrinks a failing one; the kit's own
    shrinking stays out of it.

    Args:
        max_decisions: How many decisions to draw at most.

    Raises:
        ValueError: If `max_decisions` is below 1.

    Example:
        >>> from hypothesis import given, settings
        >>> import asyncio, aioreplica.testing as art
        >>> @settings(max_examples=5, database=None)
        ... @given(schedule=art.schedules())
        ... def test(schedule):
        ...     art.run(lambda: asyncio.sleep(1), schedule=schedule)
        >>> test()
    """
    from hypothesis import strategies

    if max_decisions < 1:
        raise ValueError(f"max_decisions must be at least 1, got {max_decisions}.")
    ranks = strategies.lists(strategies.integers(0, MAX_RANK), max_size=max_decisions)
    return ranks.map(_schedule)


def _schedule(ranks: list[int]) -> Schedule:
    choices = tuple((decision, rank) for decision, rank in enumerate(ranks) if rank)
    return Schedule(CHOICES, choices=choices)
