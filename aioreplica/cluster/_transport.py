"""Transports, which move bytes and notes for an engine; and the link: what is known of the others.

A thread makes the calls of an engine and polls what it has begun, see `Poller`; where an engine
allows it, the event loop's thread begins those that a task waits for. Between polls the thread
looks for what the others have to say, and at the clock.

Workers tell each other four things in notes, outside of the collectives: that they wait in a call,
again and again (so that a stall names who does not, or has stopped in it), that they have left,
that a run of a strategy has failed (an alarm), and why the group has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, final

import numpy as np

from ..devices import CompletionQueue, Op
from ..tree import Array
from ._communicator import LOST, STALLED, Failure
from ._frame import digest_of
from ._poller import Entry, Poller
from ._rows import closed_text, crossed_failure, group_in_words, stall_text, workers_in_words

if TYPE_CHECKING:
    from ._engine import EngineCommunicator, Visit

LOGGER = logging.getLogger("aioreplica.cluster")

WAITING, PASSED, LEFT, ALARM = "waiting", "passed", "left", "alarm"
NOTE_BYTES = 1024
NAME_CHARACTERS = 256  # of a group, in notes
WAITING_S = 0.5  # in a call, before a worker tells the others that it waits there, and again
WARN_S = 10.0  # in a call, before a worker logs for whom it waits
QUIET_S = 3.0  # without a word from a worker that has said that it waits
PATIENCE_S = 150e-6  # of the event loop, which takes longer to wake the lane and be woken by it

Poll: TypeAlias = Callable[[], bool]
"""Tells whether an exchange is over; does not wait."""


@final
class Group(NamedTuple):
    """Workers that exchange with each other: all of them, or those of a split.

    Attributes:
        rank: The number of this worker among them.
        ranks: The members, by rank, as they are numbered in the outermost group.
        name: Tells it from other groups; empty for the outermost one.
    """

    rank: int
    ranks: tuple[int, ...]
    name: str = ""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def others(self) -> list[int]:
        """The ranks of the other members."""
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]


@final
@dataclass(frozen=True, slots=True)
class Note:
    """Message of one worker to all others.

    Attributes:
        kind: WAITING, PASSED, LEFT or ALARM, or the kind of a failure.
        rank: Who says so, in the outermost group.
        group: The name of the group it is about.
        number: Of the call it waits in or has ended, or of its calls before it left.
        text: Of the failure; names the call it waits in.
        ranks: Of the failure; of an alarm, who raises it, in the group it is about.
        timeout: Of the failure.
    """

    kind: str
    rank: int
    group: str = ""
    number: int = 0
    text: str = ""
    ranks: tuple[int, ...] = ()
    timeout: float | None = None

    def encode(self) -> bytes:
        """Return at most `NOTE_BYTES` bytes."""
        text, ranks = self.text, self.ranks
        while True:
            fields = [self.kind, self.rank, self.group, self.number, text, ranks, self.timeout]
            data = json.dumps(fields).encode()
            if len(data) <= NOTE_BYTES:
                return data
            text, ranks = text[: len(text) * 3 // 4], ranks[: max(8, len(ranks) // 2)]

    @staticmethod
    def decode(data: bytes) -> Note:
        """Return what `encode` was called on."""
        kind, rank, group, number, text, ranks, timeout = json.loads(data)
        return Note(kind, rank, group, number, text, tuple(ranks), timeout)


class Transport(ABC):
    """Moves bytes and notes between workers; called on one thread at a time, mostly the lane's.

    Exchanges start and return at once. Their arrays are flat, contiguous and of bytes, and are held
    by the poll function until it has told that the exchange is over. What a worker would send to
    itself may be left out.

    Attributes:
        rank: The number of this worker among all.
        size: How many there are.
        added: The names of dtypes that `add` adds up, as NumPy does, and fast.
    """

    rank: int
    size: int
    added: Sequence[str] = ()

    @abstractmethod
    def all_gather(self, group: Group, send: Array, recv: Array) -> Poll:
        """Collect the bytes of all members, by rank; `send` may be its own place in `recv`."""

    @abstractmethod
    def all_to_all(self, group: Group, sends: list[Array], recv: Array, counts: list[int]) -> Poll:
        """Give each member its part, by rank; collect the others': so many bytes of each."""

    @abstractmethod
    def broadcast(self, group: Group, buffer: Array, root: int) -> Poll:
        """Fill the buffer with that of `root`."""

    @abstractmethod
    def barrier(self, group: Group) -> Poll:
        """Wait for all members."""

    @abstractmethod
    def add(self, group: Group, array: Array) -> Poll:
        """Add the array of the other one of two members; it is flat, of a dtype in `added`."""

    @abstractmethod
    def tell(self, note: Note) -> None:
        """Send a note to all other workers, as far as they can be reached; does not wait."""

    @abstractmethod
    def notes(self, *, at_once: bool = False, waits: bool = True) -> list[Note]:
        """Return the notes that have come since the last call.

        Args:
            at_once: Ask even if that takes long and was done a moment ago.
            waits: Wait for the answer, within limits; if not, it is found by a later call.
        """

    @abstractmethod
    def explain(self, error: Exception, what: str) -> Failure | None:
        """Say what an error of the engine means; None if it is not the engine's."""

    @abstractmethod
    def unreachable(self) -> tuple[int, ...]:
        """Return the workers without whom no note comes any more; usually none."""

    @abstractmethod
    def forget(self, group: Group) -> None:
        """Give back what a split has used, which all of its members have left."""

    @abstractmethod
    def end(self) -> None:
        """Make the group useless for everybody, so that those who wait in the engine return."""

    @abstractmethod
    def close(self) -> Poll:
        """Begin to give the engine back, after a group that has worked to its end."""


