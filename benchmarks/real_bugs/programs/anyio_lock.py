"""Three requests take turns with a lock; the client of one goes away."""

import asyncio

import anyio


async def main():
    lock = anyio.Lock()

    async def request():
        async with lock:
            await asyncio.sleep(0)

    requests = [asyncio.create_task(request()) for _ in range(3)]

    async def client_gone():
        requests[1].cancel()

    await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    assert not lock.locked()
