"""Parameter servers as on spot machines: `dask` processes with TLS, some of which are killed."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import numpy as np
import psutil

import aioreplica as ar

NUM_EXAMPLES = 200
NUM_WORKERS = 3
LIMIT_S = 120.0
"""Without any progress, an epoch has come to a stop; how long it takes is the machine's."""
MAX_GROWTH_BYTES = 48 * 1024**2

CONNECT = "5s"
"""How long processes try to reach one that was killed."""

WORKERS_PER_SERVER = 15
"""With copies, a server is killed after so many workers."""

NUM_SPARE = 3
"""Processes for servers, with copies: the successor of one is not waited for."""


@final
@dataclass(slots=True)
class Spot:
    """What became of the epochs.

    Attributes:
        num_kills: Workers that were killed.
        num_servers_killed: Parameter servers that were killed.
        num_epochs: Epochs, each of `NUM_EXAMPLES` closures that take an example and push twice.
        num_lost: Pushes that did not count.
        num_twice: Pushes that counted more than once.
        num_cancelled: Closures that were cancelled.
        num_retries: Closures that ran again after they had pushed.
        growth_bytes: By how much program, scheduler and server grew between the second epoch and
            the last one.
        seconds: How long all that took.
    """

    num_kills: int = 0
    num_servers_killed: int = 0
    num_epochs: int = 0
    num_lost: int = 0
    num_twice: int = 0
    num_cancelled: int = 0
    num_retries: int = 0
    growth_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"killed {self.num_kills} workers and {self.num_servers_killed} servers in "
            f"{self.num_epochs} epochs of {NUM_EXAMPLES} examples and {self.seconds:.0f} s: "
            f"of {2 * NUM_EXAMPLES * self.num_epochs} pushes "
            f"{self.num_lost} lost, {self.num_twice} counted twice; {self.num_cancelled} closures "
            f"cancelled, {self.num_retries} ran again; memory grew by "
            f"{self.growth_bytes / 2**20:.1f} MiB"
        )

    @property
    def is_good(self) -> bool:
        """Whether each example was learned once, and nothing was cancelled or kept."""
        wrong = self.num_lost or self.num_twice or self.num_cancelled
        return bool(self.num_kills) and not wrong and self.growth_bytes < MAX_GROWTH_BYTES


def examples(context: Any) -> Any:
    """Return the examples of one worker."""
    return range(context.input_pipeline_id, NUM_EXAMPLES, context.num_input_pipelines)


def learn(seen: Any, iterator: Any, seconds: float) -> None:
    """Take an example; push, work, push."""
    row = next(iterator)
    for column in (0, 1):
        delta = np.zeros((1, 2))
        delta[0, column] = 1.0
        seen.assign_add(ar.IndexedSlices(delta, [row], seen.shape))
        time.sleep(seconds / 2)


async def run_spot(
    num_kills: int, *, pause_s: float, replicate: bool = False, seed: int = 0
) -> Spot:
    """Train epoch by epoch while a random worker is killed every now and then.

    Args:
        num_kills: How many workers to kill.
        pause_s: After how many seconds, on average.
        replicate: Whether servers have copies, and are killed too.
        seed: Of what is random.
    """
    rng, spot, start_s = Random(seed), Spot(), time.monotonic()
    num_ps = 2 if replicate else 1
    async with _Machines.started(NUM_SPARE if replicate else 1) as machines:
        strategy = ar.ParameterServerStrategy(
            machines.address, num_ps=num_ps, replicate=replicate, security=machines.security,
            variable_partitioner=ar.FixedShardsPartitioner(num_ps),
        )  # fmt: skip
        coordinator = ar.ClusterCoordinator(strategy, max_attempts=50)
        async with strategy, coordinator:
            with strategy.scope():
                seen = ar.Variable(np.zeros((NUM_EXAMPLES, 2)), name="seen")
            await seen.read()
            strategy.engine.watch(machines)
            machines.learn_workers(strategy.engine.workers_now)
            copied = functools.partial(_until_copied, strategy) if replicate else None
            killing = asyncio.ensure_future(
                machines.kill_now_and_then(num_kills, pause_s, rng, copied)
            )
            sizes: list[int] = []
            while not killing.done():
                await seen.assign(np.zeros(seen.shape))
                epoch = _epoch(coordinator, seen, rng)
                await while_it_advances(epoch, lambda: coordinator.statistics().num_finished)
                found = await seen.read()
                spot.num_lost += int(np.sum(found < 1))
                spot.num_twice += int(np.sum(found > 1))
                spot.num_epochs += 1
                sizes.append(machines.memory_bytes())
            await killing
            statistics = coordinator.statistics()
    spot.num_kills, spot.num_servers_killed = num_kills, machines.num_servers_killed
    spot.num_retries, spot.num_cancelled = statistics.num_retries, statistics.num_cancelled
    spot.growth_bytes = sizes[-1] - sizes[min(1, len(sizes) - 1)]
    spot.seconds = time.monotonic() - start_s
    return spot


