"""The wait-for graph of a program that is stuck: who waits for what, and who could bring it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from ._errors import Wait
from ._op_points import call_of_op, frames_of_op, site_of_op, wait_of_library
from ._owners import Owners
from ._points import (
    MEETING_METHODS,
    call_of,
    frame_of,
    frames_of,
    own_frame,
    primitive_of,
    site_of,
)
from ._pools import PoolOp

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._task import SimTask

NameOf = Callable[[Any], str]


@final
@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Who waits for whom.

    Attributes:
        waits: One edge for each task that waits, in the order the tasks were made.
        cycle: Names of tasks that wait for each other in a ring; empty without one.
        busy: Names of the tasks that could go on.
    """

    waits: tuple[Wait, ...]
    cycle: tuple[str, ...]
    busy: tuple[str, ...]

    @staticmethod
    def of(loop: SimLoop, name_of: NameOf, owners: Owners) -> WaitGraph:
        """Look at every task of a loop that has stopped."""
        look = _Look(loop, name_of, owners)
        waits: list[Wait] = []
        edges: dict[str, tuple[str, ...]] = {}
        busy: list[str] = []
        for task in loop.sim_tasks:
            if task.done():
                continue
            if task._fut_waiter is None:  # type: ignore[attr-defined]
                busy.append(name_of(task))
                continue
            wait, needs = look.at(task)
            waits.append(wait)
            edges[wait.who] = needs
        for op in loop.pools.waiting:
            wait, needs = look.at_op(op)
            waits.append(wait)
            edges[wait.who] = needs
        return WaitGraph(tuple(waits), _find_cycle(edges), tuple(busy))

    def describe(self) -> str:
        """Return one line for each wait, and the cycle."""
        lines = [f"  {wait.describe()}" for wait in self.waits]
        if self.cycle:
            lines.append(f"  cycle: {' -> '.join((*self.cycle, self.cycle[0]))}")
        return "\n".join(lines)


