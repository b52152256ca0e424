"""Two requests share a client, each in a block of its own."""

import asyncio

from memory_redis import MemoryConnection, Server
from redis.asyncio import ConnectionPool, Redis


async def main():
    server = Server()
    client = Redis.from_pool(ConnectionPool(connection_class=MemoryConnection, server=server))

    async def request(key):
        async with client:
            await client.set(key, "1")
            return await client.get(key)

    assert await asyncio.gather(request("a"), request("b")) == [b"1", b"1"]
