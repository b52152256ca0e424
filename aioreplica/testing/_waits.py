"""The wait-for graph of a program that is stuck: who waits for what, and who could end the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, final
from weakref import WeakKeyDictionary

from ._errors import Wait
from ._forbidden import is_foreign
from ._library import LibraryWatch
from ._network import Network
from ._participants import SimTask
from ._points import frames_of, name_in, primitive_of, site_of
from ._pools import PoolOp, PoolTable
from ._sockets import LISTENING, SimSocket, name_of

PRIMITIVES: Final = (asyncio.Lock, asyncio.Semaphore)

NameOf = Callable[[Any], str]


@final
@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Graph of the waits between participants.

    Attributes:
        waits: One edge for each task that waits, in the order the tasks were made.
        cycle: Names of tasks that wait for each other in a ring; empty without one.
        busy: Names of the tasks that could go on.
        silent: Connections that a fault has made half-open.
    """

    waits: tuple[Wait, ...]
    cycle: tuple[str, ...]
    busy: tuple[str, ...]
    silent: tuple[str, ...] = ()

    @staticmethod
    def of(
        tasks: Sequence[SimTask],
        pools: PoolTable,
        name_of: NameOf,
        owners: Owners,
        library: LibraryWatch,
    ) -> WaitGraph:
        """Look at the tasks and ops of a run that has stopped."""
        look = _Look(tasks, pools, name_of, owners, library)
        waits: list[Wait] = []
        edges: dict[str, tuple[str, ...]] = {}
        busy: list[str] = []
        for task in tasks:
            if task.done():
                continue
            if task._fut_waiter is None:  # type: ignore[attr-defined]
                busy.append(name_of(task))
                continue
            wait, needs = look.at(task)
            waits.append(wait)
            edges[wait.who] = needs
        for op in pools.waiting:
            wait, needs = look.at_op(op)
            waits.append(wait)
            edges[wait.who] = needs
        network = pools.loop.network
        silent = tuple(network.silent_links()) if isinstance(network, Network) else ()
        return WaitGraph(tuple(waits), _find_cycle(edges), tuple(busy), silent)

    def describe(self) -> str:
        """Return one line for each wait, and the cycle."""
        lines = [f"  {wait.describe()}" for wait in self.waits]
        if self.cycle:
            lines.append(f"  cycle: {' -> '.join((*self.cycle, self.cycle[0]))}")
        lines += [f"  the connection {each} is half-open: a fault" for each in self.silent]
        return "\n".join(lines)


