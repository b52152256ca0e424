"""anyio's worker threads inside a simulated run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio._backends import _asyncio as backend
from anyio._core._eventloop import claim_worker_thread, threadlocals

from ._pools import PoolOp, name_of_call
from ._sets import numbered

if TYPE_CHECKING:
    from ._simulation import Simulation

ANYIO_POOL = "anyio threads"
ANYIO_WORKERS = 1_000_000  # the limiter, not the pool, bounds them


def anyio_patches(simulation: Simulation) -> list[tuple[Any, str, Any]]:
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
