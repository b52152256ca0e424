"""Checkpoints of a learner: when they are due, what they hold, what the journal then forgets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bound
from typing import final

from ..checkpoint import (
    CheckpointManager,
    DescribedState,
    MisfitError,
    remove_step,
    wait_beside,
    waited_for,
)
from ..devices import OwnedTask, run_on_host
from ..errors import CheckpointError, JournalError
from ..tree import Tree
from ._generations import require_match, require_own, step_before, void_steps
from ._journal import OpenJournal
from ._journal_format import MAIN, JournalFacts, Rollback
from ._settings import Settings


@final
class _Progress:
    """Facts that a checkpoint has beside the variables; those of older releases lack some."""

    def __init__(self) -> None:
        self.facts: dict[str, Tree] = {"journal": "", "learned": 0, "version": 0}
        self.facts |= {
            "generation": 0,
            "served": {},
            "judged": {},
            "model": MAIN,
            "spec_version": 1,
        }

    def state_dict(self) -> dict[str, Tree]:
        return dict(self.facts)

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        self.facts |= state


@final
class Saving:
    """Saves and restores the variables of a learner together with how far it has learned.

    Args:
        settings: Says what is saved, where and how often.
        journal: What is compacted behind a checkpoint.
        changed: Called when a checkpoint is durable, or has failed.

    Attributes:
        learned: The number of the last example that what was restored, or saved last, has learned.
        version: The version of that.
        saved_number: The number of the newest durable checkpoint, None without one.
        num_saved: How many were saved.
        error: Why the last one failed; "" if it did not.
        rollbacks: All that the journal has.
        rollback_from: The oldest checkpoint that a rollback can go back to; None without one.
        has_gone_back: Whether what was restored was saved before the last rollback.
    """

    def __init__(
        self,
        settings: Settings,
        journal: OpenJournal | None,
        changed: Callable[[], None],
    ) -> None:
        self.saved_number: int | None = None
        self.num_saved = 0
        self.error = ""
        self.rollbacks: tuple[Rollback, ...] = ()
        self.rollback_from: int | None = None
        self.has_gone_back = False
        self._manager = settings.checkpoints
        self._journal = journal
        self._every_s = settings.checkpoint_every_s
        self._changed = changed
        progress = _Progress()
        self._progress = progress.facts
        self._schema = settings.schema
        progress.facts["spec_version"] = self._schema.version
        self._state = DescribedState({"variables": settings.variables, "online": progress})
        self._waiters: list[asyncio.Future[int]] = []
        self._task: OwnedTask[None] | None = None
        self._failure: CheckpointError | None = None
        self._before: dict[str, Tree] = {}
        self._has_void = False  # perhaps
        self._due_at = math.inf

    @property
    def learned(self) -> int:
        """Number of the last example that was learned, as restored or saved last."""
        return int(self._progress["learned"])

    @property
    def version(self) -> int:
        """The version of that."""
        return int(self._progress["version"])

    def about(self, name: str) -> Mapping[str, object]:
        """Return further facts: "served" of `Serving.kept`, "judged" of `Prequential.kept`."""
        return dict(self._progress[name])

    # ---- restoring -----------------------------------------------------------------------

    async def restore(self) -> None:
        """Restore the newest good checkpoint, if there is one, and compare it with the journal.

        Raises:
            CheckpointError: If none can be restored.
            JournalError: If the journal is not the one that belongs to it.
        """
        journal = self._journal
        if journal is not None:
            self.rollbacks = await journal.rollbacks()
            await self._require_own()
            await self._require_way_back(journal.facts)
            await self._remove_void()
        steps = () if self._manager is None else await run_on_host(self._manager.steps)
        if self._manager is not None and steps:
            self.saved_number = await self._restore(self._manager, None)
        if journal is not None:
            if self._progress["journal"] == "" and self.learned and not journal.facts.last_number:
                await journal.compact([self.learned])  # learned without one until now
            else:
                facts = journal.facts
                require_match(self._progress, self.generation, journal.path, facts)
            self._progress.update(journal=journal.facts.id, model=journal.model)
        self.has_gone_back = self._progress["generation"] < self.generation
        self._progress["generation"] = self.generation
        self._note_steps(steps)
        self._postpone()

    async def _restore(self, manager: CheckpointManager, step: int | None) -> int:
        return await self._schema.restore(manager, self._state, step, self._progress)

    async def _require_own(self) -> None:
        journal = self._journal
        if self._manager is not None and journal is not None:
            about = journal.path, journal.facts.id, journal.model
            await run_on_host(require_own, self._manager, *about)

    async def has_checkpoint(self) -> bool:
        """Tell whether there is one that counts; others are removed.

        Raises:
            CheckpointError: If that cannot be read.
            JournalError: If they belong to another model or journal.
        """
        assert self._manager is not None  # each of several models has one
        assert self._journal is not None
        await self._require_own()
        self.rollbacks = await self._journal.rollbacks()
        await self._remove_void()
        return bool(await run_on_host(self._manager.steps))

    async def join(self, other: Settings, name: str) -> tuple[int, str]:
        """Take what the learner of another model, of some name, has saved last into the variables.

        Returns:
            The number that it has learned, and ""; or, if there is nothing that fits, the one that
            the journal begins behind, and why.

        Raises:
            CheckpointError: If it cannot be read.
        """
        assert self._journal is not None  # of both
        await self._require_own()
        first = self._journal.first_number - 1
        assert other.checkpoints is not None  # as it has a model
        reader = CheckpointManager(other.checkpoints._storage)
        void = await run_on_host(void_steps, reader, await self._journal.of(name).rollbacks())
        able = [step for step in await run_on_host(reader.steps) if step not in void]
        if not able:
            return first, "the champion has no checkpoint yet."
        given = self._state, able[-1] if void else None, self._progress, other.schema
        try:
            return await self._schema.restore(reader, *given), ""
        except MisfitError as error:
            return first, str(error)

    async def has_joined(self, learned: int) -> None:
        """Go on from what was joined, which is saved; no checkpoint from before counts any more."""
        assert self._journal is not None
        self.rollbacks = await self._journal.rollbacks()
        await self._remove_void()
        self._progress.update(journal=self._journal.facts.id, model=self._journal.model)
        self._progress.update(learned=learned, generation=self.generation, served={}, judged={})
        if learned:  # or the journal has all that it takes to begin again
            await self.begin(learned, self.version, {})
            await self.settled()

    @property
    def generation(self) -> int:
        """Number of rollbacks so far."""
        return self.rollbacks[-1].generation if self.rollbacks else 0

    def _note_steps(self, steps: Sequence[int]) -> None:
        first = 1 if self._journal is None else self._journal.first_number
        able = (step for step in steps if step + 1 >= first)
        self.rollback_from = None if self._journal is None else min(able, default=None)

    async def _require_way_back(self, facts: JournalFacts) -> None:
        """Check that after a rollback there is something to begin with, before anything goes."""
        if self._manager is None or not self.rollbacks:
            return
        to = min(each.rolled_to for each in self.rollbacks)
        find = bound(step_before, self._manager, facts.last_number, facts.first_number)
        try:
            await run_on_host(find, self.rollbacks)
        except ValueError as error:
            if facts.first_number > 1:
                raise JournalError(
                    f"The journal was rolled back to {to}. {error} Restore the folder of "
                    "checkpoints from a copy."
                ) from error

    async def _remove_void(self) -> None:
        """Remove the checkpoints that count no more since a rollback.

        Raises:
            CheckpointError: If one cannot be removed.
        """
        if self._manager is None or not self.rollbacks:
            return
        self._has_void = True
        for step in await run_on_host(void_steps, self._manager, self.rollbacks):
            try:
                await run_on_host(remove_step, self._manager._storage, step)
            except OSError as error:
                raise CheckpointError(
                    f"Checkpoint {step} counts no more since a rollback, and cannot be removed: "
                    f"{error}. Remove it: aioreplica ckpt rm FOLDER {step}"
                ) from error
        self._has_void = False

    # ---- going back ----------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until no checkpoint is under way."""
        if self._task is not None and self._manager is not None:
            with waited_for(self._manager):
                await self._task.done_or_cancelled()

    async def step_before(self, to: int) -> int:
        """Return the checkpoint that a rollback goes back to; see `_rollback.step_before`."""
        assert self._manager is not None
        assert self._journal is not None
        first = self._journal.first_number
        return await run_on_host(step_before, self._manager, to, first, self.rollbacks)

    async def go_back(self, step: int) -> None:
        """Restore a checkpoint; `undo_going_back` forgets that.

        Raises:
            CheckpointError: If it cannot be restored. Then nothing has changed.
        """
        assert self._manager is not None  # or it was refused
        self._before = dict(self._progress)
        await self._restore(self._manager, step)

    def undo_going_back(self) -> None:
        """Take back what `go_back` has restored beside the variables."""
        self._progress.update(self._before)

    def follow(self) -> None:
        """Go on from what was restored: its number is that of the newest checkpoint."""
        self._progress["generation"] = self.generation
        self.saved_number = self.learned
        self._postpone()

    async def remove_void(self) -> None:
        """Remove checkpoints that count no more; what cannot be is removed before the next one."""
        try:
            await self._remove_void()
            assert self._manager is not None  # as above
            self._note_steps(await run_on_host(self._manager.steps))
        except OSError as error:
            self.error = str(error)

    # ---- saving --------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Tell whether one should be saved now."""
        if self._task is not None:
            return False
        return bool(self._waiters) or now >= self._due_at

    def due_at(self, learned: int) -> float | None:
        """Return when the next one is due, by the loop's clock; None for never."""
        has_news = learned != self.saved_number and learned > 0
        if self._manager is None or self._task is not None or not has_news:
            self._due_at = math.inf
        elif self._due_at == math.inf:
            self._postpone()
        return None if self._due_at == math.inf else self._due_at

    def _postpone(self) -> None:
        if self._manager is not None:
            self._due_at = asyncio.get_running_loop().time() + self._every_s

    async def request(self) -> int:
        """Wait until one was saved that began after the call; return its number."""
        assert self._manager is not None  # or it was refused
        with waited_for(self._manager):
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            self._changed()
            return await future

    async def begin(self, learned: int, version: int, about: Mapping[str, object]) -> None:
        """Take the cut, between two steps; files are written in the background."""
        assert self._manager is not None  # or none is due
        waiters, self._waiters = self._waiters, []
        self._progress.update(about, learned=learned, version=version)
        self._due_at = math.inf
        try:
            await self._manager.save(learned, self._state, wait=False)
        except Exception as error:  # noqa: BLE001 - storages and states of users raise anything
            self._failed(error, waiters)
        except BaseException:
            self._waiters = [*waiters, *self._waiters]  # some have come meanwhile
            raise
        else:
            self._task = OwnedTask(self._settle(learned, waiters), "online checkpoint")

    def fail(self, why: str) -> None:
        """Note why none can be saved now."""
        waiters, self._waiters = self._waiters, []
        self._failed(OSError(why), waiters)

    def _failed(self, error: Exception, waiters: list[asyncio.Future[int]]) -> None:
        failure = error if isinstance(error, CheckpointError) else _not_saved(error)
        self.error, self._failure = str(failure), failure
        self._postpone()
        _refuse(waiters, failure)

    async def _settle(self, learned: int, waiters: list[asyncio.Future[int]]) -> None:
        """Wait until a checkpoint is durable; then delete what the oldest retained one holds."""
        assert self._manager is not None  # it saves
        try:
            try:
                await wait_beside(self._manager)
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(error, waiters)
                return
            self.saved_number, self.error, self._failure = learned, "", None
            self.num_saved += 1
            await self._compact()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(learned)
        finally:
            _refuse(waiters, "the learner was closed")
            self._task = None
            self._changed()

    async def _compact(self) -> None:
        if self._journal is not None and self._manager is not None:
            try:
                if self._has_void:
                    await self._remove_void()
                steps = await run_on_host(self._manager.steps)
                await self._journal.compact(steps or [0])
                self._note_steps(steps)
            except OSError as error:  # the checkpoint is good; what could go goes next time
                self.error = str(error)

    async def aclose(self) -> None:
        """End what goes on in the background, wait for a save, give the manager's lock back."""
        refuse_waiters(self)
        try:
            if (task := self._task) is not None:
                task.cancel()
                await task.ended(through_interrupt=True)
        finally:
            if self._manager is not None:
                try:
                    await self._manager.aclose()
                except CheckpointError as error:
                    self.error = str(error)
            refuse_waiters(self)  # those who have asked meanwhile


async def save_last(
    saving: Saving, learned: int, version: int, about: Mapping[str, object]
) -> None:
    """Save what is not saved yet, and wait for that.

    Raises:
        CheckpointError: If it could not be saved.
    """
    await saving.settled()
    if saving._manager is not None and learned > 0 and learned != saving.saved_number:
        await saving.begin(learned, version, about)
        await saving.settled()
        if saving._failure is not None:
            raise saving._failure


def refuse_waiters(saving: Saving) -> None:
    """Tell who waits for a checkpoint that none is saved any more."""
    waiters, saving._waiters = saving._waiters, []
    _refuse(waiters, "the learner was closed")


def _refuse(waiters: list[asyncio.Future[int]], why: object) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(why if isinstance(why, CheckpointError) else _not_saved(why))


def _not_saved(why: object) -> CheckpointError:
    return CheckpointError(f"No checkpoint was saved: {why}")
