"""Copies of parameter servers: what changes one is done by its copy too, in the same order.

A server does each call, and puts it into the queue of a link, in one section. The link's thread
sends what is there to the copy, outside of that section: two servers that keep each other's copies
do not wait for each other. Who has called asks `followed` at the end, beside other calls.

Invariants:
    * The copy has done a prefix of the calls of its server.
    * Calls of before a `followed` that was answered are not lost with the server, unless it stands
      alone, which only the program decides.
    * A copy that has taken the place of its server follows no more, so a server that is wrongly
      thought dead is told so by its next `followed`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from ...cluster import StateHandle
from ...devices import OwnedTask
from ...errors import ContextError, WorkerLostError
from ...tree import map_leaves
from ...values import IndexedSlices
from ._messages import Array, Item, Key, NewShard, Pull, ServerStatistics, SlotSpec, Stamp
from ._server import ParameterServer, Pulled
from ._splits import Element, Leases

LOGGER = logging.getLogger("aioreplica.strategies")

RETRY_S = 1.0
"""After so many seconds another process is looked for, for a copy that there is none of."""

MAX_DOUBLINGS = 6
"""So many times that is doubled for processes where a copy has failed."""


class _Done(NamedTuple):
    """A call that was done: its method, its arguments, and whether it has raised."""

    method: str
    args: tuple[Any, ...]
    has_raised: bool


@final
class CopiedServer:
    """A parameter server that has a copy, or is one.

    Args:
        is_copy: Whether it is one; it begins to know something with the first call it follows.
        args: Of the `ParameterServer`, its number first.
    """

    def __init__(self, is_copy: bool, *args: Any) -> None:
        self._state = ParameterServer(*args)
        self._server: int = args[0]
        self._is_copy = is_copy
        self._is_complete = not is_copy
        self._link: _Link | None = None
        self._lock = threading.Lock()  # of `_link`, which `followed` reads beside other calls

    # ---- as a server ---------------------------------------------------------------------

    def pull(self, pulls: Sequence[Pull]) -> list[Pulled]:
        """Do what `ParameterServer.pull` does."""
        return self._state.pull(pulls)

    def slots(self) -> list[SlotSpec]:
        """Do what `ParameterServer.slots` does."""
        return self._state.slots()

    def leases(self) -> dict[int, Leases]:
        """Do what `ParameterServer.leases` does."""
        return self._state.leases()

    def create(self, shards: Sequence[NewShard]) -> None:
        """Do what `ParameterServer.create` does, here and there, as the ones below."""
        self._change("create", shards)

    def learn(self, *args: Any) -> None:
        """Take an optimizer."""
        self._change("learn", *args)

    def push(self, stamp: Stamp, items: Sequence[Item]) -> dict[Key, int]:
        """Apply what a closure pushes."""
        counts: dict[Key, int] = self._change("push", stamp, items)
        return counts

    def load(self, values: Mapping[Key, Array], *args: Any) -> None:
        """Take values of a checkpoint."""
        self._change("load", values, *args)

    def take(self, *args: Any) -> Element | None:
        """Lease an element."""
        element: Element | None = self._change("take", *args)
        return element

    def lease(self, *args: Any) -> None:
        """Know what is left of iterators."""
        self._change("lease", *args)

    def report(self, *args: Any) -> ServerStatistics:
        """Learn which closures are over."""
        statistics: ServerStatistics = self._change("report", *args)
        return statistics

    def _change(self, method: str, *args: Any) -> Any:
        # A closure beside it may write its arrays as soon as they are pushed.
        kept = args if self._link is None else map_leaves(_owned, args)
        has_raised = True
        try:
            result = getattr(self._state, method)(*args)
            has_raised = False
            return result
        finally:
            if self._link is not None:
                self._link.add(_Done(method, kept, has_raised))

    # ---- its copy ------------------------------------------------------------------------

    def copy_to(self, copy: StateHandle) -> None:
        """Have a copy from now on, in place of the one before; it is there once it has followed."""
        link = _Link(copy, self._server)
        link.add(_Done("take_over", (self._state.image(),), False))
        self._change_link(link)

    def stand_alone(self) -> None:
        """Have no copy from now on."""
        self._change_link(None)

    def _change_link(self, link: _Link | None) -> None:
        with self._lock:
            former, self._link = self._link, link
            waiting = [] if former is None else former.leave()
            for future in waiting:
                if link is None:
                    future.set_result(None)
                else:
                    link.add(future)

    def has_copy(self) -> bool:
        """Tell whether a copy follows, as far as is known."""
        return self._link is not None and self._link.follows

    def followed(self) -> Future[None]:
        """Return a future that is done when the copy has done all that was done here before."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it
        with self._lock:
            if self._link is None:
                future.set_result(None)
            else:
                self._link.add(future)
        return future

    def __del__(self) -> None:
        """End the thread of the link."""
        link = getattr(self, "_link", None)
        if link is not None:
            link.leave()

    # ---- as a copy -----------------------------------------------------------------------

    def follow(self, calls: Sequence[_Done]) -> None:
        """Do what the server has done.

        Raises:
            ContextError: If this one has taken its place, or something has ended otherwise here.
        """
        if not self._is_copy:
            raise ContextError("Another process has taken the place of this one.")
        for call in calls:
            error: Exception | None = None
            try:
                getattr(self._state, call.method)(*call.args)
            except Exception as raised:  # noqa: BLE001 - as the server has done
                error = raised
            if (error is not None) != call.has_raised:
                raise ContextError(f"{call.method} has ended otherwise in the copy: {error!r}.")
        self._is_complete = True

    def promote(self) -> None:
        """Take the place of the server.

        Raises:
            ContextError: If it does not know what the server knew.
        """
        if not self._is_complete:
            raise ContextError(f"The copy of parameter server {self._server} is not complete.")
        if self._is_copy:
            self._is_copy = False
            self._state.begin_term()

    def __repr__(self) -> str:
        what = "copy" if self._is_copy else "server"
        return f"<CopiedServer {self._server} | {what}, {self._state!r}>"


