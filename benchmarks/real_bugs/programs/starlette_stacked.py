"""An upload is broken off; the endpoint behind two middlewares notices and answers."""

import asyncio

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import Route

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}


async def main():
    completed = []

    async def endpoint(request):
        try:
            async for _ in request.stream():
                pass
        except ClientDisconnect:
            pass
        return PlainTextResponse("ok")

    async def pass_on(request, call_next):
        response = await call_next(request)
        completed.append(response)
        return response

    app = Starlette(
        routes=[Route("/", endpoint, methods=["POST"])],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=pass_on) for _ in range(2)],
    )
    messages = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        await asyncio.sleep(0)
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message):
        await asyncio.sleep(0)

    await app(dict(SCOPE), receive, send)
    assert len(completed) == 2
