"""Readiness of sockets in a run: selectors, and the moments of a schedule.

A moment is a participant, as an op of a pool is one. It keeps the order that asyncio promises for
one socket: a task that was woken, or made, when something came from a socket takes that step
before anything else comes from it. A real loop reads a socket at most once in a round, and
runs in between whatever was ready, so servers may rely on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import isfuture
from selectors import EVENT_READ, EVENT_WRITE, SelectorKey
from typing import TYPE_CHECKING, Any, final

from ._forbidden import refuse
from ._pools import LATENCY_S, MAX_LATENCY_S
from ._sockets import CONNECTING, LISTENING, SimSocket, name_of

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._network import Network
    from ._threads import OpRun

IDLE, OFFERED, DELAYED, FIRED = range(4)


class SimSelector(ABC):
    """Registrations of a loop, as `selectors.BaseSelector` keeps them.

    Args:
        network: Of the run.
    """

    needs_loop = False

    def __init__(self, network: Network) -> None:
        self._network = network
        self.keys: dict[int, SelectorKey] = {}

    def register(self, fd: object, events: int, data: object = None) -> SelectorKey:
        """Begin to watch a socket, or its number."""
        network = self._network
        fd = _number(fd)
        sock = network.sockets.get(fd)
        if sock is None:
            refuse("Watching a file descriptor")
        key = self.keys[fd] = SelectorKey(fd, fd, events, data)
        network.watchers[fd] = self
        network.update(sock)
        return key

    def modify(self, fd: object, events: int, data: object = None) -> SelectorKey:
        """Watch it for something else."""
        return self.register(fd, events, data)

    def unregister(self, fd: object) -> SelectorKey:
        """Watch it no longer; KeyError if it is not watched."""
        fd = _number(fd)
        key = self.keys.pop(fd)
        self._network.watchers.pop(fd, None)
        sock = self._network.sockets.get(fd)
        if sock is not None:
            self._network.update(sock)
        return key

    def get_key(self, fd: object) -> SelectorKey:
        """Return what is registered; KeyError if nothing is."""
        return self.keys[_number(fd)]

    def get_map(self) -> dict[int, SelectorKey]:
        """Return all that is registered."""
        return self.keys

    def close(self) -> None:
        """Watch nothing any more."""
        for fd in tuple(self.keys):
            self.unregister(fd)

    @abstractmethod
    def notify(self, ready: Ready) -> None:
        """Tell that a socket is ready."""


@final
class LoopSelector(SimSelector):
    """Selector of the loop of a run."""

    needs_loop = True

    def notify(self, ready: Ready) -> None:
        """Put what is registered behind the callbacks that wait, as a real loop does."""
        self._network.loop.call_soon(self._run, ready)

    def _run(self, ready: Ready) -> None:
        key = self.keys.get(ready.sock.number)
        handle = None if key is None else key.data[ready.is_write]
        if handle is not None and not (handle._cancelled or _has_done_its_work(handle)):
            handle._run()
        ready.rest()


def _number(fd: Any) -> int:
    return fd if isinstance(fd, int) else int(fd.fileno())


def _has_done_its_work(handle: Any) -> bool:
    """Return True if what is called back has ended, or was cancelled, and is about to unregister.

    A real loop may call it all the same, in the round in which it was cancelled: asyncio and anyio
    then log an `InvalidStateError`, of which no program can know.
    """
    owner = getattr(handle._callback, "__self__", None)
    return any(isfuture(each) and each.done() for each in (owner, *(handle._args or ())))


@final
class Ready:
    """The next moment at which a socket can be read, or written; a participant of the schedule.

    Args:
        sock: The socket.
        is_write: Whether it is about writing.

    Attributes:
        waiter: The op that is suspended until then, on a socket that blocks; else None.

    Invariants:
        * It is an option only while somebody waits for it and the socket has something.
    """

    __slots__ = (
        "deadline", "due", "index", "is_write", "pool", "since_step", "sock", "state", "waiter",
    )  # fmt: skip

    def __init__(self, sock: SimSocket, network: Network, *, is_write: bool) -> None:
        self.sock = sock
        self.pool = network
        self.is_write = is_write
        self.index = network.loop.new_index()
        self.state = IDLE
        self.due = self.deadline = 0.0
        self.since_step = 0
        self.waiter: OpRun | None = None

    @property
    def name(self) -> str:
        """Name in traces: the socket."""
        sock = self.sock
        if sock.link is not None:
            return f"network {sock.link.describe()}"
        return f"network {name_of(sock.peer_address or sock.address)}"

    def describe(self) -> str:
        """Say for traces what will happen."""
        sock = self.sock
        if self.is_write:
            return "connects" if sock.state == CONNECTING else "has room"
        if sock.state == LISTENING:
            return "has a connection"
        to = f"to {name_of(sock.address)}"
        if sock.arrived or sock.in_flight or sock.packets:
            return f"brings {len(sock.arrived) + len(sock.in_flight)} bytes {to}"
        return f"brings {'a reset' if sock.reset_sent else 'the end'} {to}"

    @property
    def needs_loop(self) -> bool:
        """True if it can do nothing while the loop is blocked."""
        watcher = self.pool.watchers.get(self.sock.number)
        return self.waiter is None and watcher is not None and watcher.needs_loop

    @property
    def is_overdue(self) -> bool:
        """True if time has passed in which it would have happened."""
        return self.due > 0 and self.pool.loop.now > self.deadline

    def is_off(self) -> bool:
        """Return True if nothing is delayed."""
        return self.state != DELAYED

    def update(self) -> None:
        """Become an option, or none, after something has changed."""
        if self.state in (FIRED, DELAYED):
            return
        is_wanted = self._is_wanted()
        if is_wanted and self.state == IDLE:
            self._offer()
        elif not is_wanted and self.state == OFFERED:
            self.state = IDLE
            loop = self.pool.loop
            (loop.postponed if self in loop.postponed else loop.external).remove(self)

    def become_due(self, loop: SimLoop) -> None:
        """Become an option: the time is over that a fault has added."""
        self.state = IDLE
        if self._is_wanted():
            self._put(loop, loop.now)

    def rest(self) -> None:
        """Note that whoever was told has looked."""
        self.state = IDLE
        self.update()

    def fire(self) -> None:
        """Let it arrive, or be connected, and tell whoever waits."""
        network, sock = self.pool, self.sock
        network.let_time_pass(self.due)
        self.state = FIRED
        if not self.is_write:
            sock.arrive()
        elif sock.state == CONNECTING:
            network.finish_connect(sock)
        watcher = network.watchers.get(sock.number)
        if self.waiter is not None:
            self.state = IDLE
            self.waiter.wake()
        elif watcher is not None:
            watcher.notify(self)
        else:
            self.state = IDLE

    def wait(self, timeout_s: float | None, what: str) -> bool:
        """Suspend the op that called until then; False after the timeout."""
        op = self.pool.pools.current_op
        if op is None:
            refuse(
                f"A blocking {what} on the event loop",
                "Use asyncio's streams, or loop.sock_recv and the like on a socket that was set "
                "not to block; or call it in a thread.",
            )
        run = op.on_thread()
        if run.catch_up():
            return True
        self.waiter = run
        self.pool.update(self.sock)
        try:
            return run.wait(None, timeout_s)
        finally:
            self.waiter = None
            if self.state == FIRED:
                self.state = IDLE
            self.pool.update(self.sock)

    def _is_wanted(self) -> bool:
        sock = self.sock
        if self.waiter is None:
            watcher = self.pool.watchers.get(sock.number)
            if watcher is None:
                return False
            wanted = EVENT_WRITE if self.is_write else EVENT_READ
            if not watcher.keys[sock.number].events & wanted:
                return False
        return sock.can_write() if self.is_write else sock.can_read()

    def _offer(self) -> None:
        loop, sock = self.pool.loop, self.sock
        if self.is_write:
            is_on_its_way = sock.state == CONNECTING
        else:
            is_on_its_way = not (sock.arrived or sock.end_arrived or sock.reset_arrived)
        if not is_on_its_way:
            self._put(loop, loop.now)
            return
        extra = 0.0 if sock.link is None else sock.link.latency_s
        if extra:
            self.state = DELAYED
            loop.call_when_due(loop.now + extra, self)
        else:
            self._put(loop, loop.now + LATENCY_S)

    def _put(self, loop: SimLoop, due: float) -> None:
        self.state = OFFERED
        self.due, self.deadline = due, loop.now + MAX_LATENCY_S
        self.since_step = len(loop.order)
        (loop.external if self.may_go(loop) else loop.postponed).append(self)

    def may_go(self, loop: SimLoop) -> bool:
        """Return True if the tasks have gone on that came before, see above."""
        followers = self.sock.followers
        if self.is_write or not followers or loop.fidelity != "reorder":
            return True
        followers[:] = [each for each in followers if each[0].callback is each[1]]
        return not followers
