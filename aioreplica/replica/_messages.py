"""Messages between replicas of one run: what was sent, what is waited for, what is never received.

Pure decision code, beside `_rendezvous.py`: sends and receives go in, and who may go on comes out.
A *channel* leads from one replica to another, once for each tag; it keeps values in the order in
which they were sent, and has numbers of its own. A *transfer* is one send or one receive.

Invariants:
    * A channel that has values has no receive that waits, and the other way round.
    * Sends wait only while the channel is full, and the first of them is let go first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Iterator
from types import CodeType, FrameType
from typing import Any, final

from ..telemetry import MessageEntry, source_line
from ._meeting import SyncGroup

SEND_BOUND = 2
"""Number of values that a channel keeps before a send waits, unless the run says otherwise."""


@final
class Channel:
    """Way of values from one replica to another, first in, first out.

    Attributes:
        source: Who sends, among the replicas of this process.
        destination: Who receives.
        tag: Tells several channels between the two apart.
        num_sent: How many values were taken from senders.
        num_received: How many were handed to the receiver.
        values: The sends whose values were not received so far.
        sends: Those that wait for room.
        receives: The receives that wait for a value.
    """

    __slots__ = (
        "destination", "num_received", "num_sent", "receives", "sends", "source", "tag", "values",
    )  # fmt: skip

    def __init__(self, source: int, destination: int, tag: Hashable) -> None:
        self.source = source
        self.destination = destination
        self.tag = tag
        self.num_sent = 0
        self.num_received = 0
        self.values: deque[Transfer] = deque()
        self.sends: deque[Transfer] = deque()
        self.receives: deque[Transfer] = deque()

    def __repr__(self) -> str:
        tag = "" if self.tag is None else f" (tag {self.tag!r})"
        waiting = f"{len(self.sends)} sends and {len(self.receives)} receives wait"
        return (
            f"<Channel {self.source} to {self.destination}{tag} | {len(self.values)} values, "
            f"{waiting}>"
        )


@final
class Transfer:
    """One send or one receive, and the line of its call.

    Observers know it as a call and as a wait; for the rendezvous it is something that a replica
    can wait for, like a generation of calls, with one replica that is missing: the other one.

    Args:
        group: All replicas of the run.
        source: Who sends.
        destination: Who receives.
        tag: Of the channel.
        is_send: Whether it is a send.
        value: What is sent; of a receive, what has come.
        frame: Where it was called.

    Attributes:
        channel: Its channel, as soon as it has arrived.
        sequence: Its number in the channel, from 1; 0 as long as it has none.
        is_over: Whether the value was taken from the sender, or handed to the receiver.
        matched: The send that a receive got its value of.
        waiter: The future that its task waits for; None where none does.
        timer: What ends the run if it waits for too long, or None.
        arrived_s: When it arrived, on the clock of records.
    """

    __slots__ = (
        "arrived_s", "channel", "code", "destination", "group", "instruction", "is_over",
        "is_send", "matched", "sequence", "source", "tag", "timer", "value", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        group: SyncGroup,
        source: int,
        destination: int,
        tag: Hashable,
        value: object,
        frame: FrameType,
        *,
        is_send: bool,
    ) -> None:
        self.group = group
        self.source = source
        self.destination = destination
        self.tag = tag
        self.is_send = is_send
        self.value = value
        self.code: CodeType = frame.f_code
        self.instruction = frame.f_lasti
        self.channel: Channel | None = None
        self.sequence = 0
        self.is_over = False
        self.matched: Transfer | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.arrived_s = 0.0

    @property
    def name(self) -> str:
        """The name of the method that was called."""
        return "send" if self.is_send else "receive"

    @property
    def replica_id(self) -> int:
        """Index of the caller among the replicas of the run."""
        return self.source if self.is_send else self.destination

    @property
    def peer(self) -> int:
        """Index of the other replica."""
        return self.destination if self.is_send else self.source

    @property
    def step(self) -> int:
        """Number of the run in its strategy."""
        return self.group.step

    @property
    def run(self) -> object:
        """Identifies the numbering: the channel, as soon as it is known."""
        return self.channel or self

    @property
    def members(self) -> tuple[int, int]:
        """The two replicas, first the sender."""
        return self.source, self.destination

    @property
    def result(self) -> Any:  # Any: what users send
        """The value that a receive has got; None for a send."""
        return None if self.is_send else self.value

    @property
    def missing(self) -> int:
        """Number of replicas that have to come: the other one, until it is over."""
        return 0 if self.is_over else 1

    @property
    def is_merged(self) -> bool:
        """True if it is over, in the words of a generation."""
        return self.is_over

    @property
    def file(self) -> str:
        """Source file of the call."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Source line of the call."""
        return source_line(self.code, self.instruction)

    @property
    def site(self) -> str:
        """File and line of the call, with a colon between them."""
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        """Name it with its number, such as "receive #3 from replica 0"."""
        number = f" #{self.sequence}" if self.sequence else ""
        tag = "" if self.tag is None else f" (tag {self.tag!r})"
        way = "to" if self.is_send else "from"
        return f"{self.name}{number} {way} replica {self.group.global_id(self.peer)}{tag}"

    def call_of(self, _replica_id: int) -> Transfer:
        """Return itself: one replica alone waits in it."""
        return self

    def present_members(self) -> tuple[int, ...]:
        """Return the caller."""
        return (self.replica_id,)

    def missing_members(self) -> tuple[int, ...]:
        """Return the other replica, until it is over."""
        return () if self.is_over else (self.peer,)

    def awaited(self) -> None:
        """Return None: only a replica is waited for."""

    def entry(self, time_s: float) -> MessageEntry:
        """Return the record of a receive whose value came at that time: nothing of the value."""
        ends = (self.matched or self), self
        visits = [(each.code, each.instruction, each.arrived_s) for each in ends]
        tag = None if self.tag is None else repr(self.tag)
        return (time_s, self.step, self.sequence, tag, self.members, visits)

    def give_up(self) -> None:
        """Cancel its task, on the event loop."""
        if self.timer is not None:
            self.timer.cancel()
        if self.waiter is not None:
            self.waiter.cancel()

    def wake(self) -> None:
        """Let its task go on, on the event loop; threads are woken by their gate."""
        if self.timer is not None:
            self.timer.cancel()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def __repr__(self) -> str:
        return f"<Transfer {self.describe()} | {'over' if self.is_over else 'under way'}>"


