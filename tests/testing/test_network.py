"""The simulated network: asyncio's streams, protocols and socket calls, anyio's, and its faults."""

import asyncio
import errno
import http.client
import select
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import ModuleType
from typing import Any

import anyio
import pytest

import aioreplica.testing as art

PORT = 8000


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def ask(text: bytes, host: str = "localhost", port: int = PORT) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(text)
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


# --- programs that are correct ----------------------------------------------------------------


async def streams() -> None:
    async with await asyncio.start_server(echo, "127.0.0.1", PORT):
        answers = await asyncio.gather(*[ask(b"%d\n" % i) for i in range(3)])
        assert answers == [b"0\n", b"1\n", b"2\n"]


async def protocols() -> None:
    class Shout(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data.upper())

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Shout, "api.internal", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await ask(b"yes\n", "api.internal", port) == b"YES\n"


async def sockets() -> None:
    loop = asyncio.get_running_loop()
    listener, client = socket.socket(), socket.socket()
    for each in (listener, client):
        each.setblocking(False)
    listener.bind(("", PORT))
    listener.listen()

    async def serve() -> None:
        accepted, address = await loop.sock_accept(listener)
        with accepted:
            assert address == accepted.getpeername() == client.getsockname()
            buffer = bytearray(2)
            while size := await loop.sock_recv_into(accepted, buffer):
                await loop.sock_sendall(accepted, buffer[:size])

    with listener, client:
        serving = asyncio.create_task(serve())
        await loop.sock_connect(client, ("127.0.0.1", PORT))
        await loop.sock_sendall(client, b"abc")
        client.shutdown(socket.SHUT_WR)
        got = b""
        while data := await loop.sock_recv(client, 10):
            got += data
        assert got == b"abc"
        await serving


async def much_data() -> None:
    """More than a connection holds: both ends have to wait for each other."""

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % len(await reader.read()))
        writer.close()

    async with await asyncio.start_server(count, "127.0.0.1", PORT):
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        for _ in range(4):
            writer.write(bytes(100_000))
            await writer.drain()
        writer.write_eof()
        assert await reader.read() == b"400000"
        writer.close()
        await writer.wait_closed()


async def datagrams() -> None:
    class Inbox(asyncio.DatagramProtocol):
        def __init__(self) -> None:
            self.packets: asyncio.Queue[Any] = asyncio.Queue()

        def datagram_received(self, data: bytes, address: Any) -> None:
            self.packets.put_nowait((data, address))

    loop = asyncio.get_running_loop()
    server, inbox = await loop.create_datagram_endpoint(Inbox, local_addr=("127.0.0.1", PORT))
    client, answers = await loop.create_datagram_endpoint(Inbox, remote_addr=("127.0.0.1", PORT))
    client.sendto(b"ping")
    data, address = await inbox.packets.get()
    server.sendto(data * 2, address)
    assert (await answers.packets.get())[0] == b"pingping"
    for transport in (server, client):
        transport.close()


async def unix_sockets() -> None:
    async with await asyncio.start_unix_server(echo, "/nowhere/at/all.sock"):
        reader, writer = await asyncio.open_unix_connection("/nowhere/at/all.sock")
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


async def anyio_streams() -> None:
    async def serve(stream: Any) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=PORT) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        async with await anyio.connect_tcp("localhost", PORT) as stream:
            await stream.send(b"hello")
            assert await stream.receive() == b"hello"
        group.cancel_scope.cancel()


async def blocking_client_in_a_thread() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    def get() -> bytes:
        connection = http.client.HTTPConnection("localhost", PORT)
        connection.request("GET", "/")
        body = connection.getresponse().read()
        connection.close()
        return body

    async with await asyncio.start_server(serve, "127.0.0.1", PORT):
        bodies = await asyncio.gather(asyncio.to_thread(get), asyncio.to_thread(get))
        assert bodies == [b"hi", b"hi"]


