"""A cancelled holder of a lock tries once more to release it."""

import asyncio
import contextlib

from memory_redis import MemoryConnection, Server
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import LockNotOwnedError


async def main():
    server = Server()
    pool = ConnectionPool(connection_class=MemoryConnection, server=server)
    client = Redis(connection_pool=pool)
    lock = client.lock("lock")
    await lock.acquire()
    release = asyncio.create_task(lock.release())

    async def client_gone():
        release.cancel()

    await asyncio.gather(client_gone(), release, return_exceptions=True)
    if await lock.owned():
        with contextlib.suppress(LockNotOwnedError):
            await lock.release()
    is_locked = await lock.locked()
    await server.stop(pool)
    assert not is_locked