@final
class Messages:
    """Decides which send meets which receive, and which of them waits.

    Args:
        bound: How many values a channel keeps before a send waits.

    Attributes:
        num_moved: How many values were received, a sign of progress.
    """

    __slots__ = ("_bound", "_channels", "num_moved")

    def __init__(self, bound: int = SEND_BOUND) -> None:
        self._bound = bound
        self._channels: dict[tuple[int, int, Hashable], Channel] = {}
        self.num_moved = 0

    def arrive(self, transfer: Transfer) -> Transfer | None:
        """Record a send or a receive; return the one that it lets go on, if there is one.

        The transfer itself waits if it is not over afterwards.
        """
        channel = self._join(transfer)
        return (
            self._send(channel, transfer) if transfer.is_send else self._receive(channel, transfer)
        )

    def wait(self, transfer: Transfer) -> None:
        """Record one whose other replica will never come: it only waits."""
        channel = self._join(transfer)
        (channel.sends if transfer.is_send else channel.receives).append(transfer)

    def withdraw(self, transfer: Transfer) -> Transfer | None:
        """Take back a transfer whose task was cancelled; return the one that may go on now.

        A send that waited was not made. A value that a receive has got and not returned is the
        first in its channel again.
        """
        channel = transfer.channel
        if channel is None:
            return None
        if not transfer.is_over:
            waiting = channel.sends if transfer.is_send else channel.receives
            waiting.remove(transfer)
            return None
        if transfer.matched is None:
            return None
        channel.values.appendleft(transfer.matched)
        channel.num_received -= 1
        self.num_moved -= 1
        if not channel.receives:
            return None
        following = channel.receives.popleft()
        self._hand(channel, following)
        return following

    # ---- questions -----------------------------------------------------------------------

    def waiting(self) -> Iterator[Transfer]:
        """Yield the transfers that wait."""
        for channel in self._channels.values():
            yield from channel.sends
            yield from channel.receives

    def waiting_of(self, replica_id: int) -> list[Transfer]:
        """Return the transfers that tasks of a replica wait in."""
        return [each for each in self.waiting() if each.replica_id == replica_id]

    def waiting_for(self, source: int) -> Transfer | None:
        """Return a receive that waits for a value of a replica."""
        found = (each for each in self.waiting() if each.source == source and not each.is_send)
        return min(found, key=_order, default=None)

    def not_received(self, destination: int) -> Transfer | None:
        """Return the first send whose value a replica has not received."""
        found = (
            send
            for channel in self._channels.values()
            if channel.destination == destination
            for send in (*channel.values, *channel.sends)
        )
        return min(found, key=_order, default=None)

    def not_received_of(self, source: int) -> list[Transfer]:
        """Return the sends of a replica whose values lie in their channels."""
        channels = [each for each in self._channels.values() if each.source == source]
        return [send for channel in channels for send in channel.values]

    def has_value(self, transfer: Transfer) -> bool:
        """Tell whether a receive would get a value at once."""
        channel = self._channels.get((transfer.source, transfer.destination, transfer.tag))
        return channel is not None and bool(channel.values)

    def forget(self) -> None:
        """Let go of all values."""
        self._channels.clear()

    # ---- moves ---------------------------------------------------------------------------

    def _join(self, transfer: Transfer) -> Channel:
        key = transfer.source, transfer.destination, transfer.tag
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(*key)
        transfer.channel = channel
        if transfer.is_send:
            transfer.sequence = channel.num_sent + len(channel.sends) + 1
        else:
            transfer.sequence = channel.num_received + len(channel.receives) + 1
        return channel

    def _send(self, channel: Channel, send: Transfer) -> Transfer | None:
        if channel.receives:
            self._take(channel, send)
            receive = channel.receives.popleft()
            self._hand(channel, receive)
            return receive
        if len(channel.values) < self._bound:
            self._take(channel, send)
        else:
            channel.sends.append(send)
        return None

    def _receive(self, channel: Channel, receive: Transfer) -> Transfer | None:
        if not channel.values:
            channel.receives.append(receive)
            return None
        self._hand(channel, receive)
        if not channel.sends or len(channel.values) >= self._bound:
            return None
        send = channel.sends.popleft()
        self._take(channel, send)
        return send

    def _take(self, channel: Channel, send: Transfer) -> None:
        """Take a value from its sender, who may go on."""
        channel.values.append(send)
        channel.num_sent += 1
        send.is_over = True

    def _hand(self, channel: Channel, receive: Transfer) -> None:
        """Hand the first value to a receive."""
        receive.matched = send = channel.values.popleft()
        receive.value = send.value
        receive.is_over = True
        channel.num_received += 1
        self.num_moved += 1

    def __repr__(self) -> str:
        values = sum(len(channel.values) for channel in self._channels.values())
        return (
            f"<Messages | {len(self._channels)} channels, {values} values, {self.num_moved} moved>"
        )


def _order(transfer: Transfer) -> tuple[int, int, int]:
    """Return what orders transfers, whatever the order of events was."""
    return transfer.source, transfer.destination, transfer.sequence
