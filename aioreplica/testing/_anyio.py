"""anyio's worker threads inside a simulated run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import anyio
from anyio._backends import _asyncio as backend

from ._pools import PoolOp

if TYPE_CHECKING:
    from ._simulation import Simulation

ANYIO_POOL = "anyio threads"
ANYIO_WORKERS = 1_000_000  # the limiter, not the pool, bounds them


def anyio_patches(simulation: Simulation) -> list[tuple[Any, str, Any]]:
    """Return what to replace in anyio's asyncio backend."""
    owner = backend.AsyncIOBackend
    real = owner.run_sync_in_worker_thread.__func__  # type: ignore[attr-defined]

    async def run_sync_in_worker_thread(
        cls: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        abandon_on_cancel: bool = False,
        limiter: Any = None,
    ) -> Any:
        if not simulation.is_here():
            return await real(cls, func, args, abandon_on_cancel, limiter)
        await cls.checkpoint()
        async with limiter or cls.current_default_thread_limiter():
            with anyio.CancelScope(shield=not abandon_on_cancel):
                pool = simulation.pools.pool_named(ANYIO_POOL, ANYIO_WORKERS)
                future = simulation.loop.create_future()
                call = copy_context().run
                pool.put(PoolOp(pool, call, (func, *args), future))
                return await future

    return [
        (owner, "run_sync_in_worker_thread", classmethod(run_sync_in_worker_thread)),
        *_numbered(backend.CancelScope, simulation),
    ]


def _numbered(cls: Any, simulation: Simulation) -> list[tuple[Any, str, Any]]:
    """Let the scopes of a run hash by a number: anyio walks sets of them to cancel them."""
    real_init = cls.__init__
    numbers = simulation.numbers  # by address, as scopes have no room for an attribute

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it replaces one
        if simulation.is_here():
            simulation.number(self)
        real_init(self, *args, **kwargs)

    def __hash__(self: Any) -> int:  # noqa: N807 - it replaces one
        if simulation.is_here():
            return numbers.get(id(self), 0)
        return object.__hash__(self)

    return [(cls, "__init__", __init__), (cls, "__hash__", __hash__)]
