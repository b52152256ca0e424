"""One schedule of one program: set up, run, see what was left behind, clean up."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, final

from ._errors import LeakError, StarvationError, StuckStepError
from ._leaks import Leaks, describe_task
from ._loop import Budget, LoopObserver, SimLoop
from ._participants import CALLBACKS, Choose, SimTask, fifo
from ._pools import PoolTable
from ._sandbox import Sandbox
from ._schedule import Schedule
from ._threads import NeedsThreads
from ._watchdog import Watchdog

Main: TypeAlias = Callable[[], Coroutine[object, None, Any]]
DRAIN_STEPS: Final = 5_000
SETTLE_STEPS: Final = 3


@final
@dataclass(slots=True)
class Outcome:
    """Result of running one schedule.

    Attributes:
        kind: "passed", "raised", "leaked", "deadlock", "endless", or "stuck" in one step.
        value: What the program returned.
        error: What it raised, or the `LeakError`; None where only a rerun with a trace can make it.
        order: Who took each step, by number of participant.
        is_cut: Whether asyncio's own order decided something in a schedule of another order, as
            the program took too many steps at one instant.
    """

    kind: str
    value: Any
    error: BaseException | None
    order: array[int]
    is_cut: bool = False

    @property
    def has_failed(self) -> bool:
        """True if the schedule shows a bug."""
        return self.kind != "passed"


class RunObserver(LoopObserver, Protocol):
    """Observes a whole run."""

    def begin(self, loop: SimLoop, pools: PoolTable, main: SimTask) -> None:
        """Start to observe, before the first step."""

    def end(self, kind: str) -> None:
        """Look at a run that failed, before it is cleaned up."""


def check_main(main: object) -> None:
    """Refuse what is not a callable without arguments.

    Raises:
        TypeError: If it is a coroutine, not callable, a plain function, or needs arguments.
    """
    if inspect.iscoroutine(main):
        name = main.__qualname__
        main.close()
        raise TypeError(
            f"Got the coroutine {name}(), which can run only once. Pass the function itself: every "
            "schedule calls it anew."
        )
    if not callable(main):
        raise TypeError(f"Got {main!r} ({type(main).__name__}); pass an async function.")
    try:
        inspect.signature(main).bind()
    except TypeError as error:
        raise TypeError(
            f"{_name(main)} cannot be called without arguments ({error}). Every schedule calls it "
            "anew, so let it build its own state; functools.partial passes constants."
        ) from None
    except ValueError:  # no signature to be had
        return
    if inspect.isasyncgenfunction(main) or (
        inspect.isfunction(main)
        and main.__name__ != "<lambda>"
        and not inspect.iscoroutinefunction(main)
        and not hasattr(main, "__wrapped__")
    ):
        raise TypeError(f"{_name(main)} is not an async function. Declare it with `async def`.")


def _name(main: object) -> str:
    return getattr(main, "__qualname__", None) or repr(main)


def _as_coroutine(main: Main) -> Coroutine[object, None, object]:
    made = main()
    if inspect.iscoroutine(made):
        return made
    if not inspect.isawaitable(made):
        raise TypeError(
            f"{_name(main)} returned {made!r} ({type(made).__name__}), nothing to await. Pass an "
            "async function."
        )

    async def wrapper() -> object:
        return await made

    return wrapper()


def execute(
    main: Main,
    choose: Choose,
    sandbox: Sandbox,
    schedule: Schedule,
    context: Context,
    *,
    observer: RunObserver | None = None,
    max_steps: int | None = None,
    leaks: Leaks | None = None,
) -> Outcome:
    """Run one schedule from a fresh start.

    Args:
        main: The program.
        choose: Picks who goes next.
        sandbox: Holds the doors to the outside; must be open.
        schedule: Its seed, fidelity and faults count here.
        context: The caller's context variables; the program gets a copy.
        observer: Told of every step.
        max_steps: When to call the program endless.
        leaks: What counts as left behind; everything if not given.

    Raises:
        NeedsThreads: If an op has to wait although it has no thread; the schedule is to be run
            again, and its ops will have threads.
    """
    loop = SimLoop(
        choose, schedule.fidelity, None if max_steps is None else Budget(max_steps), observer
    )
    loop.executors = pools = PoolTable(loop)
    sandbox.begin(loop, pools, schedule)
    loop.start()
    try:
        own = context.copy()
        task = SimTask(own.run(_as_coroutine, main), loop=loop, context=own)
        if observer is not None:
            observer.begin(loop, pools, task)
        return _run(loop, pools, task, observer, leaks or Leaks(), sandbox.watchdog)
    finally:
        pools.unwind()
        pools.close()
        loop.finish()
        sandbox.end()


def _run(
    loop: SimLoop,
    pools: PoolTable,
    task: SimTask,
    observer: RunObserver | None,
    leaks: Leaks,
    watchdog: Watchdog,
) -> Outcome:
    """Run a program to its end, and say how it has ended."""
    kind = ""
    try:
        with suppress(NeedsThreads):
            kind = loop.run_until(task.done)
    except StuckStepError:
        order = loop.order[:]
        task_of_queue = loop.callbacks.task if order[-1] == CALLBACKS else None
        index = order[-1] if task_of_queue is None else task_of_queue.index
        with suppress(StuckStepError):
            _abandon(loop, pools)
        return Outcome("stuck", None, _stuck(loop, order, index, watchdog), order)
    except SystemExit as error:  # it leaves the loop at once, as it does a real one
        order = loop.order
        _abandon(loop, pools)
        return Outcome("raised", None, error, order)
    except KeyboardInterrupt:
        _abandon(loop, pools)
        raise
    _give_up_if_threads_are_needed(loop, pools)
    order, is_cut = loop.order, loop.budget.has_decided
    loop.order = array("i")
    loop.is_logging = False
    if kind != "done":
        if observer is not None:
            observer.end(kind)
        _abandon(loop, pools)
        return Outcome(kind, None, None, order, is_cut)
    outcome = _judge(loop, pools, task, order, observer, leaks)
    outcome.is_cut = is_cut
    return outcome


def _give_up_if_threads_are_needed(loop: SimLoop, pools: PoolTable) -> None:
    if pools.needs_threads:
        pools.is_given_up = True
        _abandon(loop, pools)
        raise NeedsThreads


def _stuck(loop: SimLoop, order: Sequence[int], index: int, watchdog: Watchdog) -> StarvationError:
    """Return the error for a step, of the participant of a number, that had to be interrupted."""
    tasks = [describe_task(task) for task in loop.sim_tasks if task.index == index]
    who = tasks[0] if tasks else "a callback or a call in a pool"
    lines = "".join(f"\n  {line}" for line in watchdog.stack)
    return StarvationError(
        f"Step {len(order)}, of {who}, neither awaits nor ends: it was interrupted after "
        f"{watchdog.stuck_s:.0f} s, in which the process used {watchdog.used_s:.0f} s of a "
        f"processor, at{lines or ' an unknown line'}\nNothing else can go on "
        "meanwhile, on a real event loop too. Await what it waits for.",
        steps=len(order),
        running=(who,),
    )


def _judge(
    loop: SimLoop,
    pools: PoolTable,
    main: SimTask,
    order: array[int],
    observer: RunObserver | None,
    leaks: Leaks,
) -> Outcome:
    """Say how a program that ended has ended."""
    error = _error_of(main)
    if error is None:
        for task in loop.sim_tasks:
            if not task.done() or task._log_traceback:
                break
        else:
            left = loop.complaints or loop.open_generators or pools.waiting or loop.network
            if not left:
                return Outcome("passed", main.result(), None, order)
        error = _find_leaks(loop, pools, leaks)
        if error is None:
            _abandon(loop, pools)
            return Outcome("passed", main.result(), None, order)
        if observer is not None:
            observer.end("leaked")
        _abandon(loop, pools)
        return Outcome("leaked", None, error, order)
    kind = "raised"
    if isinstance(error, asyncio.CancelledError):  # what was cancelled must leave nothing behind
        leaked = _find_leaks(loop, pools, leaks)
        if leaked is not None:
            kind, error = "leaked", leaked
        elif pools.faults is not None and pools.faults.has_cancelled:
            _abandon(loop, pools)
            return Outcome("passed", None, None, order)  # what a fault cancelled came through
    if observer is not None:
        observer.end(kind)
    _abandon(loop, pools)
    return Outcome(kind, None, error, order)


def _error_of(task: SimTask) -> BaseException | None:
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled


def _find_leaks(loop: SimLoop, pools: PoolTable, leaks: Leaks) -> LeakError | None:
    """Let what was cancelled come to its end; then what is left has leaked."""
    num_complaints = len(loop.complaints)
    serving = [task for task in loop.sim_tasks if task.ends_with_run and not task.done()]
    for task in tuple(loop.sim_tasks):
        if not task.done() and (task.cancelling() or task.ends_with_run):
            _drain(loop, task)
    if loop.network is not None:
        if not loop.is_at_rest:  # what is closed takes a moment to be gone
            loop.choose = fifo
            loop.budget = Budget(len(loop.order) + DRAIN_STEPS)
            loop.run_until(lambda: loop.is_at_rest)
        del loop.complaints[num_complaints:]  # of servers that went on when nobody was there
        for task in serving:
            if task.done() and not task.cancelled():
                task.exception()
    return leaks.find(loop, pools)


def _abandon(loop: SimLoop, pools: PoolTable) -> None:
    """Cancel every task and let them end, so that asyncio logs nothing when they are collected."""
    loop.observer = None
    for _ in range(3):
        left = [task for task in loop.sim_tasks if not task.done()]
        for task in left:
            with suppress(RecursionError):  # tasks that await each other cancel each other
                task.cancel()
        for task in left:
            _drain(loop, task)
        pools.unwind()
        _drain(loop, SimTask(_settle(), loop=loop))
    for task in loop.sim_tasks:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.callback = None
        elif task._log_traceback:
            task.exception()
    for agen in loop.open_generators:
        _drain(loop, SimTask(agen.aclose(), loop=loop))


async def _settle() -> None:
    """Let the callbacks run of what has ended, and those that they register."""
    for _ in range(SETTLE_STEPS):
        await asyncio.sleep(0)


def _drain(loop: SimLoop, task: SimTask) -> None:
    if not task.done():
        loop.choose = fifo
        loop.budget = Budget(len(loop.order) + DRAIN_STEPS)
        loop.run_until(task.done)
