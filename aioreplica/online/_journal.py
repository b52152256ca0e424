"""The journal as a program names it, and open: its calls are made on a thread of its own.

Beside it are dead letters, which are kept in memory where there is no journal.
"""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from time import time
from typing import Any, final

from ..devices import OwnLane, wait_until_done
from ..errors import JournalError
from ..tree import Tree
from ._example import unpack_example
from ._journal_file import JournalFile
from ._journal_format import MAIN, Appended, Dead, Entry, JournalFacts, Rollback, Row, Waiting
from ._journal_keys import Keeping, known, offset, without_rows
from ._journal_models import Consumer
from ._migration import Schema
from ._records import DeadLetter

TRIED_AT_ONCE = 64
"""So many examples are migrated for a trial before others have their turn."""
KEPT_IN_MEMORY = 1000
"""How many are kept without a journal, the newest ones."""


@final
class Journal:
    """Durable record of accepted examples, which may have to be learned again.

    One learner at a time has it open; any other program may read it meanwhile, and copy it with
    SQLite's own backup.

    Args:
        path: An SQLite file, made with its folder if it is not there. Beside it are `-wal`, `-shm`
            and `.lock`.
        keep_keys_s: How long idempotency keys are remembered, in seconds in which a learner has the
            journal open: no clock of the machine is asked.
        busy_timeout_s: How long to wait for other programs that have locked it.
        max_bytes: Of examples that a checkpoint has learned no more are kept, for going back to an
            older one; None keeps them as long as that checkpoint is there.
        label_ttl_s: How long predictions wait for their labels, by the same clock as keys; None
            keeps no predictions. See `OnlineLearner.expect`.
        connect: What stands for `sqlite3.connect` in a test.

    Raises:
        ValueError: If a number is negative or not finite.
        TypeError: If an argument is of the wrong type.
    """

    __slots__ = ("_busy_timeout_s", "_connect", "_keep_keys_s", "_max_bytes", "label_ttl_s", "path")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_keys_s: float = 86400.0,
        busy_timeout_s: float = 5.0,
        max_bytes: int | None = None,
        label_ttl_s: float | None = None,
        connect: Callable[..., object] = sqlite3.connect,
    ) -> None:
        self.path = Path(path)
        """Where it is."""
        self._keep_keys_s = checked_seconds("keep_keys_s", keep_keys_s)
        self._busy_timeout_s = checked_seconds("busy_timeout_s", busy_timeout_s)
        self._connect = connect
        self._max_bytes = None if max_bytes is None else checked_count("max_bytes", max_bytes)
        self.label_ttl_s = (
            None if label_ttl_s is None else checked_seconds("label_ttl_s", label_ttl_s)
        )
        """How long predictions wait for their labels."""

    def file(self, spec_version: int | None = None) -> JournalFile:
        """Return its file, not open yet; for the learner, which has a spec version."""
        labels_s = math.inf if self.label_ttl_s is None else self.label_ttl_s
        return JournalFile(
            self.path,
            Keeping(self._keep_keys_s, labels_s),
            self._busy_timeout_s,
            self._connect,
            self._max_bytes,
            spec_version,
        )

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


