"""Control of an open learner: what is served, going back to a checkpoint, and closing.

Invariants:
    * A rollback happens between two steps. What is restored is there before its transaction is
      written, so one that fails has changed nothing.
    * All waits have an end if there is a time to close, but for one that is cancelled: the learner
      that has the journal gives that back when its own step has ended, never before.
    * Who waits for a ticket, a record, a checkpoint or a rollback is told when an engine is closed,
      and when it is left behind since nothing can end it.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ..checkpoint import Savepoint
from ..devices import OwnedTask
from ..errors import ContextError, JournalError, StallError
from ._generations import checked, require_none
from ._intake import dead_error
from ._journal_format import Rollback
from ._saving import refuse_waiters, save_last

if TYPE_CHECKING:
    from ._engine import Engine

CLOSED = "The learner is closed. Use it inside `async with`."
UNDO_S = 1.0
"""Seconds that a step may take to end and be undone after the time to close is over."""


# ---- closing -----------------------------------------------------------------------------


async def close(engine: Engine, main: OwnedTask[None], grace_s: float | None) -> None:
    """Let an engine that is closing learn what was taken, within its grace, and save.

    Raises:
        StallError: If it does not end.
        Exception: What its task has raised.
    """
    engine.close_by = None if grace_s is None else engine.loop.time() + grace_s
    engine.changed.give()
    try:
        has_ended = await ends_in(main, grace_s)
        if not has_ended and engine.is_finished:  # only others are left, with limits of their own
            has_ended = await ends_in(main, 2 * UNDO_S)
        if not has_ended:
            await _cut_short(engine, main, grace_s or 0.0)
    except asyncio.CancelledError:
        main.cancel()
        if engine.is_owner:
            await main.ended(through_interrupt=True)
        elif not await ends_in(main, UNDO_S / 2):  # whoever closes it has as much as that
            warnings.warn(leave_behind(engine), RuntimeWarning, stacklevel=2)
        raise
    finally:
        if main.is_done and not engine.is_closed:  # it was cancelled before it had begun
            if engine.journal is not None and engine.is_owner:
                await engine.models.end()
                await engine.journal.aclose()
            end(engine)
    if not main.task.cancelled():  # by another caller, or the end of the loop
        await main


async def finish(engine: Engine) -> None:
    """Save the last checkpoint, and wait until the other models have saved theirs.

    Raises:
        JournalError: If dead letters could not be written down.
        CheckpointError: If it could not be saved.
        Exception: As `close`, of another model that is served.
    """
    failure: Exception | None = None
    try:
        if problem := await engine.dead.save():
            raise JournalError(f"Dead letters were not written down: {problem}")
        number = engine.learning.settled_number
        await save_last(engine.saving, number, engine.version, engine.kept)
    except Exception as error:  # noqa: BLE001 - raised once the others are closed
        failure = error
    engine.is_finished = True
    refuse_waiters(engine.saving)  # it saves no more, so no promotion may wait for that
    if engine.closing is not None:
        await engine.closing.done_or_cancelled()
        try:
            await engine.closing
        except Exception as error:
            if failure is None:
                raise
            failure.add_note(f"The model that is served was not closed either: {error}")
    if failure is not None:
        raise failure


def end(engine: Engine) -> None:
    """Note that an engine is closed, and tell all who wait for something."""
    engine.is_closing = engine.is_closed = True
    _tell_all(engine)


def leave_behind(engine: Engine) -> str:
    """Give up an engine that was cancelled and does not end; return why that is.

    All who wait for something are told, though it is not closed: what it has is not given back.
    """
    engine.learning.failure = why_stuck(engine)
    _tell_all(engine)
    return engine.learning.failure


def _tell_all(engine: Engine) -> None:
    because = "The learner was closed before the example was learned. "
    because += "The journal has it." if engine.journal is not None else "It is lost."
    engine.intake.close(CLOSED)
    engine.intake.abandon(because)
    for taken in engine.in_step:
        engine.intake.settle(taken, ContextError(because))
    refuse_all(engine.requests)
    refuse_waiters(engine.saving)
    for stream in engine.streams:
        stream.close()
    engine.changed.give()


async def _cut_short(engine: Engine, main: OwnedTask[None], grace_s: float) -> None:
    """End a learner whose time to close is over; the step under way is undone.

    Raises:
        StallError: If that step does not end, as it is on a thread.
    """
    left = engine.owner.intake.last_number - engine.learning.learned_number
    main.cancel()
    if await ends_in(main, UNDO_S):
        where = "the journal has them" if engine.journal is not None else "they are lost"
        warnings.warn(
            f"{_who(engine)} was closed after {grace_s:g} s with {left} examples left: {where}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    text = f"{leave_behind(engine)} The next process on the journal learns what is left."
    stuck = StallError(text, timeout_s=grace_s)
    if engine.closing is not None:  # what is served has saved by then, or not
        await engine.closing.done_or_cancelled()
        if not engine.closing.task.cancelled() and (error := engine.closing.task.exception()):
            raise stuck from error
    raise stuck


def left_s(engine: Engine) -> float | None:
    """Return the seconds that are left to close other models, and to undo them; None for ever."""
    if engine.close_by is None:
        return None
    left = max(0.0, engine.close_by - engine.loop.time())
    return max(left - UNDO_S, left / 2)


def why_stuck(engine: Engine) -> str:
    """Return why an engine that was cancelled does not end."""
    running_s = engine.learning.under_way.running_s
    devices = ", ".join(engine.settings.strategy._runtime.device_names)
    step = (
        f"a step has been running for {running_s:.1f} s on the thread of a device ({devices}), "
        "where nothing can end it"
    )
    what = step if running_s else "the disk does not take what it has to write"
    return f"{_who(engine)} cannot be closed: {what}. End the process."


def _who(engine: Engine) -> str:
    return "The learner" if engine.is_owner else f"The model {engine.model!r}"


async def ends_in(main: OwnedTask[None] | OwnedTask[int], limit_s: float | None) -> bool:
    """Wait until a task has ended, at most for some seconds; return whether it has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await main.done_or_cancelled()
    return main.is_done


