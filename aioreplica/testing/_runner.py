"""Runs schedules of one program, plainly or with their trace, and checks that they repeat."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import TypeVar, final

from ..errors import ContextError
from ._cancel import canceller_of
from ._errors import DeadlockError, NondeterminismError, StarvationError
from ._execute import Main, Outcome, RunObserver, execute
from ._faults import Targets
from ._leaks import Ignored, Leaks
from ._participants import Choose
from ._points import describe_error, line_of_error
from ._sandbox import Sandbox
from ._schedule import HELD, Hold, Schedule
from ._sets import PlainSet, SetFinder, program_classes
from ._shrink import HoldChooser
from ._strategies import FIFO
from ._threads import NeedsThreads
from ._trace import Keys, Step, Trace

T = TypeVar("T")
C = TypeVar("C", bound=Choose)


def check_no_loop(what: str) -> None:
    """Refuse to simulate inside a running loop.

    Raises:
        ContextError: If an event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ContextError(
        f"{what} was called inside a running event loop. Call it from a plain function: it makes a "
        "loop of its own for every schedule."
    )


def check_integer(name: str, value: object) -> None:
    """Refuse what is not an integer.

    Raises:
        TypeError: If it is not one.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")


@final
class Runner:
    """Runs schedules of one program.

    Args:
        main: The program.
        sandbox: Must be open.
        max_steps: When to call the program endless; None for the usual number.
        ignored: What does not count as left behind, see `Leaks`.

    Attributes:
        max_steps: When to call the program endless; None for the usual number.
        warnings: Sets that were given an order, in words.
    """

    def __init__(
        self,
        main: Main,
        sandbox: Sandbox,
        max_steps: int | None = None,
        ignored: Ignored = (),
    ) -> None:
        self.main = main
        self._sandbox = sandbox
        self.max_steps = max_steps
        self._leaks = Leaks(ignored)
        self._context = copy_context()
        self._plain_sets: tuple[PlainSet, ...] = ()
        self.warnings: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the program did that is not simulated."""
        return tuple(self._sandbox.simulation.notes)

    @property
    def targets(self) -> Targets:
        """Names that came by in the runs so far, which faults could strike."""
        return self._sandbox.targets

    def run(self, schedule: Schedule, max_steps: int | None = None) -> Outcome:
        """Run one schedule, without its trace."""
        if schedule.maker == HELD:
            return self.run_holds(schedule, schedule.holds, max_steps)

        def attempt() -> Outcome:
            return self._execute(schedule, canceller_of(schedule), schedule.chooser(), max_steps)

        return self._with_threads_if_needed(attempt)

    def choose(self, schedule: Schedule, make: Callable[[], C]) -> tuple[Outcome, C]:
        """Run one schedule with a chooser that takes notes; return that too."""

        def attempt() -> tuple[Outcome, C]:
            chooser = make()
            return self._execute(schedule, None, chooser), chooser

        return self._with_threads_if_needed(attempt)

    def trace(self, schedule: Schedule, max_steps: int | None = None) -> tuple[Outcome, Trace]:
        """Run one schedule with its trace; errors that need a trace are made."""
        if schedule.maker == HELD:
            return self.trace_holds(schedule, schedule.holds, max_steps)

        def attempt() -> tuple[Outcome, Trace]:
            trace = Trace(canceller_of(schedule))
            return self._with_trace(schedule, trace, schedule.chooser(), max_steps), trace

        return self._explained(*self._with_threads_if_needed(attempt))

    def trace_first(self, schedule: Schedule) -> tuple[Outcome, Trace]:
        """Run the first schedule; once more if it has imported something.

        Modules are imported once, and what they do then, such as taking random numbers, is part of
        no other run.
        """
        num_modules = len(sys.modules)
        with self._sandbox.find_real_clocks():
            traced = self.trace(schedule)
        return traced if len(sys.modules) == num_modules else self.trace(schedule)

    def run_holds(
        self, schedule: Schedule, holds: Sequence[Hold], max_steps: int | None = None
    ) -> Outcome:
        """Run asyncio's own order under constraints, with a schedule's seed and faults."""

        def attempt() -> Outcome:
            keys = Keys(canceller_of(schedule))
            return self._execute(schedule, keys, HoldChooser(holds, keys), max_steps)

        return self._with_threads_if_needed(attempt)

    def trace_holds(
        self, schedule: Schedule, holds: Sequence[Hold], max_steps: int | None = None
    ) -> tuple[Outcome, Trace]:
        """Run constraints with their trace."""

        def attempt() -> tuple[Outcome, Trace]:
            trace = Trace(canceller_of(schedule))
            choose = HoldChooser(holds, trace.keys)
            return self._with_trace(schedule, trace, choose, max_steps), trace

        return self._explained(*self._with_threads_if_needed(attempt))

    def find_sets(self, schedule: Schedule) -> tuple[PlainSet, ...]:
        """Run a schedule again to find the sets of objects that hash by their addresses."""
        if schedule.maker == HELD:
            schedule = replace(schedule, maker=FIFO, holds=())

        def attempt() -> SetFinder:
            finder = SetFinder(canceller_of(schedule))
            self._execute(schedule, finder, schedule.chooser())
            return finder

        self._plain_sets = tuple(self._with_threads_if_needed(attempt).found.values())
        return self._plain_sets

    def freshen_uuids(self, *, is_on: bool) -> bool:
        """Give every run uuids of its own, or those of its schedule; tell if any are drawn."""
        self._sandbox.has_fresh_uuids = is_on
        return self._sandbox.draws_uuids

    @property
    def has_own_uuids(self) -> bool:
        """True if runs draw uuids, and each has its own."""
        return self._sandbox.has_fresh_uuids and self._sandbox.draws_uuids

    def order_sets(self) -> bool:
        """Give the sets that were found last an order; tell whether that may change anything."""
        plain, self._plain_sets = self._plain_sets, ()
        ordered = [each for each in plain if any([*map(self._sandbox.order_sets_of, each.classes)])]
        self.warnings += tuple(
            f"The order of {each.describe()}, decides what happens, and it is that of addresses: "
            "outside the kit it varies, here every schedule had the same."
            for each in ordered
        )
        return bool(ordered)

    def order_unseen_sets(self) -> dict[str, None]:
        """Give all objects of the program's own classes an order.

        Returns:
            Takes the names of those classes that are hashed from now on.
        """
        hashed: dict[str, None] = {}
        for cls in program_classes():
            self._sandbox.order_sets_of(cls, hashed)
        return hashed

    def nondeterminism(
        self, schedule: Schedule, first: Trace, second: Trace, ends: Sequence[Outcome]
    ) -> NondeterminismError:
        """Return the error for a schedule that ran otherwise, and look for the sets that did it."""
        return nondeterminism(first.steps, second.steps, ends, self.find_sets(schedule))

    def _with_threads_if_needed(self, attempt: Callable[[], T]) -> T:
        """Run a schedule; once more, from its beginning, if an op turns out to need a thread."""
        try:
            return attempt()
        except NeedsThreads:
            self._sandbox.simulation.threads.is_needed = True
        return attempt()

    def _with_trace(
        self, schedule: Schedule, trace: Trace, choose: Choose, max_steps: int | None
    ) -> Outcome:
        try:
            return self._execute(schedule, trace, choose, max_steps)
        finally:
            trace.close()

    def _execute(
        self,
        schedule: Schedule,
        observer: RunObserver | None,
        choose: Choose,
        max_steps: int | None = None,
    ) -> Outcome:
        return execute(
            self.main,
            choose,
            self._sandbox,
            schedule,
            self._context,
            observer=observer,
            max_steps=max_steps or schedule.max_steps or self.max_steps,
            leaks=self._leaks,
        )

    def _explained(self, outcome: Outcome, trace: Trace) -> tuple[Outcome, Trace]:
        if outcome.error is None and outcome.has_failed:
            make = _deadlock if outcome.kind == "deadlock" else _endless
            outcome.error = make(trace, outcome)
        return outcome, trace


