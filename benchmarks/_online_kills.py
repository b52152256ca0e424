"""A service that is killed again and again while a real client sends it examples."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, final

import httpx

from ._online_counting import SIZE

NUM_CLIENTS = 8
LIMIT_S = 120.0
PAUSE_S = 0.02


@final
@dataclass(slots=True)
class Kills:
    """What became of the examples.

    Attributes:
        num_kills: How often the service was killed.
        acknowledged: Examples whose acknowledgement came.
        given_up: Examples that were sent, and not sent again when no answer came.
        num_lost: Acknowledged ones that were not learned: must be 0.
        num_twice: Examples that were learned more than once: must be 0.
    """

    num_kills: int = 0
    acknowledged: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    num_lost: int = 0
    num_twice: int = 0

    def __str__(self) -> str:
        return (
            f"killed {self.num_kills} times under load: {len(self.acknowledged)} examples "
            f"acknowledged, {self.num_lost} lost, {self.num_twice} learned twice; "
            f"{len(self.given_up)} given up without an answer"
        )

    @property
    def is_good(self) -> bool:
        """Whether every acknowledged example was learned, and each once."""
        return bool(self.acknowledged) and not self.num_lost and not self.num_twice


@contextlib.asynccontextmanager
async def serving(folder: Path, port: int = 0) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """Run the service until the block ends; gives the process, and a client that knows the port."""
    command = [sys.executable, "-m", "benchmarks._online_counting", str(folder), str(port)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError("The service did not start.")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{line}", timeout=30, limits=limits, trust_env=False
        ) as client:
            await until_ready(client)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until the service answers, and has caught up."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(PAUSE_S)


async def statistics(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the service's metrics without labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.split() for line in lines if line.startswith("aioreplica_online_")]
    prefix = len("aioreplica_online_")
    return {name[prefix:]: float(value) for name, value in pairs if "{" not in name}


async def until_learned(client: httpx.AsyncClient) -> dict[str, float]:
    """Wait until everything taken is learned or set aside; return the metrics."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            now = await statistics(client)
            if now["learned_number"] == now["last_number"]:
                return now
            await asyncio.sleep(PAUSE_S)


async def counts(client: httpx.AsyncClient, examples: list[int]) -> list[int]:
    """Ask how often examples were learned."""
    found: list[int] = []
    for start in range(0, len(examples), 256):
        part = examples[start : start + 256]
        answer = await client.post("/predict", json={"inputs": part})
        found += answer.raise_for_status().json()["predictions"]["count"]
    return found


async def kill_under_load(num_kills: int, *, seed: int = 0) -> Kills:
    """Kill the service at random times; start it again on the same folder; count at the end."""
    rng, kills, numbers = Random(seed), Kills(), iter(range(SIZE - 1))
    with tempfile.TemporaryDirectory() as directory:
        retried: list[int] = []
        for _ in range(num_kills):
            async with serving(Path(directory)) as (process, client), asyncio.TaskGroup() as tasks:
                for _ in range(NUM_CLIENTS):
                    tasks.create_task(_send(client, numbers, kills, retried, rng))
                await asyncio.sleep(rng.uniform(0.02, 0.6))
                process.kill()
                await process.wait()
            kills.num_kills += 1
        async with serving(Path(directory)) as (_, client):
            while retried:
                await _learn(client, retried.pop(), kills)
            await until_learned(client)
            learned = await counts(client, sorted(kills.acknowledged))
            others = await counts(client, sorted(kills.given_up))
    kills.num_lost = learned.count(0)
    kills.num_twice = sum(each > 1 for each in [*learned, *others])
    return kills


async def _send(
    client: httpx.AsyncClient, numbers: Any, kills: Kills, retried: list[int], rng: Random
) -> None:
    """Send examples until the service is gone: first those that got no answer, with their keys."""
    while True:
        example = retried.pop() if retried else next(numbers)
        try:
            await _learn(client, example, kills)
        except httpx.TransportError:
            if rng.random() < 0.5:
                retried.append(example)
            else:
                kills.given_up.add(example)
            return


async def _learn(client: httpx.AsyncClient, example: int, kills: Kills) -> None:
    while True:
        body = {"input": example, "target": 0}
        answer = await client.post("/learn", json=body, headers={"idempotency-key": f"k{example}"})
        if answer.status_code == 202:
            kills.acknowledged.add(example)
            return
        if answer.status_code not in {429, 503}:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        await asyncio.sleep(PAUSE_S)
