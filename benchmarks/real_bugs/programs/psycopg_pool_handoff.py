"""A request that waits for a connection is cancelled; it ends as cancelled or with a connection."""

import asyncio

from memory_postgres import MemoryConnection
from psycopg_pool import AsyncConnectionPool


async def main():
    pool = AsyncConnectionPool(
        connection_class=MemoryConnection, min_size=1, max_size=1, timeout=0.5, open=False
    )
    await pool.open()

    async def poll():
        while True:
            async with pool.connection() as connection:
                await connection.execute("select 1")
            await asyncio.sleep(0.01)

    async def request():
        async with pool.connection() as connection:
            await connection.execute("select 1")

    poller = asyncio.create_task(poll())
    other = asyncio.create_task(request())

    async def shut_down():
        poller.cancel()

    await asyncio.gather(shut_down(), other)
    done, _ = await asyncio.wait([poller], timeout=0.1)
    poller.cancel()
    await asyncio.gather(poller, return_exceptions=True)
    await pool.close()
    assert done, "the poller went on although it was cancelled"
