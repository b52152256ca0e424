"""Patient tasks wait for a token, a hasty one takes it only if it is free."""

import asyncio

import anyio


async def main():
    limiter = anyio.CapacityLimiter(1)
    busy = most = 0

    async def work():
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1

    async def patient():
        async with limiter:
            await work()

    async def hasty():
        try:
            limiter.acquire_nowait()
        except anyio.WouldBlock:
            return
        try:
            await work()
        finally:
            limiter.release()

    await asyncio.gather(patient(), patient(), hasty())
    assert most <= 1
