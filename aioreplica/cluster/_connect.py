"""Connecting this process to the other workers, with the engine that its launcher suggests."""

from __future__ import annotations

import os

from ..context import REGISTRY
from ..errors import ContextError
from ._arguments import require_timeout
from ._communicator import Communicator
from ._environment import resolve
from ._local import LocalCommunicator
from ._mpi import MpiCommunicator
from ._resolver import ClusterResolver
from ._torch import TorchCommunicator

ENGINES = ("mpi", "torch", "local")


async def connect(
    resolver: ClusterResolver | None = None,
    *,
    engine: str | None = None,
    timeout: float | None = None,
) -> Communicator:
    """Meet the other workers of the cluster that this process was started in.

    Every worker has to call this; each returns when all have come.

    Args:
        resolver: Which worker this is, and how many there are; None asks the launcher's variables,
            see `resolve`.
        engine: "mpi", "torch" (torch.distributed with Gloo) or "local", which is for one worker;
            None takes MPI under `mpirun`, torch under every other launcher, and "local" for one
            worker.
        timeout: How long this, and each collective, may wait for the others, in seconds; None
            waits for ever.

    Returns:
        The communicator; close it with `aclose()`, or use it in an `async with`.

    Raises:
        ContextError: If this process is connected already, or was forked from one that uses MPI.
        ImportError: If the engine is not installed; names the extra that brings it.
        StallError: If not all workers came before the timeout.
        TypeError: If an argument is of the wrong type.
        ValueError: If the engine is unknown or cannot serve this cluster, or the engine and the
            resolver do not agree in the number of workers or the rank; and as in `resolve` and
            `TorchCommunicator.connect`.

    Cancellation:
        What was begun goes on in the background; connect again only in a new process.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     async with await connect(ClusterResolver()) as communicator:
        ...         return await communicator.all_reduce(2.0), communicator.size
        >>> asyncio.run(main())
        (array(2.), 1)
    """
    resolver = resolve() if resolver is None else resolver
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"connect takes a ClusterResolver, got {resolver!r}.")
    timeout = require_timeout(timeout)
    name = _engine_for(resolver, engine)
    if name == "local":
        return LocalCommunicator.group(1, timeout=timeout)[0]
    return await _meet_once(name, resolver, timeout)


async def _meet_once(name: str, resolver: ClusterResolver, timeout: float | None) -> Communicator:
    """Meet the others, unless this process is connected.

    Raises:
        ContextError: If it is.
    """
    held = REGISTRY.once("cluster_connection", dict[int, Communicator | None])
    process = os.getpid()
    if process in held and not _is_closed(held[process]):
        raise ContextError(
            f"This process is connected already: {held[process] or 'it is just connecting'}. Close "
            "that communicator first, hand it on, or split it."
        )
    held[process] = None
    try:
        communicator = held[process] = await _meet(name, resolver, timeout)
    except BaseException:
        del held[process]
        raise
    return communicator


async def _meet(name: str, resolver: ClusterResolver, timeout: float | None) -> Communicator:
    if name == "torch":
        return await TorchCommunicator.connect(resolver, timeout=timeout)
    communicator = await MpiCommunicator.connect(timeout=timeout)
    await _check_agreement(communicator, resolver)
    return communicator


def _engine_for(resolver: ClusterResolver, engine: str | None) -> str:
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} or None, got {engine!r}.")
    if resolver.rank is None:
        raise ValueError(
            f"A task of type {resolver.task_type!r} is not a worker, so it has no communicator."
        )
    if engine is None:
        if resolver.source.startswith("mpirun"):
            return "mpi"
        return "local" if resolver.num_workers == 1 else "torch"
    if engine == "local" and resolver.num_workers > 1:
        raise ValueError(
            f'engine="local" is for one worker, but {resolver.source} tells of '
            f"{resolver.num_workers}. Use LocalCommunicator.group for many in one process."
        )
    return engine


async def _check_agreement(communicator: Communicator, resolver: ClusterResolver) -> None:
    """Check that MPI and the resolver tell the same.

    Raises:
        ValueError: If they do not.
    """
    of_mpi = communicator.rank, communicator.size
    told = resolver.rank, resolver.num_workers
    if of_mpi != told:
        await communicator.aclose()
        raise ValueError(
            f"MPI says that this is worker {of_mpi[0]} of {of_mpi[1]}, {resolver.source} that it "
            f"is worker {told[0]} of {told[1]}. Start the workers with the mpirun of the MPI that "
            "mpi4py finds."
        )


def _is_closed(communicator: Communicator | None) -> bool:
    return communicator is not None and communicator.is_closed
