"""The format of a journal: its tables, version by version, their rows, and what opening one does.

A journal of an older version gets what it lacks, in one transaction, when it is opened.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from ..checkpoint import FileLock, LocalStorage
from ..errors import AioReplicaError, JournalError
from ..tree import Tree

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

_VERSION_3 = """
CREATE TABLE pending (
    id TEXT PRIMARY KEY, crc32 INTEGER NOT NULL, body BLOB NOT NULL, clock_s REAL NOT NULL
);
CREATE INDEX pending_by_clock ON pending (clock_s);
"""

_VERSION_4 = """
CREATE TABLE offsets (source TEXT PRIMARY KEY, read_to TEXT NOT NULL) WITHOUT ROWID;
"""

_VERSION_5 = ""
"""Reserved."""

MAX_NUMBER = 2**63 - 1
"""Of an example: the largest that a file can hold."""

MAIN = "main"
"""The model whose learner has the journal."""

_VERSION_6 = f"""
CREATE TABLE consumers (
    model TEXT PRIMARY KEY, kept_behind INTEGER NOT NULL, learned INTEGER NOT NULL, ahead INTEGER,
    least_version INTEGER NOT NULL, detached TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO consumers SELECT '{MAIN}', coalesce(max(value), 1) - 1, coalesce(max(value), 1) - 1,
    (SELECT max(value) FROM facts WHERE name = 'ahead'), 0, '' FROM facts WHERE name = 'first';
CREATE TABLE gone (
    model TEXT, number INTEGER, successor INTEGER NOT NULL, PRIMARY KEY (model, number)
) WITHOUT ROWID;
INSERT INTO gone SELECT '{MAIN}', CAST(substr(name, 7) AS INTEGER), value FROM facts
    WHERE name GLOB 'moved *';
DELETE FROM facts WHERE name = 'ahead' OR name GLOB 'moved *';
INSERT INTO facts VALUES ('champion', '{MAIN}');
ALTER TABLE dead RENAME TO dead_before;
CREATE TABLE dead (
    number INTEGER NOT NULL, crc32 INTEGER NOT NULL, body BLOB NOT NULL, error TEXT NOT NULL,
    time REAL NOT NULL, model TEXT NOT NULL, PRIMARY KEY (model, number)
);
INSERT INTO dead SELECT number, crc32, body, error, time, '{MAIN}' FROM dead_before;
DROP TABLE dead_before;
ALTER TABLE rollbacks RENAME TO rollbacks_before;
CREATE TABLE rollbacks (
    model TEXT, generation INTEGER, rolled_to INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (model, generation)
) WITHOUT ROWID;
INSERT INTO rollbacks SELECT '{MAIN}', generation, rolled_to, time FROM rollbacks_before;
DROP TABLE rollbacks_before;
"""
_SCHEMAS = (_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4, _VERSION_5, _VERSION_6)
VERSION = len(_SCHEMAS)


class Waiting(NamedTuple):
    """A prediction that waits for its label.

    Attributes:
        id: Its name.
        kept: "input", and "prediction" if that is kept too.
        spec_version: Of the program that has kept it.
    """

    id: str
    kept: Mapping[str, Tree]
    spec_version: int = 1


class Label(NamedTuple):
    """The label of a prediction."""

    id: str
    target: object


class Progress(NamedTuple):
    """An advance in a source.

    Attributes:
        source: Its name.
        after: The offset before.
        to: The offset of the last example.
    """

    source: str
    after: str | None
    to: str


class Entry(NamedTuple):
    """One submission, to be appended.

    Attributes:
        examples: As `as_example` gives them; none for a label whose prediction is not there.
        key: Its idempotency key.
        revived: The dead letter that it takes the place of, and whose it is: for that model alone.
        label: What it was made of, together with the prediction that goes.
        progress: The source that the examples come from.
    """

    examples: Sequence[Tree]
    key: str | None = None
    revived: tuple[str, int] | None = None
    label: Label | None = None
    progress: Progress | None = None


class Row(NamedTuple):
    """An example in the journal."""

    number: int
    body: bytes


class Dead(NamedTuple):
    """An example that is set aside."""

    number: int
    error: str
    time: float


class Appended(NamedTuple):
    """Outcome of submissions.

    Attributes:
        results: For each the number of its first example and whether that was known; or an error.
        strays: Rows that are in the file although writing them had failed. They come before.
        last: The number of the last one of these, for whichever model.
    """

    results: list[tuple[int, bool] | AioReplicaError | KeyError]
    strays: list[Row]
    last: int


class Rollback(NamedTuple):
    """Begin of a generation: what was learned behind a number before it counts no more.

    Attributes:
        generation: Its number; the first generation is 0, and no rollback has begun that.
        rolled_to: The number.
    """

    generation: int
    rolled_to: int


@final
@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Facts of an open journal.

    Attributes:
        id: Drawn when it was made.
        first_number: Rows before it may have been deleted.
        last_number: The newest number.
        clock_s: How many seconds learners have had it open.
        champion: The model that is served.
        rollbacks: See `Rollback`, in their order; those of the model that has opened it.
        specs: The first number from which on rows have a spec version, by that, ascending.
    """

    id: str
    first_number: int
    last_number: int
    clock_s: float
    champion: str
    rollbacks: tuple[Rollback, ...]
    specs: Mapping[int, int]


def prepare(connection: Any, path: Path, *, is_exclusive: bool, only_looks: bool = False) -> None:
    """Set a new connection up, and make the tables if there are none; closed if that fails.

    What is no journal is refused before anything is written. Who only looks never writes: what an
    older journal lacks is there in a transaction that ends with the connection, for nobody else.
    """
    try:
        if is_exclusive:
            list(connection.execute("PRAGMA locking_mode = EXCLUSIVE"))
        version = _version_of(connection, path)
        if only_looks:
            if version == 0:
                raise JournalError(f"{path} is empty: no learner has made a journal of it yet.")
            if version < VERSION:
                list(connection.execute("PRAGMA cache_spill = OFF"))
                _make(connection, version)
            return
        [[mode]] = connection.execute("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise JournalError(
                f"The file system of {path} has no write-ahead log for SQLite (it gives "
                f"mode {mode!r}). Put the journal on a local disk."
            )
        for setting in ("synchronous = FULL", "fullfsync = ON"):
            list(connection.execute(f"PRAGMA {setting}"))
        if version < VERSION:
            _make(connection, version)
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise


def _version_of(connection: Any, path: Path) -> int:
    """Return the version of the format of what a file holds; 0 if that is nothing.

    Raises:
        JournalError: If it is no journal, or one of a newer release.
    """
    [[application]] = connection.execute("PRAGMA application_id")
    [[tables]] = connection.execute("SELECT count(*) FROM sqlite_schema")
    [[version]] = connection.execute("PRAGMA user_version")
    if not tables:
        return 0
    if application != APPLICATION_ID:
        raise JournalError(
            f"{path} is an SQLite file but not a journal. Give the journal a path of its own."
        )
    if not 1 <= version <= VERSION:
        raise JournalError(
            f"The journal {path} has version {version} of the format, this release "
            f"reads versions 1 to {VERSION}. Open it with the release that wrote it."
        )
    return int(version)


def _make(connection: Any, version: int) -> None:
    """Begin a transaction that makes what the tables of a version lack; 0 has none."""
    connection.execute("BEGIN IMMEDIATE")
    for statements in _SCHEMAS[version:]:
        for statement in filter(str.strip, statements.split(";")):
            connection.execute(statement)
    if version == 0:
        facts = {"id": secrets.token_hex(16), "first": 1, "last": 0, "clock_s": 0.0}
        connection.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
    connection.execute(f"PRAGMA user_version = {VERSION}")


def advice_for(name: str) -> str:
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


def lock_of(path: Path) -> Path:
    """Return the file that is locked while a journal is open; it stays beside the journal."""
    return path.with_name(f"{path.name}.lock")


def locked(path: Path) -> FileLock:
    """Return a lock beside the journal, in a folder that is made if it is missing.

    Raises:
        JournalError: If a learner has it, or it cannot be made.
    """
    try:
        if not path.parent.is_dir():
            LocalStorage(path.parent).make_folder("")
        return FileLock(lock_of(path))
    except BlockingIOError as error:
        raise JournalError(
            f"The journal {path} is in use: a learner of {error.strerror} has it open. Close it, "
            "or give each learner a journal of its own."
        ) from None
    except OSError as error:
        raise JournalError(
            f"The journal {path} cannot be opened: {error}. Let the process write into its "
            "folder, or put it on a local disk with room."
        ) from error
