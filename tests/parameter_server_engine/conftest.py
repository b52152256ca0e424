"""One cluster of processes per module, and a coordinator per test; nothing may be left of them.

The processes are forks of one that has imported what they need, else most of the time is imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed.utils import get_mp_context

import aioreplica as ar
from tests.parameter_server_engine.closures import LIMIT_S, PAUSE_S, FileGate

END_S = 10.0

dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
get_mp_context().set_forkserver_preload(["distributed", "distributed.nanny", "aioreplica"])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a connection of Dask be that it has left half open to a process that was killed."""
    item.add_marker(
        pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"), append=False
    )


@asynccontextmanager
async def coordinating(
    cluster: Any = None, *, num_ps: int = 1, num_workers: int = 2, timeout_s: float | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Any, Any]]:  # fmt: skip
    """Open a strategy and its coordinator."""
    strategy = ar.ParameterServerStrategy(
        cluster, num_ps=num_ps, num_workers=num_workers, **options
    )
    coordinator = ar.ClusterCoordinator(strategy, timeout_s=timeout_s)
    async with asyncio.timeout(4 * LIMIT_S), strategy, coordinator:
        yield strategy, coordinator


async def pids_of(strategy: Any, role: str) -> list[int]:
    return [each.pid for each in await strategy.engine.workers() if each.role == role]


async def until_workers(strategy: Any, num_workers: int, role: str = "W") -> list[int]:
    """Wait until so many workers are there, and alive."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            pids = [pid for pid in await pids_of(strategy, role) if is_alive(pid)]
            if len(pids) == num_workers:
                return pids
            await asyncio.sleep(PAUSE_S)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def kill(pid: int) -> None:
    """End a process as the kernel does, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        while is_alive(pid):
            await asyncio.sleep(PAUSE_S)


def table_of(strategy: Any, num_rows: int = 24) -> Any:
    """Return a variable with two columns: one for each push of a closure."""
    with strategy.scope():
        return ar.Variable(np.zeros((num_rows, 2)), name="table")


@pytest.fixture
def gate(tmp_path: Path) -> FileGate:
    return FileGate(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a module that leaves a process behind."""
    ours = psutil.Process()
    before = set(ours.children(recursive=True))
    yield
    left = [each for each in ours.children(recursive=True) if each not in before]
    _, alive = psutil.wait_procs([each for each in left if not is_tracker(each)], END_S)
    assert [each for each in alive if each.is_running()] == []


def is_tracker(process: psutil.Process) -> bool:
    """Say whether it is one of multiprocessing's own, which stay: it tracks resources, or forks."""
    try:
        command = " ".join(process.cmdline())
        return "resource_tracker" in command or "forkserver import main" in command
    except psutil.NoSuchProcess:
        return False
