"""Planted bugs over the same libraries, which a fault of the network has to show."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp

import aioreplica.testing as art

from .databases import REDIS_PORT, redis_client
from .web import PORT, serving


async def aiohttp_without_timeout() -> None:
    """Waits for ever for a server that is gone."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        serving(),
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://localhost:{PORT}/you") as response,
    ):
        await response.text()


async def redis_without_timeout() -> None:
    """The same, of redis-py."""
    async with redis_client(socket_timeout=None, socket_connect_timeout=None) as client:
        await client.set("a", "1")


async def connection_lost_in_a_request() -> None:
    """Closes a WebSocket only if the request beside it succeeds: its connection stays in use."""
    connector = aiohttp.TCPConnector(limit=2)
    timeout = aiohttp.ClientTimeout(total=None)
    async with serving(), aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        url = f"http://localhost:{PORT}"
        with contextlib.suppress(aiohttp.ClientError):
            socket = await session.ws_connect(f"{url}/ws")
            async with session.post(f"{url}/two", data=b"x" * 1000):
                await socket.close()
        async with session.ws_connect(f"{url}/ws"), session.get(f"{url}/three"):
            pass


async def pool_slot_lost() -> None:
    """Gives the slot of a pool back only if the request succeeds."""
    slots = asyncio.Semaphore(1)
    async with redis_client(retry=None) as client:
        for _ in range(2):
            with contextlib.suppress(Exception):
                await slots.acquire()
                await client.incr("a")
                slots.release()
        async with asyncio.timeout(None):
            await slots.acquire()


BUGS: list[tuple[Any, art.Faults, type[BaseException]]] = [
    (aiohttp_without_timeout, art.Faults().half_open(PORT), art.DeadlockError),
    (redis_without_timeout, art.Faults().half_open(REDIS_PORT), art.DeadlockError),
    (connection_lost_in_a_request, art.Faults().reset_connection(PORT), art.DeadlockError),
    (pool_slot_lost, art.Faults().reset_connection(REDIS_PORT, times=20), art.DeadlockError),
]