@final
class _Look:
    """Looks at one waiting task after the other.

    Args:
        loop: Where they wait.
        name_of: Names them.
        owners: Knows who holds which lock.
    """

    def __init__(self, loop: SimLoop, name_of: NameOf, owners: Owners) -> None:
        self._loop = loop
        self._name_of = name_of
        self._owners = owners
        self._frames = {task: frames_of(task) for task in loop.sim_tasks if not task.done()}
        self._ops = {id(op.future): op for op in _ops_of(loop)}

    def at_op(self, op: PoolOp) -> tuple[Wait, tuple[str, ...]]:
        """Return what an op waits for that stands still, and who could end the wait."""
        frames = frames_of_op(op)
        who, site = self._name_of(op), site_of_op(frames)
        call = call_of_op(frames)
        if call is not None:
            missing = self._missing_replicas(frames)
            return Wait(who, f"blocking {call.describe()}", site, missing=missing), missing
        words = wait_of_library(frames)
        if words:
            missing = self._missing_replicas(frames)
            return Wait(who, words, site, missing=missing), missing or self._host_task(frames)
        found = primitive_of(frames)
        what = "a wait" if found is None else found[0]
        name = self._variable_name(found[1]) if found is not None else ""
        holder = getattr(op.run.waits_for, "holder", None) if op.run is not None else None
        owner = self._name_of(holder) if holder is not None and holder is not op else ""
        return Wait(who, f"{what} '{name}'" if name else what, site, owner), (owner,)

    def _host_task(self, frames: list[FrameType]) -> tuple[str, ...]:
        """Return the task that an op waits for on the host."""
        host = frame_of(frames, "ThreadPoint.call_on_host")
        task = host.f_locals["call"].task if host is not None else None
        return () if task is None else (self._name_of(task),)

    def at(self, task: SimTask) -> tuple[Wait, tuple[str, ...]]:
        """Return what a task waits for, and the names of those that could end the wait."""
        frames = self._frames[task]
        frame = own_frame(frames)
        site = site_of(frame) if frame is not None else "-"
        who = self._name_of(task)
        awaited = task._fut_waiter  # type: ignore[attr-defined]
        call = call_of(frames)
        if call is not None:
            missing = self._missing_replicas(frames)
            return Wait(who, call.describe(), site, missing=missing), missing
        found = primitive_of(frames)
        if found is not None:
            return self._at_primitive(who, site, task, *found)
        if isinstance(awaited, asyncio.Task):
            name = self._name_of(awaited)
            return Wait(who, f"task {name}", site, owner=""), (name,)
        children = getattr(awaited, "_children", None)
        if children:
            names = tuple(
                self._name_of(c) for c in children if not c.done() and hasattr(c, "index")
            )
            return Wait(who, f"gather of {', '.join(names) or 'futures'}", site), names
        op = self._ops.get(id(awaited))
        if op is not None:
            name = self._name_of(op)
            return Wait(who, name, site, owner=f"the workers of {op.pool.name}"), (name,)
        return self._at_future(who, site, frames)

    def _at_primitive(
        self, who: str, site: str, task: SimTask, kind: str, primitive: Any
    ) -> tuple[Wait, tuple[str, ...]]:
        what = kind
        name = self._variable_name(primitive)
        if name:
            what += f" '{name}'"
        if kind.endswith(".TaskGroup"):
            left = [t for t in getattr(primitive, "_tasks", ()) if not t.done()]
            names = tuple(self._name_of(each) for each in left)
            return Wait(who, f"{what} of {', '.join(names)}", site), names
        if kind == "asyncio.Barrier":
            missing = tuple(
                self._name_of(other)
                for other, frames in self._frames.items()
                if other is not task
                and _knows(frames, primitive)
                and (primitive_of(frames) or ("", None))[1] is not primitive
            )
            count, parties = primitive.n_waiting, primitive.parties
            return Wait(who, f"{what} ({count} of {parties} arrived)", site, "", missing), missing
        holders = tuple(dict.fromkeys(
            self._name_of(each) for each in self._owners.holders(primitive) if each is not None
        ))  # fmt: skip
        if kind == "anyio.Lock" and primitive.statistics().owner is not None:
            owner = primitive.statistics().owner.id  # anyio keeps it, as the id of the task
            holders = tuple(self._name_of(each) for each in self._frames if id(each) == owner)
        return Wait(who, what, site, ", ".join(holders)), holders

    def _at_future(
        self, who: str, site: str, frames: list[FrameType]
    ) -> tuple[Wait, tuple[str, ...]]:
        inner = frames[-1].f_code.co_qualname if frames else ""
        if inner == "ReplicaGroup.wait":
            left = [seat.work for seat in frames[-1].f_locals["self"].seats]
            names = tuple(
                self._name_of(self._ops.get(id(each), each))
                for each in left
                if each is not None and not each.done()
            )
            return Wait(who, f"the run of {', '.join(names) or 'replicas'}", site), names
        if inner == "_wait":
            left = [each for each in frames[-1].f_locals.get("fs", ()) if not each.done()]
            names = tuple(self._name_of(each) for each in left if hasattr(each, "index"))
            return Wait(who, f"asyncio.wait of {', '.join(names) or 'futures'}", site), names
        return Wait(who, f"a future ({inner or 'awaited'})", site), ()

    def _missing_replicas(self, frames: list[FrameType]) -> tuple[str, ...]:
        for frame in reversed(frames):
            if frame.f_code.co_qualname in MEETING_METHODS | {"BridgedCall.wait"}:
                point = frame.f_locals["self"]
                point = getattr(point, "_point", point)
                rows = point.rendezvous.rows()
                return tuple(f"replica {row.replica_id}" for row in rows if row.state != "waiting")
        return ()

    def _variable_name(self, wanted: Any) -> str:
        """Find the name by which some task's code knows an object; the outermost one counts."""
        for frames in self._frames.values():
            for frame in frames:
                name = _name_in(frame, wanted)
                if name:
                    return name
        return ""


def _name_in(frame: FrameType, wanted: Any) -> str:
    """Return the local variable, or the attribute of `self`, that holds an object; or ""."""
    for name, value in frame.f_locals.items():
        if name != "self":
            if value is wanted:
                return name
            continue
        for attribute, held in getattr(value, "__dict__", {}).items():
            if held is wanted and value is not wanted:
                return f"{type(value).__name__}.{attribute}"
    return ""


def _knows(frames: list[FrameType], wanted: Any) -> bool:
    return any(value is wanted for frame in frames for value in frame.f_locals.values())


def _ops_of(loop: SimLoop) -> list[PoolOp]:
    return list(loop.pools.ops)


def _find_cycle(edges: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first ring that following the edges in order meets."""
    done: set[str] = set()
    for start, following in edges.items():
        path = [start]
        todo = [iter(following)]
        while todo:
            step = next((name for name in todo[-1] if name in edges and name not in done), None)
            if step is None:
                done.add(path.pop())
                todo.pop()
            elif step in path:
                return tuple(path[path.index(step) :])
            else:
                path.append(step)
                todo.append(iter(edges[step]))
    return ()
