"""States and closures on Dask distributed: actors on parameter servers, tasks on workers.

The client lives in the program's event loop. What it sends as a task is bytes, pickled before, so
that neither the scheduler nor the client looks into it. Roles are resources of Dask's workers:
`PS` and `W`. Each task is for one worker, so the scheduler chooses nothing, and gives nothing up.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import warnings
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, final
from uuid import uuid4
from weakref import WeakSet

from ..devices import OwnedTask
from ..errors import ContextError, WorkerLostError
from ._closures import (
    PARAMETER_SERVER,
    WORKER,
    ClosureEngine,
    ClosureTask,
    StateHandle,
    Submission,
    Watcher,
    WorkerInfo,
)
from ._dask_client import address_and_security, close_client, open_client, warn_if_open
from ._dask_processes import END_S, DaskProcesses, check_roles, load_dask
from ._dask_states import DaskHost, DaskState, actor_of, closure_worker
from ._dask_workers import DaskWorkers

RELEASE_S = 2.0
"""How long workers have to let go of what a closed strategy has left there, in seconds."""

WATCH_S = 0.1
"""After so many seconds the connection to the scheduler is looked at, and again after so many."""

LOOK_AGAIN_S = 1.0
"""After so many seconds a scheduler that did not answer is asked again for its workers."""

MESSAGE_BYTES = 1024 * 1024
"""Tasks that are submitted together go to the scheduler in messages of this size or one task."""


@final
class DaskClosureEngine(ClosureEngine):
    """An engine on Dask distributed.

    Args:
        target: The address of a scheduler, an asynchronous `distributed.Client` of the running
            loop, to whose scheduler another connection is made; None starts a local cluster.
        num_workers: How many workers a cluster of its own has.
        security: A `distributed.Security` for an address.
        timeout_s: How long the cluster may take to answer, in seconds.

    Raises:
        ImportError: If Dask distributed is not installed.
        TypeError: If `target` is nothing of these.
        ValueError: If `num_workers` is not a positive integer.
    """

    def __init__(
        self,
        target: Any = None,  # Any: a client of a package that need not be installed
        *,
        num_workers: int = 2,
        security: object = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers!r}.")
        distributed = load_dask()
        if target is not None and not isinstance(target, (str, distributed.Client)):
            raise TypeError(
                "A Dask cluster is given as the address of its scheduler, such as "
                f"'tcp://127.0.0.1:8786', or as a distributed.Client, got {target!r} "
                f"({type(target).__name__})."
            )
        self._target = target
        self._security = security
        self._timeout_s = timeout_s
        self._num_new_workers = num_workers
        self._client: Any = None
        self._comm: object = None  # of the client; it takes another one when that is lost
        self._lost: str | None = None
        self._reopening = asyncio.Lock()
        self._own: DaskProcesses | None = None
        self._num_users = 0
        self._known = DaskWorkers(self._forget)
        self._submissions: dict[str, WeakSet[_DaskSubmission]] = {}
        # What is made in each process, or there; handles alone keep it.
        self._states: dict[str, WeakSet[asyncio.Task[object] | DaskState]] = {}
        self._background: set[OwnedTask[object]] = set()
        self._watch: OwnedTask[None] | None = None
        self._keys = count()

    async def start(self, num_servers: int) -> None:
        """Connect to the scheduler, or start one and its processes."""
        await self.reopen(num_servers)
        self._num_users += 1

    @property
    def lost(self) -> str | None:
        """Sentence that says that the scheduler is gone; None while it is there."""
        return self._lost

    async def reopen(self, num_servers: int) -> None:
        """Connect if there is no connection, or the scheduler was lost."""
        async with self._reopening:
            if self._client is not None and self._lost is None:
                return
            lost = self._lost
            try:
                await self._disconnect()
                self._lost = None
                await self._connect(num_servers)
                check_roles(await self._look(), num_servers)
            except BaseException:
                self._lost = lost
                await self._disconnect()
                raise

    def notice_loss(self) -> str | None:
        """Look whether the connection was lost; the scheduler has let go of all that was ours."""
        is_there = self._client is None or self._client.scheduler_comm is self._comm
        if is_there or self._lost is not None:
            return self._lost
        self._lost = "The Dask scheduler was lost, and with it the servers and all results."
        lost, self._states = self._states, {}
        for there in lost.values():
            _lose(there)
        self._submissions.clear()
        self._known.all_gone()
        return self._lost

    def is_connected_for(self, other: DaskClosureEngine) -> bool:
        """True if this one is connected where another one would connect."""
        if self._client is None or other._target is None or self.notice_loss() is not None:
            return False
        return bool(self._client.scheduler.address == address_and_security(other._target)[0])

    async def _watch_scheduler(self) -> None:
        while self.notice_loss() is None:  # noqa: ASYNC110 - Dask tells nobody
            await asyncio.sleep(WATCH_S)

    async def create_state(
        self, owner: str, factory: Callable[..., object], args: Sequence[object], server: int, *,
        apart_from: Sequence[StateHandle] = (),
    ) -> StateHandle:  # fmt: skip
        """Make an actor on a worker with the resource `PS`; on another if that goes meanwhile."""
        data = pickle.dumps((factory, tuple(args)), protocol=5)
        while True:
            try:
                infos = await self._look()  # with a worker that has just died, perhaps
            except OSError as error:
                raise WorkerLostError(str(error), ranks=(server,)) from error
            places = _places_of_servers(infos, server, apart_from)
            place = places[server % len(places)]
            key = f"parameter-server-{server}-{uuid4().hex}"
            where = {"workers": [place], "allow_other_workers": False}
            future = self._client.submit(DaskHost, data, actor=True, pure=False, key=key, **where)
            making = OwnedTask[object](actor_of(self._client, future), f"start of server {server}")
            there = self._states.setdefault(place, WeakSet())
            there.add(making.task)
            try:
                await asyncio.wait([making.task])
            finally:
                making.cancel()
            if making.task.cancelled() or self.notice_loss():  # else it is waited for for ever
                self._in_background(self._client.cancel([future]), "cancel the start of a server")
                continue
            state = DaskState(owner, server, await making, self._client, future)
            there.add(state)
            if self._states.get(place) is not there:  # it has gone just now
                state.lose()
            return state

    def submit(self, worker: str, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Send tasks to a worker, up to `MESSAGE_BYTES` in one message."""
        if self._lost is not None:
            raise WorkerLostError(self._lost)
        found: list[_DaskSubmission] = []
        together: list[bytes] = []
        size = 0
        for task in tasks:
            together.append(pickle.dumps(task, protocol=5))
            size += len(together[-1])
            if size >= MESSAGE_BYTES:
                found += self._send(worker, together)
                together, size = [], 0
        if together:
            found += self._send(worker, together)
        self._submissions.setdefault(worker, WeakSet()).update(found)
        if worker not in self._known.now:  # it has gone, and that was told
            self._forget(worker)
        return [*found]

    def _send(self, worker: str, tasks: list[bytes]) -> list[_DaskSubmission]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            futures = self._client.map(
                _run_task,
                tasks,
                pure=False,  # keys are sorted: a worker begins with the least one of a message
                key=[f"closure-{next(self._keys):012d}-{uuid4().hex}" for _ in tasks],
                workers=[worker],
                allow_other_workers=False,
                resources={WORKER: 1},
            )
        return [_DaskSubmission(self, self._client, future) for future in futures]

    async def cancel(self, submissions: Sequence[Submission]) -> None:
        """Have the scheduler take tasks back."""
        futures = [each.future for each in submissions if isinstance(each, _DaskSubmission)]
        if futures and self._client is not None and self._lost is None:
            await self._client.cancel(futures, reason="it is not needed any more")

    def release(self, owner: str, keys: Sequence[Hashable] | None = None) -> None:
        """Have the workers let go of what they keep, between their messages."""
        workers = [*self._known.now]
        if self._client is not None and workers:
            releasing = self._client.run(_release, owner, keys, workers=workers, on_error="ignore")
            self._in_background(releasing, "release of what workers keep")

    def _in_background(self, work: Coroutine[object, None, object], name: str) -> None:
        task = OwnedTask(work, name)
        self._background.add(task)
        task.when_done(lambda _error: self._background.discard(task))

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Ask the scheduler, and every process for its id."""
        infos = await self._infos()
        pids = await self._client.run(os.getpid, on_error="ignore")
        return _with_roles(infos, pids)

    @property
    def workers_now(self) -> Mapping[str, int]:
        """Addresses of the workers, as the scheduler has told."""
        return dict(self._known.now)

    @property
    def num_workers(self) -> int:
        """Number of workers; before the start, of those that a cluster of its own will have."""
        return self._num_new_workers if self._client is None else len(self._known.now)

    def watch(self, watcher: Watcher) -> None:
        """Tell somebody whenever the scheduler tells of a worker that has come or gone."""
        self._known.watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it no more."""
        self._known.watchers.remove(watcher)

    def _learn_of(self, event: tuple[float, Any]) -> None:
        """Take an event of the scheduler."""
        told = event[1]
        action = told.get("action") if isinstance(told, dict) else None
        if action == "remove-worker":
            _lose(self._states.pop(told["worker"], ()))
            self._known.has_gone(told["worker"])
        elif action == "add-worker":
            self._in_background(self._look_until_answered(), "look at the workers")

    def _forget(self, worker: str) -> None:
        """Let go of what a worker had; who waits for it is told."""
        lost = [*self._submissions.pop(worker, ())]
        if lost:
            self._in_background(self.cancel(lost), "cancel tasks of a lost worker")

    async def add_worker(self) -> str:
        """Start a worker in the local cluster; return its name.

        Raises:
            ContextError: If the cluster is not this engine's own.
        """
        name = await self._require_own("add_worker").add_worker()
        await self._look()
        return name

    async def remove_worker(self, name: str) -> None:
        """End a process of the local cluster; what it was doing is done again elsewhere.

        Raises:
            ContextError: If the cluster is not this engine's own.
            ValueError: If it has no such process.
        """
        await self._require_own("remove_worker").remove(name)
        await self._look()

    async def restart_worker(self, worker: str) -> bool:
        """Restart a worker, if it has a nanny."""
        try:
            done = await self._client.restart_workers(
                [worker], timeout=END_S, raise_for_error=False
            )
        except Exception:  # noqa: BLE001 - there is no nanny: the worker stays as it is
            return False
        return bool(done.get(worker) == "OK")

    async def aclose(self) -> None:
        """Disconnect, if nobody else uses it; end a cluster of its own.

        Cancellation:
            Raised again once that is done.
        """
        self._num_users -= 1
        if self._num_users > 0:
            return
        self._num_users = 0
        await self._disconnect()

    async def _disconnect(self) -> None:
        """End all that there is; a cancellation is raised again once that is done."""
        client, self._client = self._client, None
        ending = OwnedTask(self._end(client), "end of a Dask cluster")
        await ending.ended()
        await ending

    async def _end(self, client: Any) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._background and self._own is None and self._lost is None:
            await asyncio.wait([each.task for each in self._background], timeout=RELEASE_S)
        for task in tuple(self._background):
            task.cancel()
            await task.ended()
        self._known.now = {}
        self._states.clear()
        self._submissions.clear()
        if client is not None:
            with suppress(Exception):  # it never connected, or the scheduler is gone
                client.unsubscribe_topic("all")
            await close_client(client)
        own, self._own = self._own, None
        if own is not None:
            await own.aclose()

    def __repr__(self) -> str:
        where = "a cluster of its own" if self._target is None else self._target
        state = "new" if self._client is None else "connected"
        return f"<DaskClosureEngine {where} | {state}, {self.num_workers} workers>"

    # ---- starting ------------------------------------------------------------------------

    async def _connect(self, num_servers: int) -> None:
        if self._target is None:
            self._own = DaskProcesses()
            address, self._security = await self._own.start(num_servers, self._num_new_workers)
        else:
            address, self._security = address_and_security(self._target, self._security)
            warn_if_open(address, self._security)
        self._client = await open_client(
            address, self._security, is_own=self._target is None, timeout_s=self._timeout_s
        )
        self._comm = self._client.scheduler_comm
        self._client.subscribe_topic("all", self._learn_of)
        self._watch = OwnedTask(self._watch_scheduler(), "watch over the scheduler")

    async def _infos(self) -> list[tuple[str, Any]]:
        """Ask the scheduler for its workers, in order of their names."""
        if self._lost is not None:
            raise WorkerLostError(self._lost)
        if self._client is None:
            raise ContextError(f"{self!r} is not connected. Start it first.")
        found = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        return sorted(found.items(), key=lambda item: _natural(str(item[1]["name"])))

    async def _look_until_answered(self) -> None:
        """Look because of a worker that has come, of which nothing else would tell."""
        while self._client is not None and self._lost is None:
            try:
                await self._look()
            except OSError:  # of a connection that was not made in time
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                return

    async def _look(self) -> list[tuple[str, object]]:
        """Ask the scheduler for its workers, but for those that have gone; tell of new ones."""
        look = self._known.begin_look()
        infos: list[tuple[str, object]] | None = None
        try:
            infos = await self._infos()
            return [each for each in infos if each[0] not in look.gone]
        finally:
            self._known.end_look(look, infos)

    def _require_own(self, what: str) -> DaskProcesses:
        if self._own is None:
            raise ContextError(
                f"{what} works in a cluster that the engine has started. Start and end the "
                "workers of another one with Dask."
            )
        return self._own


