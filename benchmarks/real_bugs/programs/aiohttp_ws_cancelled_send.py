"""A send over a compressed web socket is cancelled; the next message can be read."""

import asyncio
import random

from aiohttp import WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp._websocket.writer import WebSocketWriter
from aiohttp.base_protocol import BaseProtocol


class Pipe(asyncio.Transport):
    """Hands every frame to a reader."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def write(self, data):
        self.reader.feed_data(bytes(data))

    def writelines(self, chunks):
        self.write(b"".join(chunks))

    def is_closing(self):
        return False


async def main():
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    queue = WebSocketDataQueue(protocol, 2**20, loop=loop)
    pipe = Pipe(WebSocketReader(queue, 2**20, True))
    writer = WebSocketWriter(protocol, pipe, compress=15)
    texts = [bytes(random.Random(seed).choices(b"abcdefgh", k=20_000)) for seed in range(3)]
    requests = [asyncio.create_task(writer.send_frame(text, WSMsgType.TEXT)) for text in texts]

    async def client_gone():
        requests[0].cancel()

    await asyncio.gather(client_gone(), *requests, return_exceptions=True)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    received = []
    while queue._buffer:
        received.append((await queue.read()).data.encode())
    assert set(received) <= set(texts)
    assert texts[1] in received
    assert texts[2] in received
