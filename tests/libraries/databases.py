"""Clients of databases, pools of connections and queues between threads."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
import janus
import trustme
from redis.asyncio import Redis

REDIS_PORT = 6379


class FakeRedis:
    """As much of a redis server as the programs need, over asyncio's streams."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(self._answer(words[0].upper(), words[1:]))
                await writer.drain()
        writer.close()

    def _answer(self, command: bytes, words: list[bytes]) -> bytes:
        if command == b"SET":
            self._values[words[0]] = words[1]
        elif command == b"GET":
            value = self._values.get(words[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        elif command in (b"INCR", b"INCRBY"):
            number = int(self._values.get(words[0], b"0")) + 1
            self._values[words[0]] = b"%d" % number
            return b":%d\r\n" % number
        return b"+OK\r\n"


@contextlib.asynccontextmanager
async def redis_client(**options: Any) -> AsyncIterator[Any]:
    """Yield a client of a fake server."""
    async with (
        await asyncio.start_server(FakeRedis().serve, "127.0.0.1", REDIS_PORT),
        Redis(host="localhost", port=REDIS_PORT, protocol=2, **options) as client,
    ):
        yield client


async def redis_counter() -> None:
    async with redis_client() as client:
        await client.set("a", "0")
        await asyncio.gather(*[client.incr("a") for _ in range(3)])
        assert await client.get("a") == b"3"


async def redis_cancelled_command() -> None:
    """The answer of a command that was cancelled must not be taken for that of the next."""
    async with redis_client() as client:
        await client.set("foo", "1")
        await client.set("bar", "2")
        lost = asyncio.create_task(client.get("foo"))
        await asyncio.sleep(0.001)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert await client.get("bar") == b"2"


async def aiosqlite_rows() -> None:
    async with aiosqlite.connect(":memory:") as database:
        await database.execute("create table t (x)")

        async def put(number: int) -> None:
            await database.execute("insert into t values (?)", (number,))
            await database.commit()

        await asyncio.gather(put(1), put(2))
        async with database.execute("select x from t order by x") as cursor:
            assert [row[0] for row in await cursor.fetchall()] == [1, 2]


async def janus_queue() -> None:
    queue: Any = janus.Queue()

    def produce() -> None:
        for number in range(3):
            queue.sync_q.put(number)
        queue.sync_q.join()

    producing = asyncio.ensure_future(asyncio.to_thread(produce))
    for number in range(3):
        assert await queue.async_q.get() == number
        queue.async_q.task_done()
    await producing
    await queue.aclose()


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client that trusts it."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ca.pem"
        authority.cert_pem.write_to_path(str(path))
        client = ssl.create_default_context(cafile=str(path))
    return server, client


SERVER, CLIENT = contexts()


async def tls_streams() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(echo, "127.0.0.1", 8443, ssl=SERVER):
        reader, writer = await asyncio.open_connection("localhost", 8443, ssl=CLIENT)
        writer.write(b"secret\n")
        assert await reader.readline() == b"secret\n"
        writer.close()
        await writer.wait_closed()


PROGRAMS = [redis_counter, redis_cancelled_command, aiosqlite_rows, janus_queue, tls_streams]