def _lose(there: Iterable[asyncio.Task[object] | DaskState]) -> None:
    """Tell what was in a process, or made there, that it is gone."""
    for each in tuple(there):
        if isinstance(each, DaskState):
            each.lose()
        else:
            each.cancel()


@final
class _DaskSubmission(Submission):
    def __init__(self, engine: DaskClosureEngine, client: Any, future: Any) -> None:
        self._engine = engine
        self._client = client
        self.future = future

    async def wait(self) -> None:
        error = await self.future.exception()  # `distributed.wait` makes two tasks of its own
        if error is not None:
            raise _translated(error)
        if self.future.cancelled():
            self._engine.notice_loss()
            raise WorkerLostError(f"The Dask cluster has dropped a closure: {self.future.key}")

    async def result(self) -> Any:
        distributed = load_dask()
        try:
            return await self._client.gather(self.future)
        except distributed.client.FutureCancelledError as error:
            raise WorkerLostError(f"The Dask cluster has dropped a result: {error}") from error
        except (OSError, distributed.client.ClosedClientError) as error:
            raise WorkerLostError(f"A result cannot be reached: {error}") from error
        except Exception as error:  # noqa: BLE001 - most are what the task raised
            raise _translated(error) from None


def _translated(error: Exception) -> Exception:
    distributed = load_dask()
    if isinstance(error, distributed.scheduler.KilledWorker):
        return WorkerLostError(f"A closure was lost with each worker that tried it: {error}")
    return error


