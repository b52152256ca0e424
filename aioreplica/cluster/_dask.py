"""States and closures on Dask distributed: actors on parameter servers, tasks on workers.

The client lives in the program's event loop. What it sends as a task is bytes, pickled before, so
that neither the scheduler nor the client looks into it. Roles are resources of Dask's workers:
`PS` and `W`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, final
from uuid import uuid4

from ..context import REGISTRY
from ..devices import OwnedTask
from ..errors import ContextError, WorkerLostError
from ._closures import (
    PARAMETER_SERVER,
    WORKER,
    ClosureEngine,
    ClosureTask,
    ClosureWorker,
    StateHandle,
    Submission,
    WorkerInfo,
)

LOOK_S = 2.0
"""How old the number of workers may be."""

END_S = 10.0
"""How long the processes of a local cluster have to end, and a worker to restart, in seconds."""

CONNECT_S = 5.0
"""How long a process of a local cluster tries to reach another one, before that counts as lost."""

MESSAGE_BYTES = 1024 * 1024
"""Tasks that are submitted together go to the scheduler in messages of this size or one task."""


@final
class DaskClosureEngine(ClosureEngine):
    """An engine on Dask distributed.

    Args:
        target: The address of a scheduler, an asynchronous `distributed.Client` of the running
            loop, which stays the caller's; None starts a cluster of processes on 127.0.0.1.
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
        security: Any = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers!r}.")
        distributed = _load()
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
        self._scheduler: Any = None
        self._nannies: dict[str, Any] = {}
        self._num_workers = num_workers
        self._num_named = 0
        self._looked_s = 0.0
        self._look: OwnedTask[None] | None = None
        self._servers: list[str] = []
        self._quiet = ExitStack()

    async def start(self, num_servers: int) -> None:
        """Connect to the scheduler, or start one and its processes."""
        if self._client is not None:
            return
        try:
            await self._connect(num_servers)
            infos = await self._infos()
            self._servers = [a for a, info in infos if PARAMETER_SERVER in info["resources"]]
            self._check_roles(infos, num_servers)
        except BaseException:
            await self.aclose()
            raise

    async def create_state(
        self, factory: Callable[..., object], args: Sequence[Any], server: int
    ) -> StateHandle:
        """Make an actor on a worker with the resource `PS`."""
        infos = await self._infos()
        places = [a for a, info in infos if PARAMETER_SERVER in info["resources"]]
        if not places:
            raise WorkerLostError(
                f"No worker with the resource {PARAMETER_SERVER!r} is left in the cluster for "
                f"parameter server {server}. Start one.", ranks=(server,),
            )  # fmt: skip
        data = pickle.dumps((factory, tuple(args)), protocol=5)
        future = self._client.submit(
            _Host,
            data,
            actor=True,
            pure=False,
            key=f"parameter-server-{server}-{uuid4().hex}",
            workers=[places[server % len(places)]],
            allow_other_workers=False,
        )
        with self._client.as_current():  # an actor looks for it
            actor = await future
        return _DaskState(server, actor, self._client, future)

    def submit(self, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Send tasks to workers with the resource `W`, up to `MESSAGE_BYTES` in one message."""
        self._look_again()
        found: list[Submission] = []
        together: list[bytes] = []
        size = 0
        for task in tasks:
            together.append(pickle.dumps(task, protocol=5))
            size += len(together[-1])
            if size >= MESSAGE_BYTES:
                found += self._send(together)
                together, size = [], 0
        return found + self._send(together) if together else found

    def _send(self, tasks: list[bytes]) -> list[Submission]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            futures = self._client.map(
                _run_task,
                tasks,
                pure=False,
                key=[f"closure-{uuid4().hex}" for _ in tasks],
                resources={WORKER: 1},
            )
        return [_DaskSubmission(self._client, future) for future in futures]

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Ask the scheduler, and every process for its id."""
        infos = await self._infos()
        pids = await self._client.run(os.getpid, on_error="ignore")
        found = [
            WorkerInfo(str(info["name"]), role, address, pids.get(address, 0))
            for address, info in infos
            for role in (PARAMETER_SERVER, WORKER)
            if role in info["resources"]
        ]
        return tuple(found)

    @property
    def num_workers(self) -> int:
        """Number of workers that the scheduler had when it was last asked."""
        return self._num_workers

    async def add_worker(self) -> str:
        """Start a worker in the local cluster; return its name.

        Raises:
            ContextError: If the cluster is not this engine's own.
        """
        self._require_own("add_worker")
        name = f"worker-{self._num_named}"
        self._num_named += 1
        await self._start_process(name, WORKER)
        await self._infos()
        return name

    async def remove_worker(self, name: str) -> None:
        """End a process of the local cluster; what it was doing is done again elsewhere.

        Raises:
            ContextError: If the cluster is not this engine's own.
            ValueError: If it has no such process.
        """
        self._require_own("remove_worker")
        nanny = self._nannies.pop(name, None)
        if nanny is None:
            raise ValueError(f"There is no process {name!r} in {self!r}.")
        await nanny.close(timeout=END_S)
        await self._infos()

    async def restart_worker(self, submission: Submission) -> None:
        """Restart the worker that has a task, if it has a nanny."""
        assert isinstance(submission, _DaskSubmission)
        processing = await self._client.processing()
        key = submission.future.key
        places = [address for address, keys in processing.items() if key in keys]
        submission.cancel()
        if places:
            with suppress(Exception):  # there is no nanny: the worker stays as it is
                await self._client.restart_workers(places, timeout=END_S, raise_for_error=False)

    async def aclose(self) -> None:
        """Disconnect; end a cluster of its own.

        Cancellation:
            Raised again once that is done.
        """
        client, self._client = self._client, None
        ending = OwnedTask(self._end(client), "end of a Dask cluster")
        await ending.ended()
        await ending

    async def _end(self, client: Any) -> None:
        if self._look is not None:
            self._look.cancel()
            await self._look.ended()
        if client is not None and client is not self._target:
            with suppress(TimeoutError, OSError):
                await client.close()
        nannies, self._nannies = [*self._nannies.values()], {}
        closing = [nanny.close(timeout=END_S) for nanny in nannies]
        await asyncio.gather(*closing, return_exceptions=True)
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            await scheduler.close()
        self._quiet.close()

    def __repr__(self) -> str:
        where = "a cluster of its own" if self._target is None else self._target
        state = "new" if self._client is None else "connected"
        return f"<DaskClosureEngine {where} | {state}, {self._num_workers} workers>"

    # ---- starting ------------------------------------------------------------------------

    async def _connect(self, num_servers: int) -> None:
        distributed = _load()
        target = self._target
        if isinstance(target, distributed.Client):
            _require_asynchronous(target)
            self._client = target
            return
        direct = None
        if target is None:
            address = await self._start_cluster(num_servers)
            direct = True
        else:
            address = target
            _warn_if_open(address, self._security)
        self._client = distributed.Client(  # kept before it connects: what fails closes it
            address,
            asynchronous=True,
            direct_to_workers=direct,
            set_as_default=False,
            security=self._security,
            timeout=self._timeout_s,
            name="aioreplica",
        )
        try:
            await self._client
        except (OSError, TimeoutError) as error:
            raise ConnectionError(
                f"The Dask scheduler at {address} does not answer: {error}"
            ) from error

    async def _start_cluster(self, num_servers: int) -> str:
        distributed = _load()
        quiet = distributed.utils.silence_logging_cmgr(logging.WARNING)
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet)
        self._scheduler = await distributed.Scheduler(
            host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0"
        )
        names = [(f"ps-{i}", PARAMETER_SERVER) for i in range(num_servers)]
        names += [(f"worker-{i}", WORKER) for i in range(self._num_new_workers)]
        self._num_named = self._num_new_workers
        results = await asyncio.gather(
            *(self._start_process(name, role) for name, role in names), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        address: str = self._scheduler.address
        return address

    async def _start_process(self, name: str, role: str) -> None:
        nanny = _load().Nanny(
            self._scheduler.address,
            nthreads=1,
            name=name,
            host="127.0.0.1",
            resources={role: 1},
            memory_limit=0,
            dashboard=False,
            config={"distributed.comm.timeouts.connect": f"{CONNECT_S:g}s"},
            silence_logs=logging.CRITICAL,  # errors of closures are raised in the program
        )
        self._nannies[name] = nanny
        await nanny

    def _check_roles(self, infos: Sequence[tuple[str, Any]], num_servers: int) -> None:
        both = [
            str(info["name"])
            for _, info in infos
            if PARAMETER_SERVER in info["resources"] and WORKER in info["resources"]
        ]
        if both:
            raise ValueError(
                f"Dask workers {', '.join(both)} have both resources, 'PS' and 'W': a closure "
                "there would wait for the parameter server in its own process. Give each one of "
                "them."
            )
        if len(self._servers) < num_servers:
            raise ValueError(
                f"{num_servers} parameter servers were asked for, but "
                f"{len(self._servers)} of the {len(infos)} Dask workers have the resource 'PS'. "
                "Start more: dask worker ADDRESS --nthreads 1 --resources 'PS=1'."
            )
        if not self._num_workers:
            raise ValueError(
                f"None of the {len(infos)} Dask workers has the resource 'W'. Start some: "
                "dask worker ADDRESS --nthreads 1 --resources 'W=1'."
            )

    async def _infos(self) -> list[tuple[str, Any]]:
        """Ask the scheduler for its workers, in order of their names."""
        if self._client is None:
            raise ContextError(f"{self!r} is not connected. Start it first.")
        found = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        infos = sorted(found.items(), key=lambda item: _natural(str(item[1]["name"])))
        self._num_workers = sum(WORKER in info["resources"] for _, info in infos)
        self._looked_s = asyncio.get_running_loop().time()
        return infos

    def _look_again(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked_s > LOOK_S and (self._look is None or self._look.is_done):
            self._looked_s = now
            self._look = OwnedTask(self._refresh(), "number of Dask workers")

    async def _refresh(self) -> None:
        with suppress(OSError, TimeoutError):
            await self._infos()

    def _require_own(self, what: str) -> None:
        if self._scheduler is None:
            raise ContextError(
                f"{what} works in a cluster that the engine has started. Start and end the "
                "workers of another one with Dask."
            )


@final
class _Host:
    """The actor: keeps a state, and tells its errors from those of the connection.

    Args:
        data: The pickled factory and its arguments.
    """

    def __init__(self, data: bytes) -> None:
        factory, args = pickle.loads(data)
        self._state = factory(*args)

    def call(self, method: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        """Return the result of a method, or what it raised."""
        try:
            return getattr(self._state, method)(*args), None
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return None, error


@final
class _DaskState(StateHandle):
    def __init__(self, server: int, actor: Any, client: Any = None, future: Any = None) -> None:
        self.server = server
        self._actor = actor
        self._client = client  # None on workers, where actors find their own
        self._future = future  # keeps the actor alive
        # An actor whose worker is gone waits for its future, which would wait for ever: no other
        # worker may have it.
        actor._future = None
        self._reduced = _state_on_worker, (server, actor.key, pickle.dumps(actor, protocol=5))

    async def call(self, method: str, *args: Any) -> Any:
        try:
            with self._client.as_current():
                pending = self._actor.call(method, args)
            result, error = await pending
        except Exception as failure:
            raise self._lost(failure) from failure
        if error is not None:
            raise error
        return result

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        try:
            pending = self._actor.call(method, args)
        except Exception as failure:
            raise self._lost(failure) from failure

        def finish() -> Any:
            try:
                result, error = pending.result()
            except Exception as failure:
                raise self._lost(failure) from failure
            if error is not None:
                raise error
            return result

        return finish

    def _lost(self, failure: Exception) -> WorkerLostError:
        return WorkerLostError(
            f"Parameter server {self.server} was lost: {failure}", ranks=(self.server,)
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def _state_on_worker(server: int, key: str, actor: bytes) -> _DaskState:
    """Return a worker's handle of a state, one for all tasks: each new actor asks the scheduler."""
    here = (_load().get_worker().address, key)
    return _closure_worker().once(here, lambda: _DaskState(server, pickle.loads(actor)))


@final
class _DaskSubmission(Submission):
    def __init__(self, client: Any, future: Any) -> None:
        self._client = client
        self.future = future

    async def wait(self) -> None:
        distributed = _load()
        try:
            with self._client.as_current():
                waiting = distributed.wait(self.future)
            await waiting
        except distributed.client.FuturesCancelledError as error:
            raise WorkerLostError(f"The Dask cluster has dropped a closure: {error}") from error
        if self.future.status == "error":
            raise _translated(await self.future.exception())

    async def result(self) -> Any:
        distributed = _load()
        try:
            return await self._client.gather(self.future)
        except distributed.client.FutureCancelledError as error:
            raise WorkerLostError(f"The Dask cluster has dropped a result: {error}") from error
        except Exception as error:  # noqa: BLE001 - most are what the task raised
            raise _translated(error) from None

    def cancel(self) -> None:
        cancelling = self.future.cancel(reason="the batch of closures has failed")
        if asyncio.iscoroutine(cancelling):
            _background(cancelling)


def _background(cancelling: Any) -> None:
    task = OwnedTask[None](cancelling, "cancel a Dask task")
    task.when_done(lambda _error: None)


def _translated(error: Exception) -> Exception:
    distributed = _load()
    if isinstance(error, distributed.scheduler.KilledWorker):
        return WorkerLostError(f"A closure was lost with each worker that tried it: {error}")
    return error


def _run_task(data: bytes) -> Any:
    """Run a task in the thread that Dask has for it."""
    task: ClosureTask = pickle.loads(data)
    return task.run(_closure_worker())


def _closure_worker() -> ClosureWorker:
    name = str(_load().get_worker().name)
    return REGISTRY.once(f"closure_worker:{name}", lambda: ClosureWorker(name))


def _load() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise ImportError(
            "Parameter servers run on Dask distributed, which is not installed. Install the extra "
            '`dask`: pip install "aioreplica[dask]". For tests, ar.cluster.LocalClosureEngine '
            "needs none."
        ) from error
    return distributed


def _require_asynchronous(client: Any) -> None:
    if not client.asynchronous or client.loop.asyncio_loop is not asyncio.get_running_loop():
        raise ContextError(
            f"{client!r} does not live on the running event loop. Make it there: "
            "`await distributed.Client(address, asynchronous=True)`."
        )


def _warn_if_open(address: str, security: Any) -> None:
    """Warn if closures, which are pickles, go over a network that is not protected."""
    scheme, _, rest = address.rpartition("://")
    host = rest.rsplit(":", 1)[0].strip("[]")
    is_here = host in {"localhost", "::1"} or host.startswith("127.") or scheme == "inproc"
    has_tls = scheme == "tls" or (security is not None and security.require_encryption)
    if not is_here and not has_tls:
        warnings.warn(
            f"The Dask scheduler at {address} is reached without TLS: whoever can connect to it "
            "can run code in the program and read the variables. Use a 'tls://' address and "
            "security=distributed.Security(...).",
            RuntimeWarning,
            stacklevel=2,
        )


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts worker-2 before worker-10."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for letter in f"{name}\0":
        if letter.isdecimal():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, letter))
    return tuple(parts)