@final
class OpenJournal:
    """The calls of a journal, awaitable. Each one raises what the journal raises.

    Cancellation:
        A call that has begun is waited for.
    """

    def __init__(self, journal: Journal, schema: Schema) -> None:
        self.model = MAIN
        """Whose examples, dead letters and rollbacks these are."""
        self._path = journal.path
        self._schema = schema
        self._keep_keys_s = journal._keep_keys_s
        self._file = journal.file(schema.version)
        self._lane = OwnLane("journal", writes_files=True)
        self._facts: JournalFacts | None = None
        self._first_number = [1]  # one for all models
        self._opened_at = 0.0

    def of(self, model: str) -> OpenJournal:
        """Return the same open journal for another model; only this one is closed."""
        view = copy(self)
        view.model = model
        return view

    @property
    def first_number(self) -> int:
        """Examples from this one on are kept."""
        return self._first_number[0]

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def facts(self) -> JournalFacts:
        """Facts read from the journal when it was opened."""
        assert self._facts is not None  # it is opened first
        return self._facts

    @property
    def clock_s(self) -> float:
        """Seconds for which learners have had the journal open, this one included."""
        return self.facts.clock_s + asyncio.get_running_loop().time() - self._opened_at

    async def open(self) -> None:
        """Open it; closed again if that fails."""
        try:
            self._facts = await self._lane.run(self._file.open)
            self._first_number[0] = self.facts.first_number
        except BaseException:
            await self.aclose()
            raise
        self._opened_at = asyncio.get_running_loop().time()

    async def append(self, entries: Sequence[Entry], waiting: Sequence[Waiting]) -> Appended:
        return await self._lane.run(self._file.append, entries, self.clock_s, waiting)

    async def offset(self, source: str) -> str | None:
        return await self._lane.run(self._file.read, offset, source)

    async def taken_before(self, key: str, size: int) -> int | None:
        """Return the first of so many numbers that older programs took with a key, or None."""
        since = self.clock_s - self._keep_keys_s
        found = await self._lane.run(self._file.read, known, key, since)
        if not found or self._spec_version_of(found[0][1] + size - 1) == self._schema.version:
            return None
        return int(found[0][1])

    async def waiting(self, name: str) -> Waiting | None:
        return await self._lane.run(self._file.waiting, name, self.clock_s)

    async def skip_versions(self, learned: int, version: int) -> int:
        return await self._lane.run(self._file.skip_versions, learned, version, self.model)

    async def rows(self, after: int, limit: int) -> list[Row]:
        return await self._lane.run(self._file.rows, after, limit, self.model)

    def example_of(self, row: Row) -> Tree:
        """Return the example of a row, as the program has it now.

        Raises:
            JournalError: If it is of an older spec version, and cannot be migrated.
            ValueError: If it is damaged.
        """
        return self.migrated(row.number, unpack_example(row.body))

    def migrated(self, number: int, example: object) -> Tree:
        """Return an example that was taken as a number, as the program has it now; as above."""
        version = self._spec_version_of(number)
        return self._schema.example(example, version, f"Example {number} in {self._path}")

    def _spec_version_of(self, number: int) -> int:
        if number > self.facts.last_number:
            return self._schema.version
        return max((own for own, first in self.facts.specs.items() if first <= number), default=1)

    async def try_migrations(self, after: int, to: int) -> None:
        """Migrate all examples from a number to another one, and forget what comes of it.

        Raises:
            JournalError: If that fails for one of them.
        """
        own = self.facts.specs.get(self._schema.version, self.facts.last_number + 1)
        while after < min(to, own - 1) and self._spec_version_of(after + 1) < self._schema.version:
            rows = await self.rows(after, TRIED_AT_ONCE)
            for row in rows:
                self.example_of(row)
            after = rows[-1].number if rows else to

    async def set_aside(self, letters: Sequence[Dead]) -> None:
        await self._lane.run(self._file.set_aside, letters, self.model)

    async def discard(self, number: int) -> bool:
        return await self._lane.run(self._file.discard, number, self.model)

    async def take_back(self, numbers: Sequence[int]) -> list[int]:
        return await self._lane.run(self._file.take_back, numbers, self.model)

    async def roll_back(self, base: int, to: int, skip: Sequence[int]) -> tuple[Rollback, ...]:
        return await self._lane.run(self._file.roll_back, base, to, skip, time(), self.model)

    async def rollbacks(self) -> tuple[Rollback, ...]:
        return await self._lane.run(self._file.rollbacks, self.model)

    async def without_rows(self, numbers: Sequence[int]) -> list[int]:
        return await self._lane.run(self._file.read, without_rows, numbers)

    async def compact(self, numbers: Sequence[int]) -> None:
        first = await self._lane.run(self._file.compact, numbers, self.clock_s, self.model)
        self._first_number[0] = first

    async def dead_letters(self, after: int, limit: int, before: int | None) -> list[DeadLetter]:
        return await self._lane.run(self._file.dead_letters, after, limit, before, self.model)

    async def fates(self, numbers: Sequence[int]) -> dict[int, int | str]:
        return await self._lane.run(self._file.fates, numbers, self.model)

    async def consumers(self) -> dict[str, Consumer]:
        return await self._lane.run(self._file.consumers)

    async def champion(self) -> str:
        return await self._lane.run(self._file.champion)

    async def attach(self, number: int) -> None:
        await self._lane.run(self._file.attach, self.model, number, time())

    async def detach(self, why: str) -> None:
        await self._lane.run(self._file.detach, self.model, why)

    async def promote(self, learned: int, version: int) -> None:
        await self._lane.run(self._file.promote, self.model, learned, version)

    async def aclose(self) -> None:
        """Close the file and end the thread, through every cancellation."""
        clock_s = None if self._facts is None else self.clock_s
        op = self._lane.run(self._file.close, clock_s)
        op.put()
        try:
            await wait_until_done(op, through_interrupt=True)
            op.result()
        finally:
            self._lane.close()


