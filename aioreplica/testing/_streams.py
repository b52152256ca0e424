"""Additions of simulated loops to asyncio's selector loop: Unix sockets, servers that close."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from ._participants import SimFuture

REAL_THREAD: Final = (
    "The thread {!r} called the event loop and is real: it was started before the program, or in "
    "C. No schedule decides when it calls, and none waits for it. Start it in the program, or put "
    "a stub in its place."
)


class Networks(Protocol):
    """Source of the readiness of sockets.

    Attributes:
        selector: Where the loop registers what it wants to be told of.
    """

    selector: Any

    @property
    def is_delayed(self) -> bool:
        """True if something is on its way for longer than usual."""

    def open_sockets(self, is_closing: Callable[[int], bool]) -> Iterable[str]:
        """Name what was left open."""

    def run_callback(self, handle: Any) -> None:
        """Run a plain callback, which may be about a socket."""

    def close(self) -> None:
        """Let go of all sockets."""


class Executors(Protocol):
    """Runner of the calls that a program gives to executors."""

    def submit_call(
        self, executor: Any, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Submit a call; return the future of its result."""

    def catch_up(self) -> None:
        """Let the time pass that the call has slept that runs."""


class StreamLoop:
    """Methods of an event loop; for Unix sockets a path is a mere name."""

    async def _accept_connection2(
        self, factory: Any, conn: Any, extra: Any, sslcontext: Any = None, server: Any = None,
        *rest: Any, **options: Any,
    ) -> None:  # fmt: skip
        """Make the transport of an accepted connection; none if the server has been closed.

        asyncio fails an assertion then, and loses the connection: no program can know of it.
        """
        if server is not None and not server.sockets:
            conn.close()
            return
        loop: Any = super()
        await loop._accept_connection2(factory, conn, extra, sslcontext, server, *rest, **options)

    async def create_unix_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        path: Any = None,
        *,
        ssl: object = None,
        sock: Any = None,
        server_hostname: str | None = None,
        **rest: object,
    ) -> Any:
        """Connect to who listens at a path."""
        loop: Any = self
        if sock is None:
            if path is None:
                raise ValueError("no path and sock were specified")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, os.fspath(path))
            except BaseException:
                sock.close()
                raise
        elif path is not None:
            raise ValueError("path and sock can not be specified at the same time")
        return await loop._create_connection_transport(
            sock, protocol_factory, ssl, server_hostname or ("" if ssl else None), **rest
        )

    async def create_unix_server(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        path: Any = None,
        *,
        sock: Any = None,
        backlog: int = 100,
        ssl: Any = None,
        ssl_handshake_timeout: float | None = None,
        ssl_shutdown_timeout: float | None = None,
        start_serving: bool = True,
        **rest: Any,
    ) -> Any:
        """Listen at a path."""
        loop: Any = self
        if sock is None:
            if path is None:
                raise ValueError("path was not specified, and no sock specified")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(os.fspath(path))
            except BaseException:
                sock.close()
                raise
        elif path is not None:
            raise ValueError("path and sock can not be specified at the same time")
        sock.setblocking(False)
        server: Any = asyncio.base_events.Server(
            loop, [sock], protocol_factory, ssl, backlog, ssl_handshake_timeout,
            ssl_shutdown_timeout,
        )  # fmt: skip
        if start_serving:
            await _serve(server)
        return server

    async def create_server(self, *args: Any, start_serving: bool = True, **kwargs: Any) -> Any:
        """Make a TCP server."""
        loop: Any = super()
        server = await loop.create_server(*args, start_serving=False, **kwargs)
        if start_serving:
            await _serve(server)
        return server


async def _serve(server: Any) -> None:
    """Begin to serve, as asyncio does, but close a server that its maker will never get.

    asyncio leaves it open where it is cancelled in this moment, which no program can mend.
    """
    server._start_serving()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        server.close()
        raise


class NetworkLoop(StreamLoop):
    """Network part of a simulated loop; the network is made when it is first needed.

    Attributes:
        network: What the run opens sockets in; None before.
        make_network: Makes it; set before the run.
        followers: Takes the steps that the callback makes possible that runs, where it is one of
            a socket; else None.
        postponed: What comes from sockets once their followers have gone on.
        is_here: Tells whether the caller is the program under test; set before the run.
    """

    _closed: bool
    enabled: list[Any]
    external: list[Any]
    notes: dict[str, None]
    executors: Executors | None
    call_soon: Callable[..., Any]
    _transports: WeakValueDictionary[int, Any]

    def begin_network(self) -> None:
        """Have none yet."""
        self._transports = WeakValueDictionary()
        self.network: Networks | None = None
        self.make_network: Callable[[], Any] | None = None
        self.followers: list[tuple[Any, Any]] | None = None
        self.postponed: list[Any] = []
        self.is_here: Callable[[], bool] | None = None

    def call_from_thread(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> object:
        """Register a callback, and note if a thread does that no schedule decides about."""
        if self.is_here is not None and not self.is_here():
            self.notes[REAL_THREAD.format(threading.current_thread().name)] = None
        elif self.executors is not None:
            self.executors.catch_up()
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[object]:
        """Make a future; where there is a network, one whose place in a set is known."""
        loop: Any = self
        return asyncio.Future(loop=loop) if self.network is None else SimFuture(loop=loop)

    @property
    def _selector(self) -> object:
        if self.network is None and not self._closed:
            assert self.make_network is not None
            self.make_network()
        return None if self.network is None else self.network.selector

    @property
    def open_sockets(self) -> Iterable[str]:
        """Sockets that the program has left open and is not about to close."""
        transports = self._transports
        if self.network is None:
            return ()
        return self.network.open_sockets(
            lambda fd: fd in transports and transports[fd].is_closing()
        )

    def offer_postponed(self) -> None:
        """Let come from sockets what tasks need not go before any more."""
        free = [each for each in self.postponed if each.may_go(self)]
        if free:
            self.postponed = [each for each in self.postponed if each not in free]
            self.external += free

    @property
    def is_at_rest(self) -> bool:
        """True if nothing goes on but timers of the program."""
        delayed = self.network is not None and self.network.is_delayed
        return not (self.enabled or self.external or delayed)

    def forget_network(self) -> None:
        """Take the sockets from transports that were left open, which would warn of it."""
        for transport in tuple(self._transports.values()):
            transport._closing = True
            transport._sock = None
        self.postponed.clear()
        if self.network is not None:
            self.network.close()
            self.network = None
