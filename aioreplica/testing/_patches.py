"""Patches of other modules while schedules run: concurrent.futures, anyio, socket, and names.

What is replaced in a module is replaced under every name, too, by which a module outside the
standard library has it at its top level (`from queue import SimpleQueue`), as freezegun does for
clocks.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextvars import copy_context
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, final

import anyio
from anyio._backends import _asyncio as backend
from anyio._core._eventloop import claim_worker_thread, threadlocals

from ..context import REGISTRY
from ._forbidden import refuse
from ._locks import block_loop
from ._pools import PoolOp, SimPool, name_of_call
from ._sets import numbered
from ._sockets import SimSocket

if TYPE_CHECKING:
    from ._simulation import Patches, Simulation


@final
class SubmittedOp(PoolOp):
    """A call that was given to an executor itself, so its future is a concurrent one."""

    __slots__ = ()

    def claim(self) -> bool:
        """Take the call, unless it was cancelled."""
        return bool(self.future.set_running_or_notify_cancel())


@final
class SubmittedFuture(futures.Future[Any]):
    """The future of a simulated call: blocking on it lets its pool go on until it is done."""

    pool: SimPool | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the result; while the loop's own thread waits for it, ops alone go on."""
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, in the same way."""
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        """Wait if this is the loop's thread; return for how long to wait otherwise."""
        pool = self.pool
        if pool is None or pool.table.current_op is not None or self.done():
            return timeout
        _block(pool, self.done, timeout)
        return 0.0