def _endless(trace: Trace, outcome: Outcome) -> DeadlockError | StarvationError:
    """Return the error for a program that took more steps than its budget."""
    only_timers = trace.busy and all(each.is_timer for each in trace.busy)
    return _deadlock(trace, outcome) if only_timers else _starvation(trace, outcome)


def _deadlock(trace: Trace, outcome: Outcome) -> DeadlockError:
    assert trace.graph is not None
    graph = trace.graph
    head = "Nothing can happen any more, and the program has not ended."
    if graph.cycle:
        head = f"Deadlock: {' waits for '.join((*graph.cycle, graph.cycle[0]))}."
    elif trace.busy:
        head = "The program has not ended, and only timers go on."
    text = f"{head}\n{graph.describe()}"
    for timer in dict.fromkeys(each.point for each in trace.busy):
        text += f"\n  the timer of {timer} went on for {len(outcome.order)} steps"
    text += _unretrieved(trace)
    return DeadlockError(text, waits=graph.waits, cycle=graph.cycle, exceptions=trace.exceptions)


def _starvation(trace: Trace, outcome: Outcome) -> StarvationError:
    assert trace.graph is not None
    graph, ended = trace.graph, len(outcome.order)
    busy = [each for each in trace.busy if not each.is_timer][:5]
    running = tuple(each.who for each in busy)
    text = (
        f"The program has not ended after {ended} steps. Lately these went on: "
        f"{', '.join(running)}."
    )
    text += "".join(f"\n  {each.who} goes round at {each.point}" for each in busy)
    known = {each.who for each in trace.busy}
    waits = tuple(wait for wait in graph.waits if wait.who not in known)
    if waits:
        text += "\nMeanwhile these waited:" + "".join(f"\n  {wait.describe()}" for wait in waits)
    return StarvationError(
        text + _unretrieved(trace),
        steps=ended,
        running=running,
        waits=waits,
        cycle=graph.cycle,
        exceptions=trace.exceptions,
    )


