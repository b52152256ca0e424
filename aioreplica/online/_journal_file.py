"""The journal: an SQLite file of the examples that were taken, in the order they are learned.

All calls of an open journal block and are made on one thread.

Invariants:
    * Numbers ascend by one, and none is used twice, not even after rows were deleted.
    * What `append` returned is durable: `COMMIT` returns behind the fsync of the write-ahead log.
    * After a failed write the connection is given up: a new one reads what the file really has.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from ..checkpoint import FileLock
from ..errors import JournalError, KeyReusedError
from ._example import pack_example, unpack_example
from ._records import DeadLetter

APPLICATION_ID = 0x61724F6C  # "arOl"
VERSION = 1
CLEAN_EVERY = 256
"""After so many commits old keys are deleted."""

_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE examples (number INTEGER PRIMARY KEY, crc32 INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE dead (
    number INTEGER PRIMARY KEY, crc32 INTEGER NOT NULL, body BLOB NOT NULL, error TEXT NOT NULL,
    time REAL NOT NULL
);
CREATE TABLE keys (
    key TEXT PRIMARY KEY, digest BLOB NOT NULL, first INTEGER NOT NULL, clock_s REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX keys_by_clock ON keys (clock_s);
PRAGMA user_version = {VERSION};
PRAGMA application_id = {APPLICATION_ID};
"""


class Entry(NamedTuple):
    """One submission, to be appended.

    Attributes:
        examples: As `as_example` gives them.
        key: Its idempotency key.
        revived: The dead letter that it takes the place of.
    """

    examples: Sequence[Any]
    key: str | None = None
    revived: int | None = None


class Row(NamedTuple):
    """An example in the journal."""

    number: int
    body: bytes


class Dead(NamedTuple):
    """An example that is set aside."""

    number: int
    body: bytes
    error: str
    time: float


class Appended(NamedTuple):
    """Outcome of submissions.

    Attributes:
        results: For each the number of its first example and whether that was known; or an error.
        strays: Rows that are in the file although writing them had failed. They come before.
    """

    results: list[tuple[int, bool] | KeyReusedError | KeyError]
    strays: list[Row]


