"""One schedule of one program: set up, run, see what was left behind, clean up."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from ._budget import Budget
from ._errors import LeakError
from ._loop import SimLoop
from ._op_points import point_of_op
from ._op_threads import NeedsThreads
from ._participant import Choose
from ._strategies import fifo
from ._task import SimTask

if TYPE_CHECKING:
    from ._sandbox import Sandbox
    from ._schedule import Schedule

Main: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]
DRAIN_STEPS: Final = 5_000


@final
@dataclass(slots=True)
class Outcome:
    """How one schedule ended.

    Attributes:
        kind: "passed", "raised", "leaked", "deadlock" or "endless".
        value: What the program returned.
        error: What it raised, or the `LeakError`; None where only a rerun can tell the story.
        order: Who took each step, by number of participant.
    """

    kind: str
    value: Any
    error: BaseException | None
    order: list[int]

    @property
    def has_failed(self) -> bool:
        """Whether the schedule shows a bug."""
        return self.kind != "passed"


def check_main(main: Any) -> None:
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


def _name(main: Any) -> str:
    return getattr(main, "__qualname__", None) or repr(main)


def _as_coroutine(main: Main) -> Coroutine[Any, Any, Any]:
    made = main()
    if inspect.iscoroutine(made):
        return made
    if not inspect.isawaitable(made):
        raise TypeError(
            f"{_name(main)} returned {made!r} ({type(made).__name__}), nothing to await. Pass an "
            "async function."
        )

    async def wrapper() -> Any:
        return await made

    return wrapper()


def execute(
    main: Main,
    choose: Choose,
    sandbox: Sandbox,
    schedule: Schedule,
    context: Context,
    *,
    observer: Any = None,  # Any: the story, which knows this module
    max_steps: int | None = None,
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

    Raises:
        NeedsThreads: If an op has to wait although it has no thread; the schedule is to be run
            again, and its ops will have threads.
    """
    loop = SimLoop(
        choose, schedule.fidelity, None if max_steps is None else Budget(max_steps), observer
    )
    sandbox.begin(loop, schedule)
    loop.start()
    try:
        own = context.copy()
        task = SimTask(own.run(_as_coroutine, main), loop=loop, context=own)
        if observer is not None:
            observer.begin(loop, task)
        kind = ""
        try:
            with suppress(NeedsThreads):
                kind = loop.run(task)
        except SystemExit as error:  # it leaves the loop at once, as it does a real one
            order = loop.order
            _abandon(loop)
            return Outcome("raised", None, error, order)
        except KeyboardInterrupt:
            _abandon(loop)
            raise
        _give_up_if_threads_are_needed(loop)
        order = loop.order
        loop.order = []
        if kind != "done":
            if observer is not None:
                observer.end(kind)
            _abandon(loop)
            return Outcome(kind, None, None, order)
        return _judge(loop, task, order, observer)
    finally:
        loop.pools.unwind()
        loop.finish()
        sandbox.end()


def _give_up_if_threads_are_needed(loop: SimLoop) -> None:
    if loop.pools.needs_threads:
        loop.pools.is_given_up = True
        _abandon(loop)
        raise NeedsThreads


def _judge(loop: SimLoop, main: SimTask, order: list[int], observer: Any) -> Outcome:
    """Say how a program that ended has ended."""
    error = _error_of(main)
    if error is None:
        for task in loop.sim_tasks:
            if not task.done() or task._log_traceback:
                break
        else:
            left = loop.complaints or loop._asyncgens or loop.pools.waiting  # type: ignore[attr-defined]
            if not left:
                return Outcome("passed", main.result(), None, order)
        error = _find_leaks(loop)
        if error is None:
            return Outcome("passed", main.result(), None, order)
        if observer is not None:
            observer.end("leaked")
        _abandon(loop)
        return Outcome("leaked", None, error, order)
    kind = "raised"
    if isinstance(error, asyncio.CancelledError):  # what was cancelled must leave nothing behind
        leaked = _find_leaks(loop)
        if leaked is not None:
            kind, error = "leaked", leaked
    if observer is not None:
        observer.end(kind)
    _abandon(loop)
    return Outcome(kind, None, error, order)


def _error_of(task: SimTask) -> BaseException | None:
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled


def _find_leaks(loop: SimLoop) -> LeakError | None:
    """Let what was cancelled come to its end; then whatever is left has leaked."""
    for task in tuple(loop.sim_tasks):
        if not task.done() and (task.cancelling() or task.ends_with_run):
            _drain(loop, task)
    tasks = tuple(_describe(task) for task in loop.sim_tasks if not task.done())
    exceptions = tuple(
        f"{task.get_name()}: {_retrieved(task)!r}"
        for task in loop.sim_tasks
        if task.done() and task._log_traceback
    )
    exceptions += tuple(_complaint(context) for context in loop.complaints)
    generators = tuple(agen.__qualname__ for agen in loop.open_generators)
    threads = tuple(
        f"{op.describe()} on {op.pool.name} ({point_of_op(op)})" for op in loop.pools.waiting
    )
    if not (tasks or generators or exceptions or threads):
        return None
    parts = []
    if tasks:
        parts.append(f"tasks that had not ended: {', '.join(tasks)}")
    if generators:
        parts.append(f"asynchronous generators that were not closed: {', '.join(generators)}")
    if threads:
        parts.append(f"threads that waited for ever: {', '.join(threads)}")
    if exceptions:
        parts.append(f"exceptions that nobody retrieved: {', '.join(exceptions)}")
    return LeakError(
        f"The program ended and left behind {'; '.join(parts)}. Await, cancel or close them "
        "before it ends.",
        tasks=tasks,
        generators=generators,
        exceptions=exceptions,
        threads=threads,
    )


def _describe(task: SimTask) -> str:
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)
    return f"{task.get_name()} ({name})"


def _retrieved(task: SimTask) -> BaseException | None:
    return task.exception()


def _complaint(context: dict[str, Any]) -> str:
    error = context.get("exception")
    message = context.get("message", "").partition(" <")[0]
    return f"{message}: {error!r}" if error is not None else message


def _abandon(loop: SimLoop) -> None:
    """Cancel every task and let them end, so that none speaks up when it is collected."""
    loop.observer = None
    for _ in range(3):
        left = [task for task in loop.sim_tasks if not task.done()]
        for task in left:
            with suppress(RecursionError):  # tasks that await each other cancel each other
                task.cancel()
        for task in left:
            _drain(loop, task)
        loop.pools.unwind()
    for task in loop.sim_tasks:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.callback = None
        elif task._log_traceback:
            task.exception()
    for agen in loop.open_generators:
        _drain(loop, SimTask(agen.aclose(), loop=loop))


def _drain(loop: SimLoop, task: SimTask) -> None:
    if not task.done():
        loop.choose = fifo
        loop.budget = Budget(len(loop.order) + DRAIN_STEPS)
        loop.run(task)
