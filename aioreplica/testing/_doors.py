"""The functions of `socket` while schedules run."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from ._forbidden import refuse
from ._sockets import SimSocket

if TYPE_CHECKING:
    from ._simulation import Simulation


def socket_patches(simulation: Simulation) -> list[tuple[Any, str, Any]]:
    """Return what to replace in `socket`; the class makes simulated sockets inside a run."""
    here, cls = simulation.is_here, socket.socket
    make: Any = cls.__new__
    real = {
        name: getattr(socket, name)
        for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "socketpair")
    }

    def new(kind: Any, *args: object, **kwargs: object) -> object:
        if not here():
            return make(kind)
        if kind is not cls and kind is not SimSocket:
            refuse(f"A socket of class {kind.__qualname__}", "Make a socket.socket.")
        made = make(SimSocket)
        made.network = simulation.open_network()
        return made

    def getaddrinfo(*args: Any, **kwargs: Any) -> object:
        if not here():
            return real["getaddrinfo"](*args, **kwargs)
        return simulation.open_network().lookup(*args, **kwargs)

    def gethostbyname(name: str) -> str:
        return simulation.open_network().resolve(name) if here() else real["gethostbyname"](name)

    def gethostbyname_ex(name: str) -> object:
        if not here():
            return real["gethostbyname_ex"](name)
        return name, [], [simulation.open_network().resolve(name)]

    def socketpair(family: Any = None, type: int = socket.SOCK_STREAM, proto: int = 0) -> object:  # noqa: A002
        if not here():
            return real["socketpair"](family, type, proto)
        return simulation.open_network().pair(family or socket.AF_UNIX, type)

    def forget(writer: Any) -> None:
        """Note a writer that the program dropped without closing it; asyncio only warns."""
        transport = writer._transport
        if not here():
            if real_del is not None:
                real_del(writer)
        elif not transport.is_closing():
            simulation.open_network().note_dropped(transport.get_extra_info("socket"))
            transport.abort()

    real_del: Any = getattr(asyncio.StreamWriter, "__del__", None)
    return [
        (asyncio.StreamWriter, "__del__", forget),
        (cls, "__new__", staticmethod(new)),
        (socket, "getaddrinfo", getaddrinfo),
        (socket, "gethostbyname", gethostbyname),
        (socket, "gethostbyname_ex", gethostbyname_ex),
        (socket, "socketpair", socketpair),
    ]
