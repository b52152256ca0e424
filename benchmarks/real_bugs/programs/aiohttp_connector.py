"""Three requests wait for one connection; the client of one goes away."""

import asyncio

import aiohttp
from memory_aiohttp import MemoryConnector


async def main():
    async with aiohttp.ClientSession(connector=MemoryConnector(limit=1)) as session:

        async def request():
            async with session.get("http://example.com/") as response:
                return await response.text()

        requests = [asyncio.create_task(request()) for _ in range(3)]

        async def client_gone():
            requests[1].cancel()

        first, _, third, _ = await asyncio.gather(*requests, client_gone(), return_exceptions=True)
        assert [first, third] == ["ok", "ok"], [first, third]
