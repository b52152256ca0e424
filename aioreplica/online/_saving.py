"""Checkpoints of a learner: when they are due, what they hold, what the journal then forgets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, final

from ..checkpoint import CheckpointManager, DescribedState
from ..devices import OwnedTask, run_on_host
from ..errors import CheckpointError, JournalError
from ._journal import OpenJournal


@final
class _Progress:
    """Facts that a checkpoint has beside the variables; those of older releases lack some."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"journal": "", "learned": 0, "version": 0, "served": {}}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.facts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.facts |= state


@final
class Saving:
    """Saves and restores the variables of a learner together with how far it has learned.

    Args:
        manager: Saves; None for never.
        variables: What steps change.
        journal: What is compacted behind a checkpoint.
        every_s: How long after a checkpoint the next one is due.
        changed: Called when a checkpoint is durable, or has failed.

    Attributes:
        learned: The number of the last example that what was restored, or saved last, has learned.
        version: The version of that.
        saved_number: The number of the newest durable checkpoint, None without one.
        num_saved: How many were saved.
        error: Why the last one failed; "" if it did not.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        variables: Any,
        journal: OpenJournal | None,
        every_s: float,
        changed: Callable[[], None],
    ) -> None:
        self.saved_number: int | None = None
        self.num_saved = 0
        self.error = ""
        self._manager = manager
        self._journal = journal
        self._every_s = every_s
        self._changed = changed
        progress = _Progress()
        self._progress = progress.facts
        self._state = DescribedState({"variables": variables, "online": progress})
        self._waiters: list[asyncio.Future[int]] = []
        self._task: OwnedTask[None] | None = None
        self._failure: CheckpointError | None = None
        self._due_at = math.inf

    @property
    def learned(self) -> int:
        """Number of the last example that was learned, as restored or saved last."""
        return int(self._progress["learned"])

    @property
    def version(self) -> int:
        """The version of that."""
        return int(self._progress["version"])

    @property
    def served(self) -> Mapping[str, Any]:
        """Facts about what was served instead of that, see `Serving.kept`."""
        return dict(self._progress["served"])

    # ---- restoring -----------------------------------------------------------------------

    async def restore(self) -> None:
        """Restore the newest good checkpoint, if there is one, and compare it with the journal.

        Raises:
            CheckpointError: If none can be restored.
            JournalError: If the journal is not the one that belongs to it.
        """
        steps = () if self._manager is None else await run_on_host(self._manager.steps)
        if self._manager is not None and steps:
            self.saved_number = await self._manager.restore(self._state)
        journal = self._journal
        if journal is not None:
            await self._match(journal)
            self._progress["journal"] = journal.facts.id
        self._postpone()

    async def _match(self, journal: OpenJournal) -> None:
        facts, path = journal.facts, journal.path
        own, learned = self._progress["journal"], self.learned
        if own == "" and learned and facts.last_number == 0:  # learned without one until now
            await journal.compact(learned)
            return
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
                f"restored has learned examples up to {learned} only: checkpoints are missing. "
                "Restore the folder of checkpoints from a copy."
            )

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
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._changed()
        return await future

    async def begin(self, learned: int, version: int, served: Mapping[str, Any]) -> None:
        """Take the cut, between two steps; files are written in the background."""
        assert self._manager is not None  # or none is due
        waiters, self._waiters = self._waiters, []
        self._progress.update(learned=learned, version=version, served=served)
        self._due_at = math.inf
        try:
            await self._manager.save(learned, self._state, wait=False)
        except Exception as error:  # noqa: BLE001 - storages and states of users raise anything
            self._failed(error, waiters)
        except BaseException:
            self._waiters = waiters
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
                await self._manager.wait()
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
                steps = await run_on_host(self._manager.steps)
                await self._journal.compact(min(steps, default=0))
            except OSError as error:  # the checkpoint is good; what could go goes next time
                self.error = str(error)

    async def finish(self, learned: int, version: int, served: Mapping[str, Any]) -> None:
        """Save what is not saved yet, and wait for that.

        Raises:
            CheckpointError: If it could not be saved.
        """
        if self._task is not None:
            await self._task.done_or_cancelled()
        if self._manager is not None and learned > 0 and learned != self.saved_number:
            await self.begin(learned, version, served)
            if self._task is not None:
                await self._task.done_or_cancelled()
            if self._failure is not None:
                raise self._failure

    async def aclose(self) -> None:
        """End what goes on in the background, wait for a save, give the manager's lock back."""
        _refuse(self._waiters, "the learner was closed")
        task = self._task
        try:
            if task is not None:
                task.cancel()
                await task.ended(through_interrupt=True)
        finally:
            if self._manager is not None:
                try:
                    await self._manager.aclose()
                except CheckpointError as error:
                    self.error = str(error)


def _refuse(waiters: list[asyncio.Future[int]], why: object) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(why if isinstance(why, CheckpointError) else _not_saved(why))


def _not_saved(why: object) -> CheckpointError:
    return CheckpointError(f"No checkpoint was saved: {why}")
