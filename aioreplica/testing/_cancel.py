"""Cancellation as a decision of the schedule: once at a given step, or where a fault strikes.

Cancellers observe a run. A task is cancelled between two steps, as by another task that nobody
had to write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Protocol, final

from ._faults import CANCEL, Fault, name_number
from ._leaks import names_of
from ._loop import SimLoop
from ._participants import Participant, SimTask, who_went
from ._pools import PoolTable
from ._schedule import CANCELLED, Schedule
from ._strategies import SEED_BITS, mix

CHANCE: Final = 0.5
"""How likely a fault without a fixed place strikes a task that it could strike."""
MEAN_AWAITS: Final = 3
MAX_DELAY_BITS: Final = 5
LATE_CHANCE: Final = 0.4
STRUCK: Final = -2


class Canceller(Protocol):
    """Cancels tasks between the steps of a run.

    Attributes:
        struck: The tasks that the last step was followed by the cancellation of.
    """

    struck: list[SimTask]

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Count the step, and cancel what is to be cancelled after it."""

    def end(self, kind: str) -> None:
        """Note that nothing is left to do."""


def canceller_of(schedule: Schedule) -> Canceller | None:
    """Return what cancels tasks in a schedule; None if nothing does."""
    if schedule.maker == CANCELLED:
        return StepCanceller(schedule.cancel_step, schedule.cancel_task)
    if schedule.faults is not None:
        faults = tuple(each for each in schedule.faults.entries if each.kind == CANCEL)
        if faults:
            return FaultCanceller(faults, schedule.seed)
    return None


@final
class StepCanceller:
    """Cancels one task once.

    Args:
        step: After how many steps; 0 cancels a main task that has not begun.
        number: Which task, in the order of their making; 0 is the main one.
    """

    __slots__ = ("_loop", "_num_steps", "_number", "_step", "struck")

    def __init__(self, step: int, number: int = 0) -> None:
        self._step = step
        self._number = number
        self._num_steps = 0
        self._loop: SimLoop = None  # type: ignore[assignment]  # set by begin
        self.struck: list[SimTask] = []

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""
        self._loop = loop
        self._strike_if_due()

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Count the step."""
        self._num_steps += 1
        self._strike_if_due()

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def _strike_if_due(self) -> None:
        self.struck.clear()
        if self._num_steps == self._step:
            task = self._loop.sim_tasks.get(self._number)
            if task is not None and not task.done() and task.cancel("art.cancel_everywhere"):
                self.struck.append(task)


@final
@dataclass(slots=True)
class _Plan:
    """Moment at which one task is cancelled: after so many of its awaits and of steps of others.

    If it is late, that is when the task has been woken and has not gone on.
    """

    task: SimTask
    fault: int
    awaits: int
    delay: int
    is_late: bool

    def is_due(self) -> bool:
        """Count a step; tell whether the moment has come."""
        if self.awaits > 0:
            return False
        if self.is_late:
            return self.task.callback is not None and bool(self.task.args)
        self.delay -= 1
        return self.delay < 0


@final
class FaultCanceller:
    """Cancels tasks as the faults of a schedule say.

    What happens to a task depends on the seed, on its place among the tasks that match, and on its
    own awaits, so that it stays the same when other tasks are held.

    Args:
        faults: Those that cancel tasks.
        seed: The schedule's.
    """

    __slots__ = ("_faults", "_loop", "_num_known", "_num_struck", "_plans", "_pools", "_seed",
                 "_seen", "struck")  # fmt: skip

    def __init__(self, faults: tuple[Fault, ...], seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._seen = [0] * len(faults)
        self._num_struck = [0] * len(faults)
        self._num_known = 1  # the main task is not struck
        self._plans: dict[int, list[_Plan]] = {}
        self._loop: SimLoop = None  # type: ignore[assignment]  # set by begin
        self._pools: PoolTable = None  # type: ignore[assignment]  # likewise
        self.struck: list[SimTask] = []

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""
        self._loop, self._pools = loop, pools

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Count the step, and cancel what is due."""
        self.struck.clear()
        tasks = self._loop.sim_tasks
        if self._num_known < tasks.num_made:
            for number in range(self._num_known, tasks.num_made):
                task = tasks.get(number)
                if task is not None:
                    self._consider(task)
            self._num_known = tasks.num_made
        for plan in self._plans.get(who_went(chosen).index, ()):
            plan.awaits -= 1
        for plans in tuple(self._plans.values()):
            for plan in plans:
                if plan.is_due():
                    self._strike(plan)
                    plan.delay = STRUCK
            left = [each for each in plans if each.delay > STRUCK and not each.task.done()]
            if left:
                plans[:] = left
            else:
                del self._plans[plans[0].task.index]

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def _consider(self, task: SimTask) -> None:
        """Decide whether and when a new task is cancelled."""
        names = names_of(task)
        for i, fault in enumerate(self._faults):
            is_one, run = is_named(fault.fn, names), self._pools.faults
            if run is not None:
                run.targets.note(fault, [n.rpartition(".")[2] for n in names], is_one=is_one)
            if not is_one:
                continue
            place = self._seen[i]
            self._seen[i] = place + 1
            chance, awaits, delay, bits = (
                mix(self._seed, i, place, what) / (1 << SEED_BITS) for what in range(4)
            )
            at = fault.at
            if chance < CHANCE if at is None else at <= place < at + fault.times:
                num_awaits = int(-MEAN_AWAITS * math.log(1.0 - awaits))
                num_steps = 0 if delay < 0.7 else int(2 ** (bits * MAX_DELAY_BITS))
                plan = _Plan(task, i, num_awaits, num_steps, delay < LATE_CHANCE)
                self._plans.setdefault(task.index, []).append(plan)

    def _strike(self, plan: _Plan) -> None:
        i = plan.fault
        if self._num_struck[i] < self._faults[i].times and plan.task.cancel("a fault"):
            self._num_struck[i] += 1
            self.struck.append(plan.task)
            if self._pools.faults is not None:
                self._pools.faults.has_cancelled = True


def is_named(pattern: str | None, names: tuple[str, ...]) -> bool:
    """Tell whether a pattern, or the number of a name read from a token, is that of a task."""
    if pattern is None:
        return True
    every = (*names, *(name.rpartition(".")[2] for name in names))
    if pattern.startswith("#"):
        return int(pattern[1:]) in map(name_number, every)
    return any(fnmatchcase(name, pattern) for name in every)
