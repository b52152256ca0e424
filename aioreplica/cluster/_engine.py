"""Communicators over an engine: one thread makes all of its calls, first in, first out.

The thread (a lane) blocks on its queue when there is nothing to do. In a call it polls: at first
without a pause, for about as long as the bytes take, then with pauses that grow to a millisecond,
so a late peer costs little. Between polls it looks for what the others have to say, and at the
clock.

Workers tell each other three things in notes, outside of the collectives: that they wait in a call,
again and again (so that a stall names who does not, or has stopped in it), that they have left, and
why the group has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, final

from ..devices import CompletionQueue, Lane, Op
from ._communicator import (
    ENDED,
    LOST,
    STALLED,
    Call,
    Communicator,
    Failure,
)
from ._exchange import Collectives, Exchange, Poll
from ._local import closed_text, split_shrink_error, stall_text, workers_in_words

LOGGER = logging.getLogger("aioreplica.cluster")

WAITING, PASSED, LEFT = "waiting", "passed", "left"
WAITING_S = 0.5  # in a call, before a worker tells the others that it waits there, and again
WARN_S = 10.0  # in a call, before a worker logs for whom it waits
QUIET_S = 3.0  # without a word from a worker that has said that it waits
SPIN_S = 150e-6  # without pauses, plus what the bytes take
SPIN_BYTES_PER_S = 1e9
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
CLOSE_S = 1.0
NOTE_BYTES = 1024


@final
@dataclass(frozen=True, slots=True)
class Note:
    """Message of one worker to all others.

    Attributes:
        kind: WAITING, PASSED or LEFT, or the kind of a failure.
        rank: Who says so, in the outermost group.
        group: The name of the group it is about.
        number: Of the call it waits in or has ended, or of its calls before it left.
        text: Of the failure; names the call it waits in.
        ranks: Of the failure.
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


class Engine(Exchange):
    """Interface of an engine's adapter; called on the lane's thread only."""

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
    def subgroup(self, ranks: tuple[int, ...], name: str) -> Exchange:
        """Return an exchange between some of the workers; `name` is that of the group."""

    @abstractmethod
    def unreachable(self) -> tuple[int, ...]:
        """Return the workers without whom no note comes any more; usually none."""

    @abstractmethod
    def end(self) -> None:
        """Make the group useless for everybody, so that those who wait in the engine return."""

    @abstractmethod
    def close(self) -> None:
        """Give the engine back, after a group that has worked to its end."""


