"""Going back: what a rollback does to a learner, open or closed.

A rollback begins a generation in the journal, with the number that it goes back to. Going back
takes the newest checkpoint that is not void, and learns the examples behind it again, but for those
that are left out.

Invariants:
    * The transaction of the journal is the rollback: before it all is as it was, after it every
      opening goes back.
    * A void checkpoint is never restored: it is removed before anything is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, final

from ..checkpoint import CheckpointManager, Savepoint
from ..errors import ContextError, JournalError
from ._generations import owner_of, step_before
from ._intake import dead_error
from ._journal import Journal
from ._journal_format import MAIN, MAX_NUMBER, Rollback
from ._journal_keys import without_rows

if TYPE_CHECKING:
    from ._engine import Engine

MAX_LISTED = 5


@final
@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A rollback that is asked for.

    Attributes:
        to: What was learned behind this number counts no more.
        skip: Examples behind it that are not learned again.
        done: Gets the number of the checkpoint that was gone back to.
    """

    to: int
    skip: tuple[int, ...]
    done: asyncio.Future[int]


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
        _require_none(file.read(without_rows, numbers))
        file.roll_back(base, to, numbers, time(), model)
    finally:
        file.close()
    return base


def _require_none(missing: Sequence[int]) -> None:
    if missing:
        listed = ", ".join(map(str, missing[:MAX_LISTED]))
        raise ValueError(f"The journal has no examples of these numbers to leave out: {listed}.")


# ---- an open learner ---------------------------------------------------------------------


def refuse_all(requests: Iterable[RollbackRequest]) -> None:
    """Tell who asked that the learner is closed."""
    for request in requests:
        _refuse(request, ContextError("The learner was closed before it was rolled back."))


def _refuse(request: RollbackRequest, error: Exception) -> None:
    """Tell who asked that there was no rollback."""
    if not request.done.done():
        request.done.set_exception(error)


async def answer_request(engine: Engine, request: RollbackRequest) -> None:
    """Roll back, or tell who asked why not.

    Raises:
        JournalError: If nobody knows whether it is in the journal. The learner ends then.

    Cancellation:
        The learner has gone back or not; so does the next one.
    """
    try:
        base = await roll_back(engine, request)
    except UnknownRollbackError as error:
        failure = JournalError(
            "The learner has ended: a rollback may be in the journal or not, as neither writing "
            f"nor reading it was possible. Restart the program. {error.__cause__}"
        )
        _refuse(request, failure)
        raise failure from error.__cause__
    except Exception as error:  # noqa: BLE001 - nothing has changed
        _refuse(request, error)
    except BaseException:
        _refuse(request, ContextError("The learner was closed while it was rolled back."))
        raise
    else:
        if not request.done.done():
            request.done.set_result(base)


async def roll_back(engine: Engine, request: RollbackRequest) -> int:
    """Go back, between two steps; return the number of the checkpoint.

    Raises:
        ValueError: If that is not possible.
        CheckpointError: If the checkpoint cannot be restored.
        JournalError: If the journal cannot be written. Nothing has changed then.
        UnknownRollbackError: If nobody knows whether it was written.
    """
    journal, saving = engine.journal, engine.saving
    assert journal is not None  # or it was refused
    base = await _require_possible(engine, request)
    problem = await engine.dead.save()
    if problem:
        raise JournalError(problem)
    await saving.settled()
    undo = Savepoint(engine.learning.state)
    gates = [(gate, gate.next_step) for gate in engine.learning.state.read().gates]
    known = saving.rollbacks
    try:
        await saving.go_back(base)
        try:
            saving.rollbacks = await journal.roll_back(base, request.to, request.skip)
        except JournalError as error:
            saving.rollbacks = await _really(engine, error)
            if saving.rollbacks == known:
                raise
    except BaseException:
        undo.put_back()
        saving.undo_going_back()
        for gate, number in gates:
            gate.next_step = number
        raise
    await _follow(engine, base, request)
    return base


@final
class UnknownRollbackError(Exception):
    """Raised inside the package when a rollback may be in the journal or not, for its cause."""


async def _really(engine: Engine, error: JournalError) -> tuple[Rollback, ...]:
    """Return the rollbacks that the journal has after one that failed."""
    assert engine.journal is not None
    try:
        return await engine.journal.rollbacks()
    except JournalError:
        raise UnknownRollbackError from error


async def _require_possible(engine: Engine, request: RollbackRequest) -> int:
    """Return the checkpoint to go back to.

    Raises:
        ValueError: If something is in the way.
        JournalError: If the journal cannot be read.
    """
    assert engine.journal is not None
    if request.to > engine.learning.learned_number:
        raise ValueError(
            f"Only {engine.learning.learned_number} examples are learned: there is no way back to "
            f"{request.to}."
        )
    _require_none(await engine.journal.without_rows(request.skip))
    base = await engine.saving.step_before(request.to)
    await engine.journal.try_migrations(base, engine.learning.learned_number)
    return base


async def _follow(engine: Engine, base: int, request: RollbackRequest) -> None:
    """Let everything follow what the journal and the variables are now."""
    assert engine.journal is not None
    intake, why = engine.intake, f"Left out by the rollback to {request.to}"
    engine.learning.learned_number = base
    engine.dead.num_added += len(request.skip)
    for taken in intake.take_out({*request.skip}):
        intake.settle(taken, dead_error(taken.number, why))
    if engine.reads:
        for number in request.skip:
            engine.models.settle(engine, number, why)
    last = engine.owner.intake.last_number
    engine.backlog_end = intake.queue[0].number - 1 if intake.queue else last
    engine.learning.failures.kept()
    engine.learning.failure = ""
    is_new = False  # the version of the first look at what was restored
    while not is_new:
        engine.learning.last_version = max(engine.learning.last_version, engine.version) + 1
        await engine.learning.skip_versions(engine.journal)
        is_new = engine.learning.last_version > engine.version  # else a promotion has taken it
    engine.serving.begin_again(engine.learning.last_version)
    engine.changed.give()
    engine.saving.follow()
    if engine.prequential is not None:
        engine.prequential.load(engine.saving.about("judged"))
    if engine.serving.kept:  # a checkpoint that has the pin may be void now
        await engine.saving.begin(base, engine.learning.last_version, engine.kept)
        await engine.saving.settled()
    await engine.saving.remove_void()
