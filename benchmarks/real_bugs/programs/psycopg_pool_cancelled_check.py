"""A pool checks its connections; a request is cancelled while it does."""

import asyncio

from memory_postgres import MemoryConnection
from psycopg_pool import AsyncConnectionPool


async def check(connection):
    await connection.execute("")


async def main():
    pool = AsyncConnectionPool(
        connection_class=MemoryConnection,
        min_size=1,
        max_size=1,
        timeout=0.5,
        check=check,
        open=False,
    )
    await pool.open()

    async def request():
        async with pool.connection() as connection:
            await connection.execute("select 1")

    cancelled = asyncio.create_task(request())

    async def client_gone():
        cancelled.cancel()

    await asyncio.gather(client_gone(), cancelled, return_exceptions=True)
    await request()
    await pool.close()
