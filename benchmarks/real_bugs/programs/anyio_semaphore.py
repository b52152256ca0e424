"""Requests share a semaphore; the client of one goes away."""

import asyncio

import anyio


async def main():
    semaphore = anyio.Semaphore(1)

    async def request():
        async with semaphore:
            await asyncio.sleep(0)

    requests = [asyncio.create_task(request()) for _ in range(3)]

    async def client_gone():
        requests[1].cancel()

    await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    assert semaphore.value == 1
