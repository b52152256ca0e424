"""The network of a simulated run: addresses, who listens where, and connections.

A socket becomes ready when the schedule lets it: what is in flight arrives, a connection is made,
there is room to write again. Each of these is a participant, as an op of a pool is one, and takes
place before `MAX_LATENCY_S` of virtual time have passed. The transports, streams and servers on
top are asyncio's own: they are told by a selector, as by a real one.
"""

from __future__ import annotations

import errno
import socket
from asyncio.selector_events import _SelectorTransport  # type: ignore[attr-defined]
from binascii import crc32
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from ._forbidden import refuse
from ._pools import let_time_pass
from ._ready import DELAYED, LoopSelector, Ready, SimSelector
from ._sockets import (
    CLOSED,
    CONNECTED,
    CONNECTING,
    FRESH,
    LISTENING,
    UNNAMED,
    SimSocket,
    error_of,
    name_of,
)

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._pools import PoolTable

FIRST_NUMBER: Final = 1_000_000
"""Numbers of simulated sockets: no file descriptor is as high."""
FIRST_PORT: Final = 40_000
ANYWHERE: Final = ("0.0.0.0", "::")
INSTEAD: Final = (
    "Start a server for it in the program: at 127.0.0.1, localhost, or at that very name, which "
    "is then a host of the simulated network."
)


