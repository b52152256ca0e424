"""Three requests wait for one connection; the client of one goes away."""

import anyio
from memory_http import make_pool


async def main():
    pool = make_pool(max_connections=1)
    statuses = []
    client = anyio.CancelScope()

    async def request():
        response = await pool.request("GET", "http://example.com/")
        statuses.append(response.status)

    async def request_of_client():
        with client:
            await request()

    async def client_gone():
        client.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(request)
        group.start_soon(request_of_client)
        group.start_soon(request)
        group.start_soon(client_gone)
    await pool.aclose()
    assert statuses.count(200) >= 2
