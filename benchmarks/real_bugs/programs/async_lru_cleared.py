"""A cache is cleared while a value is on its way."""

import asyncio

from async_lru import alru_cache


async def main():
    @alru_cache
    async def fetch(key):
        await asyncio.sleep(0)
        return key

    async def configuration_changed():
        fetch.cache_clear()

    value, _ = await asyncio.gather(fetch(1), configuration_changed())
    assert value == 1