async def end_task(task: OwnedTask[None]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    await task.ended(through_interrupt=True)


async def end_source(task: OwnedTask[None]) -> None:
    """End a task that runs code of users, which may swallow a cancellation."""
    while not task.is_done:
        task.cancel()
        await ends_in(task, UNDO_S)


# ---- what is served ----------------------------------------------------------------------


async def pin(engine: Engine, version: int | None) -> None:
    """See `OnlineLearner.pin`."""
    served = _served_by(engine)
    served.serving.pin(version)
    await _keep_served(served)


async def unpin(engine: Engine) -> None:
    """See `OnlineLearner.unpin`."""
    served = _served_by(engine)
    served.serving.unpin()
    await _keep_served(served)


def _served_by(engine: Engine) -> Engine:
    """Return the one of the model that is served."""
    if engine.served.is_closing:
        raise ContextError(
            f"The model {engine.served.model!r}, which is served, has ended. Promote another one, "
            "or restart the program."
        )
    return engine.served


async def _keep_served(engine: Engine) -> None:
    """Publish what is served, after a change, and save a checkpoint that says so."""
    engine.changed.give()
    if engine.settings.checkpoints is not None:
        await engine.saving.request()


# ---- going back --------------------------------------------------------------------------


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


async def request_rollback(engine: Engine, to: int, skip: Sequence[int]) -> int:
    """See `OnlineLearner.rollback`."""
    if engine.settings.checkpoints is None or engine.journal is None:
        raise ContextError("A rollback needs a journal and checkpoints. Pass both.")
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    engine.requests.append(RollbackRequest(*checked(to, skip), done))
    engine.changed.give()
    return await asyncio.shield(done)


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
        base = await _roll_back(engine, request)
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


async def _roll_back(engine: Engine, request: RollbackRequest) -> int:
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
    require_none(await engine.journal.without_rows(request.skip))
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
