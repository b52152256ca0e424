"""The task of a simulated run: one participant, whose next step waits to be chosen.

A set of tasks is walked in the order of their hashes, and an ordinary task hashes by its address,
which no two runs share. This one hashes by its number, so whatever walks a set of tasks (anyio's
scopes, `asyncio.TaskGroup`) does so alike in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

RealTask = asyncio.Task  # kept: `asyncio.Task` stands for `SimTask` while a program runs
NAMES = tuple(f"Task-{i}" for i in range(256))


class SimTask(RealTask[Any]):
    """A task that a schedule may hold.

    Invariants:
        * At most one step waits: asyncio schedules the next one from within a step, or when the
          future that the task awaits is done.
    """

    __slots__ = ("args", "callback", "context", "ends_with_run", "index", "number")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: Any = None,  # Any: None, a simulated loop, or another thread's real one
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if loop is None:
            loop = asyncio.get_running_loop()
        self.callback: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.context: Context | None = None
        self.ends_with_run = False
        tasks = getattr(loop, "sim_tasks", None)
        if tasks is None:
            self.index = self.number = id(self) >> 4
            super().__init__(coro, loop=loop, name=name, **kwargs)
            return
        self.number = number = len(tasks)
        self.index = loop.new_index()
        tasks.append(self)
        if name is None:  # asyncio's own counter goes on from run to run
            name = NAMES[number] if number < 256 else f"Task-{number}"
        super().__init__(coro, loop=loop, name=name, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def fire(self) -> None:
        """Run the step that waits."""
        callback, self.callback = self.callback, None  # no cycle: nobody collects during a run
        self.context.run(callback, *self.args)  # type: ignore[union-attr, arg-type]  # set together
