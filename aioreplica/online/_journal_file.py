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
NO_ROOM = {"SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_SHMOPEN", "SQLITE_FULL"}
"""Errors of a disk that has no room for the index of the log, 32 KiB."""
MAX_NUMBER = 2**63 - 1  # of SQLite
MOVED = "moved "
"""Begin of the facts that say what has taken a dead letter's place."""
_FORGET_MOVES = f"""
DELETE FROM facts WHERE name GLOB '{MOVED}*' AND CAST(substr(name, {len(MOVED) + 1}) AS INTEGER)
< (SELECT coalesce(min(first), 9e18) FROM keys)
"""
MAX_MOVES = 1000
"""Times that an example which is retried and fails again is followed."""
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


_LAST = """
SELECT max(value, (SELECT coalesce(max(number), 0) FROM examples)) FROM facts WHERE name = 'last'
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
        self._is_exclusive = False
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
                [[self._last]] = self._run(_LAST)
                facts = dict(self._run("SELECT name, value FROM facts"))
        except BaseException:
            self.close()
            raise
        return JournalFacts(
            str(facts["id"]), int(facts["first"]), self._last, float(facts["clock_s"])
        )

    def _connected(self) -> Any:
        try:
            return self._connected_with(is_exclusive=False)
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") not in NO_ROOM:
                raise
            # What it holds can be read all the same: the index of its log is in memory then, and
            # other programs wait, until it can be written again.
            return self._connected_with(is_exclusive=True)

    def _connected_with(self, *, is_exclusive: bool) -> Any:
        connection = self._connect(
            str(self._path),
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        _prepare(connection, self._path, is_exclusive=is_exclusive)
        self._is_exclusive = is_exclusive
        return connection

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
        if entry.revived is not None and not self._take_out(entry.revived, number):
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
        self._run(_FORGET_MOVES)

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

    def take_back(self, numbers: Sequence[int]) -> list[int]:
        """Delete dead letters and keep their rows, which are learned then; blocks.

        Returns:
            The numbers of those that were there.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        select, delete = (f"{verb} FROM dead WHERE number = ?" for verb in ("SELECT 1", "DELETE"))
        with self._writing("written"):
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
        return [
            Row(number, _checked(self._path, number, crc32, body)) for number, crc32, body in found
        ]

    def dead_letters(self, after: int, limit: int, before: int | None = None) -> list[DeadLetter]:
        """Return dead letters behind a number, or the last ones before another one; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._told("read"):
            self._reopen()
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

    def fates(self, numbers: Sequence[int]) -> dict[int, int | str]:
        """Return what became of those examples that are not as they were; blocks.

        Returns:
            The error of a dead letter; or the number that a dead letter was taken again as, 0 if it
            was discarded.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._told("read"):
            self._reopen()
            found = {number: _fate(self._run, number) for number in numbers}
            return {number: fate for number, fate in found.items() if fate is not None}

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
            if self._is_exclusive:
                self._drop()

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


def _prepare(connection: Any, path: Path, *, is_exclusive: bool) -> None:
    """Set a new connection up, and make the tables if there are none; closed if that fails."""
    try:
        if is_exclusive:
            list(connection.execute("PRAGMA locking_mode = EXCLUSIVE"))
        [[mode]] = connection.execute("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise JournalError(
                f"The file system of {path} has no write-ahead log for SQLite (it gives "
                f"mode {mode!r}). Put the journal on a local disk."
            )
        for setting in ("synchronous = FULL", "fullfsync = ON"):
            list(connection.execute(f"PRAGMA {setting}"))
        [[application]] = connection.execute("PRAGMA application_id")
        [[tables]] = connection.execute("SELECT count(*) FROM sqlite_schema")
        [[version]] = connection.execute("PRAGMA user_version")
        if application != APPLICATION_ID and tables:
            raise JournalError(
                f"{path} is an SQLite file but not a journal. Give the journal a path of its own."
            )
        if tables and version != VERSION:
            raise JournalError(
                f"The journal {path} has version {version} of the format, this release "
                f"reads version {VERSION}. Open it with the release that wrote it."
            )
        if not tables:
            _make(connection)
    except BaseException:
        connection.close()
        raise


def _make(connection: Any) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            connection.execute(statement)
    facts = {"id": secrets.token_hex(16), "first": 1, "last": 0, "clock_s": 0.0}
    connection.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
    connection.execute("COMMIT")


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
