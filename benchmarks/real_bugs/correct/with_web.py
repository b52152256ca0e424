"""Correct programs over starlette, httpx, aiohttp and sse-starlette."""

import asyncio

import aiohttp
import httpx
from memory_aiohttp import MemoryConnector
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

LEAKS = "_shutdown_watcher"  # sse-starlette keeps it for the life of the process


def client_of(*routes, **options):
    app = Starlette(routes=[Route(f"/{each.__name__}", each) for each in routes], **options)
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def ask_an_app_at_once():
    async def hello(request):
        await asyncio.sleep(0)
        return JSONResponse({"name": request.query_params["name"]})

    async with client_of(hello) as client:
        answers = await asyncio.gather(*(client.get("/hello", params={"name": n}) for n in "abc"))
    assert [answer.json()["name"] for answer in answers] == ["a", "b", "c"]


async def stream_through_a_middleware():
    async def numbers(request):
        async def body():
            for number in range(3):
                await asyncio.sleep(0)
                yield f"{number}\n"

        return StreamingResponse(body())

    async def pass_on(request, call_next):
        response = await call_next(request)
        response.headers["seen"] = "yes"
        return response

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=pass_on)]
    async with client_of(numbers, middleware=middleware) as client:
        answers = await asyncio.gather(*(client.get("/numbers") for _ in range(2)))
    assert [answer.text for answer in answers] == ["0\n1\n2\n"] * 2
    assert answers[0].headers["seen"] == "yes"


async def run_background_tasks():
    done = []

    async def log():
        await asyncio.sleep(0)
        done.append("log")

    async def order(request):
        return PlainTextResponse("ok", background=BackgroundTask(log))

    async with client_of(order) as client:
        await asyncio.gather(client.get("/order"), client.get("/order"))
    assert done == ["log", "log"]


async def compute_in_a_thread_pool():
    async def square(request):
        return JSONResponse(await run_in_threadpool(pow, int(request.query_params["of"]), 2))

    async with client_of(square) as client:
        answers = await asyncio.gather(*(client.get(f"/square?of={n}") for n in range(3)))
    assert [answer.json() for answer in answers] == [0, 1, 4]


async def cancel_a_request():
    ended = []

    async def slow(request):
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)
        return PlainTextResponse("late")

    async with client_of(slow) as client:
        try:
            async with asyncio.timeout(1):
                await client.get("/slow")
        except TimeoutError:
            pass
    assert ended == [True]


async def fetch_over_few_connections():
    async with aiohttp.ClientSession(connector=MemoryConnector(limit=2)) as session:

        async def fetch():
            async with session.get("http://example.com/") as response:
                return await response.text()

        assert await asyncio.gather(*(fetch() for _ in range(5))) == ["ok"] * 5


async def send_events():
    sent = []

    async def events():
        for number in range(3):
            await asyncio.sleep(1)
            yield {"data": number}

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        await asyncio.sleep(0)
        sent.append(message["type"])

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    await EventSourceResponse(events(), ping=60)(scope, receive, send)
    assert sent[0] == "http.response.start"
    assert len(sent) >= 4
