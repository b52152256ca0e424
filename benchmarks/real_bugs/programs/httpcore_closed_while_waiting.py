"""A pool is closed while a request waits for a connection."""

import asyncio

import httpcore
from memory_http import make_pool


async def main():
    pool = make_pool(max_connections=1)
    outcomes = []

    async def request():
        try:
            await pool.request("GET", "http://example.com/", extensions={"timeout": {"pool": 0.01}})
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            outcomes.append(error)

    async def shut_down():
        await pool.aclose()

    results = await asyncio.gather(request(), request(), shut_down(), return_exceptions=True)
    assert not any(isinstance(result, ValueError) for result in results), results
