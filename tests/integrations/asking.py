"""Asks an ASGI application as a server does, in the same process, a piece of the body at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


def scope_of(method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    named = {"host": "127.0.0.1:8000", **headers}
    listed = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    path, _, query = path.partition("?")
    where = {"path": path, "root_path": "", "query_string": query.encode()}
    return {"type": "http", "method": method, "headers": listed, **where}


async def ask(
    app: Any,
    method: str,
    path: str,
    *pieces: bytes,
    goes: bool = False,
    stalls: bool = False,
    **headers: str,
) -> Answer:
    """Send a request; its client goes, or stalls, instead of ending the body if that is wanted."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if pieces:
        named.setdefault("content-type", "application/json")
    left = [*(pieces or [b""])]
    answer = Answer()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if left:
            piece = left.pop(0)
            is_more = bool(left) or goes or stalls
            return {"type": "http.request", "body": piece, "more_body": is_more}
        if stalls:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope_of(method, path, named), receive, send)
    return answer


async def post(app: Any, path: str, body: Any, **headers: str) -> Answer:
    return await ask(app, "POST", path, json.dumps(body).encode(), **headers)


async def until(condition: Callable[[], Any], *, limit_s: float = 30.0) -> None:
    """Wait until a condition, or an awaitable that it gives, is true."""
    async with asyncio.timeout(limit_s):
        while True:
            found = condition()
            if await found if isawaitable(found) else found:
                return
            await asyncio.sleep(0.001)


def events_of(body: bytes) -> Sequence[Any]:
    """Return the data of server-sent events."""
    lines = body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