@final
class Network:
    """The sockets of one run.

    Args:
        loop: The loop of the run.
        pools: Its pools, which know the op that runs, and the faults.

    Attributes:
        sockets: Those that are open, by number, in the order of their making.
        watchers: Which selector watches a socket.
        selector: That of the run's loop.
    """

    name = "the network"

    def __init__(self, loop: SimLoop, pools: PoolTable) -> None:
        self.loop = loop
        self.pools = pools
        self.sockets: dict[int, SimSocket] = {}
        self.watchers: dict[int, SimSelector] = {}
        self.selector = LoopSelector(self)
        self._num_made = 0
        self._num_ports = 0
        self._bound: dict[tuple[bool, str, int], SimSocket] = {}
        self._served = {"127.0.0.1", "::1", *ANYWHERE}
        self._names: dict[str, str] = {}
        self._dropped: list[str] = []
        self._untold: set[int] = set()  # sockets that began to connect, and did not ask again

    # ---- sockets ------------------------------------------------------------------------------

    def add(self, sock: SimSocket) -> int:
        """Give a new socket its number."""
        number = FIRST_NUMBER + self._num_made
        self._num_made += 1
        self.sockets[number] = sock
        sock.reads = Ready(sock, self, is_write=False)
        sock.writes = Ready(sock, self, is_write=True)
        return number

    def make(self, family: int, kind: int) -> SimSocket:
        """Make a socket."""
        return SimSocket(family, kind, network=self)

    def remove(self, sock: SimSocket) -> None:
        """Forget a socket that was closed."""
        self.sockets.pop(sock.number, None)
        self._bound = {key: each for key, each in self._bound.items() if each is not sock}
        watcher = self.watchers.get(sock.number)
        if watcher is not None:
            watcher.unregister(sock.number)
        for ready in (sock.reads, sock.writes):
            ready.update()
        if sock.num_backlog:
            self._update_connecting()

    def update(self, sock: SimSocket) -> None:
        """Look again at what a socket can do."""
        sock.reads.update()
        sock.writes.update()

    def pair(self, family: int, kind: int) -> tuple[SimSocket, SimSocket]:
        """Make two sockets that are connected."""
        one, other = self.make(family, kind), self.make(family, kind)
        self._join(one, other, "a pair")
        return one, other

    def let_time_pass(self, due: float) -> None:
        """Let virtual time pass until `due`, if nothing else is left to do."""
        loop = self.loop
        if not loop.enabled and due > loop.now:
            let_time_pass(loop, due)

    def run_callback(self, handle: Any) -> None:
        """Run a plain callback; the steps that it makes possible follow the socket it is about."""
        sock = self._socket_of(handle)
        if sock is None:
            handle._run()
            return
        self.loop.followers = sock.followers
        try:
            handle._run()
        finally:
            self.loop.followers = None

    def _socket_of(self, handle: Any) -> SimSocket | None:
        """Return the socket that a callback of a transport, or of the selector, is about."""
        for each in (getattr(handle._callback, "__self__", None), *handle._args[:1]):
            if isinstance(each, Ready):
                return each.sock
            if isinstance(each, _SelectorTransport):
                return self.sockets.get(each._sock_fd)
        return None

    # ---- addresses ----------------------------------------------------------------------------

    def resolve(self, host: Any, *, is_passive: bool = False) -> str:
        """Return the address of a host; each name has one of its own."""
        if isinstance(host, (bytes, bytearray)):
            host = host.decode("ascii")
        if not host:
            return ANYWHERE[0] if is_passive or host == "" else "127.0.0.1"
        if host == "localhost":
            return "127.0.0.1"
        try:
            return str(ip_address(host.partition("%")[0]))
        except ValueError:
            number = crc32(host.lower().encode())
            address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            self._names[address] = host
            return address

    def lookup(
        self,
        host: object,
        port: object,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the name in socket.getaddrinfo
        proto: int = 0,
        flags: int = 0,
    ) -> list[object]:
        """Answer as `socket.getaddrinfo` does."""
        address = self.resolve(host, is_passive=bool(flags & socket.AI_PASSIVE))
        is_six = ":" in address
        if family == socket.AF_INET6 and not is_six:
            if address not in ("127.0.0.1", ANYWHERE[0]):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            address, is_six = ("::1" if address == "127.0.0.1" else "::"), True
        if family == socket.AF_INET and is_six:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if isinstance(port, (str, bytes)):
            number = {"http": 80, "https": 443}.get(str(port))
            port = int(port) if number is None else number
        found = socket.AF_INET6 if is_six else socket.AF_INET
        sockaddr = (address, port or 0, 0, 0) if is_six else (address, port or 0)
        kinds = [
            (socket.SOCK_STREAM, socket.IPPROTO_TCP),
            (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
        ]
        return [
            (found, kind, number, "", sockaddr)
            for kind, number in kinds
            if type in (0, kind) and proto in (0, number)
        ]

    def bind(self, sock: SimSocket, address: Any) -> None:
        """Give a socket its address.

        Raises:
            OSError: EADDRINUSE if another socket of the program has it.
        """
        if sock.family == socket.AF_UNIX:
            key = (sock.is_datagram, str(_text(address)), 0)
            sock.address = _text(address)
        else:
            host = self.resolve(address[0], is_passive=True)
            port = address[1] or self._new_port()
            key = (sock.is_datagram, host, port)
            sock.address = _sockaddr(sock, host, port)
            self._served.add(host)
        if key in self._bound:
            raise error_of(errno.EADDRINUSE)
        self._bound[key] = sock

    def _new_port(self) -> int:
        self._num_ports += 1
        return FIRST_PORT + self._num_ports - 1

    def _find(self, sock: SimSocket, address: Any) -> SimSocket | None:
        if sock.family == socket.AF_UNIX:
            return self._bound.get((sock.is_datagram, str(address), 0))
        hosts = (address[0], *ANYWHERE)
        found = (self._bound.get((sock.is_datagram, host, address[1])) for host in hosts)
        return next((each for each in found if each is not None), None)

    # ---- connections --------------------------------------------------------------------------

    def connect(self, sock: SimSocket, address: Any) -> int:
        """Begin to connect a socket; return EINPROGRESS, or another number where that is all."""
        if sock.family == socket.AF_UNIX:
            address = _text(address)
            if self._find(sock, address) is None:
                return errno.ENOENT
        else:
            address = _sockaddr(sock, self.resolve(address[0]), address[1])
            if address[0] not in self._served and self._find(sock, address) is None:
                refuse(f"A connection to {self._host_of(address)}", INSTEAD)
        sock.peer_address = address
        if sock.is_datagram:
            sock.state = CONNECTED
            self._name_client(sock)
            return 0
        sock.state = CONNECTING
        if sock.family == socket.AF_UNIX and self.has_room_for(sock):  # there is no way to go
            self.finish_connect(sock)
            error, sock.error = sock.error, 0
            return error
        self.update(sock)
        self._untold.add(sock.number)
        return errno.EINPROGRESS

    def connect_again(self, sock: SimSocket) -> int:
        """Answer for a socket that is connected: 0 once, if who asks was told to wait before."""
        if sock.timeout_s == 0 and sock.number in self._untold:
            self._untold.remove(sock.number)
            return 0
        return errno.EISCONN

    def finish_connect(self, sock: SimSocket) -> None:
        """Find who listens, and make the other end of the connection."""
        address = sock.peer_address
        listener = self._find(sock, address)
        if listener is None or listener.state != LISTENING:
            sock.state = FRESH
            sock.error = errno.ECONNREFUSED
            return
        self._name_client(sock)
        other = self.make(sock.kernel_family, sock.kernel_type)
        other.made_at = listener.made_at
        other.address, other.peer_address = address, sock.address
        other.timeout_s = None
        self._join(sock, other, self._host_of(address))
        listener.backlog.append(other)
        self.update(listener)
        if len(listener.backlog) == listener.num_backlog:
            self._update_connecting()

    def has_room_for(self, sock: SimSocket) -> bool:
        """Return False if a socket has to wait until who listens has accepted another."""
        listener = self._find(sock, sock.peer_address)
        if listener is None or listener.state != LISTENING:
            return True  # to be refused
        return len(listener.backlog) < listener.num_backlog

    def took_connection(self, listener: SimSocket) -> None:
        """Let others connect, after a connection was accepted."""
        self.update(listener)
        if len(listener.backlog) == listener.num_backlog - 1:
            self._update_connecting()

    def _update_connecting(self) -> None:
        for sock in tuple(self.sockets.values()):
            if sock.state == CONNECTING:
                sock.writes.update()

    def _name_client(self, sock: SimSocket) -> None:
        if sock.address == UNNAMED:
            host = "::1" if sock.kernel_family == socket.AF_INET6 else "127.0.0.1"
            sock.address = _sockaddr(sock, host, self._new_port())

    def _join(self, one: SimSocket, other: SimSocket, server: str) -> None:
        address = one.peer_address
        names = [server, name_of(address)] if address is not None else [server]
        if isinstance(address, tuple):
            names.append(f":{address[1]}")
        faults: Any = self.pools.faults
        link = Connection(name_of(one.address), server, tuple(dict.fromkeys(names)), faults)
        for end, peer in ((one, other), (other, one)):
            end.link, end.peer, end.state = link, peer, CONNECTED
            if end.peer_address is None:
                end.peer_address = peer.address

    def _host_of(self, address: object) -> str:
        if not isinstance(address, tuple):
            return str(address)
        return name_of((self._names.get(address[0], address[0]), address[1]))

    def send_packet(self, sock: SimSocket, data: bytes, address: Any) -> int:
        """Send a datagram; without anybody there it is lost."""
        if sock.family != socket.AF_UNIX:
            self._name_client(sock)
            self._bound.setdefault((True, sock.address[0], sock.address[1]), sock)
            address = (self.resolve(address[0]), address[1])
        target = self._find(sock, address)
        if target is not None:
            target.packets.append((data, sock.address))
            self.update(target)
        return len(data)

    # ---- what is left at the end --------------------------------------------------------------

    def open_sockets(self, is_closing: Callable[[int], bool]) -> Iterator[str]:
        """Name what the program has left open; not what it is about to close."""
        yield from self._dropped
        for sock in self.sockets.values():
            if is_closing(sock.number):
                continue
            if sock.state == LISTENING:
                yield f"server at {name_of(sock.address)} (made at {sock.made_at})"
            elif sock.link is not None:
                yield f"{sock.link.describe()} (made at {sock.made_at})"
            elif sock.is_datagram or sock.state == FRESH:
                yield f"socket {name_of(sock.address)} (made at {sock.made_at})"

    def note_dropped(self, transport_socket: object) -> None:
        """Note a connection that nobody has closed and nobody can close any more."""
        sock = getattr(transport_socket, "_sock", None)
        if isinstance(sock, SimSocket) and sock.link is not None:
            self._dropped.append(f"{sock.link.describe()} (made at {sock.made_at})")

    @property
    def is_delayed(self) -> bool:
        """True if a fault keeps something on its way."""
        return any(sock.reads.state == DELAYED for sock in self.sockets.values())

    def silent_links(self) -> Iterator[str]:
        """Name the connections that a fault has made half-open."""
        links = {sock.link: None for sock in self.sockets.values() if sock.link is not None}
        return (link.describe() for link in links if link.is_silent)

    def close(self) -> None:
        """Let go of everything: these close cycles, which only the collector could free."""
        for sock in self.sockets.values():
            sock._closed, sock.state = True, CLOSED
            sock.peer = sock.link = None
            sock.backlog.clear()
            sock.followers.clear()
            sock.reads = sock.writes = None  # type: ignore[assignment]  # the run is over
        self.sockets, self.watchers, self._bound = {}, {}, {}
        self.selector.keys = {}


def _text(address: Any) -> object:
    return address.decode() if isinstance(address, bytes) else address


def _sockaddr(sock: SimSocket, host: str, port: int) -> tuple[object, ...]:
    if sock.kernel_family == socket.AF_INET6:
        return (host if ":" in host else f"::ffff:{host}", port, 0, 0)
    return (host, port)


# ---- connections and their faults ---------------------------------------------------------------


class LinkFaults(Protocol):
    """The decisions of a schedule about what goes wrong in connections."""

    def is_reset(self, names: Sequence[str]) -> bool:
        """Decide, when something is sent, whether the connection is reset."""

    def is_silenced(self, names: Sequence[str]) -> bool:
        """Decide whether nothing arrives any more from now on."""

    def link_latency_s(self, names: Sequence[str]) -> float:
        """Return how much longer everything takes."""

    def cut(self, names: Sequence[str], size: int) -> int:
        """Decide how many of the bytes in flight arrive together."""


@final
class Connection:
    """A connection: what both of its ends have in common.

    Args:
        client: Address of the end that has connected.
        server: Address of the other end.
        names: What faults may call it.
        faults: The schedule's, or None.

    Attributes:
        is_silent: Whether nothing arrives any more, in either direction, and nobody is told.
    """

    __slots__ = ("_faults", "client", "is_silent", "names", "server")

    def __init__(
        self, client: str, server: str, names: Sequence[str], faults: LinkFaults | None
    ) -> None:
        self.client = client
        self.server = server
        self.names = names
        self.is_silent = False
        self._faults = faults

    def is_reset_by_fault(self, sender: Any) -> bool:
        """Let faults strike when an end sends something; True if that reset the connection."""
        faults = self._faults
        if faults is None or self.is_silent:
            return False
        if faults.is_reset(self.names):
            assert sender.peer is not None
            for end in (sender, sender.peer):
                end.be_reset()
            return True
        self.is_silent = faults.is_silenced(self.names)
        return False

    def cut(self, size: int) -> int:
        """Return how many of the bytes in flight arrive now."""
        return size if self._faults is None else self._faults.cut(self.names, size)

    @property
    def latency_s(self) -> float:
        """Additional latency of the connection, in seconds."""
        return 0.0 if self._faults is None else self._faults.link_latency_s(self.names)

    def describe(self) -> str:
        """Name both ends."""
        return f"{self.client} -> {self.server}"
