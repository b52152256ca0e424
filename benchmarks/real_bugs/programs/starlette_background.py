"""A response has a background task; the client goes away once it has the response."""

import asyncio

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


async def main():
    written = []

    async def write_log():
        await asyncio.sleep(0)
        written.append("log")

    async def endpoint(request):
        return PlainTextResponse("ok", background=BackgroundTask(write_log))

    async def pass_on(request, call_next):
        return await call_next(request)

    app = Starlette(
        routes=[Route("/", endpoint)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=pass_on)],
    )
    sent = asyncio.Event()
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            sent.set()

    await app(dict(SCOPE), receive, send)
    assert written == ["log"]
