"""Everyone who asked for a value has gone; nobody computes it any longer."""

import asyncio

from async_lru import alru_cache


async def main():
    started, ended = asyncio.Event(), asyncio.Event()

    @alru_cache
    async def compute(key):
        started.set()
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    requests = [asyncio.create_task(compute(1)) for _ in range(2)]

    async def clients_gone():
        for request in requests:
            request.cancel()

    await asyncio.gather(*requests, clients_gone(), return_exceptions=True)
    if started.is_set():
        async with asyncio.timeout(1):
            await ended.wait()