def _with_roles(
    infos: Sequence[tuple[str, Any]], pids: Mapping[str, int]
) -> tuple[WorkerInfo, ...]:
    return tuple(
        WorkerInfo(str(info["name"]), role, address, pids.get(address, 0))
        for address, info in infos
        for role in (PARAMETER_SERVER, WORKER)
        if role in info["resources"]
    )


def _run_task(data: bytes) -> object:
    """Run a task in the thread that Dask has for it."""
    task: ClosureTask = pickle.loads(data)
    return task.run(closure_worker())


def _release(owner: str, keys: Sequence[Hashable] | None, dask_worker: object) -> None:
    """Let go of what this worker keeps; called on its event loop."""
    closure_worker(dask_worker).release(owner, keys)


def _places_of_servers(
    infos: Sequence[tuple[str, Any]], server: int, apart_from: Sequence[StateHandle]
) -> list[str]:
    others = {each.place for each in apart_from if isinstance(each, DaskState)}
    servers = [address for address, info in infos if PARAMETER_SERVER in info["resources"]]
    places = [address for address in servers if address not in others]
    if not places:
        what = "a copy of parameter" if others else "parameter"
        raise WorkerLostError(
            f"No worker with the resource {PARAMETER_SERVER!r} is left in the cluster for {what} "
            f"server {server}. Start one.",
            ranks=(server,),
        )
    return places


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return what sorts worker-2 before worker-10."""
    parts = filter(None, re.split("([0-9]+)", f"{name}\0"))
    return [(0, int(each), "") if each[0] in "0123456789" else (1, 0, each) for each in parts]
