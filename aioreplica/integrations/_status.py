"""The status of strategies as plain data for JSON, and the socket that tells it to `top`.

Whoever connects is sent one JSON document and the connection is closed; nothing is read. The socket
has mode 0600, and processes of other users are refused even if they can open it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, cast, final

from ..strategies import Strategy
from ..telemetry import usage

VERSION = 1
MAX_BYTES = 16 * 1024 * 1024

Status: TypeAlias = dict[str, Any]  # Any: what JSON can be made of


def status_of(strategies: Mapping[str, Strategy]) -> Status:
    """Return what strategies are doing, by name; on the event loop."""
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "program": " ".join(sys.argv[:3]),
        "time_s": time.monotonic(),
        "strategies": [_one(name, strategy) for name, strategy in strategies.items()],
        "input_calls": dict(usage().input_calls),
    }


def _one(name: str, strategy: Strategy) -> Status:
    now = strategy.statistics()
    return {
        "name": name,
        "kind": type(strategy).__name__,
        "state": now.state,
        "num_steps": now.num_steps,
        "num_active": now.num_active,
        "loop_lag_s": now.loop_lag_s,
        "max_loop_lag_s": now.max_loop_lag_s,
        "devices": [
            {
                "name": device,
                "queued": lane.queued,
                "running": lane.running,
                "done": lane.done,
                "busy_s": lane.busy_s,
            }
            for device, lane in now.lanes.items()
        ],
        "replicas": [
            {
                "replica_id": each.replica_id,
                "device": device,
                "num_merges": each.num_merges,
                "num_last": each.num_last,
                "late_s": each.late_s,
            }
            for each, device in zip(now.skew, strategy._runtime.device_names, strict=True)
        ],
        "waits": [
            {
                "step": wait.step,
                "replica_id": wait.replica_id,
                "what": wait.what,
                "waits_for": list(wait.waits_for),
                "where": wait.where,
            }
            for wait in strategy.waiting()
        ],
    }


def name_strategies(strategies: tuple[Strategy, ...]) -> dict[str, Strategy]:
    """Give each strategy a name: its class, and a number if there are several.

    Raises:
        TypeError: If there is none, or one is not a strategy.
    """
    if not strategies:
        raise TypeError("Give at least one strategy to look at.")
    named: dict[str, Strategy] = {}
    for strategy in strategies:
        if not isinstance(strategy, Strategy):
            raise TypeError(f"Only strategies can be looked at, got {strategy!r}.")
        name, number = type(strategy).__name__, 1
        while name in named:
            number += 1
            name = f"{type(strategy).__name__} {number}"
        named[name] = strategy
    return named


def socket_folder() -> Path:
    """Return where the sockets of this user's processes are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "aioreplica"
    return Path(tempfile.gettempdir()) / f"aioreplica-{os.getuid()}"


@asynccontextmanager
async def serve(
    *strategies: Strategy, path: str | os.PathLike[str] | None = None
) -> AsyncIterator[Path]:
    """Let `python -m aioreplica top` look at strategies while a block runs; gives the path.

    Args:
        *strategies: Which.
        path: Where the Unix socket is made; None makes one for this process in a folder of this
            user, where `top` finds it.

    Raises:
        TypeError: If there is no strategy.
        FileExistsError: If the path is something else than a socket.
        OSError: If another process listens there, or the folder is not private to this user.

    Cancellation:
        The socket is removed.
    """
    named = name_strategies(strategies)
    chosen = _private_path() if path is None else Path(path)
    listening = _listen(chosen)
    try:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _Teller(named), sock=listening)
    except BaseException:
        listening.close()
        chosen.unlink(missing_ok=True)
        raise
    try:
        yield chosen
    finally:
        server.close()
        with suppress(OSError):
            chosen.unlink(missing_ok=True)


@final
class _Teller(asyncio.Protocol):
    """Sends the status to one who has connected."""

    def __init__(self, strategies: Mapping[str, Strategy]) -> None:
        self._strategies = strategies

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer, or hang up on another user."""
        writer = cast(asyncio.WriteTransport, transport)
        uid = peer_uid(transport.get_extra_info("socket"))
        if uid != os.getuid():
            logging.getLogger("aioreplica.telemetry").warning(
                "A process of user %s asked for the status of this process. It was refused.", uid
            )
            writer.abort()
            return
        writer.write(json.dumps(status_of(self._strategies)).encode() + b"\n")
        writer.close()


def peer_uid(connection: socket.socket) -> int:
    """Return the user that the process at the other end runs as."""
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", found)[1])
    credentials = connection.getsockopt(0, 1, 80)  # SOL_LOCAL, LOCAL_PEERCRED of macOS and BSD
    return int(struct.unpack_from("2I", credentials)[1])


def read_status(path: Path, timeout_s: float = 2.0) -> Status:
    """Ask a process for its status, and wait for the answer.

    Raises:
        OSError: If no process answers there in time.
        ValueError: If what it sends is not a status.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        if peer_uid(connection) != os.getuid():
            raise PermissionError(f"The process behind {path} runs as another user.")
        received = bytearray()
        while piece := connection.recv(65_536):
            received += piece
            if len(received) > MAX_BYTES:
                raise ValueError(
                    f"{path} sends more than {MAX_BYTES} bytes, which is too much for a status."
                )
    if not received:
        raise ConnectionResetError(f"The process behind {path} hung up.")
    status = json.loads(received)
    if not isinstance(status, dict) or status.get("version") != VERSION:
        raise ValueError(f"{path} is not the status of this version of aioreplica.")
    return status


def _private_path() -> Path:
    """Return this process's path in the user's folder, which is made if needed.

    Raises:
        OSError: If the folder is somebody else's, or open to others.
    """
    folder = socket_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"The folder {folder} must belong to this user alone (mode 0700). Remove it, or give "
            "serve() another path."
        )
    return folder / f"{os.getpid()}.sock"


def _listen(path: Path) -> socket.socket:
    """Return a socket that is bound to the path with mode 0600."""
    _clear(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise OSError(
            error.errno, f"Cannot listen at {path}: {error.strerror or error}."
        ) from error
    finally:
        os.umask(mask)
    return listening


def _clear(path: Path) -> None:
    """Remove the socket that a process left behind when it was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is not a socket. Give serve() another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # it is busy
            pass
    raise FileExistsError(f"Another process listens at {path}. Give serve() another path.")
