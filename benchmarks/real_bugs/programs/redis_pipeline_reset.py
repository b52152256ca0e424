"""A request that watches a key is cancelled; the connection is there for the next one."""

import asyncio

from memory_redis import MemoryConnection, Server
from redis.asyncio import BlockingConnectionPool, Redis


async def main():
    server = Server()
    pool = BlockingConnectionPool(
        connection_class=MemoryConnection, server=server, max_connections=1, timeout=1
    )
    client = Redis(connection_pool=pool)

    async def transaction():
        async with client.pipeline() as pipe:
            await pipe.watch("a")
            await pipe.get("a")

    await client.set("a", "1")
    request = asyncio.create_task(transaction())

    async def client_gone():
        request.cancel()

    await asyncio.gather(client_gone(), request, return_exceptions=True)
    await client.set("a", "2")
    await server.stop(pool)
