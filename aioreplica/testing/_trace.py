"""The trace of a schedule: every step with a name, made by running the schedule again.

A trace observes a simulated loop. It also keeps what shrinking needs: for each step a key that
means the same participant in other schedules of the same program, and since when the step could
have been taken.

Numbers of participants are given in the order of making, and two schedules of one program may make
the same tasks in different orders. A key says who made the participant, who made that one, and so
on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import ref

from ..context import PLACE
from ._cancel import Canceller
from ._effects import Effects
from ._leaks import names_of
from ._library import LibraryWatch, MadeCall, OrderWatch
from ._loop import SimLoop
from ._participants import (
    CALLBACKS,
    CLOCK,
    FIRST_INDEX,
    START_S,
    Participant,
    SimTask,
    SimTimer,
    who_went,
)
from ._points import describe_error, inner_line_of, point_of
from ._pools import AWAKE, IN_FLIGHT, LATE, PoolOp, PoolTable
from ._ready import Ready
from ._schedule import Key
from ._strategies import mix
from ._waits import Owners, WaitGraph

CALLBACKS_KEY: Final[Key] = (CALLBACKS,)
CLOCK_KEY: Final[Key] = (CLOCK,)
MAIN_KEY: Final[Key] = (FIRST_INDEX,)
MAX_TRACE_STEPS: Final = 3_000
MAX_KEY: Final = 8
"""How long a key gets: timers that make each other would have keys as long as their number."""
MAX_KEYS: Final = 50_000
LATE_KEY: Final[Key] = (CALLBACKS, CALLBACKS)
"""Of what is made after so many others: a run that goes on for ever needs no more memory."""
RECENT: Final = 1000


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule.

    Attributes:
        who: Name of the participant.
        lane: What it belongs to: the task itself, or the pool.
        did: What it did, in words.
        at: Where it stood before.
        reached: Where it stood afterwards.
        time_s: Virtual time since the start of the run.
        key: Who it is, in other schedules too.
        nth: Which of its own steps this was, from 0.
        since: Counts steps in the order in which they became possible.
        num_options: How many participants could have gone instead, itself included.
        effects: What it did to others, such as "wakes main".
    """

    who: str
    lane: str
    did: str
    at: str
    reached: str
    time_s: float
    key: Key
    nth: int
    since: int
    num_options: int
    effects: tuple[str, ...] = ()

    @property
    def story(self) -> str:
        """Description of the step and of its effects on others."""
        return "; ".join((self.did, *self.effects))

    def is_same(self, other: Step) -> bool:
        """Tell whether another run took the same step; names may differ, such as of a counter."""
        mine, others = (
            (self.key, self.did, self.num_options),
            (other.key, other.did, other.num_options),
        )
        return mine == others

    def describe(self) -> str:
        """Return one line."""
        return f"{self.time_s:10.4f}  {self.who:<24}  {self.story}"


@final
@dataclass(frozen=True, slots=True)
class Busy:
    """A participant that took many of the last steps.

    Attributes:
        who: Its name.
        point: Where it stood last; for a timer, the name of its callback.
        is_timer: Whether it is a timer.
    """

    who: str
    point: str
    is_timer: bool


@final
@dataclass(slots=True)
class MadeTask:
    """A task of a run.

    Attributes:
        who: Its name in the trace.
        names: Its own name, and that of its function.
        made_after: After how many steps it was made.
        ended_after: After how many steps it had ended; None if it had not.
    """

    who: str
    names: tuple[str, str]
    made_after: int
    ended_after: int | None = None