PROGRAMS = [
    streams, protocols, sockets, much_data, datagrams, unix_sockets, anyio_streams,
    blocking_client_in_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_correct_program_passes_every_schedule(program: Any) -> None:
    art.explore(program, schedules=25).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fidelity",
    [
        pytest.param("asyncio", marks=pytest.mark.xslow),
        pytest.param("reorder", marks=pytest.mark.xslow),
        "adversarial",  # it may do all that the others may
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_correct_program_passes_many_schedules(program: Any, fidelity: str) -> None:
    art.explore(program, fidelity=fidelity, schedules=200, seed=1).check()


async def server_that_relies_on_its_tasks() -> None:
    """A task that a connection has woken goes on before the connection is lost, as on any loop."""
    loop = asyncio.get_running_loop()

    class Serve(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.answer: Any = transport.write
            self.task = loop.create_task(self.serve())

        async def serve(self) -> None:
            self.request = loop.create_future()
            data = await self.request
            self.answer(data)

        def data_received(self, data: bytes) -> None:
            self.request.set_result(data)

        def connection_lost(self, error: Exception | None) -> None:
            self.answer = None

    async with await loop.create_server(Serve, "127.0.0.1", PORT):
        _, writer = await asyncio.open_connection("localhost", PORT)
        writer.write(b"1")
        writer.close()
        assert await ask(b"2\n") == b"2\n"
        await asyncio.sleep(1)


def test_what_a_connection_wakes_goes_on_before_it_is_lost() -> None:
    for fidelity in ("asyncio", "reorder"):
        art.explore(server_that_relies_on_its_tasks, schedules=100, fidelity=fidelity).check()


@pytest.mark.parametrize("program", [streams, much_data, sockets])
def test_data_may_arrive_in_parts_and_late(program: Any) -> None:
    faults = art.Faults().split_data(PORT).slow_connection(factor=30)

    art.explore(program, schedules=25, faults=faults).check()


# --- bugs -------------------------------------------------------------------------------------


async def takes_what_arrives_for_all_of_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read(1024)
        if not request.endswith(b"\n"):
            raise ValueError(f"no request: {request!r}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", PORT):
        with suppress(ConnectionError):
            await ask(b"a request\n")


@asynccontextmanager
async def listening(serve: Any, port: int = PORT) -> AsyncIterator[None]:
    """Serve for a block; from Python 3.12 on `async with server` would wait for connections."""
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


async def forwards_and_forgets() -> None:
    """A proxy that loses its upstream connection when its client is reset."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", PORT)
        try:
            upstream.write(await reader.readline())
        except ConnectionError:
            writer.close()
            return
        writer.write(await upstream_reader.readline())
        for each in (upstream, writer):
            each.close()

    async with listening(echo), listening(forward, PORT + 1):
        with suppress(ConnectionError):
            await ask(b"hello\n", port=PORT + 1)


async def asks_without_a_timeout() -> None:
    async with await asyncio.start_server(echo, "127.0.0.1", PORT):
        await ask(b"hello\n")


async def forgets_to_close() -> None:
    async with listening(echo):
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(b"hello\n")
        await reader.readline()


def failure_of(main: Any, faults: art.Faults | None = None) -> BaseException:
    report = art.explore(main, schedules=200, faults=faults)
    assert report.failure is not None
    with pytest.raises(type(report.failure.error)) as caught:
        art.replay(main, report.failure.token)
    assert str(caught.value) == str(report.failure.error)
    return report.failure.error


def test_parts_that_are_taken_for_the_whole_are_found() -> None:
    art.explore(takes_what_arrives_for_all_of_it, schedules=50).check()

    error = failure_of(takes_what_arrives_for_all_of_it, art.Faults().split_data(PORT))

    assert isinstance(error, art.LeakError)
    assert "ValueError" in error.exceptions[0]


def test_a_reset_in_the_middle_of_a_request_shows_the_connection_that_leaks() -> None:
    art.explore(forwards_and_forgets, schedules=50).check()

    error = failure_of(forwards_and_forgets, art.Faults().reset_connection(PORT + 1))

    assert isinstance(error, art.LeakError)
    assert any("-> 127.0.0.1:8000 (made at " in each for each in error.connections)
    assert "test_network.py:" in str(error.connections)


def test_a_peer_that_is_half_open_is_named_by_the_deadlock() -> None:
    error = failure_of(asks_without_a_timeout, art.Faults().half_open("localhost:8000"))

    assert isinstance(error, art.DeadlockError)
    waits = {wait.who: wait for wait in error.waits}
    assert waits["main"].awaits.startswith("data from 127.0.0.1:8000, half-open")
    assert waits["main"].site.startswith("test_network.py:")


def test_a_timeout_helps_against_a_peer_that_is_half_open() -> None:
    async def main() -> None:
        async with await asyncio.start_server(echo, "127.0.0.1", PORT) as server:
            try:
                await asyncio.wait_for(ask(b"hello\n"), 10)
            except TimeoutError:
                server.close()
            for transport in asyncio.get_running_loop()._transports.values():  # type: ignore[attr-defined]
                transport.abort()  # what a server with a timeout of its own would do

    art.explore(main, schedules=50, faults=art.Faults().half_open(PORT)).check()


def test_a_slow_connection_runs_into_a_timeout() -> None:
    async def main() -> None:
        async with await asyncio.start_server(echo, "127.0.0.1", PORT):
            await asyncio.wait_for(ask(b"hello\n"), 2)

    art.explore(main, schedules=50).check()

    assert isinstance(
        failure_of(main, art.Faults().slow_connection(PORT, factor=5000)), TimeoutError
    )


def test_a_connection_that_was_not_closed_has_leaked() -> None:
    error = failure_of(forgets_to_close)

    assert isinstance(error, art.LeakError)
    assert "test_network.py:" in error.connections[0]
    art.explore(forgets_to_close, schedules=20, leaks=["*:8000*", "echo"]).check()


# --- errors -----------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionRefusedError):
            await ask(b"hello\n")

    art.explore(main, schedules=10).check()


async def more_clients_than_a_backlog() -> None:
    async with await asyncio.start_server(echo, "127.0.0.1", PORT, backlog=20):
        asked = [ask(b"%d\n" % number) for number in range(50)]
        answers = await asyncio.gather(*asked)
        assert answers == [b"%d\n" % number for number in range(50)]


async def more_clients_than_a_backlog_of_a_path() -> None:
    async def ask_there() -> bytes:
        reader, writer = await asyncio.open_unix_connection("/there")
        writer.write(b"x\n")
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer

    async def ask_by_anyio() -> bytes:
        async with await anyio.connect_unix("/there") as stream:
            await stream.send(b"x\n")
            return await stream.receive()

    async with await asyncio.start_unix_server(echo, "/there", backlog=1):
        for asks in (ask_there, ask_by_anyio):
            assert await asyncio.gather(*[asks() for _ in range(6)]) == [b"x\n"] * 6


async def blocking_clients_of_a_small_backlog() -> None:
    def connect() -> bytes:
        with socket.create_connection(("127.0.0.1", PORT)) as sock:
            return sock.recv(1)

    with socket.create_server(("127.0.0.1", PORT), backlog=1) as server:
        clients = [asyncio.create_task(asyncio.to_thread(connect)) for _ in range(4)]
        await asyncio.sleep(1)
        assert not any(client.done() for client in clients)
        for _ in clients:
            (await asyncio.to_thread(server.accept))[0].close()
        assert await asyncio.gather(*clients) == [b""] * 4


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", ["asyncio", "reorder", "adversarial"])
@pytest.mark.parametrize(
    "main",
    [
        more_clients_than_a_backlog,
        more_clients_than_a_backlog_of_a_path,
        blocking_clients_of_a_small_backlog,
    ],
)
def test_clients_wait_while_the_backlog_is_full(main: Any, fidelity: str) -> None:
    art.explore(main, schedules=5, fidelity=fidelity).check()


def test_a_server_that_closes_refuses_those_who_wait() -> None:
    async def main() -> list[type]:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", PORT), backlog=1) as server:
            clients = [socket.socket() for _ in range(3)]
            for client in clients:
                client.setblocking(False)
            asked = [loop.sock_connect(client, ("127.0.0.1", PORT)) for client in clients]
            connecting = asyncio.gather(*asked, return_exceptions=True)
            await asyncio.sleep(1)
            server.close()
            ends = await connecting
        for client in clients:
            client.close()
        return [type(end) for end in ends]

    assert art.run(main) == [type(None), type(None), ConnectionRefusedError]


def test_a_host_outside_is_refused_by_name() -> None:
    async def main() -> None:
        await ask(b"hello\n", "example.org", 80)

    with pytest.raises(art.RealIOError, match=r"connection to example\.org:80 at .*test_network"):
        art.run(main)


def test_an_address_is_taken_once() -> None:
    async def main() -> int | None:
        first, second = socket.socket(), socket.socket()
        with first, second:
            first.bind(("127.0.0.1", PORT))
            try:
                second.bind(("127.0.0.1", PORT))
            except OSError as error:
                return error.errno
        return None

    assert art.run(main) == errno.EADDRINUSE


def test_sockets_outside_the_program_stay_real() -> None:
    make = socket.socket.__new__
    art.run(streams)

    assert socket.socket.__new__ is make
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")
        assert other.recv(1) == b"x"


def test_addresses_are_checked() -> None:
    with pytest.raises(TypeError, match="a port"):
        art.Faults().half_open(1.5)
    with pytest.raises(ValueError, match="above 1, got 1"):
        art.Faults().slow_connection(factor=1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        art.Faults().reset_connection(times=0)


@pytest.mark.parametrize(
    ("host", "flags", "address"),
    [
        ("localhost", 0, "::1"),
        ("127.0.0.1", 0, "::1"),
        (None, socket.AI_PASSIVE, "::"),
        ("::1", 0, "::1"),
        ("api.internal", 0, None),
    ],
)
def test_only_names_of_this_host_have_addresses_of_ipv6(
    host: str | None, flags: int, address: str | None
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ask = loop.getaddrinfo(host, PORT, family=socket.AF_INET6, flags=flags)
        if address is None:
            with pytest.raises(socket.gaierror, match="not known"):
                await ask
        else:
            assert {each[4] for each in await ask} == {(address, PORT, 0, 0)}

    art.run(main)


def test_a_server_may_be_cancelled_while_it_starts() -> None:
    async def shop() -> bytes:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"sold " + await reader.readline())
            writer.close()

        async with await asyncio.start_server(handle, "shop.internal", PORT):
            reader, writer = await asyncio.open_connection("shop.internal", PORT)
            try:
                writer.write(b"tea\n")
                return await reader.readline()
            finally:
                writer.close()

    assert art.run(shop) == b"sold tea\n"
    art.cancel_everywhere(shop).check()


def test_channels_of_grpc_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: the real one ends the interpreter if it is not refused."""
    grpc = ModuleType("grpc.aio")
    vars(grpc)["insecure_channel"] = lambda target: pytest.fail("it was opened")
    monkeypatch.setitem(sys.modules, "grpc.aio", grpc)

    async def main() -> None:
        vars(sys.modules["grpc.aio"])["insecure_channel"]("localhost:50051")

    with pytest.raises(art.RealIOError, match=r"grpc\.aio at .*test_network\.py"):
        art.run(main)


@pytest.mark.skipif(not hasattr(select, "poll"), reason="no poll here")
def test_a_poll_that_does_not_wait_sees_simulated_sockets() -> None:
    """As httpcore asks whether a kept connection is still open; else it makes another one."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            asked = select.poll()
            asked.register(ours, select.POLLIN)
            assert asked.poll(0) == []
            asked.modify(ours.fileno(), select.POLLIN | select.POLLOUT)
            assert asked.poll(0) == [(ours.fileno(), select.POLLOUT)]
            asked.modify(ours, select.POLLIN)
            theirs.close()
            assert asked.poll(0) == [(ours.fileno(), select.POLLIN)]
            asked.unregister(ours)
            assert asked.poll(0) == []

    art.explore(main, schedules=20).check()


def test_a_policy_makes_a_simulated_loop() -> None:
    async def main() -> type:
        loop = asyncio.get_event_loop_policy().new_event_loop()
        loop.close()
        return type(loop)

    assert art.run(main).__module__.startswith("aioreplica.testing")
    loop = asyncio.get_event_loop_policy().new_event_loop()
    loop.close()
    assert not type(loop).__module__.startswith("aioreplica")
