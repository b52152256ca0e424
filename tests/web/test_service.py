"""A real service whose clients break off, whose disk is full, and whose bodies do not come."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks._online_counting import POISON
from benchmarks._online_kills import counts, kill_under_load, serving, statistics, until_learned
from benchmarks._online_soak import soak

NUM_GONE = 1000


def request(example: int) -> bytes:
    body = json.dumps({"input": example, "target": 0}).encode()
    head = b"POST /learn HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def learn(client: httpx.AsyncClient, *examples: int) -> httpx.Response:
    body = {"examples": [{"input": each, "target": 0} for each in examples]}
    return await client.post("/learn", json=body)


@pytest.mark.asyncio
async def test_a_thousand_clients_that_break_off_leave_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, client):
        assert (await learn(client, *range(100))).status_code == 202
        await until_learned(client)
        watched = psutil.Process(process.pid)
        threads, files = watched.num_threads(), watched.num_fds()
        gone = [
            socket.create_connection(("127.0.0.1", client.base_url.port)) for _ in range(NUM_GONE)
        ]
        for number, each in enumerate(gone):
            whole = request(1000 + number)
            each.sendall(whole if number % 2 else whole[: -1 - number % 20])
        for each in gone:  # all at once, and with a reset
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        async with asyncio.timeout(60):
            while (answer := await learn(client, *range(100, 200))).status_code == 429:
                await asyncio.sleep(0.05)  # the queue is full of what the gone ones sent
            assert answer.status_code == 202
            while watched.num_fds() > files + 2:
                await asyncio.sleep(0.05)
        now, num_threads = await until_learned(client), watched.num_threads()
        learned = await counts(client, [*range(200), *range(1000, 1000 + NUM_GONE)])

    assert learned[:200] == [1] * 200
    assert set(learned[200:]) <= {0, 1}
    assert sum(learned[200::2]) == 0  # those whose bodies never ended
    assert sum(learned) == now["learned_total"] == now["taken_total"]
    assert now["rollbacks_total"] == now["dead_total"] == 0
    assert num_threads <= threads + 1


@pytest.mark.asyncio
async def test_bodies_that_are_slow_long_or_deep_end_their_connection(tmp_path: Path) -> None:
    head = b"POST /learn HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    long = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    deep = b"100\r\n" + b"[" * 0x100 + b"\r\n"
    asked = {
        b"408": head + b'content-length: 25\r\n\r\n{"input"',
        b"413": chunked + long + long,
        b"422": chunked + deep,
    }
    async with serving(tmp_path) as (_, client):
        for status, request_bytes in asked.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(request_bytes)
            async with asyncio.timeout(60):
                answer = await reader.read()  # to the end: the service closes, the client does not
            writer.close()
            assert answer.startswith(b"HTTP/1.1 " + status), answer
        now = await statistics(client)

    assert now["taken_total"] == 0


@pytest.mark.asyncio
async def test_a_full_disk_stops_acknowledging_and_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, client):
        assert (await learn(client, 1)).status_code == 202
        await until_learned(client)
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))  # no file may grow
        refused = await learn(client, 2)
        predicted = await client.post("/predict", json={"input": 1})
        unready = await client.get("/readyz")
        metrics = await statistics(client)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        async with asyncio.timeout(60):
            while (await learn(client, 3)).status_code != 202:
                await asyncio.sleep(0.05)
        await until_learned(client)
        learned = await counts(client, [1, 3])
        ready = await client.get("/readyz")

    assert (refused.status_code, predicted.status_code, unready.status_code) == (503, 200, 503)
    assert refused.headers["retry-after"] == "5"
    assert predicted.json()["prediction"]["count"] == 1
    assert metrics["journal_failing"] == 1
    assert learned == [1, 1]
    assert ready.status_code == 200


@pytest.mark.asyncio
async def test_a_poisoned_example_is_set_aside_and_the_rest_learned(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        assert (await learn(client, *range(20), POISON, *range(20, 40))).status_code == 202
        now = await until_learned(client)
        letters = (await client.get("/dead-letters")).json()["dead_letters"]
        learned = await counts(client, [*range(40), POISON])

    assert learned == [1] * 40 + [0]
    assert now["dead_total"] == 1
    assert [letter["example"]["input"] for letter in letters] == [POISON]


@pytest.mark.asyncio
async def test_sigterm_learns_the_accepted_examples_and_ends_the_streams(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (process, client),
        client.stream("GET", "/events") as events,
    ):
        await anext(events.aiter_lines())
        taken = await learn(client, *range(50))
        process.terminate()
        async with asyncio.timeout(60):
            await process.wait()
    async with serving(tmp_path) as (_, client):
        now = await statistics(client)
        learned = await counts(client, [*range(50)])

    assert taken.status_code == 202
    assert now["learned_total"] == 0  # nothing was left over
    assert learned == [1] * 50


@pytest.mark.asyncio
async def test_examples_survive_sigkill() -> None:
    kills = await kill_under_load(3, seed=7)

    assert kills.is_good, kills


@pytest.mark.asyncio
async def test_memory_threads_and_files_stay_flat() -> None:
    found: Any = await soak(10)

    assert found.is_good, found
    assert {200, 202, 413, 422} <= set(found.num_answers)
