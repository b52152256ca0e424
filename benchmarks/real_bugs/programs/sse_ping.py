"""A stream of events with pings; the server is never asked to send two messages at once."""

import asyncio

from sse_starlette.sse import EventSourceResponse

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


async def main():
    sending = most = 0

    async def events():
        for number in range(2):
            await asyncio.sleep(1)
            yield {"data": number}

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        nonlocal sending, most
        sending += 1
        most = max(most, sending)
        await asyncio.sleep(0)
        sending -= 1

    await EventSourceResponse(events(), ping=1)(dict(SCOPE), receive, send)
    assert most == 1
