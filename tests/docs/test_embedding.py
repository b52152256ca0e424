"""The page on embedding: a request whose client goes away, under uvicorn."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.run_page import blocks

uvicorn = pytest.importorskip("uvicorn")
starlette = pytest.importorskip("starlette.applications")

from starlette.responses import JSONResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embedding.md"
BOUND_S = 30  # of each wait; what is waited for takes milliseconds


def unless_gone() -> Callable[[Any, Awaitable[Any]], Awaitable[Any]]:
    """Return the function that the page shows."""
    [code] = [block.code for block in blocks(PAGE) if "def unless_gone" in block.code]
    names: dict[str, Any] = {"asyncio": asyncio}
    exec(code, names)
    return names["unless_gone"]


async def request(handler: Any, entered: asyncio.Event, left: asyncio.Event | None) -> bytes:
    """Send a request to a server; close the connection once it is handled, or read the answer."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = starlette.Starlette(routes=[Route("/", handler, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
    listening.listen()
    serving = asyncio.create_task(server.serve([listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}")
    async with asyncio.timeout(BOUND_S):
        await entered.wait()
        first = b"" if left is not None else await reader.readline()
        writer.close()
        if left is not None:
            await left.wait()
        server.should_exit = True
        await serving
    return first


@pytest.mark.slow
@pytest.mark.asyncio
async def test_uvicorn_does_not_cancel_the_task_of_a_client_that_has_gone() -> None:
    entered, left = asyncio.Event(), asyncio.Event()
    told: list[Any] = []

    async def handler(request: Any) -> Any:
        await request.json()
        entered.set()
        told.append((await request.receive())["type"])
        told.append(await request.is_disconnected())
        left.set()
        return JSONResponse({})

    await request(handler, entered, left)

    assert told == ["http.disconnect", True]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_page_says_how_to_cancel_it() -> None:
    entered, left = asyncio.Event(), asyncio.Event()
    results: list[Any] = []

    async def work() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            results.append("cancelled")
            raise

    async def handler(request: Any) -> Any:
        await request.json()
        results.append(await unless_gone()(request, work()))
        left.set()
        return JSONResponse({})

    await request(handler, entered, left)

    assert results == ["cancelled", None]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_wait_in_progress_is_left_alone() -> None:
    entered, results = asyncio.Event(), []

    async def work() -> str:
        entered.set()
        await asyncio.sleep(0)
        return "done"

    async def handler(request: Any) -> Any:
        await request.json()
        results.append(await unless_gone()(request, work()))
        return JSONResponse({})

    assert b"200" in await request(handler, entered, None)
    assert results == ["done"]
