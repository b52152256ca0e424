"""Servers and clients of HTTP and WebSockets, each pair in one program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import fastapi
import httpx
import hypercorn.asyncio
import uvicorn
import websockets.asyncio.client
import websockets.asyncio.server
from aiohttp import web
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

PORT = 8080


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[None]:
    """Serve with aiohttp: `/NAME` answers, `/ws` echoes."""

    async def greet(request: web.Request) -> web.Response:
        await asyncio.sleep(0.01)
        return web.Response(text=f"hi {request.match_info['name']}")

    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    app = web.Application()
    app.add_routes([web.get("/ws", echo), web.get("/{name}", greet)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def aiohttp_requests() -> None:
    async with serving(), aiohttp.ClientSession() as session:

        async def get(number: int) -> str:
            async with session.get(f"http://localhost:{PORT}/{number}") as response:
                return await response.text()

        assert await asyncio.gather(*map(get, range(3))) == ["hi 0", "hi 1", "hi 2"]


async def aiohttp_cancelled_request() -> None:
    """A client that gives up must not disturb who comes after it."""
    async with serving(), aiohttp.ClientSession() as session:

        async def get(name: str) -> str:
            async with session.get(f"http://localhost:{PORT}/{name}") as response:
                return await response.text()

        lost = asyncio.create_task(get("lost"))
        await asyncio.sleep(0.005)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert await get("next") == "hi next"


async def aiohttp_websocket() -> None:
    async with (
        serving(),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://localhost:{PORT}/ws") as socket,
    ):
        for text in ("a", "b"):
            await socket.send_str(text)
            assert (await socket.receive()).data == text


async def websockets_echo() -> None:
    async def echo(socket: Any) -> None:
        async for message in socket:
            await socket.send(message)

    async with (
        websockets.asyncio.server.serve(echo, "127.0.0.1", PORT),
        websockets.asyncio.client.connect(f"ws://127.0.0.1:{PORT}") as client,
    ):
        for text in ("a", "b"):
            await client.send(text)
            assert await client.recv() == text


def greeting_app() -> Starlette:
    async def greet(request: Request) -> PlainTextResponse:
        await asyncio.sleep(0.01)
        return PlainTextResponse(f"hi {request.path_params['name']}")

    async def count(request: Request) -> StreamingResponse:
        async def numbers() -> AsyncIterator[str]:
            for number in range(3):
                await asyncio.sleep(0)
                yield str(number)

        return StreamingResponse(numbers())

    return Starlette(routes=[Route("/count", count), Route("/{name}", greet)])


class Server(uvicorn.Server):
    """uvicorn, without its handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def uvicorn_and_httpx() -> None:
    server = Server(uvicorn.Config(greeting_app(), port=PORT, log_config=None))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=f"http://localhost:{PORT}", verify=False) as client:
        answers = await asyncio.gather(*[client.get(f"/{number}") for number in range(2)])
        assert [each.text for each in answers] == ["hi 0", "hi 1"]
        assert (await client.get("/count")).text == "012"
    server.should_exit = True
    await running


async def hypercorn_and_httpx() -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{PORT}"]
    config.errorlog = config.accesslog = None
    stop = asyncio.Event()
    serve: Any = hypercorn.asyncio.serve
    running = asyncio.create_task(serve(greeting_app(), config, shutdown_trigger=stop.wait))
    await asyncio.sleep(1)
    async with httpx.AsyncClient(verify=False) as client:
        urls = [f"http://127.0.0.1:{PORT}/{number}" for number in range(2)]
        answers = await asyncio.gather(*map(client.get, urls))
        assert [each.text for each in answers] == ["hi 0", "hi 1"]
    stop.set()
    await running


async def starlette_test_client() -> None:
    """A client that blocks: its portal runs the app in a thread."""
    with TestClient(greeting_app()) as client:
        assert client.get("/you").text == "hi you"
        assert client.get("/count").text == "012"


async def fastapi_in_threads() -> None:
    app, log = fastapi.FastAPI(), list[str]()

    def resource() -> Iterator[int]:
        log.append("open")
        try:
            yield 3
        finally:
            log.append("close")

    @app.get("/sync")
    def sync(value: int = fastapi.Depends(resource)) -> int:
        return value

    @app.get("/async")
    async def asynchronous() -> int:
        return 4

    def use() -> None:
        client = TestClient(app)
        assert client.get("/sync").json() == 3
        assert client.get("/async").json() == 4

    await asyncio.gather(asyncio.to_thread(use), asyncio.to_thread(use))
    assert sorted(log) == ["close", "close", "open", "open"]


PROGRAMS = [
    aiohttp_requests, aiohttp_cancelled_request, aiohttp_websocket, websockets_echo,
    uvicorn_and_httpx, hypercorn_and_httpx, starlette_test_client, fastapi_in_threads,
]  # fmt: skip
