"""Minutes of mixed load on one service: its memory, threads and file handles must stay flat."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, final

import anyio
import httpx
import psutil

from ._online_counting import POISON, SIZE
from ._online_kills import counts, serving, until_learned

MIB = 1024 * 1024
GROWTH_MIB = 8.0  # of the last quarter's memory over the second one's
NUM_SAMPLES = 60


@final
@dataclass(slots=True)
class Soak:
    """What the service held, sample by sample, and what was asked of it."""

    seconds: float
    memory_mib: list[float] = field(default_factory=list)
    num_threads: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    num_answers: dict[int, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    num_wrong: int = 0

    def quarters(self, samples: list[Any]) -> tuple[float, float]:
        """Return the medians of the second and the last quarter."""
        part = max(len(samples) // 4, 1)
        return median(samples[part : 2 * part] or samples), median(samples[-part:])

    @property
    def is_good(self) -> bool:
        """Whether nothing grew, and each example taken was learned once."""
        memory, later = self.quarters(self.memory_mib)
        threads = self.quarters(self.num_threads)
        files = self.quarters(self.num_files)
        is_flat = later - memory <= GROWTH_MIB and threads[1] <= threads[0] + 1
        return is_flat and files[1] <= files[0] + 8 and not self.num_wrong

    def __str__(self) -> str:
        def shown(samples: list[Any]) -> str:
            return " -> ".join(f"{each:.0f}" for each in self.quarters(samples))

        answers = ", ".join(f"{n} x {code}" for code, n in sorted(self.num_answers.items()))
        return (
            f"{self.seconds:.0f} s of mixed load: {shown(self.memory_mib)} MiB, "
            f"{shown(self.num_threads)} threads, {shown(self.num_files)} files (second quarter -> "
            f"last); {len(self.taken)} taken, {self.num_wrong} not learned once; {answers}"
        )


async def soak(seconds: float) -> Soak:
    """Load a service with everything at once, good and bad."""
    found, rng = Soak(seconds), Random(0)
    numbers = iter(range(SIZE - 1))
    kinds: list[Callable[[httpx.AsyncClient, Soak, Random, Any], Coroutine[Any, Any, None]]]
    kinds = [_predict, _predict, _learn, _learn, _follow, _bad, _leave, _scrape]
    with tempfile.TemporaryDirectory() as directory:
        async with serving(Path(directory)) as (process, client):
            watched = psutil.Process(process.pid)
            async with asyncio.TaskGroup() as tasks:
                end = time.monotonic() + seconds
                for kind in kinds:
                    tasks.create_task(_until(end, kind, client, found, rng, numbers))
                for _ in range(NUM_SAMPLES):
                    await asyncio.sleep(seconds / NUM_SAMPLES)
                    found.memory_mib.append(watched.memory_info().rss / MIB)
                    found.num_threads.append(watched.num_threads())
                    found.num_files.append(watched.num_fds())
            await until_learned(client)
            found.num_wrong = sum(n != 1 for n in await counts(client, sorted(found.taken)))
    return found


async def _until(
    end: float, kind: Any, client: httpx.AsyncClient, found: Soak, rng: Random, numbers: Any
) -> None:
    while time.monotonic() < end:
        await kind(client, found, rng, numbers)


def _note(found: Soak, answer: httpx.Response) -> None:
    code = answer.status_code
    found.num_answers[code] = found.num_answers.get(code, 0) + 1


async def _predict(client: httpx.AsyncClient, found: Soak, rng: Random, _numbers: Any) -> None:
    _note(found, await client.post("/predict", json={"input": rng.randrange(SIZE)}))
    await asyncio.sleep(0.01)


async def _learn(client: httpx.AsyncClient, found: Soak, rng: Random, numbers: Any) -> None:
    chosen = [each for _, each in zip(range(rng.randint(1, 4)), numbers, strict=False)]
    examples = [{"input": each, "target": 0} for each in chosen]
    if not examples:  # all there are
        await asyncio.sleep(0.1)
        return
    while True:
        key = {"idempotency-key": f"k{chosen[0]}"}
        answer = await client.post("/learn", json={"examples": examples}, headers=key)
        _note(found, answer)
        if answer.status_code == 202:
            break
        await asyncio.sleep(0.05)
    found.taken.update(chosen)
    await asyncio.sleep(0.02)


async def _follow(client: httpx.AsyncClient, found: Soak, rng: Random, _numbers: Any) -> None:
    with anyio.move_on_after(rng.uniform(0.1, 2)):  # it leaves in the middle
        async with client.stream("GET", "/events") as answer:
            _note(found, answer)
            async for _ in answer.aiter_lines():
                pass


async def _bad(client: httpx.AsyncClient, found: Soak, rng: Random, _numbers: Any) -> None:
    json_type = {"content-type": "application/json"}
    body = rng.choice([b"{", b"[" * 1000, b" " * 100_000, b'{"input": NaN}', b'{"input": [1]}'])
    with contextlib.suppress(httpx.TransportError):  # it may be cut off while it sends
        _note(found, await client.post("/predict", content=body, headers=json_type))
    if rng.random() < 0.05:
        poison = {"input": POISON, "target": 0}
        _note(found, await client.post("/learn", json=poison))
    await asyncio.sleep(0.05)


async def _leave(client: httpx.AsyncClient, _found: Soak, rng: Random, _numbers: Any) -> None:
    """Break off in the middle of a request."""
    _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    head = b"POST /learn HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    body = b'{"input": 0, "target": 0}'
    writer.write(head + b"content-length: 25\r\n\r\n" + body[: rng.randrange(25)])
    await writer.drain()
    writer.transport.abort()
    await asyncio.sleep(0.02)


async def _scrape(client: httpx.AsyncClient, found: Soak, _rng: Random, _numbers: Any) -> None:
    _note(found, await client.get("/metrics"))
    _note(found, await client.get("/dead-letters"))
    await asyncio.sleep(0.5)
