"""Clusters that are there already, that are not what they should be, and that go away."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster
from distributed.security import Security

import aioreplica as ar
from aioreplica.cluster import DaskClosureEngine
from aioreplica.errors import ContextError
from tests.parameter_server_engine import closures
from tests.parameter_server_engine.closures import FileGate
from tests.parameter_server_engine.conftest import coordinating, pids_of

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:The Dask scheduler at .*127.0.0.1:RuntimeWarning"),
]
HOST = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}


@asynccontextmanager
async def dask_cluster(
    roles: tuple[str, ...] = ("PS", "W", "W"), security: Any = None, **options: Any
) -> AsyncIterator[Any]:
    """Start a cluster as a user of Dask would."""
    common = {"security": security, **HOST, **options}
    workers = {
        i: {"cls": Nanny, "options": {"nthreads": 1, "resources": {role: 1}, **common}}
        for i, role in enumerate(roles)
    }
    scheduler = {"cls": Scheduler, "options": common}
    async with SpecCluster(
        workers, scheduler=scheduler, security=security, asynchronous=True, silence_logs=50
    ) as cluster:
        async with Client(cluster, asynchronous=True, security=security) as client:
            await client.wait_for_workers(len(roles))
        yield cluster


async def check(cluster: Any, **options: Any) -> None:
    """Train a little."""
    async with coordinating(cluster, **options) as (strategy, coordinator):
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        for _ in range(6):
            await coordinator.schedule(closures.add_one, (count,))
        await coordinator.join()
        assert float(await count.read()) == 6
        assert len(await pids_of(strategy, "W")) == 2


async def test_a_running_cluster_by_its_address() -> None:
    async with dask_cluster() as cluster:
        for _ in range(2):  # what one strategy leaves does not hinder the next
            await check(cluster.scheduler_address)
        async with Client(cluster, asynchronous=True) as client:
            assert await client.submit(sum, (1, 2)) == 3


async def test_a_client_of_the_user_stays_open() -> None:
    async with dask_cluster() as cluster, Client(cluster, asynchronous=True) as client:
        await check(client)
        assert client.status == "running"
        assert await client.submit(sum, (1, 2)) == 3


async def test_two_strategies_share_a_cluster() -> None:
    async with dask_cluster(("PS", "PS", "W", "W")) as cluster:
        await asyncio.gather(*(check(cluster.scheduler_address) for _ in range(2)))


async def test_tls_is_passed_through() -> None:
    security = Security.temporary()
    async with dask_cluster(security=security, protocol="tls://") as cluster:
        assert cluster.scheduler_address.startswith("tls://")
        await check(cluster.scheduler_address, security=security)


@asynccontextmanager
async def own_client() -> AsyncIterator[Any]:
    """Connect to a cluster as a user of Dask would."""
    async with dask_cluster() as cluster, Client(cluster, asynchronous=True) as client:
        yield client


async def test_small_closures_go_in_one_message_and_large_ones_apart() -> None:
    async with coordinating(num_workers=1) as (strategy, coordinator):
        client, sizes = strategy.engine._client, list[int]()
        send = client.map

        def send_and_note(fn: Any, tasks: Any, **options: Any) -> Any:
            sizes.append(len(tasks))
            return send(fn, tasks, **options)

        client.map = send_and_note
        large = b"x" * 2**20
        given = [1, 2, large, large, 3]
        remotes = [coordinator.schedule_nowait(closures.identity, (x,)) for x in given]
        assert await coordinator.fetch(remotes) == given
        assert sizes == [3, 1, 1]


async def test_a_worker_has_one_handle_of_a_server_for_all_closures() -> None:
    async with own_client() as client, coordinating(client) as (_, coordinator):
        remotes = [await coordinator.schedule(closures.pid_and_server) for _ in range(12)]
        pairs = set(await coordinator.fetch(remotes))
        assert len(pairs) == len({pid for pid, _ in pairs})


@pytest.mark.parametrize("roles", [("W", "W"), ("PS", "W")])
async def test_too_few_parameter_servers_are_an_error(roles: tuple[str, ...]) -> None:
    async with dask_cluster(roles) as cluster:
        with pytest.raises(Exception, match="PS") as caught:
            async with asyncio.timeout(30), coordinating(cluster.scheduler_address, num_ps=2):
                pass
        assert not isinstance(caught.value, TimeoutError) or "PS" in str(caught.value)
        assert "2" in str(caught.value)


async def test_no_worker_for_closures_is_an_error() -> None:
    async with dask_cluster(("PS",)) as cluster:
        with pytest.raises(Exception, match=r"[Ww]orker"):
            async with asyncio.timeout(30), coordinating(cluster.scheduler_address):
                pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "127.0.0.1:{port}"])
async def test_an_address_without_a_scheduler_is_an_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DaskClosureEngine.__init__.__kwdefaults__, "timeout_s", 2.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = address.format(port=taken.getsockname()[1])
        with pytest.raises(OSError, match=address.rpartition("/")[2]):
            async with asyncio.timeout(60), coordinating(address):
                pass


@pytest.mark.parametrize("cluster", [5, b"tcp://127.0.0.1:1", object()], ids=type)
async def test_an_argument_that_is_not_a_cluster_is_refused(cluster: Any) -> None:
    with pytest.raises(TypeError, match=r"address|Client"):
        ar.ParameterServerStrategy(cluster)


async def test_a_client_that_is_not_asynchronous_is_refused() -> None:
    async with dask_cluster() as cluster:
        client = await asyncio.to_thread(Client, cluster.scheduler_address)
        try:
            with pytest.raises(ContextError, match="asynchronous"):
                async with coordinating(client):
                    pass
        finally:
            await asyncio.to_thread(client.close)


async def test_a_client_that_is_closed_is_refused() -> None:
    async with dask_cluster() as cluster:
        client = await Client(cluster, asynchronous=True)
        await client.close()
        with pytest.raises(ContextError, match="is closed"):
            async with coordinating(client):
                pass


@pytest.mark.parametrize("how", ["address", "client"])
async def test_a_cluster_of_this_machine_without_tls_is_warned_about(how: str) -> None:
    async with dask_cluster() as cluster, Client(cluster, asynchronous=True) as client:
        with pytest.warns(RuntimeWarning, match="every user of this machine can run code"):
            await check(cluster.scheduler_address if how == "address" else client)


async def test_a_cluster_of_its_own_lets_only_its_own_processes_in() -> None:
    async with coordinating(num_workers=1) as (strategy, _):
        address = strategy.engine._client.scheduler.address
        assert address.startswith("tls://127.0.0.1:")
        for scheme in ("tcp", "tls"):
            with pytest.raises((OSError, TypeError)):
                await Client(
                    address.replace("tls", scheme, 1), asynchronous=True, timeout=1,
                    security=None if scheme == "tcp" else Security.temporary(),
                )  # fmt: skip


async def test_an_address_beyond_this_machine_without_tls_is_warned_about() -> None:
    async def connect() -> None:
        async with coordinating("tcp://192.0.2.1:8786"):  # no host has this address
            pass

    with pytest.warns(RuntimeWarning, match="TLS") as warned:  # noqa: PT031 - cancelled when seen
        connecting = asyncio.ensure_future(connect())
        while not warned and not connecting.done():
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
    gc.collect()  # a client that was not closed would be told here


async def test_a_connection_that_is_cancelled_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        strategy = ar.ParameterServerStrategy(address)
        connecting = asyncio.ensure_future(ar.ClusterCoordinator(strategy).__aenter__())
        silent.setblocking(False)
        taken, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(silent), 30)
        with taken:
            connecting.cancel()
            await asyncio.wait([connecting])
            assert connecting.cancelled()
            await strategy.aclose()
    del connecting, strategy
    gc.collect()  # a client that was not closed would be told here


async def test_a_local_cluster_listens_on_this_machine_alone() -> None:
    async with coordinating() as (strategy, coordinator):
        await (await coordinator.schedule(closures.identity, (1,))).fetch()
        ours = psutil.Process()
        found = [
            connection.laddr.ip
            for process in (ours, *ours.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert found
        assert set(found) == {"127.0.0.1"}
        assert len(await strategy.engine.workers()) == 3


@pytest.fixture
def scheduler() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scheduler in a process of its own, and its address."""
    program = (
        "import asyncio\nfrom distributed import Scheduler\n"
        "async def main():\n"
        "    async with Scheduler(host='127.0.0.1', port=0, dashboard=False) as s:\n"
        "        print(s.address, flush=True)\n        await s.finished()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def workers_of(address: str) -> AsyncIterator[None]:
    async with (
        Nanny(address, nthreads=1, resources={"PS": 1}, **HOST),
        Nanny(address, nthreads=1, resources={"W": 1}, **HOST),
        Nanny(address, nthreads=1, resources={"W": 1}, **HOST),
    ):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["join", "fetch", "read", "schedule"])
