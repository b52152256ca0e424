"""Generations: each rollback begins one, and a checkpoint counts by its own.

A checkpoint has the journal, the model and the generation that it was saved in; it is void if it
has learned more than the number of a rollback that came later. A rollback is a row of the journal:
going back takes the newest checkpoint that is not void, and learns the examples behind it again,
but for those that are left out. These functions block.

Invariants:
    * The transaction of the journal is the rollback: before it all is as it was, after it every
      opening goes back.
    * A void checkpoint is never restored: it is removed before anything is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time

from ..checkpoint import CheckpointManager, plain_value
from ..errors import JournalError
from ..tree import Tree
from ._journal import Journal
from ._journal_format import MAIN, MAX_NUMBER, JournalFacts, Rollback
from ._journal_keys import without_rows

MAX_LISTED = 5


def is_void(step: int, generation: int, rollbacks: Sequence[Rollback]) -> bool:
    """Tell whether a checkpoint has learned more than a later rollback leaves."""
    return any(step > each.rolled_to for each in rollbacks if each.generation > generation)


def generation_of(manager: CheckpointManager, step: int) -> int | None:
    """Return the generation of a learner's checkpoint, None if that is damaged; blocks."""
    facts = plain_value(manager._storage, step, "online")
    return None if facts is None else int(facts.get("generation", 0))


def void_steps(manager: CheckpointManager, rollbacks: Sequence[Rollback]) -> list[int]:
    """Return the checkpoints that count no more, ascending; blocks.

    Raises:
        CheckpointError: If something cannot be read.
    """
    lowest = min((each.rolled_to for each in rollbacks), default=None)
    if lowest is None:
        return []
    found = []
    for step in manager.steps():
        generation = generation_of(manager, step) if step > lowest else None
        if generation is not None and is_void(step, generation, rollbacks):
            found.append(step)
    return found


def step_before(
    manager: CheckpointManager, to: int, first_number: int, rollbacks: Sequence[Rollback]
) -> int:
    """Return the checkpoint that a rollback goes back to; blocks.

    Raises:
        ValueError: If there is none behind which the journal has all examples.
        CheckpointError: If something cannot be read.
    """
    void = void_steps(manager, rollbacks)
    able = [step for step in manager.steps() if step + 1 >= first_number and step not in void]
    before = [step for step in able if step <= to]
    if not before:
        oldest = f"the oldest one is {able[0]}" if able else "there is none"
        raise ValueError(
            f"There is no checkpoint at or before {to} behind which the journal has all examples: "
            f"{oldest}."
        )
    return before[-1]


def owner_of(manager: CheckpointManager) -> tuple[str, str] | None:
    """Return the model and the journal of the newest checkpoint, "" without one; None if unknown.

    Raises:
        CheckpointError: If something cannot be read.
    """
    steps = manager.steps()
    facts = plain_value(manager._storage, steps[-1], "online") if steps else None
    return (facts.get("model", MAIN), facts.get("journal", "")) if facts else None


def require_own(manager: CheckpointManager, path: Path, journal: str, model: str) -> None:
    """Check that the checkpoints of a folder are those of a model, by the newest one.

    Raises:
        JournalError: If they are not.
        CheckpointError: If something cannot be read.
    """
    storage = manager._storage
    found = owner_of(manager)
    if found is None:
        return
    saved, own = found
    if own in {"", journal} and saved != model:
        raise JournalError(
            f"The checkpoints in {storage} are those of the model {saved!r}, not of {model!r}. "
            "Give each model a folder of its own."
        )
    if model != MAIN and own != journal:
        raise JournalError(
            f"The checkpoints in {storage} belong to another journal (of id {own}) than {path} "
            f"(of id {journal}). Give the model {model!r} a folder of its own."
        )