@final
class DeadLetters:
    """Keeps what was set aside.

    Attributes:
        num_added: How many were set aside.
    """

    def __init__(self, journal: OpenJournal | None) -> None:
        self.num_added = 0
        self._journal = journal
        self._kept: deque[DeadLetter] = deque(maxlen=KEPT_IN_MEMORY)  # without a journal
        self._unsaved: list[Dead] = []
        self._num_commits = 0  # of the journal, when it was looked at last

    def take_over(self, other: DeadLetters) -> None:
        """Take what an earlier opening keeps in memory, or has not written down."""
        self._kept, self._unsaved = other._kept, other._unsaved

    async def add(self, number: int, example: object, error: str) -> None:
        """Set an example aside. If the journal cannot be written, `save` tries again."""
        self.num_added += 1
        if self._journal is None:
            self._kept.append(DeadLetter(number, example, error, time()))
            return
        self._unsaved.append(Dead(number, error, time()))
        await self.save()

    async def save(self) -> str:
        """Write down what is not yet; return why that failed, "" if it did not."""
        if self._unsaved and self._journal is not None:
            try:
                await self._journal.set_aside(self._unsaved)
            except JournalError as error:
                return str(error)
            self._unsaved = []
        return ""

    async def try_again(self, num_commits: int) -> None:
        """Write down what is not yet, if the journal has taken more commits by now."""
        if num_commits != self._num_commits:
            self._num_commits = num_commits
            await self.save()

    async def fates(self, numbers: Sequence[int]) -> dict[int, int | str]:
        """Return what became of examples, see `JournalFile.fates`, written down or not.

        Raises:
            JournalError: If the journal cannot be read.
        """
        assert self._journal is not None  # or there are no numbers to ask for
        found = await self._journal.fates(numbers)
        unsaved: dict[int | str, str] = {each.number: each.error for each in self._unsaved}
        for number in numbers:
            now = found.get(number, number)
            found[number] = unsaved.get(now, now)
        return found

    async def take_back(self, numbers: Sequence[int]) -> set[int]:
        """Make examples of dead letters again; return the numbers of those that still were.

        Raises:
            JournalError: If that failed; they are dead letters then.
        """
        if self._journal is None:
            found = {letter.number for letter in self._kept} & {*numbers}
            kept = (each for each in self._kept if each.number not in found)
            self._kept = deque(kept, KEPT_IN_MEMORY)
            return found
        found = {letter.number for letter in self._unsaved} & {*numbers}
        found |= {*await self._journal.take_back(numbers)}
        self._unsaved = [each for each in self._unsaved if each.number not in found]
        return found

    async def list(
        self, after: int, limit: int, before: int | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return those behind a number, or the last ones before another one, in order."""
        if self._journal is not None:
            return tuple(await self._journal.dead_letters(after, limit, before))
        found = [each for each in self._kept if each.number > after]
        if before is None:
            return tuple(found[:limit])
        found = [each for each in found if each.number < before]
        return tuple(found[max(0, len(found) - limit) :])

    async def find(self, number: int) -> DeadLetter:
        """Return one; KeyError if there is none of that number."""
        found = await self.list(number - 1, 1)
        if not found or found[0].number != number:
            raise KeyError(number)
        return found[0]

    async def discard(self, number: int) -> None:
        """Delete one; KeyError if there is none of that number."""
        if self._journal is None:
            self._kept.remove(await self.find(number))
        elif not await self._journal.discard(number):
            raise KeyError(number)


def checked_count(name: str, value: Any) -> int:
    """Return a count of at least 1; ValueError or TypeError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return value


def checked_seconds(name: str, value: object) -> float:
    """Return a finite number of seconds, not negative; ValueError or TypeError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}.")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}.")
    return float(value)
