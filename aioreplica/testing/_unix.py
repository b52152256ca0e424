"""Unix sockets of an event loop, as asyncio has them, over simulated sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any


class UnixSockets:
    """`create_unix_connection` and `create_unix_server` of a loop: a path is a mere name."""

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
