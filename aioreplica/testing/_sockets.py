"""Sockets inside a simulated run: what a kernel would do for them, in memory.

`SimSocket` stands for `socket.socket`. Whatever it is asked it answers at once or with
`BlockingIOError`, as a socket that does not block; when it can go on is decided by the schedule
(`_ready.py`). What one end has sent is in flight until the schedule lets it arrive.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

from ._forbidden import call_site, refuse

if TYPE_CHECKING:
    from ._network import Connection, Network
    from ._participants import SimTask
    from ._ready import Ready

BUFFER: Final = 65_536
"""How many bytes a connection holds in each direction before the sender has to wait."""
FRESH, LISTENING, CONNECTING, CONNECTED, CLOSED = range(5)
UNNAMED: Final = ("0.0.0.0", 0)


def error_of(code: int) -> OSError:
    """Return the exception of an error number, as the kernel's calls raise it."""
    return OSError(code, os.strerror(code))


class SocketSettings(socket.socket):
    """Options and names of a simulated socket."""

    kernel_family: int
    kernel_type: socket.SocketKind
    kernel_proto: int
    timeout_s: float | None
    options: dict[tuple[int, int], Any]
    error: int
    state: int

    @property
    def family(self) -> Any:
        """The family of its addresses."""
        return socket.AddressFamily(self.kernel_family)

    @property
    def type(self) -> Any:
        """SOCK_STREAM or SOCK_DGRAM."""
        return self.kernel_type

    @property
    def proto(self) -> Any:
        """The protocol's number."""
        return self.kernel_proto

    @property
    def timeout(self) -> Any:
        """Seconds that a call may block; None for ever, 0 not at all."""
        return self.timeout_s

    def gettimeout(self) -> float | None:
        """Return how long a call may block."""
        return self.timeout_s

    def settimeout(self, value: float | None) -> None:
        """Set how long a call may block."""
        self.timeout_s = value

    def setblocking(self, flag: bool) -> None:
        """Let calls block for ever, or not at all."""
        self.timeout_s = None if flag else 0.0

    def getblocking(self) -> bool:
        """Return True if calls may block."""
        return self.timeout_s != 0

    def setsockopt(self, level: int, name: int, value: object, *rest: object) -> None:
        """Keep an option, which changes nothing here."""
        self._check_open()
        self.options[level, name] = value

    def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
        """Return an option: what was set, 0 otherwise; SO_ERROR says how connecting ended."""
        self._check_open()
        if level == socket.SOL_SOCKET and name == socket.SO_ERROR:
            error, self.error = self.error, 0
            return error
        if level == socket.SOL_SOCKET and name == socket.SO_TYPE:
            return int(self.kernel_type)
        return self.options.get((level, name), bytes(size) if size else 0)

    def get_inheritable(self) -> bool:
        """Return False: there are no other processes to inherit it."""
        return False

    def set_inheritable(self, inheritable: bool) -> None:
        """Change nothing: there are no other processes."""

    def _check_open(self) -> None:
        if self.state == CLOSED:
            raise error_of(errno.EBADF)