def _unretrieved(trace: Trace) -> str:
    """Return the exceptions that may be the cause, as lines."""
    if not trace.exceptions:
        return ""
    return "\nExceptions that were never retrieved:" + "".join(
        f"\n  {each}" for each in trace.exceptions
    )


def nondeterminism(
    first: Sequence[Step],
    second: Sequence[Step],
    ends: Sequence[Outcome] = (),
    sets: Sequence[PlainSet] = (),
) -> NondeterminismError:
    """Return the error for two traces of one schedule that differ.

    Args:
        first: The steps of one run.
        second: Those of another.
        ends: How two runs ended, where that is known.
        sets: Those that are walked in the order of addresses.
    """
    advice = (
        "Let the program build all of its state inside its function, and take time and randomness "
        "from the modules that are simulated."
    )
    if sets:
        advice += (
            f" It has {'; '.join(each.describe() for each in sets)}: they hash by their addresses, "
            "so their order in a set is another in every run. Keep them in a dict, or give them a "
            "`__hash__`."
        )
    error = next((each.error for each in ends if each.error is not None), None)
    if error is not None:
        advice += f" One of the runs ended with {describe_error(error)}."
    differs = "The same schedule ran otherwise the second time, from step"
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        if one.is_same(other):
            continue
        ours, theirs = f"{one.who}: {one.did}", f"{other.who}: {other.did}"
        if ours == theirs:
            ours += f" ({one.num_options} could go)"
            theirs += f" ({other.num_options} could go)"
        return NondeterminismError(
            f"{differs} {number} on: first {ours}, then {theirs}. {advice}",
            step=number,
            first=ours,
            second=theirs,
        )
    if len(first) == len(second):
        how = " and ".join(_how_ended(each) for each in ends)
        return NondeterminismError(
            f"The same schedule took the same steps twice but ended otherwise"
            f"{': ' + how if how else ''}. {advice}"
        )
    number = min(len(first), len(second)) + 1
    longer = first if len(first) > len(second) else second
    step = f"{longer[number - 1].who}: {longer[number - 1].did}"
    ours, theirs = (step, "the end") if longer is first else ("the end", step)
    return NondeterminismError(
        f"{differs} {number} on: first {ours}, then {theirs}. {advice}",
        step=number,
        first=ours,
        second=theirs,
    )


def _how_ended(outcome: Outcome) -> str:
    if outcome.kind == "raised" and outcome.error is not None:
        return f"raised {describe_error(outcome.error)}"
    words = {"deadlock": "deadlocked", "endless": "did not end"}
    return words.get(outcome.kind, outcome.kind)


def same_end(first: Outcome, second: Outcome) -> bool:
    """Tell whether two runs took the same steps to the same end.

    A trace of an endless run is cut short, so of that only the beginning is compared.
    """
    if first.kind != second.kind:
        return False
    if first.kind == "raised" and not _same_type(first.error, second.error):
        return False
    if first.kind == "endless":
        num = min(len(first.order), len(second.order))
        return first.order[:num] == second.order[:num]
    return first.order == second.order


def same_failure(first: Outcome, second: Outcome) -> bool:
    """Tell whether two schedules show the same bug: the same kind of end, from the same line."""
    if first.kind != second.kind:
        return False
    if first.kind != "raised":
        return True
    assert first.error is not None
    assert second.error is not None
    return _same_type(first.error, second.error) and line_of_error(first.error) == line_of_error(
        second.error
    )


def _same_type(first: BaseException | None, second: BaseException | None) -> bool:
    """Compare by name: a program that defines a class makes another one in each run."""
    one, other = type(first), type(second)
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
