"""Connections of the simulated network, and what a schedule may decide to go wrong in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final


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
