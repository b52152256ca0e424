"""Connections to schedulers of Dask: to which one, how, and with what warning."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from typing import Any

from ..errors import ContextError
from ._dask_processes import load_dask


async def open_client(address: str, security: object, *, is_own: bool, timeout_s: float) -> Any:
    """Connect to a scheduler; workers of a cluster of the engine's own are reached directly.

    Raises:
        ConnectionError: If it does not answer.

    Cancellation:
        Closes what was opened.
    """
    client = load_dask().Client(
        address,
        asynchronous=True,
        direct_to_workers=True if is_own else None,
        set_as_default=False,
        security=security,
        timeout=timeout_s,
        name="aioreplica",
    )
    try:
        return await client
    except BaseException as error:
        await close_client(client)
        if isinstance(error, (OSError, TimeoutError)):
            raise ConnectionError(
                f"The Dask scheduler at {address} does not answer: {error}"
            ) from error
        raise


async def close_client(client: Any) -> None:
    """Disconnect, whether the scheduler is there or not."""
    with suppress(TimeoutError, OSError):
        await client.close()


def address_and_security(client: Any, security: object = None) -> tuple[str, object]:
    """Return how to connect as a client does, which has to live on the running event loop.

    Args:
        client: The client, or the address of a scheduler.
        security: For an address.

    Raises:
        ContextError: If it lives elsewhere, or is closed.
    """
    if isinstance(client, str):
        return client, security
    if not client.asynchronous or client.loop.asyncio_loop is not asyncio.get_running_loop():
        raise ContextError(
            f"{client!r} does not live on the running event loop. Make it there: "
            "`await distributed.Client(address, asynchronous=True)`."
        )
    if client.scheduler is None:
        raise ContextError(
            f"{client!r} is closed. Give one that is connected, or the address of its scheduler."
        )
    return client.scheduler.address, client.security


def warn_if_open(address: str, security: Any) -> None:
    """Warn if closures, which are pickles, can come from anybody who reaches the scheduler."""
    scheme, _, rest = address.rpartition("://")
    host = rest.rsplit(":", 1)[0].strip("[]")
    if scheme in {"tls", "inproc"} or (security is not None and security.require_encryption):
        return
    is_here = host in {"localhost", "::1"} or host.startswith("127.")
    who = "every user of this machine" if is_here else "whoever can connect to it"
    warnings.warn(
        f"The Dask scheduler at {address} is reached without TLS: {who} can run code in its "
        "workers and in this program, and read the variables. Use a 'tls://' address and "
        "security=distributed.Security(...), in a Client too.",
        RuntimeWarning,
        stacklevel=2,
    )
