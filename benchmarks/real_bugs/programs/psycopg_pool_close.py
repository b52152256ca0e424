"""A pool is closed while it still opens connections; none of them stays open."""

import asyncio

from memory_postgres import MemoryConnection
from psycopg_pool import AsyncConnectionPool


async def main():
    opened = []

    class Connection(MemoryConnection):
        def __init__(self):
            super().__init__()
            opened.append(self)

    pool = AsyncConnectionPool(connection_class=Connection, min_size=2, max_size=2, open=False)
    await pool.open()

    async def request():
        async with pool.connection() as connection:
            await connection.execute("select 1")

    async def shut_down():
        await pool.close()

    await asyncio.gather(request(), shut_down(), return_exceptions=True)
    assert all(connection.closed for connection in opened)