def _block(pool: SimPool, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
    """Block the loop until something of a pool is done, or the timeout has passed."""
    if not block_loop(pool.table, is_done, timeout_s) and timeout_s is None:
        refuse("A blocking wait for a pool that is stuck", "Await the call instead.")


def _wait_until_idle(pool: SimPool) -> None:
    """Wait until no call of a pool is left, as leaving its executor does."""
    op = pool.table.current_op
    if op is None:
        _block(pool, lambda: not pool.is_busy)
    elif op.pool is pool:
        raise RuntimeError("cannot join current thread")
    elif pool.is_busy:
        pool.wait_until_idle(op.on_thread())


def executor_patches(simulation: Simulation) -> Patches:
    """Return what to replace in the executors of `concurrent.futures`."""
    executor = futures.ThreadPoolExecutor
    real_submit, real_shutdown = executor.submit, executor.shutdown

    def submit(self: Any, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if not simulation.is_here():
            return real_submit(self, fn, *args, **kwargs)
        if self._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SubmittedFuture()
        future.pool = pool = simulation.pools.pool_of(self)
        call = (lambda: fn(*args, **kwargs)) if kwargs else fn
        pool.put(SubmittedOp(pool, call, () if kwargs else args, future))
        return future

    def shutdown(self: Any, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if simulation.is_here():
            pool = simulation.pools.pool_of(self)
            if cancel_futures:
                for op in pool.queue:
                    op.future.cancel()
            if wait:
                _wait_until_idle(pool)
        real_shutdown(self, wait, cancel_futures=cancel_futures)

    return [
        (executor, "submit", submit),
        (executor, "shutdown", shutdown),
    ]


ANYIO_POOL = "anyio threads"
ANYIO_WORKERS = 1_000_000  # the limiter, not the pool, bounds them


def anyio_patches(simulation: Simulation) -> Patches:
    """Return what to replace in anyio's asyncio backend.

    Raises:
        ImportError: If anyio is older than 4.0.
    """
    if not hasattr(backend, "AsyncIOBackend"):
        from importlib.metadata import version  # it takes a while

        raise ImportError(
            f"aioreplica.testing needs anyio 4.0 or newer, found {version('anyio')}: "
            "`pip install 'anyio>=4'`."
        )
    owner = backend.AsyncIOBackend
    real = owner.run_sync_in_worker_thread.__func__  # type: ignore[attr-defined]

    async def run_sync_in_worker_thread(
        cls: Any,
        func: Callable[..., object],
        args: tuple[object, ...],
        abandon_on_cancel: bool = False,
        limiter: Any = None,
        *,
        cancellable: bool = False,  # its name in anyio 4.0
    ) -> Any:
        abandon_on_cancel = abandon_on_cancel or cancellable
        if not simulation.is_here():
            return await real(cls, func, args, abandon_on_cancel, limiter)  # by place, in all of 4
        await cls.checkpoint()
        async with limiter or cls.current_default_thread_limiter():
            with anyio.CancelScope(shield=not abandon_on_cancel) as scope:
                pool = simulation.pools.pool_named(ANYIO_POOL, ANYIO_WORKERS)
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                context = copy_context()
                if "sniffio" in sys.modules:  # a worker thread is in no event loop
                    library = sys.modules["sniffio"].current_async_library_cvar
                    context.run(library.set, None)
                outer = None if abandon_on_cancel else getattr(scope, "_parent_scope", None)
                call = partial(_call_as_worker, loop, outer or scope, func)
                vars(call)["__qualname__"] = name_of_call(func, args)  # for stories
                pool.put(PoolOp(pool, context.run, (call, *args), future))
                return await future

    return [
        (owner, "run_sync_in_worker_thread", classmethod(run_sync_in_worker_thread)),
        *numbered(backend.CancelScope, simulation),  # anyio walks sets of them to cancel them
    ]


def _call_as_worker(
    loop: object, scope: object, func: Callable[..., object], *args: object
) -> object:
    """Call a function where `anyio.from_thread` finds the loop that it belongs to."""
    with claim_worker_thread(backend.AsyncIOBackend, loop):
        threadlocals.current_cancel_scope = scope
        try:
            return func(*args)
        finally:
            vars(threadlocals).pop("current_cancel_scope", None)


@final
class _Poll:
    """A poll object that knows simulated sockets, as a client looks if a kept connection is open.

    What is under way counts as if it was there. A wait for them is not simulated.
    """

    def __init__(self, real: Any, simulation: Simulation) -> None:
        self._real = real
        self._sockets = simulation.open_network().sockets
        self._masks: dict[int, int] = {}

    # 5 is POLLIN | POLLOUT, which not every system has.
    def register(self, fd: Any, mask: int = 5) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if number in self._sockets:
            self._masks[number] = mask
        else:
            self._real.register(fd, mask)

    modify = register

    def unregister(self, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if self._masks.pop(number, None) is None:
            self._real.unregister(fd)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        found = []
        for number, mask in self._masks.items():
            sock = self._sockets.get(number)
            ready = select.POLLNVAL
            if sock is not None:
                ready = mask & select.POLLIN * sock.can_read()
                ready |= mask & select.POLLOUT * sock.can_write()
            if ready:
                found.append((number, ready))
        is_told = found or (self._masks and timeout == 0)
        return found if is_told else self._real.poll(timeout)


def _poll_patches(simulation: Simulation) -> Patches:
    real: Any = getattr(select, "poll", None)

    def poll() -> object:
        return _Poll(real(), simulation) if simulation.is_here() else real()

    return [(select, "poll", poll)] if real is not None else []


def socket_patches(simulation: Simulation) -> Patches:
    """Return what to replace in `socket`; the class makes simulated sockets inside a run."""
    here, cls = simulation.is_here, socket.socket
    make: Any = cls.__new__
    real = {
        name: getattr(socket, name)
        for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "socketpair")
    }

    def new(kind: Any, *args: object, **kwargs: object) -> object:
        if not here():
            return make(kind)
        if kind is not cls and kind is not SimSocket:
            refuse(f"A socket of class {kind.__qualname__}", "Make a socket.socket.")
        made = make(SimSocket)
        made.network = simulation.open_network()
        return made

    def getaddrinfo(*args: Any, **kwargs: Any) -> object:
        if not here():
            return real["getaddrinfo"](*args, **kwargs)
        return simulation.open_network().lookup(*args, **kwargs)

    def gethostbyname(name: str) -> str:
        return simulation.open_network().resolve(name) if here() else real["gethostbyname"](name)

    def gethostbyname_ex(name: str) -> object:
        if not here():
            return real["gethostbyname_ex"](name)
        return name, [], [simulation.open_network().resolve(name)]

    def socketpair(family: Any = None, type: int = socket.SOCK_STREAM, proto: int = 0) -> object:  # noqa: A002
        if not here():
            return real["socketpair"](family, type, proto)
        return simulation.open_network().pair(family or socket.AF_UNIX, type)

    def forget(writer: Any) -> None:
        """Note a writer that the program dropped without closing it; asyncio only warns."""
        transport = writer._transport
        if not here():
            if real_del is not None:
                real_del(writer)
        elif not transport.is_closing():
            simulation.open_network().note_dropped(transport.get_extra_info("socket"))
            transport.abort()

    real_del: Any = getattr(asyncio.StreamWriter, "__del__", None)
    return [
        *_poll_patches(simulation),
        (asyncio.StreamWriter, "__del__", forget),
        (cls, "__new__", staticmethod(new)),
        (socket, "getaddrinfo", getaddrinfo),
        (socket, "gethostbyname", gethostbyname),
        (socket, "gethostbyname_ex", gethostbyname_ex),
        (socket, "socketpair", socketpair),
    ]


OWN: Final = "aioreplica.testing"
STANDARD: Final = sys.stdlib_module_names


def imported_names(real: Mapping[int, object]) -> Iterator[tuple[object, str, object]]:
    """Yield module, name and value wherever a module knows one of some objects by a name.

    Args:
        real: The objects, by their ids.

    A module is looked at once in a process: what it had imported then counts.
    """
    known: dict[str, tuple[Any, list[tuple[str, object]]]] = REGISTRY.once("testing_imported", dict)
    for module in new_modules(known):
        names = [(name, value) for name, value in vars(module).items() if id(value) in real]
        known[module.__name__] = module, names
    for module, names in known.values():
        for name, value in names:
            if vars(module).get(name) is value and id(value) in real:
                yield module, name, value


def new_modules(known: Mapping[str, object] | None = None) -> list[ModuleType]:
    """Return the modules that may have imported something and that have not been looked at."""
    if known is None:
        known = REGISTRY.once("testing_imported", dict)
    return [
        module
        for name, module in list(sys.modules.items())  # twice a schedule: what is most first
        if name not in known
        and not _is_never_patched(name)
        and type(module) is ModuleType
        and module.__name__ == name
    ]


@cache
def _is_never_patched(name: str) -> bool:
    return name.partition(".")[0] in STANDARD or name.startswith(OWN)