@final
class Trace:
    """Observes a run and keeps its steps in words.

    Attributes:
        steps: The first `MAX_TRACE_STEPS` steps.
        num_steps: How many steps there were.
        num_decisions: Before how many of them there was a choice.
        pending: Steps that could have been taken when a failing run ended.
        graph: Who waited for whom when the run got stuck; None if it did not.
        busy: Who took the last steps of an endless run, busiest first.
        lost: Wake-ups that were lost before the run got stuck.
        exceptions: What tasks and callbacks raised that was not retrieved when the run got stuck.
        ending: How the run ended.
        keys: The keys of all participants.
        order: Watches the order of collectives.
        tasks: All tasks, in the order of their making.

    Args:
        canceller: Told of every step too; None where nothing is cancelled.
    """

    def __init__(self, canceller: Canceller | None = None) -> None:
        self.steps: list[Step] = []
        self.tasks: list[MadeTask] = []
        self.num_steps = 0
        self.num_decisions = 0
        self.pending: list[Step] = []
        self.graph: WaitGraph | None = None
        self.busy: tuple[Busy, ...] = ()
        self.exceptions: tuple[str, ...] = ()
        self.ending = ""
        self._recent: deque[tuple[int, object]] = deque(maxlen=RECENT)
        self._loop: SimLoop = None  # type: ignore[assignment]  # set by begin
        self._pools: PoolTable = None  # type: ignore[assignment]  # likewise
        self.keys = Keys(canceller)
        self._nth: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._num_possible = 0
        self._points: dict[int, str] = {}
        self._inner: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._replicas: dict[int, tuple[object, SimTask]] = {}  # kept alive: ids are used again
        self._op_counts: dict[int, int] = {}
        self._op_numbers: dict[int, int] = {}
        self._owners = Owners()
        self._effects = Effects(self.name_of)
        self.lost: tuple[str, ...] = ()
        self.order = OrderWatch()
        self._library = LibraryWatch(self._note_call)
        self._now: tuple[str, int, int, int] | None = None

    # ---- the observer ------------------------------------------------------------------------

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""
        self._loop, self._pools = loop, pools
        self._names[main.index] = "main"
        self.keys.begin(loop, pools, main)
        self._owners.install()
        self._effects.install()
        self._library.start(pools)
        self._note_tasks(main)
        self._note_options(self._options_now())

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step, and who else could have."""
        self.num_steps += 1
        self.num_decisions += len(options) > 1
        waiting = self._loop.waiting
        is_task = chosen.index == CALLBACKS and type(waiting[0]) is SimTask
        goes = waiting[0] if is_task else chosen
        self._recent.append(_weakly(goes))
        if self.num_steps > MAX_TRACE_STEPS:
            return
        index = chosen.index
        self._note_options(self._options_now(), by_time=True)
        self.order.begin_step(index)
        self._effects.begin_step(self.num_steps, self.name_of(goes))
        since = self._since.pop(index, self._num_possible)
        nth = self._nth.get(index, 0)
        self._nth[index] = nth + 1
        self._now = (self._intention(chosen), nth, since, len(options))
        self._loop.stepping = goes

    def after(self, chosen: Participant) -> None:
        """Note what came of the step."""
        self.keys.after(chosen)
        self._note_tasks(chosen)
        if self.num_steps > MAX_TRACE_STEPS:
            return
        self.order.end_step(self._loop.num_indices)
        assert self._now is not None
        did, nth, since, num_options = self._now
        index = chosen.index
        at = self._points.get(index, "its start")
        who = self.name_of(chosen)
        reached = did
        if isinstance(chosen, SimTask):
            reached = self._point_of(chosen)
            was, now = self._inner.get(index, ""), inner_line_of(chosen)
            self._inner[index] = now
            is_inside = at == reached and was and now and was != now
            did = f"{at} > {was} -> {reached} > {now}" if is_inside else f"{at} -> {reached}"
        elif isinstance(chosen, PoolOp) and chosen.run is not None:
            reached = self._point_of(chosen)
            did = f"{did} -> {reached}"
        self._points[index] = reached
        lane = chosen.pool.name if isinstance(chosen, PoolOp) else who
        time_s = self._loop.now - START_S
        key = self.keys.key_of(chosen)
        canceller = self.keys.canceller
        struck = () if canceller is None else canceller.struck
        effects = tuple(self._effects.end_step(who_went(chosen), self._loop, struck))
        self.steps.append(
            Step(who, lane, did, at, reached, time_s, key, nth, since, num_options, effects)
        )
        self._note_options(self._options_now())

    def _note_tasks(self, chosen: Participant) -> None:
        """Note what tasks there are since the last step, and whether one has ended."""
        tasks, known = self._loop.sim_tasks, self.tasks
        if len(known) < tasks.num_made:
            for number in range(len(known), tasks.num_made):
                task = tasks.get(number)  # None if it has ended and is forgotten
                who = "" if task is None else self.name_of(task)
                names = ("", "") if task is None else names_of(task)
                known.append(MadeTask(who, names, self.num_steps))
                if task is not None and task.done():  # an eager one may have ended
                    known[number].ended_after = self.num_steps
                elif task is not None and getattr(task.get_coro(), "cr_suspended", False):
                    self._points[task.index] = self._point_of(task)  # or have begun
        if isinstance(chosen, SimTask) and chosen.done() and chosen.number < len(known):
            known[chosen.number].ended_after = self.num_steps

    def end(self, kind: str) -> None:
        """Look at the stuck program before it is cleaned up."""
        self.ending = kind
        for option in self._options_now():
            self.pending.append(self._never_taken(option))
        if kind in ("deadlock", "endless"):
            self.graph = WaitGraph.of(
                tuple(self._loop.sim_tasks), self._pools, self.name_of, self._owners, self._library
            )
            self.exceptions = tuple(self._unretrieved())
            if self.num_steps <= MAX_TRACE_STEPS:
                self.lost = tuple(self._effects.lost(self._loop))
        if kind == "endless":
            self.busy = tuple(self._busy())

    def _unretrieved(self) -> Iterator[str]:
        """Name the exceptions that ended tasks and callbacks and that were never retrieved."""
        for task in self._loop.sim_tasks:
            error = task._exception  # unlike `exception()` this retrieves nothing
            if task._log_traceback and error is not None:
                yield f"{self.name_of(task)} raised {describe_error(error)}"
        for context in self._loop.complaints:
            error = context.get("exception")
            if error is not None:
                handle = context.get("handle")
                who = context["message"] if handle is None else f"callback {_callback_name(handle)}"
                yield f"{who} raised {describe_error(error)}"

    def _busy(self) -> Iterator[Busy]:
        """Name who took the last steps, busiest first."""
        recent = list(self._recent)[-max(1, self.num_steps // 2) :]
        counts = Counter(index for index, _ in recent)
        last = dict(recent)
        for index in sorted(counts, key=lambda index: -counts[index]):
            held = last[index]
            each = held() if isinstance(held, ref) else held
            if each is None:
                name = self._names.get(index, "a task")
                yield Busy(name, self._points.get(index, "?"), is_timer=False)
            elif isinstance(each, SimTimer):
                yield Busy(self.name_of(each), _callback_name(each), is_timer=True)
            elif isinstance(each, (SimTask, PoolOp)):
                yield Busy(self.name_of(each), self._point_of(each), is_timer=False)
            else:
                yield Busy(self.name_of(each), self._points.get(index, "?"), is_timer=False)

    def _point_of(self, chosen: SimTask | PoolOp) -> str:
        is_done = isinstance(chosen, SimTask) and chosen.done()
        wait = None if is_done else self._library.wait_of(chosen)
        return point_of(chosen, "" if wait is None else wait.describe())

    def _note_call(self, call: MadeCall) -> None:
        task = asyncio.current_task(self._loop)  # also on the thread of an op
        maker = task if isinstance(task, SimTask) else self._loop.stepping
        if maker is not None and self.num_steps <= MAX_TRACE_STEPS:
            self.order.note(call, maker.index)

    def is_same(self, other: Trace) -> bool:
        """Tell whether another run took the same steps to the same kind of end."""
        if self.ending != other.ending or len(self.steps) != len(other.steps):
            return False
        return all(map(Step.is_same, self.steps, other.steps))

    def close(self) -> None:
        """Put back what was watched."""
        self._owners.remove()
        self._effects.remove()
        self._library.stop()

    # ---- names ---------------------------------------------------------------------------------

    def name_of(self, participant: Any) -> str:
        """Name a participant, the same whenever it is asked for."""
        index = participant.index
        name = self._names.get(index)
        if name is None:
            name = self._names[index] = self._new_name(participant)
        return name

    def _new_name(self, participant: Any) -> str:
        if isinstance(participant, SimTask):
            return self._name_task(participant)
        if isinstance(participant, PoolOp):
            replica_id = self._library.replica_of(participant)
            if replica_id is not None:
                return f"replica {replica_id}"
            count = self._op_counts.get(id(participant.pool), 0) + 1
            self._op_counts[id(participant.pool)] = count
            return f"op {participant.describe()} #{count} on {participant.pool.name}"
        if isinstance(participant, Ready):
            return participant.name
        if participant.index == CALLBACKS:
            return "callbacks"
        if participant.index == CLOCK:
            return "the clock"
        return f"timer #{participant.index}"

    def _name_task(self, task: SimTask) -> str:
        place = task.context.get(PLACE) if task.context is not None else None
        replica = getattr(place, "replica", None)
        function = _function_name(task)
        if replica is not None:
            number = replica.replica_id_in_sync_group
            if getattr(place, "is_outside", False):
                return f"{task.get_name().removeprefix('aioreplica ')} of replica {number}"
            if self._replicas.setdefault(id(replica), (replica, task))[1] is task:
                return f"replica {number}"
            return f"{function} of replica {number}"
        name = task.get_name()
        if name.startswith("Task-") or "." in name:  # asyncio's name, or anyio's
            return f"{function} (Task-{task.number})"
        return f"task '{name}'"

    def _intention(self, chosen: Any) -> str:
        if isinstance(chosen, PoolOp):
            self.name_of(chosen)
            if chosen.state == IN_FLIGHT:
                return "completes"
            if chosen.state == AWAKE:
                return "goes on"
            return "delivers its result" if chosen.state == LATE else "starts"
        if isinstance(chosen, Ready):
            return chosen.describe()
        if chosen.index == CALLBACKS:
            return f"run {_callback_name(self._loop.waiting[0])}"
        if chosen.index == CLOCK:
            return "moves on"
        if isinstance(chosen, SimTask):
            return ""
        return f"fires {_callback_name(chosen)}"

    def _never_taken(self, option: Any) -> Step:
        index, who = option.index, self.name_of(option)
        at = self._points.get(index, "its start")
        since = self._since.get(index, self._num_possible)
        key, nth = self.keys.key_of(option), self._nth.get(index, 0)
        lane = option.pool.name if isinstance(option, PoolOp) else who
        return Step(who, lane, "is never taken", at, at, 0.0, key, nth, since, 0)

    # ---- options -----------------------------------------------------------------------------

    def _options_now(self) -> list[Participant]:
        return self._loop.enabled + self._loop.external

    def _note_options(self, options: list[Participant], *, by_time: bool = False) -> None:
        for option in options:
            if option.index not in self._since:
                self._since[option.index] = self._num_possible
                self._num_possible += 1
                if not (by_time or isinstance(option, SimTimer)):  # a step has made it possible
                    self.order.became_possible(option.index)


def _weakly(participant: Any) -> tuple[int, object]:
    """Return a participant and its number; a task weakly, as nothing else keeps one that ended."""
    held = ref(participant) if isinstance(participant, SimTask) else participant
    return participant.index, held


def _function_name(task: SimTask) -> str:
    return task.function_name.rpartition(".")[2]


def _callback_name(handle: object) -> str:
    if isinstance(handle, SimTask):
        return f"{_function_name(handle)} (Task-{handle.number})"
    callback = getattr(handle, "_callback", None)
    return getattr(callback, "__qualname__", None) or type(callback).__name__


@final
class Keys:
    """Gives keys, and counts the steps of each participant; an observer of a run.

    Args:
        canceller: Told of every step too; None where nothing is cancelled.

    Attributes:
        by_number: The key of each participant so far, by its number.
        num_steps: How many steps each has taken, by key.
    """

    __slots__ = ("_loop", "_made", "by_number", "canceller", "num_steps")

    def __init__(self, canceller: Canceller | None = None) -> None:
        self.canceller = canceller
        self.by_number: list[Key] = [CALLBACKS_KEY, CLOCK_KEY]
        self.num_steps: dict[Key, int] = {}
        self._made: dict[Key, int] = {}
        self._loop: SimLoop = None  # type: ignore[assignment]  # set by begin

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""
        self._loop = loop
        self.by_number.append(MAIN_KEY)
        if self.canceller is not None:
            self.canceller.begin(loop, pools, main)

    def before(self, chosen: Participant, options: list[Participant]) -> None:
        """Note who takes the next step."""

    def after(self, chosen: Participant) -> None:
        """Give keys to what the step has made."""
        keys = self.by_number
        maker = self.key_of(chosen)
        self.num_steps[maker] = self.num_steps.get(maker, 0) + 1
        for _ in range(len(keys), min(self._loop.num_indices, MAX_KEYS)):
            count = self._made.get(maker, 0)
            self._made[maker] = count + 1
            key = (*maker, count)
            keys.append(key if len(key) < MAX_KEY else (mix(*key),))
        if self.canceller is not None:
            self.canceller.after(chosen)

    def end(self, kind: str) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is left to do."""

    def key_of(self, participant: Any) -> Key:
        """Return the key of a participant."""
        index: int = participant.index
        return self.by_number[index] if index < len(self.by_number) else LATE_KEY
