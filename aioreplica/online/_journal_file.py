"""The journal: an SQLite file of the examples that were taken, in the order they are learned.

All calls of an open journal block and are made on one thread.

Invariants:
    * Numbers ascend by one, and none is used twice, not even after rows were deleted.
    * What `append` returned is durable: `COMMIT` returns behind the fsync of the write-ahead log.
    * After a failed write the connection is given up: a new one reads what the file really has.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from ..checkpoint import FileLock
from ..errors import AioReplicaError, JournalError
from ._example import pack_example, unpack_example
from ._journal_format import (
    NO_ROOM,
    Appended,
    Dead,
    Entry,
    JournalFacts,
    Rollback,
    Row,
    Waiting,
    advice_for,
    locked,
    prepare,
)
from ._journal_keys import MOVED, Keeping, advance, claimed, find, forget, keep, offset
from ._records import DeadLetter

MAX_NUMBER = 2**63 - 1  # of SQLite
MAX_MOVES = 1000
"""Times that an example which is retried and fails again is followed."""
CLEAN_EVERY = 256
"""After so many commits old keys are deleted."""

_LAST = """
SELECT max(value, (SELECT coalesce(max(number), 0) FROM examples)) FROM facts WHERE name = 'last'
"""


@final
class JournalFile:
    """The file of a `Journal`; locked from `open` to `close`.

    The arguments are those of `Journal`.
    """

    def __init__(
        self,
        path: Path,
        keeping: Keeping,
        busy_timeout_s: float,
        connect: Callable[..., object],
        max_bytes: int | None,
    ) -> None:
        self._database = database = _JournalDatabase(path, busy_timeout_s, connect)
        self._path = database.path
        self._run = database.run
        self._keeping = keeping
        self._max_bytes = max_bytes
        self._last = 0
        self._num_commits = 0

    # ---- opening -------------------------------------------------------------------------

    def open(self) -> JournalFacts:
        """Lock the file and look into it, or make it; blocks.

        Raises:
            JournalError: If it is in use, damaged, no journal, or cannot be made.
        """
        try:
            with self._database.opening():
                [[self._last]] = self._run(_LAST)
                facts = dict(self._run("SELECT name, value FROM facts"))
                rollbacks = self._rollbacks()
        except BaseException:
            self.close()
            raise
        return JournalFacts(
            str(facts["id"]),
            int(facts["first"]),
            self._last,
            float(facts["clock_s"]),
            rollbacks,
        )

    def close(self, clock_s: float | None = None) -> None:
        """Close the file and give the lock back; blocks. Idempotent.

        Args:
            clock_s: Kept, if it is given and the file can be written.
        """
        if clock_s is not None and self._database.is_connected:
            with suppress(JournalError), self._database.writing("closed"):
                self._remember_clock(clock_s)
        self._database.close()

    # ---- writing -------------------------------------------------------------------------

    def append(
        self, entries: Sequence[Entry], clock_s: float, waiting: Sequence[Waiting] = ()
    ) -> Appended:
        """Append submissions in one transaction; when it returns they are durable. Blocks.

        Args:
            entries: The submissions.
            clock_s: The time.
            waiting: Predictions that labels of the same or later submissions may ask for.

        Raises:
            JournalError: If nothing was appended, as far as is known.
        """
        with self._database.writing("written"):
            strays = self._rows(self._last, None)
            last = strays[-1].number if strays else self._last
            if waiting:
                keep(self._run, waiting, clock_s)
            results: list[tuple[int, bool] | AioReplicaError | KeyError] = []
            for entry in entries:
                bodies = list(map(pack_example, entry.examples))
                refusal = self._refusal(entry, bodies, last + 1, clock_s)
                if refusal is not None:
                    results.append(refusal)
                    continue
                results.append((last + 1, False))
                for body in bodies:
                    last += 1
                    self._run("INSERT INTO examples VALUES (?, ?, ?)", last, zlib.crc32(body), body)
            self._remember_clock(clock_s)
        self._last = last
        return Appended(results, strays)

    def _refusal(
        self, entry: Entry, bodies: Sequence[bytes], number: int, clock_s: float
    ) -> tuple[int, bool] | AioReplicaError | KeyError | None:
        """Return why nothing is appended for a submission, or remember it as that of `number`."""
        if entry.revived is not None and not self._take_out(entry.revived, number):
            return KeyError(entry.revived)
        if entry.progress is not None:
            return advance(self._run, entry.progress)
        if entry.key is None and entry.label is None:
            return None
        return claimed(self._run, self._keeping, entry, bodies, number, clock_s)

    def _remember_clock(self, clock_s: float) -> None:
        self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'clock_s'", clock_s)
        self._num_commits += 1
        if self._num_commits % CLEAN_EVERY == 0:
            forget(self._run, self._keeping, clock_s)

    def set_aside(self, letters: Sequence[Dead]) -> None:
        """Make dead letters of examples; durable when it returns. Blocks.

        Raises:
            JournalError: If that failed.
        """
        with self._database.writing("written"):
            for number, body, error, time in letters:
                self._run(
                    "INSERT OR REPLACE INTO dead VALUES (?, ?, ?, ?, ?)",
                    number,
                    zlib.crc32(body),
                    body,
                    error,
                    time,
                )

    def discard(self, number: int) -> bool:
        """Delete a dead letter; return whether there was one. Blocks.

        Raises:
            JournalError: If that failed.
        """
        with self._database.writing("written"):
            return self._take_out(number)

    def take_back(self, numbers: Sequence[int]) -> list[int]:
        """Delete dead letters and keep their rows, which are learned then; blocks.

        Returns:
            The numbers of those that were there.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        select, delete = (f"{verb} FROM dead WHERE number = ?" for verb in ("SELECT 1", "DELETE"))
        with self._database.writing("written"):
            found = [number for number in numbers if self._run(select, number)]
            for number in found:
                self._run(delete, number)
        return found

    def _take_out(self, number: int, successor: int = 0) -> bool:
        """Delete a dead letter, and its row: without the letter a restart would learn that.

        Its key may be known still, so the number that has taken its place is kept; 0 for none.
        """
        found = bool(self._run("SELECT 1 FROM dead WHERE number = ?", number))
        self._run("DELETE FROM dead WHERE number = ?", number)
        if found:
            self._remember_last()
            self._run("DELETE FROM examples WHERE number = ?", number)
            fact = f"{MOVED}{number}"
            self._run("INSERT OR REPLACE INTO facts VALUES (?, ?)", fact, successor)
        return found

    def skip_versions(self, learned: int, version: int) -> int:
        """Return a version behind all that may have been published; blocks.

        Each has an example of its own, so the fact "ahead" bounds version minus newest number.

        Raises:
            JournalError: If that could not be written down.
        """
        with self._database.writing("written"):
            known = self._run("SELECT value FROM facts WHERE name = 'ahead'")
            ahead = max([version - learned, *(int(value) for (value,) in known)])
            first = self._last + ahead
            self._run("INSERT OR REPLACE INTO facts VALUES ('ahead', ?)", first - learned)
        return first

    def roll_back(self, to: int, skip: Sequence[int], time: float) -> tuple[Rollback, ...]:
        """Begin a generation, and make dead letters of examples, in one transaction; blocks.

        Args:
            to: What was learned behind this number counts no more.
            skip: Examples that are not to be learned again; dead letters stay as they are.
            time: When, in seconds since the epoch.

        Returns:
            All rollbacks.

        Raises:
            JournalError: If nothing was changed, as far as is known.
        """
        with self._database.writing("rolled back"):
            for number in skip:
                self._run(
                    "INSERT OR IGNORE INTO dead SELECT number, crc32, body, ?, ? FROM examples "
                    "WHERE number = ?",
                    f"Left out by the rollback to {to}",
                    time,
                    number,
                )
            self._run(
                "INSERT INTO rollbacks SELECT coalesce(max(generation), 0) + 1, ?, ? "
                "FROM rollbacks",
                to,
                time,
            )
            return self._rollbacks()

    def rollbacks(self) -> tuple[Rollback, ...]:
        """Return the rollbacks that the file really has; blocks.

        Raises:
            JournalError: If it cannot be read.
        """
        with self._database.reading():
            return self._rollbacks()

    def _rollbacks(self) -> tuple[Rollback, ...]:
        rows = self._run("SELECT generation, rolled_to FROM rollbacks ORDER BY generation")
        return tuple(itertools.starmap(Rollback, rows))

    def _remember_last(self) -> None:
        """Keep the newest number, as its row may go."""
        self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'last'", self._last)

    def compact(self, numbers: Sequence[int], clock_s: float) -> int:
        """Delete examples that no checkpoint needs, and keys too old; blocks.

        Args:
            numbers: Those of the checkpoints, ascending. What the first of them has learned goes,
                and what later ones have as long as there is more than `max_bytes`; the last one
                is used up then, too.
            clock_s: The time.

        Returns:
            The number from which on examples are kept.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        with self._database.writing("compacted"):
            number = self._compaction_to(numbers)
            last = max(self._last, numbers[-1])
            self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'last'", last)
            self._run("DELETE FROM examples WHERE number <= ?", number)
            self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'first'", number + 1)
            self._remember_clock(clock_s)
            forget(self._run, self._keeping, clock_s)
            [[first]] = self._run("SELECT value FROM facts WHERE name = 'first'")
        self._last = last
        return int(first)

    def _compaction_to(self, numbers: Sequence[int]) -> int:
        behind = "SELECT coalesce(sum(length(body)), 0) FROM examples WHERE number > ?"
        for number in numbers[:-1]:
            if self._max_bytes is None or self._run(behind, number)[0][0] <= self._max_bytes:
                return number
        return numbers[-1]

    # ---- reading -------------------------------------------------------------------------

    def without_rows(self, numbers: Sequence[int]) -> list[int]:
        """Return those of some numbers that have no example in the file; blocks.

        Raises:
            JournalError: If it cannot be read.
        """
        with self._database.reading():
            select = "SELECT 1 FROM examples WHERE number = ?"
            return [number for number in numbers if not self._run(select, number)]

    def rows(self, after: int, limit: int) -> list[Row]:
        """Return examples behind a number that are not dead letters, in order; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._database.reading():
            return self._rows(after, limit)

    def _rows(self, after: int, limit: int | None) -> list[Row]:
        found = self._run(
            "SELECT number, crc32, body FROM examples WHERE number > ? AND number NOT IN "
            "(SELECT number FROM dead) ORDER BY number LIMIT ?",
            after,
            -1 if limit is None else limit,
        )
        return [
            Row(number, _checked(self._path, number, crc32, body)) for number, crc32, body in found
        ]

    def dead_letters(self, after: int, limit: int, before: int | None = None) -> list[DeadLetter]:
        """Return dead letters behind a number, or the last ones before another one; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._database.reading():
            found = self._run(
                "SELECT number, crc32, body, error, time FROM dead WHERE number > ? AND number < ? "
                f"ORDER BY number {'ASC' if before is None else 'DESC'} LIMIT ?",
                after,
                MAX_NUMBER if before is None else before,
                limit,
            )
            return [
                DeadLetter(
                    number, unpack_example(_checked(self._path, number, crc32, body)), error, time
                )
                for number, crc32, body, error, time in sorted(found)
            ]

    def waiting(self, name: str, clock_s: float) -> Waiting | None:
        """Return a prediction that waits for its label; None if there is none. Blocks.

        Raises:
            JournalError: If it is damaged, or the file cannot be read.
        """
        with self._database.reading():
            return find(self._run, self._keeping, self._path, name, clock_s)

    def offset(self, source: str) -> str | None:
        """Return how far a source was read, None if it never was; blocks.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._database.reading():
            return offset(self._run, source)

    def fates(self, numbers: Sequence[int]) -> dict[int, int | str]:
        """Return what became of those examples that are not as they were; blocks.

        Returns:
            The error of a dead letter; or the number that a dead letter was taken again as, 0 if it
            was discarded.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._database.reading():
            found = {number: _fate(self._run, number) for number in numbers}
            return {number: fate for number, fate in found.items() if fate is not None}


@final
class _JournalDatabase:
    """The SQLite file of a journal; locked from `opening` to `close`. Everything blocks.

    After a failed write the connection is given up: a new one reads what the file really has.

    Args:
        path: Where it is.
        busy_timeout_s: How long to wait for other programs that have locked it.
        connect: `sqlite3.connect`, or what stands for it.

    Attributes:
        path: The real one: a link has no lock of its own.
    """

    def __init__(self, path: Path, busy_timeout_s: float, connect: Callable[..., object]) -> None:
        self.path = Path(os.path.realpath(path))
        self._busy_timeout_s = busy_timeout_s
        self._connect = connect
        self._connection: Any = None  # Any: a sqlite3.Connection, or what stands for one
        self._is_exclusive = False
        self._lock: FileLock | None = None

    @property
    def is_connected(self) -> bool:
        """True if there is a connection now."""
        return self._connection is not None

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Lock the file, look whether it is whole, and read it in the block.

        Raises:
            JournalError: If it is in use, damaged, no journal, or cannot be made.
        """
        self._lock = locked(self.path)
        with self._told("opened"):
            self._connection = self._connected()
            found = self.run("PRAGMA quick_check(1)")
            if found != [("ok",)]:
                raise JournalError(
                    f"The journal {self.path} is damaged: {found[0][0]}. Restore it from a copy, "
                    "or move it away to begin a new one; what it holds is then not learned."
                )
            yield

    def close(self) -> None:
        """Close the file and give the lock back. Idempotent."""
        self._drop()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement inside a block of `reading` or `writing`; return its rows."""
        return list(self._connection.execute(statement, values))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the block read.

        Raises:
            JournalError: If that failed, or it is closed.
        """
        with self._told("read"):
            self._reopen()
            yield

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Make the block one durable transaction, or give the connection up.

        Args:
            what: Done to the journal, for the error.

        Raises:
            JournalError: If that failed, as far as is known, or it is closed.
        """
        with self._told(what):
            self._reopen()
            try:
                self.run("BEGIN IMMEDIATE")
                yield
                self.run("COMMIT")
            except BaseException:
                with suppress(Exception):
                    self._connection.execute("ROLLBACK")
                self._drop()
                raise
            if self._is_exclusive:
                self._drop()

    def _connected(self) -> object:
        try:
            return self._connected_with(is_exclusive=False)
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") not in NO_ROOM:
                raise
            # What it holds can be read all the same: the index of its log is in memory then, and
            # other programs wait, until it can be written again.
            return self._connected_with(is_exclusive=True)

    def _connected_with(self, *, is_exclusive: bool) -> object:
        connection = self._connect(
            str(self.path),
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        prepare(connection, self.path, is_exclusive=is_exclusive)
        self._is_exclusive = is_exclusive
        return connection

    def _reopen(self) -> None:
        if self._lock is None:
            raise JournalError(f"The journal {self.path} is closed.")
        if self._connection is None:
            self._connection = self._connected()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, MemoryError) as error:
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            raise JournalError(
                f"The journal {self.path} could not be {what}: {error} ({name}). {advice_for(name)}"
            ) from error


def _checked(path: Path, number: int, crc32: int, body: bytes) -> bytes:
    if zlib.crc32(body) != crc32:
        raise JournalError(
            f"Example {number} in the journal {path} is damaged: its checksum does not "
            "fit. Restore the journal from a copy, or delete the row to go on without it."
        )
    return bytes(body)


def _fate(run: Callable[..., list[tuple[Any, ...]]], number: int) -> int | str | None:
    """Return the error of a dead letter, what has taken its place, 0 for nothing; None if alive."""
    fate: int | str | None = None
    for _ in range(MAX_MOVES):
        moved = run("SELECT value FROM facts WHERE name = ?", f"{MOVED}{number}")
        if not moved:
            break
        fate = number = int(moved[0][0])
    dead = run("SELECT error FROM dead WHERE number = ?", number)
    return str(dead[0][0]) if dead else fate