def _owned(leaf: object) -> object:
    if isinstance(leaf, IndexedSlices):
        return IndexedSlices(leaf.values.copy(), leaf.indices.copy(), leaf.dense_shape)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@final
class _Link:
    """Sends calls to a copy in order, from a thread of its own.

    Args:
        copy: The copy.
        server: Number of the server.
    """

    def __init__(self, copy: StateHandle, server: int) -> None:
        self._copy = copy
        self._server = server
        self._queue: list[_Done | Future[None]] = []
        self._asked: list[Future[None]] = []  # of what is on its way
        self._failure: WorkerLostError | None = None
        self._is_left = False
        self._changed = threading.Condition()
        name = f"copy of parameter server {server}"
        threading.Thread(target=self._send, name=name, daemon=True).start()

    @property
    def follows(self) -> bool:
        """False once the copy could not be reached."""
        return self._failure is None

    def add(self, thing: _Done | Future[None]) -> None:
        """Send a call; or have a future done, when what was added before has been followed."""
        with self._changed:
            if self._failure is None:
                self._queue.append(thing)
                self._changed.notify()
            elif isinstance(thing, Future):
                thing.set_exception(self._failure)

    def leave(self) -> list[Future[None]]:
        """Send nothing more; return the futures that are not done."""
        with self._changed:
            self._is_left = True
            waiting = [*self._asked, *(each for each in self._queue if isinstance(each, Future))]
            self._asked, self._queue = [], []
            self._changed.notify()
        return waiting

    def _send(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._is_left):
                    self._changed.wait()
                if self._is_left:
                    return
                things, self._queue = self._queue, []
                self._asked = [each for each in things if isinstance(each, Future)]
            calls = [each for each in things if not isinstance(each, Future)]
            failure: WorkerLostError | None = None
            try:
                if calls:
                    self._copy.begin("follow", calls)()
            except Exception as error:  # noqa: BLE001 - told to who waits
                failure = WorkerLostError(
                    f"The copy of parameter server {self._server} does not follow: {error}",
                    ranks=(self._server,),
                )
            if self._has_sent(failure):
                return

    def _has_sent(self, failure: WorkerLostError | None) -> bool:
        """Tell who waits; True if that was all."""
        with self._changed:
            asked, self._asked = self._asked, []
            if failure is not None:
                self._failure = failure
                asked += [each for each in self._queue if isinstance(each, Future)]
                self._queue = []
        for future in asked:
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
        return failure is not None


@final
class _Search:
    """Tries to give a server a copy.

    Attributes:
        num_failed: Copies that have failed.
        failed: The last ones, whose processes get no other one before `due`.
        due: The turn at which they may.
        num_lost: Those whose processes were lost.
    """

    def __init__(self) -> None:
        self.num_failed = self.due = self.num_lost = self._num_pauses = self._failed_at = 0
        self._num_in_row = self._lost_until = 0  # losses, and the turn at which their pause ends
        self.failed: list[StateHandle] = []

    def begin(self, turn: int) -> bool:
        """Forget processes that have gone, and all of them at the end of their pause.

        Returns:
            False in a pause after processes were lost: one that comes may be the same again.
        """
        self._forget_gone()
        if turn < self._lost_until:
            return False
        if not self.failed:
            self._num_pauses = 0
        elif turn >= self.due:
            self.failed = []
            if self._failed_at >= self._lost_until:  # in a process that lives
                self._num_in_row = 0
        return True

    def has_failed(self, copy: StateHandle, turn: int) -> None:
        """Learn that a copy has failed; whether its process was lost may be known later."""
        self.num_failed += 1
        self._failed_at = turn
        if not copy.is_lost:
            self._num_pauses += not self.failed
            self.due = turn + 2 ** min(self._num_pauses, MAX_DOUBLINGS)
        self.failed.append(copy)
        self._forget_gone()

    def _forget_gone(self) -> None:
        living = [each for each in self.failed if not each.is_lost]
        num_gone, self.failed = len(self.failed) - len(living), living
        if num_gone:
            self.num_lost += num_gone
            self._num_in_row += num_gone
            self._lost_until = self._failed_at + 2 ** min(self._num_in_row - 1, MAX_DOUBLINGS)

    def __str__(self) -> str:
        lost = f", {self.num_lost} of them with their processes" if self.num_lost else ""
        return f"({self.num_failed} have failed{lost})"


