"""Submissions known by a key, predictions that wait for labels by an id, sources by an offset.

A label takes its prediction away in the transaction that appends the example made of both. From
then on it is known by its id, as a submission is by its key: the same label again gives the same
number. All is forgotten by the journal's clock. These functions run in a transaction, on the
journal's thread.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import JournalError, KeyReusedError
from ..tree import Tree
from ._example import pack_example, spec_version_of, unpack_example
from ._journal_format import Entry, Progress, Waiting

Run = Callable[..., list[tuple[Any, ...]]]
"""Runs one statement of SQL, with its values."""

SPEC = "spec "
"""Begin of the facts that say from which number on rows have a spec version."""

_FORGET_GONE = """
DELETE FROM gone WHERE number < (SELECT coalesce(min(first), 9e18) FROM keys)
AND number NOT IN (SELECT number FROM examples)
"""
_LABELLED = "\0label "
"""Begin of the keys of labels; no key of a submission has that character."""


class UnknownPredictionError(KeyError):
    """No prediction of an id waits for its label, any more."""


class Keeping(NamedTuple):
    """Seconds of the journal's clock for which keys and predictions are kept."""

    keys_s: float
    labels_s: float


def claimed(
    run: Run, keeping: Keeping, entry: Entry, bodies: Sequence[bytes], number: int, clock_s: float
) -> tuple[int, bool] | KeyReusedError | KeyError | None:
    """Look a submission up; return what is known of it, or claim its key for `number`."""
    label = entry.label
    key = entry.key if label is None else f"{_LABELLED}{label.id}"
    own = _digest(bodies if label is None else [pack_example(label.target)])
    found = known(run, str(key), clock_s - keeping.keys_s)
    if found:
        [(digest, first)] = found
        return (int(first), True) if bytes(digest) == own else _reused(entry, first)
    if label is not None:
        kept = run("SELECT clock_s FROM pending WHERE id = ?", label.id)
        if not bodies or not kept or kept[0][0] < clock_s - keeping.labels_s:
            return UnknownPredictionError(label.id)
        run("DELETE FROM pending WHERE id = ?", label.id)
    run("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)", key, own, number, clock_s)
    return None


def known(run: Run, key: str, since: float) -> list[tuple[Any, ...]]:
    """Return digest and first number of a key that came after some time, nothing if none did."""
    return run("SELECT digest, first FROM keys WHERE key = ? AND clock_s >= ?", key, since)


def advance(run: Run, progress: Progress) -> JournalError | None:
    """Write down how far a source was read; return why not, if the examples are not next."""
    found = offset(run, progress.source)
    if found != progress.after:
        return JournalError(
            f"The source {progress.source!r} stands at {found!r} in the journal, not at "
            f"{progress.after!r}. It is read again from there."
        )
    run("INSERT OR REPLACE INTO offsets VALUES (?, ?)", progress.source, progress.to)
    return None


def offset(run: Run, source: str) -> str | None:
    """Return how far a source was read, None if it never was."""
    found = run("SELECT read_to FROM offsets WHERE source = ?", source)
    return str(found[0][0]) if found else None


def _reused(entry: Entry, first: int) -> KeyReusedError:
    if entry.label is not None:
        return KeyReusedError(
            f"The prediction {entry.label.id!r} had another label before; example {first} has it.",
            key=entry.label.id,
        )
    return KeyReusedError(
        f"The key {entry.key!r} came with another example before, as number {first}. Use "
        "a new key for each example.",
        key=str(entry.key),
    )


def without_rows(run: Run, numbers: Sequence[int]) -> list[int]:
    """Return those of some numbers that have no example."""
    select = "SELECT 1 FROM examples WHERE number = ?"
    return [number for number in numbers if not run(select, number)]


def begin_spec(run: Run, spec_version: int, number: int) -> None:
    """Write down that rows from a number on have a spec version, if that is not known."""
    run("INSERT OR IGNORE INTO facts VALUES (?, ?)", f"{SPEC}{spec_version}", number)


def specs_of(path: Path, facts: Mapping[str, Tree], spec_version: int | None) -> dict[int, int]:
    """Return from which number on rows have which spec version.

    Raises:
        JournalError: If one is newer than that of the program, None for any.
    """
    specs = {
        int(name[len(SPEC) :]): int(first) for name, first in facts.items() if name.startswith(SPEC)
    }
    newest = max(specs, default=1)
    if spec_version is not None and newest > spec_version:
        raise JournalError(
            f"The journal {path} has examples of spec version {newest}, from number "
            f"{specs[newest]} on, and this program is of version {spec_version}. Start the program "
            "that wrote them, or a newer one: versions only go up."
        )
    return dict(sorted(specs.items()))


def keep(run: Run, waiting: Sequence[Waiting], clock_s: float) -> None:
    """Keep predictions until their labels come."""
    for name, kept, spec_version in waiting:
        body = pack_example(kept, spec_version)
        insert = "INSERT OR REPLACE INTO pending VALUES (?, ?, ?, ?)"
        run(insert, name, zlib.crc32(body), body, clock_s)


def find(run: Run, keeping: Keeping, path: Path, name: str, clock_s: float) -> Waiting | None:
    """Return a prediction that is kept, None if there is none.

    Raises:
        JournalError: If it is damaged.
    """
    select = "SELECT crc32, body FROM pending WHERE id = ? AND clock_s >= ?"
    for crc32, body in run(select, name, clock_s - keeping.labels_s):
        if zlib.crc32(body) != crc32:
            raise JournalError(
                f"The prediction {name!r} in the journal {path} is damaged: its checksum does not "
                "fit. Restore the journal from a copy, or delete the row to go on without it."
            )
        return Waiting(name, unpack_example(bytes(body)), spec_version_of(body))
    return None


def forget(run: Run, keeping: Keeping, clock_s: float) -> None:
    """Delete what is too old."""
    run("DELETE FROM keys WHERE clock_s < ?", clock_s - keeping.keys_s)
    run("DELETE FROM pending WHERE clock_s < ?", clock_s - keeping.labels_s)
    run(_FORGET_GONE)


def _digest(bodies: Sequence[bytes]) -> bytes:
    made = hashlib.sha256()
    for body in bodies:
        made.update(len(body).to_bytes(8, "little") + body)
    return made.digest()
