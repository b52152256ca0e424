"""One connection is slow to come up; whoever wants another one does not wait for it."""

import asyncio

from memory_redis import MemoryConnection, Server
from redis.asyncio import BlockingConnectionPool, Redis


async def main():
    server = Server(delay=lambda number: 0.02 if number == 1 else 0)
    pool = BlockingConnectionPool(
        connection_class=MemoryConnection, server=server, max_connections=2, timeout=0.01
    )
    client = Redis(connection_pool=pool)
    try:
        await asyncio.gather(client.set("a", "1"), client.set("b", "2"))
    finally:
        await server.stop(pool)
    assert server.values == {b"a": b"1", b"b": b"2"}