async def while_it_advances(work: Coroutine[Any, Any, None], progress: Callable[[], Any]) -> None:
    """Wait for the end of some work.

    Raises:
        TimeoutError: If its progress has stayed the same for `LIMIT_S`; says what it is.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            before = progress()
            await asyncio.wait([task], timeout=LIMIT_S)
            if not task.done() and progress() == before:
                raise TimeoutError(f"Progress has stood at {before} for {LIMIT_S:g} s.")
    finally:
        task.cancel()
        await asyncio.wait([task])
    task.result()


async def _until_copied(strategy: Any) -> None:
    """Wait until each server has a copy: both at once are not to be killed."""

    async def repair() -> None:
        while True:
            for server in range(strategy.num_ps):
                await strategy.servers.copies.repair(server)
            if not strategy.unreplicated_servers:
                return
            await asyncio.sleep(0.05)

    await while_it_advances(repair(), lambda: strategy.unreplicated_servers)


async def _epoch(coordinator: Any, seen: Any, rng: Random) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(examples))
    for _ in range(NUM_EXAMPLES):
        await coordinator.schedule(learn, (seen, iterator, rng.uniform(0.0, 0.04)))
    await coordinator.join()


@final
class _Machines:
    """Processes of `dask scheduler` and `dask worker`; a killed worker gets a successor."""

    def __init__(self, folder: Path, security: Any, num_servers: int) -> None:
        self._folder = folder
        self._num_servers = num_servers
        self.num_servers_killed = 0
        self.security = security
        self.address = ""
        self._lasting: list[asyncio.subprocess.Process] = []
        self._workers: list[asyncio.subprocess.Process] = []
        self._num_there = 0
        self._changed = asyncio.Event()

    def learn_workers(self, workers: Mapping[str, int]) -> None:
        """Learn which workers the engine knows."""
        self._num_there = len(workers)
        self._changed.set()

    async def _until_known(self, num_workers: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self._num_there < num_workers:
                self._changed.clear()
                await self._changed.wait()

    @staticmethod
    @asynccontextmanager
    async def started(num_servers: int) -> AsyncIterator[_Machines]:
        """Start all of them; end them in the end."""
        with tempfile.TemporaryDirectory() as name:
            machines = _Machines(Path(name), _written_security(Path(name)), num_servers)
            try:
                await machines._start()
                yield machines
            finally:
                for process in (*machines._workers, *machines._lasting):
                    if process.returncode is None:
                        process.kill()
                    await process.wait()

    async def _start(self) -> None:
        told = self._folder / "scheduler.json"
        options = ("--scheduler-file", str(told), "--protocol", "tls://", "--host", "127.0.0.1")
        self._lasting.append(await self._dask("dask_scheduler", "--port", "0", *options))
        async with asyncio.timeout(LIMIT_S):
            while True:
                if told.exists() and told.read_text().endswith("}"):
                    break
                await asyncio.sleep(0.05)
        self.address = json.loads(told.read_text())["address"]
        self._lasting += [await self._worker("PS") for _ in range(self._num_servers)]
        self._workers += [await self._worker("W") for _ in range(NUM_WORKERS)]
        await self._until_there()

    async def _dask(self, name: str, *options: str) -> asyncio.subprocess.Process:
        files = {"ca-file": "ca", "cert": "cert", "key": "key"}
        tls = [each for o, f in files.items() for each in (f"--tls-{o}", str(self._folder / f))]
        command = (sys.executable, "-m", f"distributed.cli.{name}", *options, *tls)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": CONNECT,
        }
        return await asyncio.create_subprocess_exec(
            *command, "--no-dashboard", env=environment, cwd=self._folder,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def _worker(self, role: str) -> asyncio.subprocess.Process:
        options = ("--nthreads", "1", "--no-nanny", "--resources", f"{role}=1")
        return await self._dask("dask_worker", self.address, *options, "--host", "127.0.0.1")

    async def _until_there(self) -> None:
        from distributed import Client

        async with Client(self.address, asynchronous=True, security=self.security) as client:
            await client.wait_for_workers(self._num_servers + NUM_WORKERS, timeout=LIMIT_S)

    async def kill_now_and_then(
        self, num_kills: int, pause_s: float, rng: Random,
        copied: Callable[[], Awaitable[None]] | None,
    ) -> None:  # fmt: skip
        """Kill a random worker, start another one, and so on; with copies a server now and then.

        On a busy machine workers would all die before they have begun, so one is left at least.
        """
        for number in range(num_kills):
            await asyncio.sleep(rng.uniform(0.2, 1.8) * pause_s)
            await self._until_known(2)
            victim = self._workers.pop(rng.randrange(len(self._workers)))
            await self._kill(victim)
            self._workers.append(await self._worker("W"))
            if copied is not None and number % WORKERS_PER_SERVER == WORKERS_PER_SERVER // 2:
                await copied()
                scheduler, *servers = self._lasting
                victim = servers.pop(rng.randrange(len(servers)))
                await self._kill(victim)
                self.num_servers_killed += 1
                self._lasting = [scheduler, *servers, await self._worker("PS")]

    async def _kill(self, victim: asyncio.subprocess.Process) -> None:
        victim.send_signal(signal.SIGKILL)
        await victim.wait()

    def memory_bytes(self) -> int:
        """Return the memory of what lasts: this program, the scheduler and the servers."""
        pids = [os.getpid(), *(process.pid for process in self._lasting)]
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)


def _written_security(folder: Path) -> Any:
    """Make keys and certificates, and write them where `dask` reads them."""
    from distributed import Security

    made = Security.temporary()
    texts = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in texts.items():
        (folder / name).write_text(str(text))
    return made
