"""Detection of leaks: tasks, generators, threads and exceptions that a program left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias, final

from ._errors import LeakError
from ._loop import SimLoop
from ._participants import SimTask
from ._points import point_of
from ._pools import PoolTable

IgnoredLeak: TypeAlias = str | Callable[..., Any]
Ignored: TypeAlias = IgnoredLeak | Sequence[IgnoredLeak]
EVERYTHING: Final = "ignore"


@final
class Leaks:
    """Decides what counts as left behind.

    Args:
        ignored: "ignore" for everything, or what not to count: the function of a task, a generator
            or a call, its name, or the name of a task, with wildcards as in file names.

    Raises:
        TypeError: If it is none of these.
    """

    def __init__(self, ignored: Ignored = ()) -> None:
        given = ignored if isinstance(ignored, (tuple, list)) else (ignored,)
        for each in given:
            if not (isinstance(each, str) or callable(each)):
                raise TypeError(
                    f"leaks must be 'ignore', a function or its name, or a list of those, got "
                    f"{each!r}."
                )
        self._is_off = ignored == EVERYTHING
        self._patterns = tuple(
            each if isinstance(each, str) else getattr(each, "__qualname__", repr(each))
            for each in given
        )

    def find(self, loop: SimLoop, pools: PoolTable) -> LeakError | None:
        """Return the error for what a run has left behind; None if nothing counts."""
        if self._is_off:
            return None
        left = [
            task for task in loop.sim_tasks if not task.done() and self._counts(*names_of(task))
        ]
        tasks = tuple(map(describe_task, left))
        names = (getattr(agen, "__qualname__", "?") for agen in loop.open_generators)
        generators = tuple(filter(self._counts, names))
        threads = tuple(
            f"{op.describe()} on {op.pool.name} ({point_of(op)})"
            for op in pools.waiting
            if not getattr(op, "is_daemon", False) and self._counts(op.describe())
        )
        connections = tuple(filter(self._counts, loop.open_sockets))
        exceptions = tuple(self._exceptions(loop))
        parts = {
            "tasks that had not ended": tasks,
            "asynchronous generators that were not closed": generators,
            "threads that waited for ever": threads,
            "connections that were not closed": connections,
            "exceptions that were never retrieved": exceptions,
        }
        found = [f"{what}: {', '.join(those)}" for what, those in parts.items() if those]
        if not found:
            return None
        return LeakError(
            f"The program ended and left behind {'; '.join(found)}. Await, cancel or close them "
            "before it ends.",
            tasks=tasks,
            generators=generators,
            exceptions=exceptions,
            threads=threads,
            connections=connections,
        )

    def _exceptions(self, loop: SimLoop) -> Iterator[str]:
        for task in loop.sim_tasks:
            if task.done() and task._log_traceback and self._counts(*names_of(task)):
                yield f"{task.get_name()}: {task.exception()!r}"
        for context in loop.complaints:
            error = context.get("exception")
            message = context.get("message", "").partition(" <")[0]
            yield f"{message}: {error!r}" if error is not None else message

    def _counts(self, *names: str) -> bool:
        shorter = [name.rpartition(".")[2] for name in names]
        return not any(
            fnmatchcase(name, pattern) for name in (*names, *shorter) for pattern in self._patterns
        )


def names_of(task: SimTask) -> tuple[str, str]:
    """Return the name of a task, and that of its function."""
    return task.get_name(), task.function_name


def describe_task(task: SimTask) -> str:
    """Return both names of a task, such as "left (sleep)"."""
    name, function = names_of(task)
    return f"{name} ({function})"
