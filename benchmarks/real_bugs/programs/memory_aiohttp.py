"""A web server in memory, as a connector of aiohttp."""

import asyncio

import aiohttp
from aiohttp.client_proto import ResponseHandler

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class MemoryTransport(asyncio.Transport):
    """Answers every request a moment later."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol = protocol
        self.closed = False

    def write(self, data):
        if bytes(data[:3]) == b"GET":
            asyncio.get_running_loop().call_soon(self.answer)

    def writelines(self, chunks):
        self.write(b"".join(chunks))

    def answer(self):
        if not self.closed:
            self.protocol.data_received(ANSWER)

    def is_closing(self):
        return self.closed

    def close(self):
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class MemoryConnector(aiohttp.BaseConnector):
    """Connects to the server in memory."""

    async def _create_connection(self, req, traces, timeout):
        await asyncio.sleep(0)
        protocol = ResponseHandler(asyncio.get_running_loop())
        protocol.connection_made(MemoryTransport(protocol))
        return protocol
