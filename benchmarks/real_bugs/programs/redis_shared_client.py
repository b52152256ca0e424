"""Two requests share a client, each in a block of its own; the application holds it too."""

import asyncio

from memory_redis import MemoryConnection, Server
from redis.asyncio import ConnectionPool, Redis


async def main():
    server = Server()
    pool = ConnectionPool(connection_class=MemoryConnection, server=server)
    client = Redis.from_pool(pool)

    async def request(key):
        async with client:
            await client.set(key, "1")
            return await client.get(key)

    async with client:
        results = await asyncio.gather(request("a"), request("b"), return_exceptions=True)
    await server.stop(pool)
    assert results == [b"1", b"1"], results
