"""Checkpoints of a learner that count: those of its journal, its model and its generation.

A checkpoint has the generation of its model that it was saved in; it is void if it has learned more
than the number of a rollback that came later. These functions block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoint import CheckpointManager, plain_value
from ..errors import JournalError
from ..tree import Tree
from ._journal_format import MAIN, JournalFacts, Rollback


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
