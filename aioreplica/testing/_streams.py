"""What simulated loops add to asyncio's selector loop: Unix sockets, and servers that close."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any


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
        await loop._accept_connection2(
            factory, conn, extra, sslcontext, server, *rest, **options
        )

    async def create_unix_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        path: Any = None,
        *,
        ssl: Any = None,
        sock: Any = None,
        server_hostname: str | None = None,
        **rest: Any,
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
        server = asyncio.base_events.Server(
            self, [sock], protocol_factory, ssl, backlog, ssl_handshake_timeout,
            ssl_shutdown_timeout,
        )  # fmt: skip
        if start_serving:
            server._start_serving()
            await asyncio.sleep(0)
        return server
