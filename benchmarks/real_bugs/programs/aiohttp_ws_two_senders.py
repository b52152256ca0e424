"""Two tasks send over one compressed web socket; the messages can be read."""

import asyncio
import random

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_websocket import WebSocketReader, WebSocketWriter
from aiohttp.streams import FlowControlDataQueue


class Pipe(asyncio.Transport):
    """Hands every frame to a reader."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def write(self, data):
        self.reader.feed_data(bytes(data))

    def is_closing(self):
        return False


async def main():
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    queue = FlowControlDataQueue(protocol, 2**20, loop=loop)
    pipe = Pipe(WebSocketReader(queue, 2**20, True))
    writer = WebSocketWriter(protocol, pipe, compress=15)
    texts = [bytes(random.Random(seed).choices(b"abcdefgh", k=20_000)) for seed in range(2)]
    await asyncio.gather(*(writer.send(text) for text in texts))
    received = [(await queue.read()).data.encode() for _ in texts]
    assert sorted(received) == sorted(texts)
