"""The journal: an SQLite file of the examples that were taken, in the order they are learned.

All calls of an open journal block and are made on one thread.

Invariants:
    * Numbers ascend by one, and none is used twice, not even after rows were deleted.
    * What `append` returned is durable: `COMMIT` returns behind the fsync of the write-ahead log.
    * After a failed write the connection is given up: a new one reads what the file really has.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, final

from ..checkpoint import FileLock
from ..errors import AioReplicaError, JournalError
from . import _journal_models as models
from ._example import pack_example, unpack_example
from ._journal_format import (
    MAIN,
    NO_ROOM,
    Appended,
    Dead,
    Entry,
    JournalFacts,
    Rollback,
    Row,
    Waiting,
    advice_for,
    lock_of,
    locked,
    prepare,
)
from ._journal_keys import Keeping, advance, begin_spec, claimed, find, forget, keep, specs_of
from ._records import DeadLetter

Found = TypeVar("Found")
MAX_NUMBER = 2**63 - 1  # of SQLite
CLEAN_EVERY = 256
"""After so many commits old keys are deleted."""

_LAST = """
SELECT max(value, (SELECT coalesce(max(number), 0) FROM examples)) FROM facts WHERE name = 'last'
"""


@final
class JournalFile:
    """The file of a `Journal`; locked from `open` to `close`.

    The arguments are those of `Journal`, and the spec version of the program; None for who appends
    nothing.
    """

    def __init__(
        self,
        path: Path,
        keeping: Keeping,
        busy_timeout_s: float,
        connect: Callable[..., object],
        max_bytes: int | None,
        spec_version: int | None,
    ) -> None:
        self._database = database = _JournalDatabase(path, busy_timeout_s, connect)
        self._path = database.path
        self._run = database.run
        self._keeping = keeping
        self._max_bytes = max_bytes
        self._spec_version = spec_version
        self._last = 0
        self._num_commits = 0

    # ---- opening -------------------------------------------------------------------------

    def open(self, *, only_looks: bool = False) -> JournalFacts:
        """Lock the file and look into it, or make it; blocks.

        Args:
            only_looks: Whether nothing is to be changed: nothing is made, nor put into the newest
                version of the format. Then only what reads may be called.

        Raises:
            JournalError: If it is in use, damaged, no journal, or cannot be made.
        """
        try:
            with self._database.opening(only_looks=only_looks):
                [[self._last]] = self._run(_LAST)
                facts = dict(self._run("SELECT name, value FROM facts"))
                rollbacks = models.rollbacks(self._run, MAIN)
                specs = specs_of(self._path, facts, self._spec_version)
        except BaseException:
            self.close()
            raise
        return JournalFacts(
            str(facts["id"]),
            int(facts["first"]),
            self._last,
            float(facts["clock_s"]),
            str(facts["champion"]),
            rollbacks,
            specs,
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
            last = before = max(self._last, self._run(_LAST)[0][0])
            if self._spec_version is not None and self._spec_version > 1:
                begin_spec(self._run, self._spec_version, last + 1)
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
        return Appended(results, strays, before)

    def _refusal(
        self, entry: Entry, bodies: Sequence[bytes], number: int, clock_s: float
    ) -> tuple[int, bool] | AioReplicaError | KeyError | None:
        """Return why nothing is appended for a submission, or remember it as that of `number`."""
        if entry.revived is not None:
            model, old = entry.revived
            if not self._take_out(model, old, number):
                return KeyError(old)
            models.is_for_one(self._run, model, number, old)
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

    def set_aside(self, letters: Sequence[Dead], model: str = MAIN) -> None:
        """Make dead letters of examples, as they were taken; durable when it returns. Blocks.

        Raises:
            JournalError: If that failed.
        """
        with self._database.writing("written"):
            models.set_aside(self._run, model, letters)

    def discard(self, number: int, model: str = MAIN) -> bool:
        """Delete a dead letter; return whether there was one. Blocks.

        Raises:
            JournalError: If that failed.
        """
        with self._database.writing("written"):
            return self._take_out(model, number)

    def take_back(self, numbers: Sequence[int], model: str = MAIN) -> list[int]:
        """Delete dead letters and keep their rows, which are learned then; blocks.

        Returns:
            The numbers of those that were there.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        with self._database.writing("written"):
            return models.take_back(self._run, model, numbers)

    def _take_out(self, model: str, number: int, successor: int = 0) -> bool:
        self._keep_last(self._last)
        return models.take_out(self._run, model, number, successor)

    def skip_versions(self, learned: int, version: int, model: str = MAIN) -> int:
        """Return a version behind all that may have been published; blocks.

        Raises:
            JournalError: If that could not be written down.
        """
        with self._database.writing("written"):
            return models.skip_versions(self._run, model, self._last, learned, version)

    def roll_back(
        self, base: int, to: int, skip: Sequence[int], time: float, model: str = MAIN
    ) -> tuple[Rollback, ...]:
        """Begin a generation, and make dead letters of examples, in one transaction; blocks.

        Args:
            base: The checkpoint that is gone back to.
            to: What was learned behind this number counts no more.
            skip: Examples that are not to be learned again; dead letters stay as they are.
            time: When, in seconds since the epoch.
            model: Which one goes back; all its rollbacks are returned.

        Raises:
            JournalError: If nothing was changed, as far as is known.
        """
        with self._database.writing("rolled back"):
            return models.roll_back(self._run, model, base, to, skip, time)

    def rollbacks(self, model: str = MAIN) -> tuple[Rollback, ...]:
        """Return the rollbacks that the file really has; blocks.

        Raises:
            JournalError: If it cannot be read.
        """
        with self._database.reading():
            return models.rollbacks(self._run, model)

    def _keep_last(self, last: int) -> None:
        """Keep the newest number, as its row may go."""
        self._run("UPDATE facts SET value = max(value, ?) WHERE name = 'last'", last)

    def compact(self, numbers: Sequence[int], clock_s: float, model: str = MAIN) -> int:
        """Delete examples that no checkpoint needs, and keys too old; blocks.

        Args:
            numbers: Those of the checkpoints of a model, ascending; see `compaction_to`.
            clock_s: The time.
            model: Which one. What another one needs, and has not given up, stays.

        Returns:
            The number from which on examples are kept.

        Raises:
            JournalError: If that failed; nothing is deleted then.
        """
        with self._database.writing("compacted"):
            number = models.compaction_to(self._run, numbers, self._max_bytes)
            last = max(self._last, numbers[-1])
            self._keep_last(last)
            models.compact(self._run, model, number, numbers[-1])
            self._remember_clock(clock_s)
            forget(self._run, self._keeping, clock_s)
            [[first]] = self._run("SELECT value FROM facts WHERE name = 'first'")
        self._last = last
        return int(first)

    # ---- models --------------------------------------------------------------------------

    def consumers(self) -> dict[str, models.Consumer]:
        """Return all models that have ever learned from the journal; blocks.

        Raises:
            JournalError: If it cannot be read.
        """
        with self._database.reading():
            return models.consumers(self._run)

    def champion(self) -> str:
        """Return the model that is served; blocks.

        Raises:
            JournalError: If it cannot be read.
        """
        with self._database.reading():
            return models.champion(self._run)

    def attach(self, model: str, number: int, time: float) -> None:
        """Let a model begin with what was learned up to a number; blocks.

        Raises:
            JournalError: If the journal has not all behind that, or cannot be written.
        """
        with self._database.writing("written"):
            models.attach(self._run, model, number, time)

    def detach(self, model: str, why: str) -> None:
        """Keep no rows for a model any more; blocks.

        Raises:
            JournalError: If it is the champion, or the journal cannot be written.
        """
        with self._database.writing("written"):
            models.detach(self._run, model, why)

    def promote(self, model: str, learned: int | None = None, version: int = 0) -> None:
        """Make a model the champion, in one transaction; blocks.

        Args:
            model: Which one.
            learned: How far it has learned; None if no learner is open.
            version: The first version of it that is served.

        Raises:
            JournalError: If it is not attached, or the journal cannot be written.
        """
        with self._database.writing("written"):
            models.promote(self._run, model, learned, version, self._last)

    # ---- reading -------------------------------------------------------------------------

    def read(self, look: Callable[..., Found], *values: object) -> Found:
        """Return what a function of `_journal_keys` finds; blocks.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._database.reading():
            return look(self._run, *values)

    def rows(self, after: int, limit: int, model: str = MAIN) -> list[Row]:
        """Return examples behind a number that a model has to learn, in order; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._database.reading():
            return self._rows(after, limit, model)

    def _rows(self, after: int, limit: int | None, model: str = MAIN) -> list[Row]:
        most = -1 if limit is None else limit
        found = self._run(models.ROWS_OF_MODEL, after, model, model, most)
        return [
            Row(number, _checked(self._path, number, crc32, body)) for number, crc32, body in found
        ]

    def dead_letters(
        self, after: int, limit: int, before: int | None = None, model: str = MAIN
    ) -> list[DeadLetter]:
        """Return dead letters behind a number, or the last ones before another one; blocks.

        Raises:
            JournalError: If one is damaged, or the file cannot be read.
        """
        with self._database.reading():
            found = self._run(
                "SELECT number, crc32, body, error, time FROM dead WHERE model = ? AND number > ? "
                f"AND number < ? ORDER BY number {'ASC' if before is None else 'DESC'} LIMIT ?",
                model,
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

    def fates(self, numbers: Sequence[int], model: str = MAIN) -> dict[int, int | str]:
        """Return what became of those examples that are not as they were; blocks.

        Returns:
            The error of a dead letter; or the number that a dead letter was taken again as, 0 if it
            was discarded.

        Raises:
            JournalError: If the file cannot be read.
        """
        with self._database.reading():
            found = {number: models.fate(self._run, model, number) for number in numbers}
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
        self._is_exclusive = self._is_open = self._only_looks = False
        self._lock: FileLock | None = None

    @property
    def is_connected(self) -> bool:
        """True if there is a connection now."""
        return self._connection is not None

    @contextmanager
    def opening(self, *, only_looks: bool) -> Iterator[None]:
        """Lock the file, look whether it is whole, and read it in the block.

        Who only looks makes no lock: where there is none, no learner has ever had the file.

        Raises:
            JournalError: If it is in use, damaged, no journal, or cannot be made.
        """
        if not only_looks or lock_of(self.path).exists():
            self._lock = locked(self.path)
        self._is_open, self._only_looks = True, only_looks
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
        self._is_open = False
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
        prepare(connection, self.path, is_exclusive=is_exclusive, only_looks=self._only_looks)
        self._is_exclusive = is_exclusive
        return connection

    def _reopen(self) -> None:
        if not self._is_open:
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
        except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
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
