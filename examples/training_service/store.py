"""The table of jobs: SQLite, all calls on one thread."""

import asyncio
import errno
import json
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    program TEXT NOT NULL,
    settings TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'queued',
    submitted TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
    error TEXT NOT NULL DEFAULT '',
    digest TEXT NOT NULL DEFAULT '',
    num_steps INTEGER NOT NULL DEFAULT 0,
    losses BLOB NOT NULL DEFAULT x'',
    step INTEGER NOT NULL DEFAULT 0,
    starts INTEGER NOT NULL DEFAULT 0
) STRICT
"""
ADDED = {"step": "length(losses) / 8", "starts": "0"}
"""Columns that tables of earlier releases lack, and their values there."""


class Store:
    """The jobs of a folder. What a method has returned from survives a crash of the machine.

    Opened in `async with`; one process at a time. A cancelled call is carried out or not, never in
    part. Methods raise an OSError if the disk cannot take or give what they need: ENOSPC if it is
    full, ENOENT if the table was removed, ENOMEM if memory is short, EIO otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._connection: sqlite3.Connection

    async def __aenter__(self) -> Self:
        try:
            await self._call(self._open)
        except BaseException:
            self._thread.shutdown()
            raise
        return self

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=0)
        self._connection.row_factory = sqlite3.Row
        try:
            self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # one service per folder
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(SCHEMA)
            self._add_columns()
        except sqlite3.Error as error:
            self._connection.close()
            raise OSError(
                f"{self._path} cannot be used: {error}. Another service may have it; give this one "
                "a folder of its own."
            ) from error
        self._file = self._path.stat()

    def _add_columns(self) -> None:
        found = {row["name"] for row in self._connection.execute("PRAGMA table_info(jobs)")}
        for name in ADDED.keys() - found:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(
                f"ALTER TABLE jobs ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0"
            )
            self._connection.execute(f"UPDATE jobs SET {name} = {ADDED[name]}")
            self._connection.execute("COMMIT")

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._connection.close)
        self._thread.shutdown()  # the thread ends with the last call

    async def add(self, program: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Add a job and return its row."""
        insert = "INSERT INTO jobs (program, settings) VALUES (?, ?) RETURNING *"
        [row] = await self._call(self._rows, insert, program, json.dumps(settings))
        return row

    async def all(self) -> list[dict[str, Any]]:
        """Return the rows of all jobs, in the order in which they came, without their losses."""
        return await self._call(
            self._rows,
            "SELECT id, program, settings, status, submitted, error, digest, num_steps, step, "
            "starts FROM jobs ORDER BY id",
        )

    async def losses(self, job_id: int) -> bytes:
        """Return the losses of a job that has ended, as float64."""
        [row] = await self._call(self._rows, "SELECT losses FROM jobs WHERE id = ?", job_id)
        return bytes(row["losses"])

    async def update(self, job_id: int, **values: Any) -> None:
        """Set columns of a job."""
        columns = ", ".join(f"{name} = ?" for name in values)
        await self._call(
            self._rows, f"UPDATE jobs SET {columns} WHERE id = ?", *values.values(), job_id
        )

    def _rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        # SQLite goes on with a file that was removed, and what it writes there is gone with it.
        if not os.path.samestat(self._path.stat(), self._file):
            raise FileNotFoundError(errno.ENOENT, "Another file took its place", str(self._path))
        try:
            return [dict(row) for row in self._connection.execute(statement, values).fetchall()]
        except (sqlite3.Error, MemoryError) as error:
            raise as_os_error(error, self._path) from error

    async def _call(self, fn: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, fn, *args)


def as_os_error(error: sqlite3.Error | MemoryError, path: Path) -> OSError:
    """Return an error of SQLite as one of the system."""
    if isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, str(error) or "Out of memory", str(path))
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(path))