@final
class Copies:
    """Keeps a copy of each parameter server, and puts it in the place of one that is lost.

    Args:
        handles: The servers, by number; it changes them.
        make: Makes an empty copy of a server, in another process than those of some handles.

    Attributes:
        when_promoted: Called when a copy has taken the place of its server.
    """

    def __init__(
        self,
        handles: dict[int, StateHandle],
        make: Callable[[int, Sequence[StateHandle]], Awaitable[StateHandle]],
    ) -> None:
        self._handles = handles
        self._make = make
        self._copies: dict[int, StateHandle] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[OwnedTask[Any]] = set()
        self._alone: dict[int, _Search] = {}
        self._turn = 0  # of looks for processes
        self._looking: OwnedTask[Any] | None = None
        self._lost: set[int] = set()
        self.when_promoted: Callable[[], object] = bool

    @property
    def alone(self) -> tuple[int, ...]:
        """Servers that have no copy, as there is no process for it."""
        return tuple(sorted(self._alone))

    async def begin(self, server: int) -> None:
        """Look after a new server."""
        self._lost.discard(server)
        self._watch(server, self._handles[server])
        await self.repair(server)

    def is_lost(self, server: int) -> bool:
        """Tell whether a server and its copy are lost."""
        return server in self._lost

    def _watch(self, server: int, handle: StateHandle) -> None:
        handle.when_lost(partial(self._look, server))

    def _look(self, server: int) -> None:
        if server in self._handles:  # else the strategy is closed
            self._start(self._repair(server), f"copy of parameter server {server}")

    def _start(self, work: Any, name: str) -> OwnedTask[Any]:
        task = OwnedTask[Any](work, name)
        self._tasks.add(task)

        def ended(error: BaseException | None) -> None:
            self._tasks.discard(task)
            if error is not None:
                LOGGER.error("The %s was not made: %r", name, error)

        task.when_done(ended)
        return task

    async def repair(self, server: int) -> bool:
        """See that a server is there and has a copy, after something went wrong.

        Returns:
            False if it is lost, and its copy with it.

        Cancellation:
            Stops waiting; the repair goes on.
        """
        task = self._start(self._repair(server), f"copy of parameter server {server}")
        await task.done_or_cancelled()
        return bool(await task)

    async def _repair(self, server: int) -> bool:
        async with self._lock:
            while server in self._handles:
                primary, copy = self._handles[server], self._copies.get(server)
                try:
                    is_followed = bool(await primary.call("has_copy"))
                    if copy is None or copy.is_lost or not is_followed:
                        self._copies.pop(server, None)
                        await self._copy(server, primary)
                except WorkerLostError:
                    if not await self._promote(server):
                        self._lost.add(server)
                        return False
                else:
                    return True
            return False

    async def _promote(self, server: int) -> bool:
        copy = self._copies.pop(server, None)
        if copy is None:
            return False
        try:
            await copy.call("promote")
        except WorkerLostError:
            return False
        self._handles[server] = copy
        self.when_promoted()
        LOGGER.warning("Parameter server %d was lost; its copy has taken its place.", server)
        return True

    async def _copy(self, server: int, primary: StateHandle) -> None:
        """Make a copy of a server, or have it stand alone for now.

        Raises:
            WorkerLostError: If it is lost.
        """
        search = self._alone.get(server) or _Search()
        if not search.begin(self._turn):
            return
        copy: StateHandle | None = None
        try:
            copy = await self._make(server, [primary, *search.failed])
            await primary.call("copy_to", copy)
            await primary.call("followed", is_wait=True)
            why = "Its process was lost."
        except Exception as error:  # noqa: BLE001 - of whatever kind: it is told, and tried again
            why = str(error) or repr(error)
        else:
            if not copy.is_lost:
                self._copies[server] = copy
                self._watch(server, copy)
                self._alone.pop(server, None)
                return
        await primary.call("stand_alone")
        if copy is not None:
            search.has_failed(copy, self._turn)
        if copy is not None or server not in self._alone:
            LOGGER.warning(
                "Parameter server %d has no copy: %s Another one is made as soon as there is a "
                "process with the resource PS for it%s; a loss of this one loses its variables.",
                server, why, "" if copy is None else f" {search}",
            )  # fmt: skip
        self._alone[server] = search
        if self._looking is None or self._looking.is_done:
            self._looking = self._start(self._look_again(), "search for a process for copies")

    async def _look_again(self) -> None:
        while self._alone:
            await asyncio.sleep(RETRY_S)
            self._turn += 1
            for server in self.alone:
                if not await self._repair(server):
                    self._alone.pop(server, None)

    async def aclose(self) -> None:
        """Look after nothing any more."""
        for task in tuple(self._tasks):
            task.cancel()
            await task.ended()
        self._copies.clear()
        self._alone.clear()
