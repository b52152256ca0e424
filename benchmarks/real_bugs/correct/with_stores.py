"""Correct programs over redis, psycopg_pool, httpcore, async-lru and janus."""

import asyncio

import janus
from async_lru import alru_cache
from memory_http import make_pool
from memory_postgres import MemoryConnection as PostgresConnection
from memory_redis import MemoryConnection, Server
from psycopg_pool import AsyncConnectionPool
from redis.asyncio import BlockingConnectionPool, Redis


async def share_redis_connections():
    server = Server()
    pool = BlockingConnectionPool(
        connection_class=MemoryConnection, server=server, max_connections=2, timeout=5
    )
    client = Redis(connection_pool=pool)

    async def user(key):
        await client.set(key, key)
        return await client.get(key)

    values = await asyncio.gather(*(user(key) for key in "abcd"))
    await server.stop(pool)
    assert values == [b"a", b"b", b"c", b"d"]


async def take_turns_with_a_redis_lock():
    server = Server()
    pool = BlockingConnectionPool(
        connection_class=MemoryConnection,
        server=server,
        max_connections=4,
        timeout=5,
        protocol=2,
    )
    client = Redis(connection_pool=pool)
    holders = most = 0

    async def user():
        nonlocal holders, most
        async with client.lock("lock", sleep=0.1):
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0)
            holders -= 1

    await asyncio.gather(user(), user())
    await server.stop(pool)
    assert most == 1


async def share_postgres_connections():
    pool = AsyncConnectionPool(
        connection_class=PostgresConnection, min_size=1, max_size=2, open=False
    )
    served = 0

    async def request():
        nonlocal served
        async with pool.connection() as connection:
            await connection.execute("select 1")
            served += 1

    async with pool:
        await asyncio.gather(*(request() for _ in range(4)))
    assert served == 4


async def request_over_one_http_connection():
    async with make_pool(max_connections=1) as pool:
        requests = (pool.request("GET", "http://example.com/") for _ in range(3))
        answers = await asyncio.gather(*requests)
    assert [answer.content for answer in answers] == [b"ok"] * 3


async def compute_a_cached_value_once():
    computed = []

    @alru_cache(maxsize=8)
    async def compute(key):
        computed.append(key)
        await asyncio.sleep(0)
        return key * 2

    values = await asyncio.gather(*(compute(key) for key in (1, 2, 1, 2)))
    await compute.cache_close()
    assert values == [2, 4, 2, 4]
    assert sorted(computed) == [1, 2]


async def fill_a_queue_from_a_thread():
    queue = janus.Queue(maxsize=2)

    def produce():
        for item in range(4):
            queue.sync_q.put(item)

    async def consume():
        return [await queue.async_q.get() for _ in range(4)]

    _, items = await asyncio.gather(asyncio.to_thread(produce), consume())
    await queue.aclose()
    assert items == [0, 1, 2, 3]