@final
@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Facts of an open journal.

    Attributes:
        id: Drawn when it was made.
        first_number: Rows before it may have been deleted.
        last_number: The newest number.
        clock_s: How many seconds learners have had it open.
    """

    id: str
    first_number: int
    last_number: int
    clock_s: float


@final
class JournalFile:
    """The file of a `Journal`; locked from `open` to `close`.

    The arguments are those of `Journal`.
    """

    def __init__(
        self, path: Path, keep_keys_s: float, busy_timeout_s: float, connect: Callable[..., Any]
    ) -> None:
        self._path = Path(os.path.realpath(path))  # or a link would have a lock of its own
        self._keep_keys_s = keep_keys_s
        self._busy_timeout_s = busy_timeout_s
        self._connect = connect
        self._connection: Any = None  # Any: a sqlite3.Connection, or what stands for one
        self._lock: FileLock | None = None
        self._last = 0
        self._num_commits = 0

    # ---- opening -------------------------------------------------------------------------

    def open(self) -> JournalFacts:
        """Lock the file and look into it, or make it; blocks.

        Raises:
            JournalError: If it is in use, damaged, no journal, or cannot be made.
        """
        try:
            self._lock = _locked(self._path)
            with self._told("opened"):
                self._connection = self._connected()
                found = self._run("PRAGMA quick_check(1)")
                if found != [("ok",)]:
                    raise JournalError(
                        f"The journal {self._path} is damaged: {found[0][0]}. Restore it from a "
                        "copy, or move it away to begin a new one; what it holds is then not "
                        "learned."
                    )
                self._last = self._last_in_file()
                facts = dict(self._run("SELECT name, value FROM facts"))
        except BaseException:
            self.close()
            raise
        return JournalFacts(
            str(facts["id"]), int(facts["first"]), self._last, float(facts["clock_s"])
        )

    def _connected(self) -> Any:
        connection = self._connect(
            str(self._path),
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            [[mode]] = connection.execute("PRAGMA journal_mode = WAL")
            if mode != "wal":
                raise JournalError(
                    f"The file system of {self._path} has no write-ahead log for SQLite (it gives "
                    f"mode {mode!r}). Put the journal on a local disk."
                )
            for setting in ("synchronous = FULL", "fullfsync = ON"):
                list(connection.execute(f"PRAGMA {setting}"))
            [[application]] = connection.execute("PRAGMA application_id")
            [[tables]] = connection.execute("SELECT count(*) FROM sqlite_schema")
            [[version]] = connection.execute("PRAGMA user_version")
            if application != APPLICATION_ID and tables:
                raise JournalError(
                    f"{self._path} is an SQLite file but not a journal. Give the journal a path of "
                    "its own."
                )
            if tables and version != VERSION:
                raise JournalError(
                    f"The journal {self._path} has version {version} of the format, this release "
                    f"reads version {VERSION}. Open it with the release that wrote it."
                )
            if not tables:
                self._make(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self, connection: Any) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            if statement.strip():
                connection.execute(statement)
        facts = {"id": secrets.token_hex(16), "first": 1, "last": 0, "clock_s": 0.0}
        connection.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
        connection.execute("COMMIT")

    def _last_in_file(self) -> int:
        [[number]] = self._run(
            "SELECT max(value, (SELECT coalesce(max(number), 0) FROM examples)) FROM facts "
            "WHERE name = 'last'"
        )
        return int(number)

    def close(self, clock_s: float | None = None) -> None:
        """Close the file and give the lock back; blocks. Idempotent.

        Args:
            clock_s: Kept, if it is given and the file can be written.
        """
        if clock_s is not None and self._connection is not None:
            with suppress(JournalError), self._writing("closed"):
                self._remember_clock(clock_s)
        self._drop()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    # ---- writing -------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], clock_s: float) -> Appended:
        """Append submissions in one transaction; when it returns they are durable. Blocks.

        Raises:
            JournalError: If nothing was appended, as far as is known.
        """
        with self._writing("written"):
            strays = self._rows(self._last, None)
            last = strays[-1].number if strays else self._last
            results: list[tuple[int, bool] | KeyReusedError | KeyError] = []
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
    ) -> tuple[int, bool] | KeyReusedError | KeyError | None:
        """Look a submission's key up; return what is known of it, or remember it for `number`."""
        if entry.revived is not None and not self._take_out(entry.revived):
            return KeyError(entry.revived)
        if entry.key is None:
            return None
        own = _digest(bodies)
        known = self._run(
            "SELECT digest, first FROM keys WHERE key = ? AND clock_s >= ?",
            entry.key,
            clock_s - self._keep_keys_s,
        )
        if known:
            [(digest, first)] = known
            if bytes(digest) == own:
                return int(first), True
            return KeyReusedError(
                f"The key {entry.key!r} came with another example before, as number {first}. Use "
                "a new key for each example.",
                key=entry.key,
            )
        insert = "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)"
        self._run(insert, entry.key, own, number, clock_s)
        return None

    def _remember_clock(self, clock_s: float) -> None:
        self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'clock_s'", clock_s)
        self._num_commits += 1
        if self._num_commits % CLEAN_EVERY == 0:
            self._clean(clock_s)

    def _clean(self, clock_s: float) -> None:
        self._run("DELETE FROM keys WHERE clock_s < ?", clock_s - self._keep_keys_s)

    def set_aside(self, letters: Sequence[Dead]) -> None:
        """Make dead letters of examples; durable when it returns. Blocks.

        Raises:
            JournalError: If that failed.
        """
        with self._writing("written"):
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
        with self._writing("written"):
            return self._take_out(number)

    def _take_out(self, number: int) -> bool:
        """Delete a dead letter, and its row: without the letter a restart would learn that."""
        found = bool(self._run("SELECT 1 FROM dead WHERE number = ?", number))
        self._run("DELETE FROM dead WHERE number = ?", number)
        if found:
            self._remember_last()
            self._run("DELETE FROM examples WHERE number = ?", number)
        return found

    def skip_versions(self, learned: int, version: int) -> int:
        """Return a version behind all that may have been published; blocks.

        Each has an example of its own, so the fact "ahead" bounds version minus newest number.

        Raises:
            JournalError: If that could not be written down.
        """
        with self._writing("written"):
            known = self._run("SELECT value FROM facts WHERE name = 'ahead'")
            ahead = max([version - learned, *(int(value) for (value,) in known)])
            first = self._last + ahead
            self._run("INSERT OR REPLACE INTO facts VALUES ('ahead', ?)", first - learned)
        return first

    def _remember_last(self) -> None:
        """Keep the newest number, as its row may go."""
        self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'last'", self._last)

    def compact(self, number: int, clock_s: float) -> None:
        """Delete examples up to a number, which is used up then, and keys too old. Blocks.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        with self._writing("compacted"):
            last = max(self._last, number)
            self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'last'", last)
            self._run("DELETE FROM examples WHERE number <= ?", number)
            self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'first'", number + 1)
            self._remember_clock(clock_s)
            self._clean(clock_s)
        self._last = last

    # ---- reading -------------------------------------------------------------------------

    def rows(self, after: int, limit: int) -> list[Row]:
        """Return examples behind a number that are not dead letters, in order; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._told("read"):
            self._reopen()
            return self._rows(after, limit)

    def _rows(self, after: int, limit: int | None) -> list[Row]:
        found = self._run(
            "SELECT number, crc32, body FROM examples WHERE number > ? AND number NOT IN "
            "(SELECT number FROM dead) ORDER BY number LIMIT ?",
            after,
            -1 if limit is None else limit,
        )
        return [Row(number, self._checked(number, crc32, body)) for number, crc32, body in found]

    def _checked(self, number: int, crc32: int, body: bytes) -> bytes:
        if zlib.crc32(body) != crc32:
            raise JournalError(
                f"Example {number} in the journal {self._path} is damaged: its checksum does not "
                "fit. Restore the journal from a copy, or delete the row to go on without it."
            )
        return bytes(body)

    def dead_letters(self, after: int, limit: int) -> list[DeadLetter]:
        """Return dead letters behind a number; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._told("read"):
            self._reopen()
            found = self._run(
                "SELECT number, crc32, body, error, time FROM dead WHERE number > ? "
                "ORDER BY number LIMIT ?",
                after,
                limit,
            )
            return [
                DeadLetter(number, unpack_example(self._checked(number, crc32, body)), error, time)
                for number, crc32, body, error, time in found
            ]

    def dead_numbers(self, numbers: Sequence[int]) -> dict[int, str]:
        """Return which of some examples are dead letters, and their errors; blocks.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._told("read"):
            self._reopen()
            return {
                number: str(error)
                for number in numbers
                for (error,) in self._run("SELECT error FROM dead WHERE number = ?", number)
            }

    # ---- the connection ------------------------------------------------------------------

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self._connection.execute(statement, values))

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Make the block one durable transaction, or give the connection up."""
        with self._told(what):
            self._reopen()
            try:
                self._run("BEGIN IMMEDIATE")
                yield
                self._run("COMMIT")
            except BaseException:
                with suppress(Exception):
                    self._connection.execute("ROLLBACK")
                self._drop()
                raise

    def _reopen(self) -> None:
        if self._lock is None:
            raise JournalError(f"The journal {self._path} is closed.")
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
                f"The journal {self._path} could not be {what}: {error} ({name}). {_advice(name)}"
            ) from error


def _digest(bodies: Sequence[bytes]) -> bytes:
    made = hashlib.sha256()
    for body in bodies:
        made.update(len(body).to_bytes(8, "little") + body)
    return made.digest()


def _advice(name: str) -> str:
    if "FULL" in name or "IOERR" in name:
        return "Make room on the disk, or look after it; submissions may be tried again."
    if "BUSY" in name or "LOCKED" in name:
        return "Another program has locked it; submissions may be tried again."
    if "CORRUPT" in name or "NOTADB" in name:
        return (
            "It is damaged, or no journal. Restore it from a copy, or move it away to begin a "
            "new one; what it holds is then not learned."
        )
    return "Look at the path and its permissions."


def _locked(path: Path) -> FileLock:
    """Return a lock beside the journal.

    Raises:
        JournalError: If a learner has it, or it cannot be made.
    """
    try:
        return FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as error:
        raise JournalError(
            f"The journal {path} is in use: a learner of {error.strerror} has it open. Close it, "
            "or give each learner a journal of its own."
        ) from None
    except OSError as error:
        raise JournalError(
            f"The journal {path} cannot be opened: {error}. Make its folder, let the process write "
            "there, or put it on a local disk with room."
        ) from error
