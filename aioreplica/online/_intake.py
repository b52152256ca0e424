"""Taking examples: room in the queue, first come first served, and one commit for all who wait.

Invariants:
    * `depth` counts the examples that hold a place: not saved yet, queued, or in a step. It is at
      most the size of the queue, and those that were found in the journal or put back beside it.
    * The queue is in the order of the numbers; with a journal, of its rows.
    * With a journal a ticket is saved after the commit that has its example, never before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import NamedTuple, final
from weakref import ref

import anyio

from ..errors import ContextError, JournalError, PoisonedExampleError
from ..tree import Tree
from ._example import as_example, unpack_example
from ._journal import DeadLetters, OpenJournal
from ._journal_format import Entry, Waiting
from ._ticket import Signal, Ticket

MAX_KEY = 200

MAX_COMMIT = 4096
"""Most submissions of one transaction."""

MAX_WAITING = 4096
"""Most predictions that are not saved yet."""

MAX_FOLLOWERS = 16
"""From so many tickets of one example on, those that nobody has any more are forgotten."""

Outcome = int | ContextError | PoisonedExampleError
"""Of an example: the version that has it, or why there is none."""


class Taken(NamedTuple):
    """An example that waits to be learned.

    Attributes:
        number: Its number.
        example: Itself.
        ticket: That of its submission; None if it comes from the journal.
        since: When it was queued, by the loop's clock.
    """

    number: int
    example: Tree
    ticket: Ticket | None
    since: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class ExampleGroup:
    """Examples that are taken all or none.

    Attributes:
        examples: As `as_example` gives them.
        tickets: One for each.
        entry: What the journal is given; None without one.
    """

    examples: Sequence[Tree]
    tickets: tuple[Ticket, ...]
    entry: Entry | None

    @staticmethod
    def of(
        examples: Sequence[Tree],
        key: str | None,
        is_journalled: bool,
        *,
        revived: tuple[str, int] | None = None,
    ) -> ExampleGroup:
        """Make the submission of some examples."""
        entry = Entry(examples, key, revived) if is_journalled else None
        return ExampleGroup(examples, tuple(Ticket() for _ in examples), entry)

    def refuse(self, error: Exception) -> None:
        """Tell all tickets that nothing is taken."""
        for ticket in self.tickets:
            ticket.refuse(error)


@final
class Intake:
    """Takes submissions and queues their examples.

    Args:
        queue_size: How many examples may be taken and not learned.
        journal: Where they are kept; None for nowhere.
        last_number: The newest number that was given before.
        changed: Given when the queue has grown.
        is_read: Whether models read the journal by themselves. Nothing is queued then: tickets wait
            for what `tell` says, and places for `learned_to`.

    Attributes:
        queue: The examples that are saved and not taken out yet.
        depth: How many places are held.

    The other ones are as in `LearnerStatistics`.
    """

    def __init__(
        self,
        queue_size: int,
        journal: OpenJournal | None,
        last_number: int,
        changed: Signal,
        *,
        is_read: bool = False,
    ) -> None:
        self.queue: deque[Taken] = deque()
        self.depth = 0
        self.num_taken = 0
        self.num_duplicates = 0
        self.num_refused = 0
        self.num_expected = 0
        self.num_labelled = 0
        self.num_unknown_labels = 0
        self.num_commits = 0
        self.commit_s = 0.0
        self.journal_error = ""
        self.last_number = self._freed_to = last_number
        self.size = queue_size
        self._journal = journal
        self._asked = DeadLetters(journal)
        self._is_read = is_read
        self._changed = changed
        self._pending: deque[ExampleGroup] = deque()  # not saved yet
        self._room: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting: dict[str, Waiting] = {}  # predictions not saved yet
        self._has_waiting = False  # some that no commit has tried yet
        self._has_pending = Signal()
        self._followers: dict[int, list[ref[Ticket]]] = {}  # of keys that were known
        self._closed_because: str | None = None

    # ---- room ----------------------------------------------------------------------------

    def take_nowait(self, submission: ExampleGroup) -> None:
        """Take a submission if there is room and nobody waits before it.

        Raises:
            anyio.WouldBlock: If there is none.
            ContextError: If it is closed.
        """
        size = len(submission.examples)
        self._require_open()
        if self._room or self.depth + size > self.size:
            self.num_refused += size
            raise anyio.WouldBlock
        self.depth += size
        self._accept(submission)

    async def take(self, submission: ExampleGroup) -> None:
        """Take a submission as soon as there is room and it is its turn.

        Raises:
            ContextError: If it is closed.

        Cancellation:
            While it waits, nothing is taken.
        """
        size = len(submission.examples)
        self._require_open()
        if self._room or self.depth + size > self.size:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self.free(size)  # the place was given when the wait was cancelled
                else:
                    with suppress(ValueError):  # closing has emptied the list
                        self._room.remove((size, turn))
                    self._admit()
                raise
        else:
            self.depth += size
        self._accept(submission)

    @property
    def is_closed(self) -> bool:
        """True if nothing more is taken."""
        return self._closed_because is not None

    def _require_open(self) -> None:
        if self._closed_because is not None:
            raise ContextError(self._closed_because)

    def free(self, size: int) -> None:
        """Free the places of examples that were learned, set aside, or not taken after all."""
        self.depth -= size
        self._admit()

    def _admit(self) -> None:
        """Give places to those who wait, in their order."""
        while self._room:
            size, turn = self._room[0]
            if turn.done():  # cancelled: it takes itself off the list
                return
            if self.depth + size > self.size:
                return
            self._room.popleft()
            self.depth += size
            turn.set_result(None)

    # ---- predictions ---------------------------------------------------------------------

    def expect(self, waiting: Waiting) -> None:
        """Keep a prediction with the next commit.

        Raises:
            anyio.WouldBlock: If too many are not saved yet.
            ContextError: If it is closed.
        """
        self._require_open()
        if len(self._waiting) >= MAX_WAITING and waiting.id not in self._waiting:
            raise anyio.WouldBlock
        self._waiting[waiting.id] = waiting
        self._has_waiting = True
        self._has_pending.give()

    async def expected(self, name: str) -> Waiting | None:
        """Return a prediction that waits for its label, None if there is none.

        Raises:
            JournalError: If it cannot be read.
        """
        assert self._journal is not None  # or none is kept
        return self._waiting.get(name) or await self._journal.waiting(name)

    # ---- saving --------------------------------------------------------------------------

    def _accept(self, submission: ExampleGroup) -> None:
        if self._closed_because is not None:  # closed while it was its turn
            self.free(len(submission.examples))
            raise ContextError(self._closed_because)
        if self._journal is None:
            self._enqueue(submission, self.last_number + 1)
        else:
            self._pending.append(submission)
            self._has_pending.give()

    def _enqueue(self, submission: ExampleGroup, first: int) -> None:
        now = asyncio.get_running_loop().time()
        for number, (example, ticket) in enumerate(
            zip(submission.examples, submission.tickets, strict=True), first
        ):
            ticket.save(number)
            if self._is_read:
                self._follower_tickets(number).append(ref(ticket))
            else:
                self.queue.append(Taken(number, example, ticket, now))
        self.last_number = first + len(submission.examples) - 1
        self.num_taken += len(submission.examples)
        self._changed.give()

    async def commit_forever(self) -> None:
        """Save what comes, as long as it is not closed; all that waits shares a commit."""
        while self._pending or self._has_waiting or self._closed_because is None:
            if not self._pending and not self._has_waiting:
                await self._has_pending.wait()
                continue
            group = [*islice(self._pending, MAX_COMMIT)]
            try:
                await self._commit(group)
            except BaseException:
                for submission in group:  # some may be told already
                    submission.refuse(_interrupted_error())
                raise
            for _ in group:
                self._pending.popleft()

    async def _commit(self, group: list[ExampleGroup]) -> None:
        journal = self._journal
        assert journal is not None  # or there is nothing to commit
        began, waiting = perf_counter(), [*self._waiting.values()]
        self._has_waiting = False
        try:
            appended = await journal.append([each.entry for each in group if each.entry], waiting)
        except JournalError as error:
            self.journal_error = str(error)
            for submission in group:
                self._refuse(submission, JournalError(str(error)))
            return
        self.num_commits += 1
        self.commit_s += perf_counter() - began
        self.journal_error = ""
        self.num_expected += len(waiting)
        for each in waiting:
            if self._waiting.get(each.id) is each:
                del self._waiting[each.id]
        now = asyncio.get_running_loop().time()
        if self._is_read:  # by number: a stray may be one that is gone for the first model
            self.depth += appended.last - self.last_number
            self.last_number = appended.last
        else:
            self.depth += len(appended.strays)
            for number, body in appended.strays:
                self.queue.append(Taken(number, unpack_example(body), None, now))
        self._changed.give()
        known: list[tuple[ExampleGroup, int]] = []
        for submission, result in zip(group, appended.results, strict=True):
            is_label = submission.entry is not None and submission.entry.label is not None
            if isinstance(result, Exception):
                self.num_unknown_labels += is_label and isinstance(result, KeyError)
                self._refuse(submission, result)
            elif result[1]:
                known.append((submission, result[0]))
            else:
                self.num_labelled += is_label
                self._enqueue(submission, result[0])
        for submission, first in known:
            await self._follow(submission, first)

    def _refuse(self, submission: ExampleGroup, error: Exception) -> None:
        self.num_refused += len(submission.tickets)
        submission.refuse(error)
        self.free(len(submission.tickets))

    # ---- what becomes of them ------------------------------------------------------------

    async def _follow(self, submission: ExampleGroup, first: int) -> None:
        """Give tickets of a known key the numbers, and the fate, of the first submission."""
        numbers = range(first, first + len(submission.tickets))
        try:
            fates = await self._asked.fates(numbers)
        except JournalError as error:
            self._refuse(submission, error)
            return
        self.num_duplicates += len(submission.tickets)
        self.free(len(submission.tickets))
        for number, ticket in zip(numbers, submission.tickets, strict=True):
            self._tell_fate(ticket, number, fates.get(number, number))
        self._changed.give()

    async def ticket_of(self, number: int) -> Ticket:
        """See `OnlineLearner.ticket`."""
        if self._journal is None:
            raise ContextError("Only a journal knows examples by number. Pass journal=path.")
        if not 1 <= number <= self.last_number:
            raise KeyError(number)
        fates, ticket = await self._asked.fates([number]), Ticket()
        self._tell_fate(ticket, number, fates.get(number, number))
        return ticket

    def _tell_fate(self, ticket: Ticket, number: int, fate: int | str) -> None:
        """Let a ticket follow an example, or what was taken in its place."""
        ticket.save(number, is_duplicate=True)
        if isinstance(fate, str):
            ticket.settle(dead_error(number, fate))
        elif fate == 0:
            ticket.settle(_discarded_error(number))
        else:
            self._follower_tickets(fate).append(ref(ticket))

    def _follower_tickets(self, number: int) -> list[ref[Ticket]]:
        """Return the tickets that follow an example, without those that nobody has any more."""
        tickets = self._followers.setdefault(number, [])
        if len(tickets) >= MAX_FOLLOWERS:
            tickets[:] = [each for each in tickets if each() is not None]
        return tickets

    def settle(self, taken: Taken, outcome: Outcome) -> None:
        """Tell those who wait what became of an example, and free its place if it holds one."""
        self.tell(taken.number, outcome)
        if taken.ticket is not None:
            taken.ticket.settle(outcome)

    def tell(self, number: int, outcome: Outcome) -> None:
        """Tell those who follow an example what became of it."""
        for each in self._followers.pop(number, []):
            ticket = each()
            if ticket is not None:
                ticket.settle(outcome)

    def settle_followers(self, learned_number: int, version: int) -> None:
        """Tell those who follow examples that were learned before they asked."""
        for number in self.followed(learned_number):
            self.tell(number, version)

    def followed(self, to: int) -> list[int]:
        """Return the numbers up to one that somebody follows."""
        return [number for number in self._followers if number <= to]

    def ask(self, dead: DeadLetters) -> None:
        """Ask what became of examples as a model sees it, from now on."""
        self._asked = dead

    def next_batch(self, size: int) -> list[Taken]:
        """Take the first examples out of the queue; they keep their places."""
        return [self.queue.popleft() for _ in range(min(size, len(self.queue)))]

    def put_back(self, again: Sequence[Taken], left: Sequence[Taken]) -> None:
        """Put examples back as the first ones, in their order; those of `again` have no places."""
        self.depth += len(again)
        self.queue.extendleft(reversed([*again, *left]))

    def take_out(self, numbers: Collection[int]) -> list[Taken]:
        """Take examples of some numbers out of the queue, and free their places."""
        found = [taken for taken in self.queue if taken.number in numbers]
        self.queue = deque(taken for taken in self.queue if taken.number not in numbers)
        self.free(len(found))
        return found

    def learned_to(self, number: int) -> None:
        """Free the places of examples up to a number, which the champion has learned."""
        size = number - self._freed_to
        if size > 0:
            self._freed_to = number
            self.free(size)

    # ---- closing -------------------------------------------------------------------------

    def close(self, because: str) -> None:
        """Take nothing more; what is pending is still saved."""
        self._closed_because = because
        room, self._room = self._room, deque()
        for _, turn in room:
            if not turn.done():
                turn.set_exception(ContextError(because))
        self._has_pending.give()

    def abandon(self, because: str) -> None:
        """Tell all tickets that are left that this learner will not learn their examples."""
        for submission in self._pending:  # the disk may take them still
            submission.refuse(_interrupted_error())
        for taken in self.queue:
            self.settle(taken, ContextError(because))
        self.queue.clear()
        for number in [*self._followers]:
            self.tell(number, ContextError(because))


def dead_error(number: int, error: str) -> PoisonedExampleError:
    """Return what the ticket of a dead letter raises."""
    return PoisonedExampleError(
        f"Example {number} was set aside: {error.removesuffix('.')}. Look at "
        "learner.dead_letters(); after a change of the step function, `await "
        "learner.retry(number)` takes it again.",
        number=number,
    )


def _discarded_error(number: int) -> PoisonedExampleError:
    return PoisonedExampleError(
        f"Example {number} was set aside, and discarded. Submit it with another key to learn it.",
        number=number,
    )


def _interrupted_error() -> ContextError:
    return ContextError(
        "The learner was closed while the example was written, so it may be in the journal or "
        "not. Submit it again with its idempotency key."
    )


def checked_group(
    examples: Sequence[object],
    key: str | None,
    size: int,
    validate: Callable[[Tree], Tree] | None,
    is_journalled: bool,
) -> ExampleGroup:
    """Return the submission of some examples, checked; see `OnlineLearner.submit_many`."""
    if key is not None and not is_journalled:
        raise ValueError("key needs a journal, which remembers it. Pass journal=path.")
    name = None if key is None else checked_key("key", key)
    if not 0 < len(examples) <= size:
        raise ValueError(
            f"The queue has {size} places, so {len(examples)} examples cannot be taken at "
            "once. Submit at least one and at most that many."
        )
    kept = [as_example(each if validate is None else validate(each)) for each in examples]
    return ExampleGroup.of(kept, name, is_journalled)


def checked_key(name: str, value: object) -> str:
    """Return a key or an id; ValueError if it is none that the journal can keep."""
    is_text = isinstance(value, str) and 0 < len(value) <= MAX_KEY and "\0" not in value
    if not is_text or not is_unicode(str(value)):
        raise ValueError(
            f"{name} must be text of 1 to {MAX_KEY} characters, none of them zero, got {value!r}."
        )
    return str(value)


def is_unicode(text: str) -> bool:
    """Tell whether text has no lone surrogates, which no file takes."""
    return text.encode(errors="replace").decode() == text
