"""The database of a journal: its tables, version by version, and the connection to its file.

A journal of an older version gets what it lacks, in one transaction, when it is opened.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from ..checkpoint import FileLock
from ..errors import JournalError

APPLICATION_ID = 0x61724F6C  # "arOl"
NO_ROOM = {"SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_SHMOPEN", "SQLITE_FULL"}
"""Errors of a disk that has no room for the index of the log, 32 KiB."""

_VERSION_1 = f"""
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
PRAGMA application_id = {APPLICATION_ID};
"""

_VERSION_2 = """
CREATE TABLE rollbacks (
    generation INTEGER PRIMARY KEY, rolled_to INTEGER NOT NULL, time REAL NOT NULL
);
"""
_SCHEMAS = (_VERSION_1, _VERSION_2)
VERSION = len(_SCHEMAS)


@final
class JournalDatabase:
    """The SQLite file of a journal; locked from `opening` to `close`. Everything blocks.

    After a failed write the connection is given up: a new one reads what the file really has.

    Args:
        path: Where it is.
        busy_timeout_s: How long to wait for other programs that have locked it.
        connect: `sqlite3.connect`, or what stands for it.

    Attributes:
        path: The real one: a link has no lock of its own.
    """

    def __init__(self, path: Path, busy_timeout_s: float, connect: Callable[..., Any]) -> None:
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
        self._lock = _locked(self.path)
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
            str(self.path),
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        _prepare(connection, self.path, is_exclusive=is_exclusive)
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
                f"The journal {self.path} could not be {what}: {error} ({name}). {_advice(name)}"
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
        if tables and not 1 <= version <= VERSION:
            raise JournalError(
                f"The journal {path} has version {version} of the format, this release "
                f"reads versions 1 to {VERSION}. Open it with the release that wrote it."
            )
        if not tables or version < VERSION:
            _make(connection, version if tables else 0)
    except BaseException:
        connection.close()
        raise


def _make(connection: Any, version: int) -> None:
    """Make what the tables of a version lack, all or nothing; 0 has none."""
    connection.execute("BEGIN IMMEDIATE")
    for statements in _SCHEMAS[version:]:
        for statement in filter(str.strip, statements.split(";")):
            connection.execute(statement)
    if version == 0:
        facts = {"id": secrets.token_hex(16), "first": 1, "last": 0, "clock_s": 0.0}
        connection.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _advice(name: str) -> str:
    """Return what to do about an error of SQLite, by its name."""
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