@final
class GroupEndedError(Exception):
    """Carries a failure from the lane to the event loop."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@final
class Link:
    """The lane, the engine and what is known of the others: what a group shares with its splits.

    Attributes:
        engine: The engine.
        ended: Why the group has ended; set once, by the loop's thread or the lane's.
        members: The communicators that use it.
    """

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self.engine = engine
        self.lane = lane
        self.ended: Failure | None = None
        self.members: list[EngineCommunicator] = []
        self._is_told = False  # of the end, to the others
        self._waiting: dict[tuple[str, int], int] = {}
        self._passed: dict[tuple[str, int], int] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._words: dict[int, tuple[float, Note]] = {}  # the newest of each worker, and since when
        self._late: Turn | None = None  # in which the lane waits for others
        self._held: list[Poll] = []  # exchanges that the engine may not be done with

    def put(self, fn: Callable[..., Any], *args: object) -> Op[Any]:
        """Queue a call of the engine; on the event loop."""
        op: Op[Any] = Op(CompletionQueue.of_running_loop(), fn, args, {}, self.lane)
        op.put()
        return op

    # ---- on the lane's thread ------------------------------------------------------------

    def finish(self, turn: Turn, poll: Poll, num_bytes: int) -> None:
        """Wait for an exchange.

        Raises:
            GroupEndedError: If the group has ended, by whatever it was.
        """
        try:
            spin_until = monotonic() + SPIN_S + num_bytes / SPIN_BYTES_PER_S
            while not poll(0.0):
                if monotonic() >= spin_until:
                    self._wait(turn, poll)
                    break
            turn.start = monotonic()  # a timeout is for waiting: what came took its time
        except BaseException:
            self._held.append(poll)
            raise

    def _wait(self, turn: Turn, poll: Poll) -> None:
        pause = FIRST_PAUSE_S
        self._late = turn
        try:
            while not poll(pause):
                pause = min(pause * 1.25, MAX_PAUSE_S)
                self.look(turn)
        finally:
            self._late = None

    def look(self, turn: Turn) -> None:
        """Look for notes and at the clock.

        Raises:
            GroupEndedError: If the group has ended.
        """
        self.look_for_gone(turn)
        now = monotonic()
        if turn.timeout is not None and now > turn.tell_at + QUIET_S:
            # This process was stopped itself: let the others speak.
            turn.start = max(turn.start, now + 2 * turn.beat_s - turn.timeout)
        if now >= turn.tell_at:
            turn.tell_at = now + turn.beat_s
            turn.is_told = True
            self._say(turn, WAITING, now)
        if now >= turn.warn_at:
            turn.warn_at = math.inf
            self._warn(turn, now)
        if turn.timeout is not None and now >= turn.start + turn.timeout:
            self.look_for_gone(turn, at_once=True)
            self.end(self._stalled(turn, turn.timeout, monotonic()))

    def _say(self, turn: Turn, kind: str, now: float) -> None:
        own, call = self.engine.rank, turn.call
        note = Note(kind, own, turn.group, call.number, call.describe())
        self.engine.tell(note)
        self._hear(note, now)

    def _hear(self, note: Note, now: float) -> None:
        key = note.group, note.rank
        self._words[note.rank] = now, note
        self._waiting[key] = note.number
        if note.kind == PASSED:
            self._passed[key] = note.number

    def passed(self, turn: Turn) -> None:
        """Tell those who still wait in a call that this worker has ended it, not stopped in it."""
        if turn.is_told:
            self._say(turn, PASSED, monotonic())

    def absent(self) -> tuple[int, ...] | None:
        """Return who has not come to the call that the lane waits in; None if it waits in none."""
        turn = self._late
        return None if turn is None else self._missing(turn)

    def _missing(self, turn: Turn) -> tuple[int, ...]:
        """Return who has not said that it waits in the call."""
        number = turn.call.number
        return tuple(
            member for member in turn.ranks if self._waiting.get((turn.group, member), -1) < number
        )

    def _stopped(self, turn: Turn, now: float) -> tuple[int, ...]:
        """Return who has said that it waits in the call, and says nothing any more."""
        quiet_s = QUIET_S if turn.timeout is None else min(QUIET_S, 0.6 * turn.timeout)
        return tuple(
            member
            for member in turn.ranks
            if self._waiting.get((turn.group, member), -1) == turn.call.number
            and self._passed.get((turn.group, member), -1) < turn.call.number
            and self._words[member][0] + quiet_s < now
        )

    def _elsewhere(self, members: Iterable[int], group: str) -> tuple[int, ...]:
        """Return those of some workers who wait in calls of other groups."""
        return tuple(
            member
            for member in members
            if member in self._words
            and self._words[member][1].kind == WAITING
            and self._words[member][1].group != group
        )

    def _stalled(self, turn: Turn, timeout: float, now: float) -> Failure:
        """Say for whom a call has waited too long: it has not come, or has stopped in it.

        Who waits in a call of another group has not failed to come: the order of calls differs.
        """
        what = turn.call.describe()
        silent = tuple(each for each in self.engine.unreachable() if each in turn.ranks)
        if silent:  # what the others have to say does not come either
            text = (
                f"{workers_in_words(silent)} has stopped: it keeps the store where the workers "
                f"meet, which does not answer. Noticed in {what}, after {timeout:g} s."
            )
            return Failure(STALLED, text, silent, timeout)
        missing, stopped = self._missing(turn), self._stopped(turn, now)
        elsewhere = self._elsewhere(missing, turn.group)
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
        where = ", ".join(
            f"worker {each} waits in {self._words[each][1].text} of {_group_in_words(other)}"
            for each in elsewhere
            for other in [self._words[each][1].group]
        )
        own = self.engine.rank
        text = (
            f"Worker {own} has waited {timeout:g} s in {what} of {_group_in_words(turn.group)}, "
            f"while {where}. Workers must make the calls of groups that overlap in one order."
        )
        return Failure(STALLED, text, tuple(sorted((own, *elsewhere))), timeout)

    def _warn(self, turn: Turn, now: float) -> None:
        """Log for whom a call waits, and the newest word of every worker."""
        missing = self.engine.unreachable() or self._missing(turn) or self._stopped(turn, now)
        who = workers_in_words(missing).lower() if missing else "the others"
        words = "; ".join(
            f"worker {rank} {'waits in' if note.kind == WAITING else 'has ended'} {note.text}"
            for rank, (_, note) in sorted(self._words.items())
        )
        limit = "for ever" if turn.timeout is None else f"for {turn.timeout:g} s"
        LOGGER.warning(
            "Worker %d has waited %.0f s in %s for %s, and goes on waiting, %s. Newest words: %s.",
            self.engine.rank, now - turn.start, turn.call.describe(), who, limit, words,
        )  # fmt: skip

    def look_for_gone(self, turn: Turn, *, at_once: bool = False) -> None:
        """Look for notes, and whether one of the group has closed before this call.

        Raises:
            GroupEndedError: If the group has ended.
        """
        self.read_notes(at_once=at_once, waits=at_once)
        gone = tuple(
            member
            for member in turn.ranks
            if self._left.get((turn.group, member), turn.call.number + 1) <= turn.call.number
        )
        if gone:
            self.end(Failure(LOST, closed_text(gone, turn.call), gone))

    def read_notes(self, *, at_once: bool = False, waits: bool = True) -> None:
        """Take note of what the others say.

        Raises:
            GroupEndedError: If one of them says that the group has ended, or it had before.
        """
        notes = self.engine.notes(at_once=at_once, waits=waits) if self.ended is None else ()
        for note in notes:
            if note.kind in (WAITING, PASSED):
                self._hear(note, monotonic())
            elif note.kind == LEFT:
                self._left[note.group, note.rank] = note.number
            elif self.ended is None:
                self.ended = Failure(note.kind, note.text, note.ranks, note.timeout)
                self._is_told = True
        if self.ended is not None:
            raise GroupEndedError(self.ended)

    def end(self, failure: Failure) -> None:
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
        self.engine.end()

    def _tell(self) -> None:
        failure = self.ended
        assert failure is not None  # called at the end only
        if not self._is_told:
            self._is_told = True
            self.engine.tell(
                Note(
                    failure.kind, self.engine.rank, text=failure.text, ranks=failure.ranks,
                    timeout=failure.timeout,
                )
            )  # fmt: skip


@final
class Turn:
    """A call that the lane performs now.

    Args:
        call: The call.
        ranks: The members of its group, by rank, as they are numbered in the outermost one.
        timeout: How long it may take.
    """

    __slots__ = (
        "beat_s", "call", "group", "is_told", "ranks", "start", "tell_at", "timeout", "warn_at",
    )  # fmt: skip

    def __init__(
        self, call: Call, ranks: tuple[int, ...], group: str, timeout: float | None
    ) -> None:
        self.call = call
        self.ranks = ranks
        self.group = group
        self.timeout = timeout
        self.start = monotonic()
        self.beat_s = WAITING_S if timeout is None else min(WAITING_S, timeout / 5)
        self.tell_at = self.start + self.beat_s
        self.warn_at = self.start + WARN_S
        self.is_told = False  # that this worker waits in it


class EngineCommunicator(Communicator):
    """A worker of a group that an engine connects; its adapters differ in the engine only."""

    def __init__(
        self, link: Link, ranks: tuple[int, ...], timeout: float | None, group: str = ""
    ) -> None:
        worker = link.engine.rank
        super().__init__(ranks.index(worker), len(ranks), timeout, worker)
        self._link = link
        self._ranks = ranks  # in the outermost group
        self._name = group
        self._collectives: Collectives | None = None
        self._num_splits: dict[tuple[int, ...], int] = {}
        link.members.append(self)

    # ---- on the event loop ---------------------------------------------------------------

    def _enqueue(self, call: Call) -> None:
        completions = CompletionQueue.of_running_loop()
        self._link.put(self._perform, call, completions)

    def performed(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Learn on the event loop what a call has come to."""
        if error is None:
            self._settle(call, result)
        else:
            self._end_all(_failure_of(error))

    def _end_all(self, failure: Failure) -> None:
        for member in tuple(self._link.members):
            member._end(failure)

    def _spread(self, failure: Failure) -> None:
        link = self._link
        if link.ended is None:
            link.ended = failure  # seen at once by a lane that waits in a call
        self._end_all(failure)
        link.put(link.give_up).add_done_callback(_forget)

    def _absent(self) -> tuple[int, ...] | None:
        return self._link.absent()

    def _subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        ordinal = self._num_splits.get(ranks, 0)
        self._num_splits[ranks] = ordinal + 1
        outer = tuple(self._ranks[rank] for rank in ranks)
        name = f"{self._name}/{','.join(map(str, outer))}.{ordinal}"
        return SplitCommunicator(self._link, outer, self.timeout, name)

    async def _close(self) -> None:
        link = self._link
        done = link.put(self._leave, self.statistics().calls)
        done.add_done_callback(_forget)
        if not await has_ended(
            done, CLOSE_S
        ):  # it waits in a call that was abandoned, for someone who is late
            self._spread(
                Failure(LOST, f"Worker {self._worker} closed the communicator.", (self._worker,))
            )
            await has_ended(done, CLOSE_S)
        link.members.remove(self)

    # ---- on the lane's thread ------------------------------------------------------------

    def _perform(self, call: Call, completions: CompletionQueue) -> None:
        """Perform a call; its result comes to the event loop before the op is done there."""
        result, error = None, None
        try:
            result = self._result_of(call)
        except BaseException as raised:  # noqa: BLE001 - ends the group
            error = raised
        completions.add(_Performed(self, call, result, error))
        if self._link.ended is not None:  # who waits knows it first: to end may take its time
            with suppress(RuntimeError):
                self._link.give_up()

    def _result_of(self, call: Call) -> Any:
        link, engine = self._link, self._link.engine
        turn = Turn(call, self._ranks, self._name, self.timeout)
        try:
            link.read_notes()
            if self._collectives is None:
                exchange = engine.subgroup(self._ranks, self._name) if self._name else engine
                self._collectives = Collectives(exchange)
            result = self._collectives.perform(call, partial(link.finish, turn))
            link.passed(turn)
            return result
        except GroupEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - the workers are no longer in step
            with suppress(RuntimeError):  # of the engine: notes may be lost with the rest
                link.look_for_gone(turn, at_once=True)  # one that closes says so first
            failure = engine.explain(error, call.describe())
            if failure is None:
                text = f"Worker {engine.rank} failed in {call.describe()}: {error!r}"
                failure = Failure(ENDED, text, (engine.rank,))
            return link.end(failure)

    def _leave(self, num_calls: int) -> None:
        link = self._link
        if link.ended is None:
            link.engine.tell(Note(LEFT, link.engine.rank, self._name, num_calls))
        if not self._name:
            link.engine.close()


