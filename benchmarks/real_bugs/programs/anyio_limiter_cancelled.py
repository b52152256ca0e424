"""Requests share a limiter of one token; the client of one goes away."""

import asyncio

import anyio


async def main():
    limiter = anyio.CapacityLimiter(1)

    async def request():
        async with limiter:
            await asyncio.sleep(0)

    requests = [asyncio.create_task(request()) for _ in range(3)]

    async def client_gone():
        requests[1].cancel()

    await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    assert limiter.borrowed_tokens == 0
