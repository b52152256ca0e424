"""Everyone who asked for a value has gone; nobody computes it any longer."""

import asyncio

from async_lru import alru_cache


async def main():
    running = 0

    @alru_cache
    async def compute(key):
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(0.05)
        finally:
            running -= 1

    requests = [asyncio.create_task(compute(1)) for _ in range(2)]

    async def clients_gone():
        for request in requests:
            request.cancel()

    await asyncio.gather(*requests, clients_gone(), return_exceptions=True)
    await asyncio.sleep(0.01)
    assert running == 0