@final
class SplitCommunicator(EngineCommunicator):
    """A worker of a part of a group; made by `split`."""

    async def _shrink(self) -> Communicator:
        raise split_shrink_error()


async def has_ended(op: Op[Any], timeout: float | None) -> bool:
    """Wait for an op; False if it takes longer. Unlike awaiting it, this never cancels it."""
    future = op.get_loop().create_future()
    op.add_done_callback(lambda _: None if future.done() else future.set_result(None))
    await asyncio.wait([future], timeout=timeout)
    return op.done()


def _group_in_words(name: str) -> str:
    """Return, for example, "the split of workers 0 and 2", of a group by its name."""
    ranks = name.rpartition("/")[2].rpartition(".")[0]
    if not ranks:
        return "the group of all"
    return f"the split of {workers_in_words(tuple(map(int, ranks.split(',')))).lower()}"


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, GroupEndedError):
        return error.failure
    return Failure(ENDED, f"The engine's thread failed: {error!r}")


@final
class _Performed:
    """Result of a call, on its way from the lane to the event loop.

    The op of the call would bring it a cycle of the loop later, to its done callbacks.
    """

    __slots__ = ("_call", "_communicator", "_error", "_result")

    def __init__(
        self, communicator: EngineCommunicator, call: Call, result: Any, error: BaseException | None
    ) -> None:
        self._communicator = communicator
        self._call = call
        self._result = result
        self._error = error

    def resolve(self) -> None:
        self._communicator.performed(self._call, self._result, self._error)


def _forget(op: Op[Any]) -> None:
    """Take an error that every later call raises anyway."""
    if not op.cancelled():
        op.exception()
