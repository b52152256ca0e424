"""A Dask cluster of processes on this machine, which nobody else can reach."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, final

from ._closures import PARAMETER_SERVER, WORKER

END_S = 10.0
"""How long the processes of a local cluster have to end, and a worker to restart, in seconds."""

CONNECT_S = 5.0
"""How long a process of a local cluster tries to reach another one, before that counts as lost."""


@final
class DaskProcesses:
    """A scheduler in this process, and a process for each parameter server and worker.

    All listen on 127.0.0.1 and let in only who has the keys and certificates that `start` makes.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._security: object = None
        self._nannies: dict[str, Any] = {}
        self._num_named = 0
        self._quiet = ExitStack()

    async def start(self, num_servers: int, num_workers: int) -> tuple[str, object]:
        """Start all processes; return the scheduler's address, and what lets a client in.

        Raises:
            ImportError: If the package for certificates is not installed.
        """
        distributed = load_dask()
        self._security = _temporary_security()
        self._quiet.enter_context(distributed.utils.silence_logging_cmgr(logging.WARNING))
        self._scheduler = await distributed.Scheduler(
            host="127.0.0.1",
            port=0,
            protocol="tls://",
            security=self._security,
            dashboard=False,
            dashboard_address="127.0.0.1:0",
        )
        names = [(f"ps-{i}", PARAMETER_SERVER) for i in range(num_servers)]
        names += [(f"worker-{i}", WORKER) for i in range(num_workers)]
        self._num_named = num_workers
        results = await asyncio.gather(
            *(self._start_process(name, role) for name, role in names), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return self._scheduler.address, self._security

    async def add_worker(self) -> str:
        """Start one more worker; return its name."""
        name = f"worker-{self._num_named}"
        self._num_named += 1
        await self._start_process(name, WORKER)
        return name

    async def _start_process(self, name: str, role: str) -> None:
        nanny = load_dask().Nanny(
            self._scheduler.address,
            protocol="tls://",
            security=self._security,
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

    async def remove(self, name: str) -> None:
        """End a process.

        Raises:
            ValueError: If there is no such process.
        """
        nanny = self._nannies.pop(name, None)
        if nanny is None:
            raise ValueError(f"There is no process {name!r} in {self!r}.")
        await nanny.close(timeout=END_S)

    async def aclose(self) -> None:
        """End all processes."""
        nannies, self._nannies = [*self._nannies.values()], {}
        closing = [nanny.close(timeout=END_S) for nanny in nannies]
        await asyncio.gather(*closing, return_exceptions=True)
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            await scheduler.close()
        self._quiet.close()

    def __repr__(self) -> str:
        return f"<DaskProcesses | {', '.join(self._nannies) or 'none'}>"


def load_dask() -> ModuleType:
    """Import Dask distributed.

    Raises:
        ImportError: If it is not installed; says how.
    """
    try:
        import distributed
    except ImportError as error:
        raise ImportError(
            "Parameter servers run on Dask distributed, which is not installed. Install the extra "
            '`dask`: pip install "aioreplica[dask]". For tests, ar.cluster.LocalClosureEngine '
            "needs none."
        ) from error
    module: ModuleType = distributed
    return module


def _temporary_security() -> object:
    """Return keys and certificates of one cluster, which only its processes ever have."""
    try:
        return load_dask().Security.temporary()
    except ImportError as error:
        raise ImportError(
            "A cluster of processes protects its connections by TLS, for which the package "
            '`cryptography` is needed. Install the extra `dask`: pip install "aioreplica[dask]".'
        ) from error


def check_roles(infos: Sequence[tuple[str, Any]], num_servers: int) -> None:
    """Check that there are enough servers, and workers, and that nobody is both."""
    roles = {str(info["name"]): info["resources"] for _, info in infos}
    both = [name for name, role in roles.items() if PARAMETER_SERVER in role and WORKER in role]
    if both:
        raise ValueError(
            f"Dask workers {', '.join(both)} have both resources, 'PS' and 'W': a closure there "
            "would wait for the parameter server in its own process. Give each one of them."
        )
    num_found = sum(PARAMETER_SERVER in role for role in roles.values())
    if num_found < num_servers:
        raise ValueError(
            f"{num_servers} parameter servers were asked for, but {num_found} of the {len(infos)} "
            "Dask workers have the resource 'PS'. Start more: dask worker ADDRESS --nthreads 1 "
            "--resources 'PS=1'."
        )
    if not any(WORKER in role for role in roles.values()):
        raise ValueError(
            f"None of the {len(infos)} Dask workers has the resource 'W'. Start some: dask worker "
            "ADDRESS --nthreads 1 --resources 'W=1'."
        )
