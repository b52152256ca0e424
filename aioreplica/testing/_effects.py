"""Effects of a step on others: wake-ups, cancellations, events set; and wake-ups that are lost.

A wake-up is lost where a signal comes before the wait that it is for, or where whoever was woken is
cancelled before it goes on and wakes nobody in its place.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, final

from ._forbidden import is_foreign
from ._loop import SimLoop
from ._participants import Participant, SimTask
from ._points import frames_of, name_in, point_of, primitive_of

SIGNALS: Final = (
    (asyncio.Event, "set", "sets"),
    (asyncio.Event, "clear", "clears"),
    (asyncio.Condition, "notify", "notifies"),
)


@final
@dataclass(frozen=True, slots=True)
class Wakeup:
    """A primitive that was set, cleared or notified.

    Attributes:
        verb: "sets", "clears" or "notifies".
        primitive: Which, as the program knows it.
        name: Its name there.
        who: Who did it.
        step: In which step, from 1.
        is_heard: Whether anybody waited for it.
        site: `file:line` of the call.
    """

    verb: str
    primitive: Any
    name: str
    who: str
    step: int
    is_heard: bool
    site: str


@final
@dataclass(slots=True)
class _State:
    """State of a task as of the last step."""

    num_cancels: int = 0
    is_awake: bool = False
    woken: tuple[int, str] | None = None
    last_step: int = 0


@final
class Effects:
    """Observes the tasks and primitives of a run.

    Args:
        name_of: Names participants.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self._name_of = name_of
        self._states: dict[int, _State] = {}
        self._signals: list[Wakeup] = []
        self._lost: list[str] = []
        self._undo: list[tuple[type, str, object]] = []
        self._step = 0
        self._who = ""

    def install(self) -> None:
        """Begin to watch primitives."""
        for cls, name, verb in SIGNALS:
            self._watch(cls, name, verb)

    def remove(self) -> None:
        """Stop watching; idempotent."""
        for cls, name, real in self._undo:
            setattr(cls, name, real)
        self._undo.clear()

    def begin_step(self, step: int, who: str) -> None:
        """Note who takes which step."""
        self._step, self._who = step, who

    def end_step(
        self, chosen: Participant, loop: SimLoop, struck: Iterable[object]
    ) -> Iterator[str]:
        """Yield what the step did to others, in words.

        Args:
            chosen: Who took it.
            loop: Its loop.
            struck: The tasks that a fault has cancelled after the step.
        """
        for signal in self._signals:
            if signal.step == self._step:
                heard = "" if signal.is_heard or signal.verb != "notifies" else ", unheard"
                yield f"{signal.verb} {signal.name}{heard}"
        for task in loop.sim_tasks:
            state = self._states.setdefault(task.number, _State())
            if task is chosen:
                state.last_step, state.woken = self._step, None
            if task.done():
                continue
            num_cancels = task.cancelling()
            is_awake = task.callback is not None and bool(task.args)
            is_woken = is_awake and not task.args[0].cancelled()
            if is_woken and not state.is_awake and task is not chosen:
                state.woken = self._step, self._who
                yield f"wakes {self._name_of(task)}"
            if num_cancels > state.num_cancels:
                by_fault = " (a fault)" if any(each is task for each in struck) else ""
                yield f"cancels {self._name_of(task)}{by_fault}"
                if is_woken:
                    self._note_lost(task, state)
            state.num_cancels, state.is_awake = num_cancels, is_awake

    def lost(self, loop: SimLoop) -> Iterator[str]:
        """Yield the wake-ups that were lost in a run that got stuck, in words."""
        for task in loop.sim_tasks:
            found = None if task.done() else primitive_of(frames_of(task))
            if found is None or task._fut_waiter is None:  # type: ignore[attr-defined]
                continue
            since = self._states.get(task.number, _State()).last_step
            mine = [each for each in self._signals if each.primitive is found[1]]
            signals = [each for each in mine if each.step <= since and each.verb != "clears"]
            if not signals or any(each.step > since for each in mine):
                continue
            last = signals[-1]
            clears = [each for each in mine if each.step >= last.step and each.verb == "clears"]
            cleared = f", {clears[-1].who} cleared it at {clears[-1].site}" if clears else ""
            did = f"{'set' if last.verb == 'sets' else 'notified'} {last.name}"
            yield (
                f"{self._name_of(task)} has waited at {point_of(task)} since step {since}, "
                f"too late: {last.who} {did} at {last.site} in step {last.step}{cleared}"
            )
        yield from self._lost

    def _note_lost(self, task: SimTask, state: _State) -> None:
        if state.woken is not None:
            step, waker = state.woken
            self._lost.append(
                f"{waker} woke {self._name_of(task)} in step {step}, which was cancelled in step "
                f"{self._step} before it went on at {point_of(task)}: unless that wakes another, "
                "the wake-up is lost"
            )

    def _watch(self, cls: type, name: str, verb: str) -> None:
        real = vars(cls)[name]

        def stand_in(primitive: Any, *args: object, **kwargs: object) -> object:
            is_new = verb == "notifies" or primitive.is_set() == (verb == "clears")
            if is_new:
                self._note(primitive, verb)
            return real(primitive, *args, **kwargs)

        self._undo.append((cls, name, real))
        setattr(cls, name, stand_in)

    def _note(self, primitive: Any, verb: str) -> None:
        """Note a signal that the program itself gives, also through a primitive of anyio."""
        frame = sys._getframe(2)
        known, is_heard = primitive, bool(primitive._waiters)
        while frame.f_back is not None and "/anyio/" in frame.f_code.co_filename:
            known = frame.f_locals.get("self", known)
            frame = frame.f_back
        file = frame.f_code.co_filename
        if not is_foreign(file):
            name = name_in(frame, known)
            shown = f"'{name}'" if name else f"an {type(known).__name__}"
            site = f"{PurePath(file).name}:{frame.f_lineno}"
            self._signals.append(Wakeup(verb, known, shown, self._who, self._step, is_heard, site))