@final
class SimSocket(SocketSettings):
    """A socket that a run has made; it has a number, but no file descriptor.

    Args:
        family: AF_INET, AF_INET6 or AF_UNIX.
        type: SOCK_STREAM or SOCK_DGRAM.
        proto: Kept.
        fileno: Refused, as it would be of something real.
        network: Of the run.

    Attributes:
        link: The connection that this is one end of; None without one.
        peer: The other end; None without one.
        reads: Becomes an option of the schedule when there is something to read.
        writes: The same for writing, and for the end of connecting.
        made_at: Where the program made it.
        followers: Tasks that callbacks of it have woken or made, with that step.
    """

    network: Network
    link: Connection | None
    peer: SimSocket | None
    reads: Ready
    writes: Ready

    def __init__(
        self,
        family: int = -1,
        type: int = -1,  # noqa: A002 - the name in socket.socket
        proto: int = -1,
        fileno: int | None = None,
        *,
        network: Network | None = None,
    ) -> None:
        # `socket.socket.__init__` would open a file, so it is not called.
        self._io_refs = 0
        self._closed = False
        if fileno is not None:
            refuse("A socket made of a file descriptor")
        if network is not None:
            self.network = network
        network = self.network  # set by what stands for `socket.socket.__new__`, if not given
        self.kernel_family = socket.AF_INET if family == -1 else family
        flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        kind = socket.SOCK_STREAM if type == -1 else type & ~flags
        self.kernel_type = socket.SocketKind(kind)
        self.kernel_proto = 0 if proto == -1 else proto
        if self.kernel_family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            refuse(f"A socket of family {self.kernel_family!r}")
        if kind not in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            refuse(f"A socket of type {self.kernel_type!r}")
        self.timeout_s: float | None = socket.getdefaulttimeout()
        self.state = FRESH
        self.address: Any = "" if self.kernel_family == socket.AF_UNIX else UNNAMED
        self.peer_address: Any = None
        self.peer = None
        self.link = None
        self.error = 0
        self.in_flight = bytearray()
        self.arrived = bytearray()
        self.packets: deque[tuple[bytes, Any]] = deque()  # of datagrams
        self.backlog: deque[SimSocket] = deque()
        self.followers: list[tuple[SimTask, Any]] = []
        self.num_backlog = 0
        self.end_sent = self.end_arrived = False
        self.reset_sent = self.reset_arrived = False
        self.has_shut_down = False  # for writing
        self.options: dict[tuple[int, int], Any] = {}
        self.made_at = call_site()
        self.number = network.add(self)

    # ---- what the schedule needs to know ------------------------------------------------------

    @property
    def is_datagram(self) -> bool:
        """True if it is a socket of datagrams."""
        return self.kernel_type == socket.SOCK_DGRAM

    def can_read(self) -> bool:
        """Return True if reading could come to something, once the schedule lets it arrive."""
        if self.state == LISTENING:
            return bool(self.backlog)
        if self.arrived or self.packets or self.end_arrived or self.reset_arrived:
            return True
        is_silent = self.link is not None and self.link.is_silent
        return not is_silent and bool(self.in_flight or self.end_sent or self.reset_sent)

    def can_write(self) -> bool:
        """Return True if writing, or connecting, could come to something."""
        if self.state == CONNECTING:
            return self.network.has_room_for(self)
        if self.state != CONNECTED or self.reset_arrived:
            return True
        return self.peer is None or self.room() > 0

    def room(self) -> int:
        """Return how many bytes the other end can still be sent."""
        peer = self.peer
        if peer is None or peer.state == CLOSED:
            return BUFFER
        return max(0, BUFFER - len(peer.in_flight) - len(peer.arrived))

    def arrive(self) -> None:
        """Let arrive what is in flight; a fault may let only the first part of it."""
        if self.link is None or self.link.is_silent:
            return
        size = len(self.in_flight)
        if size > 1:
            size = self.link.cut(size)
        self.arrived += self.in_flight[:size]
        del self.in_flight[:size]
        if not self.in_flight:
            self.end_arrived, self.reset_arrived = self.end_sent, self.reset_sent

    # ---- calls of the kernel ------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<simulated socket {self.address} -> {self.peer_address}, made at {self.made_at}>"

    def fileno(self) -> int:
        """Return its number; -1 once closed."""
        return -1 if self.state == CLOSED else self.number

    def bind(self, address: object) -> None:
        """Take an address; OSError if another one has it."""
        self._check_open()
        self.network.bind(self, address)

    def listen(self, backlog: int = 128) -> None:
        """Accept connections from now on."""
        self._check_open()
        if self.address in ("", UNNAMED):
            self.bind(self.address)
        self.num_backlog = max(0, backlog) + 1  # as Linux counts
        self.state = LISTENING

    def accept(self) -> tuple[Any, Any]:
        """Take the first connection that was made to this address."""
        self._check_open()
        while True:
            if self.backlog:
                sock = self.backlog.popleft()
                self.network.took_connection(self)
                return sock, sock.peer_address
            self._wait(self.reads, "accept")

    def connect(self, address: object) -> None:
        """Connect to whoever listens there; that takes time.

        Raises:
            RealIOError: If no server of the program has ever listened at that host.
        """
        code = self.connect_ex(address)
        if code == errno.EINPROGRESS and self.timeout_s != 0:
            while self.state == CONNECTING:
                self._wait(self.writes, "connect")
            code = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise error_of(code)

    def connect_ex(self, address: object) -> int:
        """Begin to connect; return an error number instead of raising."""
        self._check_open()
        if self.state == CONNECTED and not self.is_datagram:
            return self.network.connect_again(self)
        return self.network.connect(self, address)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return what has arrived; b"" at the end."""
        self._check_open()
        while True:
            try:
                return self._receive(size, is_peek=bool(flags & socket.MSG_PEEK))
            except BlockingIOError:
                self._wait(self.reads, "recv")

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Read into a buffer; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        data = self.recv(size or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvfrom(self, size: int, flags: int = 0) -> tuple[bytes, object]:
        """Return a datagram and who has sent it."""
        self._check_open()
        if not self.is_datagram:
            return self.recv(size, flags), None
        while not self.packets:
            self._wait(self.reads, "recvfrom")
        data, sender = self.packets.popleft()
        self.network.update(self)
        return data[:size], sender

    def recvfrom_into(self, buffer: Any, size: int = 0, flags: int = 0) -> tuple[int, Any]:
        """Read a datagram into a buffer."""
        data, sender = self.recvfrom(size or len(buffer), flags)
        memoryview(buffer)[: len(data)] = data
        return len(data), sender

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as much as there is room for; return the number of bytes."""
        self._check_open()
        view = memoryview(data).cast("B")
        if self.is_datagram:
            if self.peer_address is None:
                raise error_of(errno.EDESTADDRREQ)
            return self.network.send_packet(self, bytes(view), self.peer_address)
        while True:
            try:
                return self._send(view)
            except BlockingIOError:
                self._wait(self.writes, "send")

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all of it."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, buffers: Any, *rest: object) -> int:
        """Send several buffers as one."""
        return self.send(b"".join(buffers))

    def sendto(self, data: Any, *rest: object) -> int:
        """Send a datagram."""
        self._check_open()
        if not self.is_datagram:
            return self.send(data)
        return self.network.send_packet(self, bytes(data), rest[-1])

    def shutdown(self, how: int) -> None:
        """Send no more, or take no more."""
        self._check_open()
        if self.state != CONNECTED:
            raise error_of(errno.ENOTCONN)
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self.has_shut_down = True
            self._send_end()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self.end_sent = self.end_arrived = True
            self.network.update(self)

    def getsockname(self) -> object:
        """Return its own address."""
        self._check_open()
        return self.address

    def getpeername(self) -> object:
        """Return the other end's address."""
        self._check_open()
        if self.peer_address is None or self.state == CONNECTING:
            raise error_of(errno.ENOTCONN)
        return self.peer_address

    def detach(self) -> int:
        """Refused: a number of a simulated socket is of no use elsewhere."""
        refuse("A socket detached")

    def dup(self) -> SimSocket:
        """Refused."""
        refuse("A socket duplicated")

    def _real_close(self, _ss: object = None) -> None:
        if self.state == CLOSED:
            return
        peer, state = self.peer, self.state
        is_unread = bool(self.arrived or (self.in_flight and not self.reset_sent))
        self.state = CLOSED
        self.network.remove(self)
        for waiting in self.backlog:  # nobody will take them
            waiting.reset()
        if state == CONNECTED and peer is not None:
            if is_unread and self.link is not None and not self.link.is_silent:
                peer.be_reset()
            else:
                self._send_end()
            self.network.update(peer)

    # ---- bytes ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Close it so that the other end sees a reset."""
        if self.peer is not None:
            self.peer.be_reset()
        self.arrived.clear()
        self.in_flight.clear()
        self.close()

    def be_reset(self) -> None:
        """Let a reset be on its way here; what was in flight is lost."""
        if self.state == CONNECTED:
            self.in_flight.clear()
            self.reset_sent = True
            self.network.update(self)

    def _send_end(self) -> None:
        if self.peer is not None:
            self.peer.end_sent = True
            self.network.update(self.peer)

    def _receive(self, size: int, is_peek: bool) -> bytes:
        if self.state != CONNECTED:
            raise error_of(errno.ENOTCONN)
        if not self.arrived and self.reads.is_overdue:
            self.arrive()
        if self.arrived:
            data = bytes(self.arrived[:size])
            if not is_peek:
                del self.arrived[:size]
                self.network.update(self)
                if self.peer is not None:
                    self.network.update(self.peer)
            return data
        if self.reset_arrived:
            self.reset_sent = self.reset_arrived = False
            self.end_sent = self.end_arrived = self.has_shut_down = True
            raise error_of(errno.ECONNRESET)
        if self.end_arrived:
            return b""
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def _send(self, view: memoryview) -> int:
        self.network.pools.catch_up()
        if self.state != CONNECTED:
            raise error_of(errno.ENOTCONN)
        if self.has_shut_down or self.reset_arrived:
            raise error_of(errno.EPIPE)
        peer, link = self.peer, self.link
        assert peer is not None
        assert link is not None
        if peer.state == CLOSED:
            if not link.is_silent:
                self.be_reset()
            return len(view)
        room = self.room()
        if not room:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data = view[:room]
        if not self.reset_sent and not link.is_reset_by_fault(self):
            peer.in_flight += data
            self.network.update(peer)
        return len(data)

    def _wait(self, ready: Ready, what: str) -> None:
        if self.timeout_s == 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not ready.wait(self.timeout_s, what):
            raise TimeoutError("timed out")


def name_of(address: object) -> str:
    """Return an address as it is written."""
    if not isinstance(address, tuple):
        return str(address) or "unnamed"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
