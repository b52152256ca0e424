"""Three requests wait for one connection; the client of one goes away."""

import asyncio

from memory_postgres import MemoryConnection
from psycopg_pool import AsyncConnectionPool


async def main():
    pool = AsyncConnectionPool(
        connection_class=MemoryConnection, min_size=1, max_size=1, timeout=0.5, open=False
    )
    await pool.open()

    async def request():
        async with pool.connection() as connection:
            await connection.execute("select 1")

    requests = [asyncio.create_task(request()) for _ in range(3)]

    async def client_gone():
        requests[1].cancel()

    first, _, third, _ = await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    await pool.close()
    assert [first, third] == [None, None]