@final
class _Look:
    """Looks at one waiting task after the other.

    Args:
        tasks: All tasks of the run.
        pools: Its pools.
        name_of: Names tasks and ops.
        owners: Knows who holds which lock.
        library: Knows who waits in the library.
    """

    def __init__(
        self,
        tasks: Sequence[SimTask],
        pools: PoolTable,
        name_of: NameOf,
        owners: Owners,
        library: LibraryWatch,
    ) -> None:
        self._name_of = name_of
        self._owners = owners
        self._library = library
        self._frames = {task: frames_of(task) for task in tasks if not task.done()}
        self._ops = {id(op.future): op for op in pools.ops}

    def at_op(self, op: PoolOp) -> tuple[Wait, tuple[str, ...]]:
        """Return what a suspended op waits for, and who could end the wait."""
        in_library = self._in_library(op)
        if in_library is not None:
            return in_library
        found = primitive_of(frames_of(op))
        what = "a wait" if found is None else found[0]
        name = self._variable_name(found[1]) if found is not None else ""
        lock = op.run.waits_for if op.run is not None else None
        holder = lock.holder if lock is not None else None
        owner = self._name_of(holder) if holder is not None and holder is not op else ""
        what = f"{what} '{name}'" if name else what
        return Wait(self._name_of(op), what, site_of(op), owner), (owner,)

    def at(self, task: SimTask) -> tuple[Wait, tuple[str, ...]]:
        """Return what a task waits for, and who could end the wait."""
        in_library = self._in_library(task)
        if in_library is not None:
            return in_library
        frames, who, site = self._frames[task], self._name_of(task), site_of(task)
        found = primitive_of(frames)
        peer = peer_of(frames)
        if found is not None and not (peer and found[0] == "asyncio.Event"):
            return self._at_primitive(who, site, task, *found)
        awaited = task._fut_waiter  # type: ignore[attr-defined]
        if isinstance(awaited, asyncio.Task):
            name = self._name_of(awaited)
            return Wait(who, f"task {name}", site, owner=""), (name,)
        children = getattr(awaited, "_children", None)
        if children:
            names = self._names_of(children)
            return Wait(who, f"gather of {', '.join(names) or 'futures'}", site), names
        op = self._ops.get(id(awaited))
        if op is not None:
            name = self._name_of(op)
            return Wait(who, name, site, owner=f"the workers of {op.pool.name}"), (name,)
        works = self._library.works_of(task)
        if works:
            names = self._names_of(works)
            return Wait(who, f"the run of {', '.join(names) or 'replicas'}", site), names
        if peer:
            return Wait(who, peer, site), ()
        inner = frames[-1].f_code.co_qualname if frames else ""
        if inner == "_wait":  # of asyncio.wait
            names = self._names_of(frames[-1].f_locals.get("fs", ()))
            return Wait(who, f"asyncio.wait of {', '.join(names) or 'futures'}", site), names
        return Wait(who, f"a future ({inner or 'awaited'})", site), ()

    def _in_library(self, participant: SimTask | PoolOp) -> tuple[Wait, tuple[str, ...]] | None:
        wait = self._library.wait_of(participant)
        if wait is None:
            return None
        missing = tuple(f"replica {replica_id}" for replica_id in wait.missing_members())
        task = wait.awaited()
        needs = missing or (() if task is None else self._names_of([task]))
        what = wait.describe()
        if missing and isinstance(participant, PoolOp) and not what.startswith("blocking "):
            what = f"blocking {what}"
        who, site = self._name_of(participant), site_of(participant)
        return Wait(who, what, site, missing=missing), needs

    def _names_of(self, awaited: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of those tasks and ops that are not done."""
        left = [self._ops.get(id(each), each) for each in awaited if each and not each.done()]
        return tuple(self._name_of(each) for each in left if hasattr(each, "index"))

    def _at_primitive(
        self, who: str, site: str, task: SimTask, kind: str, primitive: Any
    ) -> tuple[Wait, tuple[str, ...]]:
        what = kind
        name = self._variable_name(primitive)
        if name:
            what += f" '{name}'"
        if kind.endswith(".TaskGroup"):
            names = self._names_of(getattr(primitive, "_tasks", ()))
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

    def _variable_name(self, wanted: object) -> str:
        """Find the name by which some task's code knows an object; the outermost one counts."""
        for frames in self._frames.values():
            for frame in frames:
                name = name_in(frame, wanted)
                if name:
                    return name
        return ""


def _knows(frames: list[FrameType], wanted: object) -> bool:
    return any(value is wanted for frame in frames for value in frame.f_locals.values())


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


def peer_of(frames: Sequence[FrameType]) -> str:
    """Return what a task that awaits the network waits for, by its frames; "" if it does not.

    What counts are frames of asyncio and anyio, and the innermost one of any other code.
    """
    sock = None
    for frame in reversed(frames):
        sock = _socket_of(frame)
        if sock is not None or not is_foreign(frame.f_code.co_filename):
            break
    if sock is not None:
        if sock.state == LISTENING:
            return f"a connection to {name_of(sock.address)}"
        if sock.link is None:
            return f"a connection with {name_of(sock.peer_address or sock.address)}"
        is_client = name_of(sock.address) == sock.link.client
        peer = sock.link.server if is_client else sock.link.client
        broken = ", half-open by a fault of this schedule" if sock.link.is_silent else ""
        return f"data from {peer}{broken}"
    return ""


def _socket_of(frame: FrameType) -> SimSocket | None:
    """Find the socket that a frame has to do with: of a transport, or its own."""
    me = frame.f_locals.get("self")
    for holder in (me, getattr(me, "_protocol", None)):
        for name in ("_transport", "transport"):
            transport = getattr(holder, name, None)
            extra = getattr(transport, "get_extra_info", None)
            sock = getattr(extra("socket"), "_sock", None) if extra is not None else None
            if isinstance(sock, SimSocket):
                return sock
    for thing in (frame.f_locals.get("sock"), getattr(me, "_raw_socket", None)):
        if isinstance(thing, SimSocket):
            return thing
    return None


@final
class Owners:
    """Watches `acquire` and `release` of asyncio's locks and semaphores.

    Watching changes no schedule: the watched `acquire` awaits the real one and nothing else.
    """

    def __init__(self) -> None:
        self._holders: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._undo: list[tuple[type, str, object]] = []

    def install(self) -> None:
        """Begin to watch."""
        for cls in PRIMITIVES:
            self._watch(cls)

    def remove(self) -> None:
        """Stop watching; idempotent."""
        for cls, name, real in self._undo:
            setattr(cls, name, real)
        self._undo.clear()

    def holders(self, primitive: object) -> list[object]:
        """Return the tasks that hold a lock, or permits of a semaphore."""
        return list(self._holders.get(primitive, ()))

    def _watch(self, cls: type) -> None:
        real_acquire, real_release = vars(cls)["acquire"], vars(cls)["release"]
        holders = self._holders

        async def acquire(self: object) -> object:
            taken = await real_acquire(self)
            holders.setdefault(self, []).append(asyncio.current_task())
            return taken

        def release(self: object) -> None:
            held_by = holders.get(self, [])
            task = asyncio.current_task()
            if task in held_by:
                held_by.remove(task)
            elif held_by:
                held_by.pop(0)
            real_release(self)

        self._undo += [(cls, "acquire", real_acquire), (cls, "release", real_release)]
        cls.acquire = acquire  # type: ignore[attr-defined]
        cls.release = release  # type: ignore[attr-defined]
