"""Three requests wait for one connection; the client of one goes away."""

import asyncio

from memory_http import make_pool


async def main():
    pool = make_pool(max_connections=1)

    async def request():
        response = await pool.request("GET", "http://example.com/")
        return response.status

    requests = [asyncio.create_task(request()) for _ in range(3)]

    async def client_gone():
        requests[1].cancel()

    first, _, third, _ = await asyncio.gather(*requests, client_gone(), return_exceptions=True)
    await pool.aclose()
    assert [first, third] == [200, 200]
