"""More keys are asked for at once than the cache has room for."""

import asyncio

from async_lru import alru_cache


async def main():
    @alru_cache(maxsize=1, ttl=60)
    async def fetch(key):
        await asyncio.sleep(0)
        return key

    assert await asyncio.gather(fetch(1), fetch(2)) == [1, 2]
    await fetch.cache_close()
