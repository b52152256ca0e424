"""A ping is cancelled; the connection stays open."""

import asyncio

from websockets.asyncio.connection import Connection
from websockets.client import ClientProtocol
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri


class Pipe(asyncio.Transport):
    """Hands what is written to the other side, a moment later."""

    def __init__(self):
        super().__init__()
        self.peer = None
        self.closing = False

    def write(self, data):
        asyncio.get_running_loop().call_soon(self.deliver, bytes(data))

    def deliver(self, data):
        if not self.closing:
            self.peer.data_received(data)

    def write_eof(self):
        self.close()

    def can_write_eof(self):
        return False

    def close(self):
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.peer.eof_received)

    abort = close

    def is_closing(self):
        return self.closing

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_extra_info(self, name, default=None):
        return default


def connect():
    client = Connection(
        ClientProtocol(parse_uri("ws://example.com/"), state=State.OPEN), ping_interval=None
    )
    server = Connection(ServerProtocol(state=State.OPEN), ping_interval=None)
    for here, there in ((client, server), (server, client)):
        pipe = Pipe()
        pipe.peer = there
        here.connection_made(pipe)
    return client, server


async def main():
    client, server = connect()

    async def ping():
        await (await client.ping())

    pinging = asyncio.create_task(ping())

    async def lose_patience():
        pinging.cancel()

    await asyncio.gather(lose_patience(), pinging, return_exceptions=True)
    await server.send("news")
    assert await client.recv() == "news"
    await client.ping()