def require_match(
    saved: Mapping[str, Tree], generation: int, path: Path, facts: JournalFacts
) -> None:
    """Check that what a checkpoint says of a journal is so.

    Raises:
        JournalError: If it is not.
    """
    own, learned = saved["journal"], saved["learned"]
    if own not in {"", facts.id}:
        raise JournalError(
            f"The checkpoint belongs to another journal (of id {own}) than {path} (of id "
            f"{facts.id}). Give the learner the journal of its checkpoints, or an empty "
            "folder for checkpoints."
        )
    if learned > facts.last_number:
        raise JournalError(
            f"The checkpoint has learned examples up to {learned}, but the journal {path} "
            f"ends at {facts.last_number}: it is an older copy. Restore the newest copy, or "
            "restore an older checkpoint folder with it."
        )
    if learned + 1 < facts.first_number:
        raise JournalError(
            f"The journal {path} begins at example {facts.first_number}, but what is "
            f"restored has learned examples up to {learned} only: checkpoints are missing, or "
            "the journal had to forget (max_bytes). Restore the folder of checkpoints from a "
            "copy."
        )
    if saved["generation"] > generation:
        raise JournalError(
            f"The checkpoint is of generation {saved['generation']}, but the journal "
            f"{path} was rolled back {generation} times only: it is an older copy. "
            "Restore the newest copy, or restore an older checkpoint folder with it."
        )


# ---- rollbacks ---------------------------------------------------------------------------


def checked(to: object, skip: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the arguments of a rollback, the numbers to skip ascending.

    Raises:
        TypeError: If something is no int.
        ValueError: If a number is negative or too large, or an example to skip is not behind `to`.
    """
    if isinstance(to, bool) or not isinstance(to, int):
        raise TypeError(f"to must be an int, got {to!r}.")
    if any(isinstance(number, bool) or not isinstance(number, int) for number in skip):
        raise TypeError(f"skip are numbers of examples, got {skip!r}.")
    if to < 0:
        raise ValueError(f"to must not be negative, got {to}.")
    numbers = tuple(sorted({*skip}))
    if numbers and numbers[-1] > MAX_NUMBER:
        raise ValueError(f"There is no example {numbers[-1]} to leave out.")
    if numbers and numbers[0] <= to:
        raise ValueError(
            f"Example {numbers[0]} cannot be left out by a rollback to {to}: it is learned by "
            f"then. Go back to {numbers[0] - 1} or before."
        )
    return to, numbers


def roll_back_closed(
    journal: Journal, manager: CheckpointManager, to: int, skip: Sequence[int]
) -> int:
    """Roll back the model of a folder where no learner is open; the next one follows. Blocks.

    Returns:
        The number of the checkpoint that it will begin with.

    Raises:
        ValueError: As `OnlineLearner.rollback`.
        CheckpointError: If a checkpoint cannot be read.
        JournalError: If a learner has the journal open, it cannot be written, or it is another one
            than that of the checkpoints.
    """
    to, numbers = checked(to, skip)
    file = journal.file()
    facts = file.open()
    try:
        model, own = owner_of(manager) or (MAIN, "")
        if own not in {"", facts.id}:
            raise JournalError(
                f"The checkpoints in {manager._storage} belong to another journal (of id {own}) "
                f"than {journal.path} (of id {facts.id})."
            )
        if model not in file.consumers():
            raise JournalError(
                f"The checkpoints in {manager._storage} are those of the model {model!r}, which "
                f"{journal.path} does not know."
            )
        base = step_before(manager, to, facts.first_number, file.rollbacks(model))
        if to > facts.last_number:
            raise ValueError(f"There are only {facts.last_number} examples, no {to}.")
        require_none(file.read(without_rows, numbers))
        file.roll_back(base, to, numbers, time(), model)
    finally:
        file.close()
    return base


def require_none(missing: Sequence[int]) -> None:
    """Check that the journal has all examples that are to be left out, else ValueError."""
    if missing:
        listed = ", ".join(map(str, missing[:MAX_LISTED]))
        raise ValueError(f"The journal has no examples of these numbers to leave out: {listed}.")
