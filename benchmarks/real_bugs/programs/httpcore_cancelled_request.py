"""A request over an idle connection is cancelled; the next one gets that connection."""

import anyio
from memory_http import make_pool


async def main():
    pool = make_pool(max_connections=1)
    await pool.request("GET", "http://example.com/")
    scope = anyio.CancelScope()

    async def request():
        with scope:
            await pool.request("GET", "http://example.com/")

    async def client_gone():
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(request)
        group.start_soon(client_gone)
    response = await pool.request(
        "GET", "http://example.com/", extensions={"timeout": {"pool": 0.1}}
    )
    assert response.status == 200
    await pool.aclose()
