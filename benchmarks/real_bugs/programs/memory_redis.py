"""A Redis server in memory, and connections to it."""

import asyncio

from redis.asyncio import Connection


class Server:
    """Answers a few commands, each a moment after it came."""

    def __init__(self, delay=None):
        self.values = {}
        self.delay = delay
        self.connects = 0
        self.serving = []

    async def stop(self, pool):
        """Close all connections and wait until the server has noticed."""
        await pool.disconnect()
        await asyncio.gather(*self.serving)

    def answer(self, command):
        name, *arguments = command
        name = name.upper()
        if name == b"SET":
            if b"NX" in arguments and arguments[0] in self.values:
                return b"$-1\r\n"
            self.values[arguments[0]] = arguments[1]
        elif name == b"GET":
            value = self.values.get(arguments[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        elif name == b"EXISTS":
            return b":%d\r\n" % (arguments[0] in self.values)
        elif name == b"EVALSHA":  # the script that releases a lock
            _, _, key, token = arguments
            if self.values.get(key) != token:
                return b":0\r\n"
            del self.values[key]
            return b":1\r\n"
        return b"+OK\r\n"


class Writer:
    """What a connection writes to."""

    def __init__(self, server, reader):
        self.server = server
        self.reader = reader
        self.closed = False
        self.transport = self
        self.commands = asyncio.Queue()
        server.serving.append(asyncio.create_task(self.serve()))

    def write(self, data):
        lines = data.split(b"\r\n")
        commands = []
        while lines and lines[0]:
            size = int(lines[0][1:])
            commands.append(lines[2 : 2 * size + 1 : 2])
            lines = lines[2 * size + 1 :]
        for command in commands:
            self.commands.put_nowait(command)

    def writelines(self, chunks):
        self.write(b"".join(chunks))

    async def serve(self):
        while (command := await self.commands.get()) is not None:
            answer = self.server.answer(command)
            await asyncio.sleep(0)
            if not self.closed:
                self.reader.feed_data(answer)

    async def drain(self):
        await asyncio.sleep(0)

    def close(self):
        self.closed = True
        self.commands.put_nowait(None)
        if not self.reader.at_eof():
            self.reader.feed_eof()

    def is_closing(self):
        return self.closed

    async def wait_closed(self):
        await asyncio.sleep(0)

    def get_extra_info(self, name, default=None):
        return default


class MemoryConnection(Connection):
    """A connection to the server in memory."""

    def __init__(self, server=None, **options):
        super().__init__(**options)
        self.server = server

    async def _connect(self):
        self.server.connects += 1
        delay = self.server.delay
        await asyncio.sleep(delay(self.server.connects) if delay else 0)
        self._reader = asyncio.StreamReader()
        self._writer = Writer(self.server, self._reader)

    async def on_connect(self):
        self._parser.on_connect(self)

    async def on_connect_check_health(self, check_health=True):
        self._parser.on_connect(self)
