"""A request is cancelled, and the next one gets its own answer."""

import asyncio

from memory_redis import MemoryConnection, Server
from redis.asyncio import ConnectionPool, Redis


async def main():
    server = Server()
    pool = ConnectionPool(connection_class=MemoryConnection, server=server)
    client = Redis(connection_pool=pool)
    await client.set("a", "1")
    await client.set("b", "2")
    request = asyncio.create_task(client.get("a"))

    async def client_gone():
        request.cancel()

    await asyncio.gather(client_gone(), request, return_exceptions=True)
    value = await client.get("b")
    await server.stop(pool)
    assert value == b"2", value