async def test_a_scheduler_that_goes_away_is_an_error(
    scheduler: tuple[Any, str], gate: FileGate, way: str
) -> None:
    process, address = scheduler
    async with asyncio.timeout(60):
        async with workers_of(address), coordinating(address) as (strategy, coordinator):
            with strategy.scope():
                count = ar.Variable(np.zeros(()), name="count")
            remote = await coordinator.schedule(closures.hold, (gate,))
            await count.read()
            await gate.reached(1)
            process.kill()
            gate.open()
            with pytest.raises((OSError, RuntimeError)) as caught:  # noqa: PT012
                if way == "join":
                    await coordinator.join()
                elif way == "fetch":
                    await remote.fetch()
                elif way == "read":
                    while True:
                        await count.read()
                        await asyncio.sleep(0.05)
                else:
                    while True:
                        await coordinator.schedule(closures.identity, (1,))
                        await asyncio.sleep(0.05)
            assert not isinstance(caught.value, TimeoutError)


async def test_the_local_cluster_of_dask_has_no_servers() -> None:
    async with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        asynchronous=True,
        host="127.0.0.1",
        dashboard_address=None,
    ) as cluster:
        with pytest.raises(Exception, match="PS"):
            async with asyncio.timeout(30), coordinating(cluster.scheduler_address):
                pass
