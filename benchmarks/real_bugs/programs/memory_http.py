"""A web server in memory, as a network backend of httpcore."""

import asyncio

import httpcore

try:
    from httpcore import AsyncNetworkBackend, AsyncNetworkStream
except ImportError:
    from httpcore.backends.base import AsyncNetworkBackend, AsyncNetworkStream

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class MemoryStream(AsyncNetworkStream):
    """Answers every request."""

    def __init__(self):
        self.answers = []

    async def read(self, max_bytes, timeout=None):
        await asyncio.sleep(0)
        return self.answers.pop(0) if self.answers else b""

    async def write(self, buffer, timeout=None):
        await asyncio.sleep(0)
        if b"HTTP/1.1" in buffer:
            self.answers.append(ANSWER)

    async def aclose(self):
        await asyncio.sleep(0)

    def get_extra_info(self, info):
        return None


class MemoryBackend(AsyncNetworkBackend):
    """Connects to the server in memory."""

    async def connect_tcp(self, *arguments, **options):
        await asyncio.sleep(0)
        return MemoryStream()

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


def make_pool(**options):
    """Make a pool whose connections lead to the server in memory."""
    return httpcore.AsyncConnectionPool(network_backend=MemoryBackend(), **options)