def joined(parts: list[Any]) -> Array:
    """Return arrays of bytes as one: their memory where they lie one behind the other, else a copy.

    They have to be kept as long as what is returned.
    """
    starts = [part.ctypes.data for part in parts]
    ends = [start + part.size for start, part in zip(starts, parts, strict=True)]
    num_bytes = ends[-1] - starts[0]
    if ends[:-1] != starts[1:] or not num_bytes:
        return np.concatenate(parts)
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(starts[0]), np.uint8)


@final
class GroupEndedError(Exception):
    """Carries a failure from the lane to the event loop."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@final
class Link:
    """The engine and what is known of the others: what a group shares with its splits.

    Args:
        transport: Moves the bytes.
        poller: Performs the calls, with those of other groups.
        held: Takes the memory that an engine may use after its group has ended.

    Attributes:
        transport: The same.
        poller: The same.
        ended: Why the group has ended; set once, by the loop's thread or the lane's.
        members: The communicators that use it.
    """

    def __init__(
        self, transport: Transport, poller: Poller, held: list[object] | None = None
    ) -> None:
        self.transport = transport
        self.poller = poller
        self.ended: Failure | None = None
        self.members: list[EngineCommunicator] = []
        self._completions: CompletionQueue | None = None
        self._is_told = False  # of the end, to the others
        self._left: dict[tuple[str, int], int] = {}
        self._leaving: dict[str, Group] = {}  # splits that this worker has left, not all others
        self._words: dict[int, tuple[float, Note]] = {}  # the newest of each worker, and since when
        self._words_of: dict[tuple[str, int], Note] = {}  # likewise, in each group
        self._held: list[object] = [] if held is None else held
        self._patience_s = PATIENCE_S

    def completions(self) -> CompletionQueue:
        """Return the queue of the running loop, which the next call will want too."""
        known = self._completions
        if known is None or known.loop is not asyncio.get_running_loop():
            known = self._completions = CompletionQueue.of_running_loop()
        return known

    def put(self, fn: Callable[..., object], *args: object) -> Op[object]:
        """Make a call of the engine, whatever waits; on the event loop."""
        op: Op[object] = Op(self.completions(), fn, args, {})
        self.poller.put(op)
        return op

    def visit(self, visit: Visit, queue: deque[Entry]) -> Callable[[], None] | None:
        """Perform a visit behind those of its queue; on the event loop.

        One that a task waits for is attempted here, and at once, as the loop may be busy next: to
        wake the lane and to be woken by it takes longer than an exchange with workers that have
        come. The lane gets what is not over then; of what is, what brings the result is returned.
        """
        poller, is_over = self.poller, False
        lock = poller.lock
        is_attempted = visit.call.is_awaited and not queue and not poller.has_jobs
        if lock is None or not is_attempted or not lock.acquire(blocking=False):
            poller.add(queue, visit)  # the lane may be in the middle of another group's call
            return None
        try:
            is_over = visit.attempt(self._patience_s)
        finally:
            lock.release()
            if not is_over:
                poller.add(queue, visit)
        # Who is early is so again: it looks once, until the others are the early ones.
        self._patience_s = PATIENCE_S if visit.has_met else 0.0
        return visit.resolve if is_over else None

    def alarm(self, group: Group, number: int, text: str) -> Op[object]:
        """Raise an alarm in a group."""
        note = Note(ALARM, self.transport.rank, group.name, number, text, (group.rank,))
        return self.put(self.transport.tell, note)

    def _hand_on(self, alarm: Note) -> None:
        for member in tuple(self.members):
            if member.group.name == alarm.group and member._on_alarm is not None:
                member._on_alarm(alarm.ranks[0], alarm.number, alarm.text)

    def hold(self, what: object) -> None:
        """Keep the memory of an exchange that the engine may not be done with."""
        if what is not None:
            self._held.append(what)

    # ---- on the lane's thread ------------------------------------------------------------

    def look(self, visit: Visit) -> None:
        """Look for notes and at the clock.

        Raises:
            GroupEndedError: If the group has ended.
        """
        self.look_for_gone(visit)
        now = monotonic()
        if now >= visit.leave_by:  # it waits in a call that was abandoned, for someone who is late
            own = self.transport.rank
            self.end(Failure(LOST, f"Worker {own} closed the communicator.", (own,)))
        if visit.timeout is not None and now > visit.tell_at + QUIET_S:
            # This process was stopped itself: let the others speak.
            visit.start = max(visit.start, now + 2 * visit.beat_s - visit.timeout)
        if now >= visit.tell_at or self._is_waited_for(visit):
            visit.tell_at = now + visit.beat_s
            visit.is_told = True
            self._say(visit, WAITING, now)
        if now >= visit.warn_at:
            visit.warn_at = math.inf
            self._warn(visit, now)
        # Who came in time has said so a beat later.
        if visit.timeout is not None and now >= visit.start + visit.timeout + visit.beat_s:
            self.look_for_gone(visit, at_once=True)
            self.end(self._stalled(visit, visit.timeout, monotonic()))

    def _is_waited_for(self, visit: Visit) -> bool:
        """Tell whether others have said that they wait in the call, and this worker has not."""
        group, words = visit.group, self._words_of
        return not visit.is_told and any(
            (word := words.get((group.name, member))) is not None
            and (word.kind, word.number) == (WAITING, visit.call.number)
            for member in group.ranks
        )

    def _say(self, visit: Visit, kind: str, now: float) -> None:
        own, call = self.transport.rank, visit.call
        note = Note(kind, own, visit.group.name, call.number, call.describe())
        self.transport.tell(note)
        self._hear(note, now)

    def _hear(self, note: Note, now: float) -> None:
        self._words[note.rank] = now, note
        self._words_of[note.group, note.rank] = note

    def passed(self, visit: Visit) -> None:
        """Tell those who still wait in a call that this worker has ended it, not stopped in it."""
        if visit.is_told:
            self._say(visit, PASSED, monotonic())

    def missing(self, visit: Visit) -> tuple[int, ...]:
        """Return who has not said that it waits in the call."""
        group, words = visit.group, self._words_of
        return tuple(
            member
            for member in group.ranks
            if (word := words.get((group.name, member))) is None or word.number < visit.call.number
        )

    def _stopped(self, visit: Visit, now: float) -> tuple[int, ...]:
        """Return who has said that it waits in the call, and says nothing any more."""
        quiet_s = QUIET_S if visit.timeout is None else min(QUIET_S, 0.6 * visit.timeout)
        group, words = visit.group, self._words_of
        return tuple(
            member
            for member in group.ranks
            if (word := words.get((group.name, member))) is not None
            and (word.kind, word.number) == (WAITING, visit.call.number)
            and self._words[member][0] + quiet_s < now
        )

    def _elsewhere(self, members: Iterable[int], group: str) -> dict[int, Note]:
        """Return those of some workers who wait in calls of other groups, and what they say."""
        return {
            rank: word
            for (name, rank), word in sorted(self._words_of.items(), reverse=True)
            if rank in members and word.kind == WAITING and name != group
        }

    def _stalled(self, visit: Visit, timeout: float, now: float) -> Failure:
        """Say for whom a call has waited too long: it has not come, or has stopped in it.

        Who waits in a call of another group has not failed to come: the order of calls differs.
        """
        what = visit.call.describe()
        silent = tuple(each for each in self.transport.unreachable() if each in visit.group.ranks)
        if silent:  # what the others have to say does not come either
            text = (
                f"{workers_in_words(silent)} has stopped: it keeps the store where the workers "
                f"meet, which does not answer. Noticed in {what}, after {timeout:g} s."
            )
            return Failure(STALLED, text, silent, timeout)
        missing, stopped = self.missing(visit), self._stopped(visit, now)
        elsewhere = self._elsewhere(missing, visit.group.name)
        absent = tuple(member for member in missing if member not in elsewhere)
        if absent or not (stopped or elsewhere):
            return Failure(STALLED, stall_text(absent, what, timeout), absent, timeout)
        if stopped:
            has = "has" if len(stopped) == 1 else "have"
            text = (
                f"{workers_in_words(stopped)} {has} come to {what} and stopped in it, for "
                f"{timeout:g} s now. Look whether that process is suspended or its host is."
            )
            return Failure(STALLED, text, stopped, timeout)
        words = {each: (word.text, _in_words(word.group)) for each, word in elsewhere.items()}
        here = what, _in_words(visit.group.name)
        return crossed_failure(self.transport.rank, here, words, timeout)

    def _warn(self, visit: Visit, now: float) -> None:
        """Log for whom a call waits, and the newest word of every worker."""
        missing = self.transport.unreachable() or self.missing(visit) or self._stopped(visit, now)
        who = workers_in_words(missing).lower() if missing else "the others"
        words = "; ".join(
            f"worker {rank} {'waits in' if note.kind == WAITING else 'has ended'} {note.text}"
            for rank, (_, note) in sorted(self._words.items())
        )
        limit = "for ever" if visit.timeout is None else f"for {visit.timeout:g} s"
        LOGGER.warning(
            "Worker %d has waited %.0f s in %s for %s, and goes on waiting, %s. Newest words: %s.",
            self.transport.rank, now - visit.start, visit.call.describe(), who, limit, words,
        )  # fmt: skip

    def look_for_gone(self, visit: Visit, *, at_once: bool = False) -> None:
        """Look for notes, and whether one of the group has closed before this call.

        Raises:
            GroupEndedError: If the group has ended.
        """
        self.read_notes(at_once=at_once, waits=at_once)
        number = visit.call.number
        gone = tuple(
            each for each in visit.group.ranks if self._calls_of(each, visit.group) <= number
        )
        if gone:
            self.end(Failure(LOST, closed_text(gone, visit.call), gone))

    def leave(self, group: Group, num_calls: int) -> None:
        """Tell the others that this worker makes no more calls in a group."""
        note = Note(LEFT, self.transport.rank, group.name, num_calls)
        self.transport.tell(note)
        if group.name:
            self._left[group.name, note.rank], self._leaving[group.name] = num_calls, group
            self._forget(group.name)

    def _forget(self, name: str) -> None:
        """Let go of a split that all have left; not before, as some may be in its last call."""
        group = self._leaving.get(name)
        if group is None or any((name, each) not in self._left for each in group.ranks):
            return
        del self._leaving[name]
        for each in group.ranks:
            del self._left[name, each]
            self._words_of.pop((name, each), None)
        self.transport.forget(group)

    def _calls_of(self, member: int, group: Group) -> float:
        """Return how many calls of a group one makes that has left, which may not know of it."""
        most = 0 if ("", member) in self._left else math.inf
        return self._left.get((group.name, member), most)

    def read_notes(self, *, at_once: bool = False, waits: bool = True) -> None:
        """Take note of what the others say.

        Raises:
            GroupEndedError: If one of them says that the group has ended, or it had before.
        """
        notes = self.transport.notes(at_once=at_once, waits=waits) if self.ended is None else ()
        for note in notes:
            if note.kind in (WAITING, PASSED):
                self._hear(note, monotonic())
            elif note.kind == LEFT:
                self._left[note.group, note.rank] = note.number
                self._forget(note.group)
            elif note.kind == ALARM and self._completions is not None:
                self._completions.call_soon(partial(self._hand_on, note))
            elif self.ended is None:
                self.ended = Failure(note.kind, note.text, note.ranks, note.timeout)
                self._is_told = True
        if self.ended is not None:
            raise GroupEndedError(self.ended)

    def end(self, failure: Failure) -> NoReturn:
        """End the group for all workers.

        Raises:
            GroupEndedError: Always.
        """
        if self.ended is None:
            self.ended = failure
        self._tell()
        raise GroupEndedError(self.ended)

    def give_up(self) -> None:
        """Tell the others why the group has ended, and let those in the engine return."""
        self._tell()
        self.transport.end()

    def give_up_quietly(self) -> None:
        """Do so where nobody is left to be told of an engine that fails in it."""
        with suppress(Exception):
            self.give_up()

    def _tell(self) -> None:
        failure = self.ended
        assert failure is not None  # called at the end only
        if not self._is_told:
            self._is_told = True
            self.transport.tell(
                Note(
                    failure.kind, self.transport.rank, text=failure.text, ranks=failure.ranks,
                    timeout=failure.timeout,
                )
            )  # fmt: skip


@final
class Leave:
    """Last entry in the queue of a communicator: the others are told that it makes no more calls.

    That of the outermost group comes behind what its splits do, and gives the engine back.

    Args:
        communicator: The one that is closed.
        num_calls: How many calls it has made.

    Attributes:
        completions: Bring the end of it to the event loop.
        future: Done when it has left, or could not.
        spin_until: Never: nobody is in a hurry.
    """

    __slots__ = ("_communicator", "_num_calls", "_poll", "completions", "future", "spin_until")

    def __init__(self, communicator: EngineCommunicator, num_calls: int) -> None:
        self._communicator = communicator
        self._num_calls = num_calls
        self._poll: Poll | None = None
        self.completions = communicator.link.completions()
        self.future: asyncio.Future[None] = self.completions.loop.create_future()
        self.spin_until = 0.0

    def advance(self, looks: bool) -> bool:
        """Tell the others, once nothing else is under way; true if it is over."""
        try:
            if self._poll is None:
                self._poll = self._begin()
            return self._poll is not None and self._poll()
        except Exception:  # noqa: BLE001 - of an engine that has ended: nothing is left to give back
            return True

    def _begin(self) -> Poll | None:
        communicator, link = self._communicator, self._communicator.link
        group = communicator.group
        others = [each for each in tuple(link.members) if each is not communicator]
        if not group.name and any(each.queue for each in others):
            return None
        if link.ended is None:
            link.leave(group, self._num_calls)
        return (lambda: True) if group.name else link.transport.close()

    def resolve(self) -> None:
        """Wake who waits for it; on the event loop."""
        self._communicator.link.members.remove(self._communicator)
        if not self.future.done():
            self.future.set_result(None)


def name_of(outer: str, ranks: Sequence[int], key: str) -> str:
    """Return the name of a split: by its members, or by a hash of these if they are many.

    Args:
        outer: The name of the group that is split.
        ranks: The members, among all workers.
        key: Tells it from other splits into these.
    """
    name = f"{outer}/{','.join(map(str, ranks))}.{key}"
    if len(name) <= NAME_CHARACTERS:
        return name
    return f"/{len(ranks)} workers.{digest_of(name).hex()}"


def _in_words(name: str) -> str:
    """Describe the group of a name."""
    ranks = name.rpartition("/")[2].rpartition(".")[0]
    if ranks.endswith("workers"):
        return f"a split of {ranks}"
    return group_in_words(tuple(map(int, ranks.split(","))) if ranks else ())
