"""Models on one journal: what each has to learn of it, has set aside, and has learned for good.

Every model learns the examples in their order, but for those that it has set aside, which are its
dead letters, and those that are gone for it: a letter that was discarded, and one that was taken
again, whose place another number has. Rows are kept as long as a model that is attached needs them.
These functions run in a transaction, on the journal's thread.

Invariants:
    * A number is learned by a model, or is its dead letter, or is gone for it: never two of these.
    * What an attached model has not learned in its oldest retained checkpoint is in the file.
    * There is one champion at any time, and it is attached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import JournalError
from ._journal_format import Dead, Rollback

Run = Callable[..., list[tuple[Any, ...]]]
"""Runs one statement of SQL, with its values."""

MAX_MOVES = 1000
"""Times that an example which is retried and fails again is followed."""

ROWS_OF_MODEL = """
SELECT number, crc32, body FROM examples WHERE number > ?
AND number NOT IN (SELECT number FROM dead WHERE model = ?)
AND number NOT IN (SELECT number FROM gone WHERE model = ?) ORDER BY number LIMIT ?
"""


_REMEMBER_GONE = """
INSERT OR REPLACE INTO keys SELECT ?, x'', ?, value FROM facts WHERE name = 'clock_s'
"""
"""What is gone is known for as long as a key of now, whether or not the example had one."""


class Consumer(NamedTuple):
    """A model that learns from a journal.

    Attributes:
        kept_behind: Rows behind this number are kept for it: that of its oldest checkpoint.
        learned: Number of its newest checkpoint.
        least_version: No smaller version of it may be served any more.
        detached: Why it learns no more and keeps no rows; "" if it does.
    """

    kept_behind: int
    learned: int
    least_version: int
    detached: str


def consumers(run: Run) -> dict[str, Consumer]:
    """Return all models that have ever learned from the journal."""
    found = run("SELECT model, kept_behind, learned, least_version, detached FROM consumers")
    return {model: Consumer(*facts) for model, *facts in sorted(found)}


def champion(run: Run) -> str:
    """Return the model that is served."""
    [[model]] = run("SELECT value FROM facts WHERE name = 'champion'")
    return str(model)


def attach(run: Run, model: str, number: int, time: float) -> None:
    """Let a model begin with what was learned up to a number; all that it had counts no more.

    What is gone for the champion is gone for it, and letters up to the number are its own, too: it
    has the champion's past, and what becomes of it.

    Raises:
        JournalError: If the journal has not all examples behind that.
    """
    require_kept(run, number)
    first = champion(run)
    if run("SELECT 1 FROM consumers WHERE model = ?", model):
        begin_generation(run, model, 0, time)
    for table in ("dead", "gone"):
        run(f"DELETE FROM {table} WHERE model = ?", model)
    run(
        "INSERT INTO consumers VALUES (?, ?, ?, NULL, 0, '') ON CONFLICT (model) DO UPDATE SET "
        "kept_behind = excluded.kept_behind, learned = excluded.learned, detached = ''",
        model,
        number,
        number,
    )
    run(
        "INSERT INTO dead SELECT number, crc32, body, error, time, ? FROM dead "
        "WHERE model = ? AND number <= ?",
        model,
        first,
        number,
    )
    run("INSERT INTO gone SELECT ?, number, successor FROM gone WHERE model = ?", model, first)


def detach(run: Run, model: str, why: str) -> None:
    """Keep no rows for a model any more.

    Raises:
        ValueError: If it is the champion.
    """
    if champion(run) == model:
        raise ValueError(f"Model {model!r} is the champion, which stays. Promote another one.")
    run("UPDATE consumers SET detached = ? WHERE model = ?", why, model)


def promote(run: Run, model: str, learned: int | None, version: int, last: int) -> None:
    """Make a model the champion, whose versions begin with one.

    Without `learned` no learner is open: it is that of the newest checkpoint then, and versions
    begin behind all that any model may have published.

    Raises:
        JournalError: If it is not attached.
    """
    known = consumers(run)
    found = known.get(model)
    if found is None or found.detached:
        listed = ", ".join(map(repr, known))
        why = f"there are only {listed}" if found is None else f"it is detached: {found.detached}"
        raise JournalError(f"Model {model!r} cannot be promoted, as {why}.")
    if learned is None:
        [[ahead, least]] = run("SELECT max(coalesce(ahead, 0)), max(least_version) FROM consumers")
        learned, version = found.learned, max(last + ahead, least) + 1
    run("UPDATE facts SET value = ? WHERE name = 'champion'", model)
    run(
        "UPDATE consumers SET least_version = max(least_version, ?), "
        "ahead = max(coalesce(ahead, ?), ?) WHERE model = ?",
        version,
        version - learned,
        version - learned,
        model,
    )


def skip_versions(run: Run, model: str, last: int, learned: int, version: int) -> int:
    """Return a version behind all that a model may have published.

    Each has an example of its own, so "ahead" bounds version minus newest number.
    """
    [[known, least]] = run("SELECT ahead, least_version FROM consumers WHERE model = ?", model)
    ahead = version - learned if known is None else max(version - learned, int(known))
    first = max(last + ahead, int(least))
    run("UPDATE consumers SET ahead = ? WHERE model = ?", first - learned, model)
    return first


# ---- dead letters ------------------------------------------------------------------------


def set_aside(run: Run, model: str, letters: Sequence[Dead]) -> None:
    """Make dead letters of examples, as they were taken."""
    for number, error, time in letters:
        run(
            "INSERT OR REPLACE INTO dead SELECT number, crc32, body, ?, ?, ? FROM examples "
            "WHERE number = ?",
            error,
            time,
            model,
            number,
        )


def take_out(run: Run, model: str, number: int, successor: int = 0) -> bool:
    """Delete a dead letter, and its row if no other model may need that.

    Without the letter a restart would learn the example, so it is gone for the model. Its key may
    be known still, so the number that has taken its place is kept; 0 for none.
    """
    found = bool(run("SELECT 1 FROM dead WHERE model = ? AND number = ?", model, number))
    if found:
        run("DELETE FROM dead WHERE model = ? AND number = ?", model, number)
        run("INSERT OR REPLACE INTO gone VALUES (?, ?, ?)", model, number, successor)
        run(_REMEMBER_GONE, f"\0moved {number}", number)
        run(
            "DELETE FROM examples WHERE number = ? AND NOT EXISTS "
            "(SELECT 1 FROM consumers WHERE model != ? AND detached = '')",
            number,
            model,
        )
    return found


def is_for_one(run: Run, model: str, number: int, revived: int) -> None:
    """Note that a new number is an example which the other models have under its old one."""
    run(
        "INSERT INTO gone SELECT model, ?, ? FROM consumers WHERE model != ?",
        number,
        revived,
        model,
    )


def take_back(run: Run, model: str, numbers: Sequence[int]) -> list[int]:
    """Delete dead letters and keep their rows; return the numbers of those that were there."""
    where = "FROM dead WHERE model = ? AND number = ?"
    found = [number for number in numbers if run(f"SELECT 1 {where}", model, number)]
    for number in found:
        run(f"DELETE {where}", model, number)
    return found


def fate(run: Run, model: str, number: int) -> int | str | None:
    """Return the error of a dead letter, what has taken its place, 0 for nothing; None if alive."""
    found: int | str | None = None
    for _ in range(MAX_MOVES):
        select = "SELECT successor FROM gone WHERE model = ? AND number = ?"
        moved = run(select, model, number)
        if not moved:
            break
        found = number = int(moved[0][0])
    dead = run("SELECT error FROM dead WHERE model = ? AND number = ?", model, number)
    return str(dead[0][0]) if dead else found


# ---- rollbacks ---------------------------------------------------------------------------


def roll_back(
    run: Run, model: str, base: int, to: int, skip: Sequence[int], time: float
) -> tuple[Rollback, ...]:
    """Begin a generation of a model, and make dead letters of examples; see `JournalFile`.

    Raises:
        JournalError: If the journal has not all examples behind the checkpoint it goes back to.
    """
    require_kept(run, base)
    for number in skip:
        run(
            "INSERT OR IGNORE INTO dead SELECT number, crc32, body, ?, ?, ? FROM examples "
            "WHERE number = ? AND number NOT IN (SELECT number FROM gone WHERE model = ?)",
            f"Left out by the rollback to {to}",
            time,
            model,
            number,
            model,
        )
    begin_generation(run, model, to, time)
    kept = "UPDATE consumers SET kept_behind = min(kept_behind, ?) WHERE model = ?"
    run(kept, base, model)
    return rollbacks(run, model)


def begin_generation(run: Run, model: str, to: int, time: float) -> None:
    """Let what a model has learned behind a number count no more."""
    run(
        "INSERT INTO rollbacks SELECT ?, coalesce(max(generation), 0) + 1, ?, ? "
        "FROM rollbacks WHERE model = ?",
        model,
        to,
        time,
        model,
    )


def rollbacks(run: Run, model: str) -> tuple[Rollback, ...]:
    """Return the rollbacks of a model, in their order."""
    select = "SELECT generation, rolled_to FROM rollbacks WHERE model = ? ORDER BY generation"
    return tuple(itertools.starmap(Rollback, run(select, model)))


# ---- what is kept ------------------------------------------------------------------------


def require_kept(run: Run, number: int) -> None:
    """Check that all examples behind a number are in the journal.

    Raises:
        JournalError: If they are not.
    """
    [[first]] = run("SELECT value FROM facts WHERE name = 'first'")
    if number + 1 < first:
        raise JournalError(
            f"The journal begins at example {first} by now, so nothing can go on from a checkpoint "
            f"that has learned up to {number}. Take a newer one."
        )


def compact(run: Run, model: str, number: int, learned: int) -> None:
    """Delete the rows that no model needs any more.

    Args:
        run: Runs statements.
        model: Which one needs nothing up to `number`.
        number: As above.
        learned: Number of its newest checkpoint.
    """
    update = "UPDATE consumers SET kept_behind = ?, learned = ? WHERE model = ?"
    run(update, number, learned, model)
    [[least]] = run("SELECT min(kept_behind) FROM consumers WHERE detached = ''")
    run("DELETE FROM examples WHERE number <= ?", least)
    run("UPDATE facts SET value = max(value, ?) WHERE name = 'first'", least + 1)


def compaction_to(run: Run, numbers: Sequence[int], max_bytes: int | None) -> int:
    """Return the number up to which a model needs no rows, given those of its checkpoints.

    What the first of them has learned goes, and what later ones have as long as there is more than
    `max_bytes` behind; the last one is used up then, too.
    """
    behind = "SELECT coalesce(sum(length(body)), 0) FROM examples WHERE number > ?"
    for number in numbers[:-1]:
        if max_bytes is None or run(behind, number)[0][0] <= max_bytes:
            return number
    return numbers[-1]
