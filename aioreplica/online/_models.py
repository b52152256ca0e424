"""Models on one journal: the champion, which is served, and its challengers, which learn the same.

Each model reads the examples from the journal by itself, in batches of its own, and has its own
checkpoints, dead letters and rollbacks. The learner that has the journal opens the others, and
closes them; what goes wrong in one of them is told and changes nothing for the rest. A challenger
that is known and attached goes on from its checkpoints. Any other one is late: it begins with the
champion's newest checkpoint, or, if its state is another one, with its own values and the oldest
example that the journal has.

Invariants:
    * `champion_name` is what the journal says, but for the moment between the transaction of a
      promotion and what follows from it in memory.
    * Only the champion tells tickets, and frees places of the queue.
    * A version that the champion serves is larger than all that earlier champions have served.
    * Other models are closed beside the one that has the journal, so one that hangs takes neither
      time nor its checkpoint from another one.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, final

from ..devices import OwnedTask
from ..errors import CheckpointError, ContextError, JournalError
from ._control import CLOSED, UNDO_S, ends_in, leave_behind, left_s
from ._failures import described
from ._intake import dead_error
from ._journal_format import MAIN
from ._journal_models import Consumer
from ._saving import refuse_waiters
from ._settings import Challenger

if TYPE_CHECKING:
    from ._engine import Engine

LOGGER = logging.getLogger("aioreplica.online")
CLOSE_S = 10.0
"""Seconds that closing a challenger may take, if neither it nor the learner says."""
TURN_S = 10.0
"""Seconds that a promotion waits for the one before it."""
ROOM = 100
"""Versions that the champion may publish while another one is promoted."""
MAX_TRIES = 20
"""Times that a checkpoint is read whose examples the journal has forgotten meanwhile."""


@final
class Models:
    """The models that learn from the journal of a learner.

    Args:
        owner: The engine that has the journal.
        learners: The others, by name.
        max_lag: How many examples a model may be behind before it is detached.

    Attributes:
        engines: Those that are open, by name; the owner is the first.
        champion_name: The one that is served.
        problems: Why others are not open, by name.
    """

    def __init__(self, owner: Engine, learners: Mapping[str, Challenger], max_lag: int) -> None:
        self.engines: dict[str, Engine] = {MAIN: owner}
        self.champion_name = MAIN
        self.problems: dict[str, str] = {}
        self._owner = owner
        self._learners = learners
        self._max_lag = max_lag
        self._absent: dict[str, int] = {}  # how far models have learned that are not open
        self._lags_allowed: dict[str, int] = {}  # of those that were opened further behind
        self.promotions = Promotions(self, owner)

    @property
    def has_others(self) -> bool:
        """True if models read the journal by themselves, since there are several."""
        return bool(self._learners)

    @property
    def champion(self) -> Engine:
        """The engine whose model is served."""
        return self._owner.champion

    # ---- opening -------------------------------------------------------------------------

    def look_at(self, champion: str) -> None:
        """Take over which model the journal says is served.

        Raises:
            JournalError: If it is not one of these.
        """
        if champion not in {MAIN, *self._learners}:
            raise JournalError(
                f"The model {champion!r} is the champion of the journal, and there are "
                f"{', '.join(map(repr, [MAIN, *self._learners]))} here. Pass it as one of the "
                f"challengers, or promote another one: aioreplica online promote JOURNAL {MAIN}"
            )
        self.champion_name = champion

    async def begin(self, engine: Engine) -> str:
        """Restore what an engine begins with; return how it was late, "" if it was not.

        Raises:
            CheckpointError: If a checkpoint cannot be restored.
            JournalError: If the journal is not the one that belongs to it.
        """
        journal = engine.journal
        if journal is None:
            await engine.saving.restore()
            return ""
        known = (await journal.consumers()).get(engine.model)
        engine.least_version = 0 if known is None else known.least_version
        if engine.model == self.champion_name or await _goes_on(engine, known):
            await engine.saving.restore()
            return ""
        return await self._join(engine)

    async def _join(self, engine: Engine) -> str:
        """Let a late model begin with the champion's newest checkpoint, or with its own values."""
        assert engine.journal is not None  # that is what it joins
        other = self._learners.get(self.champion_name)
        settings = self._owner.settings if other is None else other._settings
        for _ in range(MAX_TRIES):
            number, why = await engine.saving.join(settings, self.champion_name)
            if why and engine.was_open:
                raise CheckpointError(
                    f"Model {engine.model!r} would begin again with what it has learned before: "
                    f"{why} Restart the program."
                )
            try:
                await engine.journal.attach(number)
            except JournalError:
                if number + 1 >= engine.journal.first_number:
                    raise
                continue  # meanwhile the champion has saved, and the journal has forgotten
            await engine.saving.has_joined(number)
            if why:
                return f"with its own values, behind example {number}: {why}"
            return f"with the champion's checkpoint {number}"
        raise CheckpointError(
            f"Model {engine.model!r} could not begin: the champion saves checkpoints faster than "
            "they can be read. Give the CheckpointManager a larger max_to_keep."
        )

    async def open(self) -> None:
        """Open the challengers; what is in the way of one is told, and `problems` has it.

        Raises:
            JournalError: If the champion cannot be opened.
            CheckpointError: As above.
        """
        journal = self._owner.journal
        if journal is None:
            return
        for name, learner in self._learners.items():
            try:
                self.engines[name] = await learner._open_as(name, self._owner)
            except Exception as error:
                if name == self.champion_name:
                    raise
                self.problems[name] = described(error)
                LOGGER.warning("The challenger %r could not be opened: %s", name, described(error))
        self._owner.champion = self.engines[self.champion_name]
        most = self._max_lag
        self._lags_allowed = {name: lag + most for name, lag in self._lags().items() if lag > most}
        known = await journal.consumers()
        self._absent = {
            name: consumer.learned
            for name, consumer in known.items()
            if name not in self.engines and not consumer.detached
        }

    # ---- while they run ------------------------------------------------------------------

    async def watch(self) -> None:
        """Wake the challengers when there is something to learn, and detach who is too late."""
        owner = self._owner
        while self.has_others or self._absent:
            for name, learned in self._lags().items():
                await self._detach_if_late(name, learned)
            for engine in self.engines.values():
                if engine is not owner:
                    engine.changed.give()
            await owner.changed.wait()

    def _lags(self) -> dict[str, int]:
        last, lags = self._owner.intake.last_number, dict[str, int]()
        for name, engine in self.engines.items():
            if not engine.detached:
                lags[name] = last - engine.learning.learned_number
        return lags | {name: last - learned for name, learned in self._absent.items()}

    async def _detach_if_late(self, name: str, lag: int) -> None:
        journal = self._owner.journal
        if lag <= self._max_lag:
            self._lags_allowed.pop(name, None)
        allowed = self._lags_allowed.get(name, self._max_lag)
        if journal is None or lag <= allowed or name == self.champion_name:
            return
        why = f"it was {lag} examples behind, and max_lag is {self._max_lag}"
        try:
            await journal.of(name).detach(why)
        except JournalError:  # it was promoted, or is detached when that can be written
            return
        LOGGER.warning(
            "The model %r is detached from the journal: %s. When the program is started again, it "
            "begins with the champion's checkpoint.",
            name,
            why,
        )
        self._absent.pop(name, None)
        if name in self.engines:
            self.engines[name].detached = why
            self.engines[name].changed.give()

    def settle(self, engine: Engine, number: int, outcome: int | str) -> None:
        """Tell those who wait what became of an example, if the engine is the champion's.

        Args:
            engine: Which one has learned it, or set it aside.
            number: The example.
            outcome: The version that has it, or the error.
        """
        if isinstance(outcome, str):
            engine.untold[number] = outcome
            if len(engine.untold) > self._owner.intake.size + engine.settings.max_batch:
                del engine.untold[next(iter(engine.untold))]
        if engine is self.champion:
            told = dead_error(number, outcome) if isinstance(outcome, str) else outcome
            self._owner.intake.tell(number, told)

    def free(self, engine: Engine) -> None:
        """Free the places of what the champion has learned."""
        if engine is self.champion and self.has_others:
            self._owner.intake.learned_to(engine.learning.learned_number)

    # ---- closing -------------------------------------------------------------------------

    async def close(self, commits: OwnedTask[None]) -> None:
        """Let the others learn what there is, once nothing more is taken, and save.

        They are closed side by side, and what goes wrong in one is warned of.

        Args:
            commits: Saves what was taken; it has ended then.

        Raises:
            Exception: As `OnlineLearner.aclose`, if it is the champion that is closed.
        """
        while not self._owner.is_closing:
            await self._owner.changed.wait()
        await commits.done_or_cancelled()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S if (left := left_s(self._owner)) is None else left):
                await self.promotions.settled()
        await self.promotions.end()
        tasks = [OwnedTask(self._close(*each), f"closing {each[0]}") for each in self._others()]
        try:
            for task in tasks:
                await task.done_or_cancelled()
        finally:
            for task in tasks:  # of those that are left, if this was cancelled
                task.cancel()
            for task in tasks:
                await task.ended(through_interrupt=True)
        for task in tasks:
            await task

    async def _close(self, name: str, engine: Engine) -> None:
        is_served, own, left = engine is self.champion, engine.settings.grace_s, left_s(self._owner)
        limits = [each for each in (own, left) if each is not None]
        try:
            await engine.aclose(left if is_served else min(limits, default=CLOSE_S))
        except Exception as error:
            if is_served:
                raise
            _warn(name, error)

    async def end(self) -> None:
        """End the challengers at once; their steps are undone."""
        for name, engine in self._others():
            main, engine.is_closing = engine._main, True
            if main is None or main.is_done:
                continue
            main.cancel()
            if not await ends_in(main, UNDO_S):
                _warn(name, leave_behind(engine))
        await self.promotions.end()

    def _others(self) -> list[tuple[str, Engine]]:
        return [each for each in self.engines.items() if each[1] is not self._owner]


@final
class Promotions:
    """Makes one of several models the one that is served, one promotion at a time.

    Args:
        models: All of them.
        owner: The engine that has the journal.
    """

    def __init__(self, models: Models, owner: Engine) -> None:
        self._models = models
        self._owner = owner
        self._is_closing = False
        self._turn = asyncio.Lock()
        self._task: OwnedTask[int] | None = None
        self._promoted: Engine | None = None  # by that task
        self._is_written = False  # perhaps, as its transaction has begun
        self._given_up: OwnedTask[int] | None = None

    async def promote(self, name: str) -> int:
        """Make a model the champion; return the first version of it that is served.

        Who asks for the one that is being promoted joins that. While another one is, the champion
        is asked for like any other: it is served again afterwards, or stays.

        Raises:
            ValueError: If it is not known, or not fit to be served.
            CheckpointError: If it has no checkpoint yet, and none could be saved.
            JournalError: If the journal could not be written, or nobody knows; or if it does not
                end to write the promotion before.
            ContextError: If the learner is closed before; or if it has no checkpoint TURN_S after
                the promotion of another one was asked for that was fit.

        Cancellation:
            Behind another promotion it is not promoted. Afterwards it is, all the same.
        """
        engine = self._fit(name)
        async with self._turn:
            task = self._under_way(engine)
            if task is None:
                await self._end_before(name)
                if self._is_closing:
                    raise ContextError(CLOSED)
                self._promoted, self._is_written = engine, False
                task = self._task = OwnedTask(self._promote(name), f"promotion of {name}")
        await task.done_or_cancelled()
        if task is self._given_up:
            raise ContextError(
                f"{name!r} was not promoted: {TURN_S:g} s after another promotion was asked for it "
                "had no checkpoint yet. Save one by its own `checkpoint()` first."
            )
        if task.task.cancelled():
            raise ContextError(
                f"The learner was closed while {name!r} was promoted: it was, or was not, as "
                "`champion` of the next learner on the journal says."
            )
        return await task

    async def _end_before(self, name: str) -> None:
        """Wait for the promotion under way; give it up if it does not come to the journal."""
        task = self._task
        if task is None or await ends_in(task, TURN_S):
            return
        if self._is_written:
            raise JournalError(
                f"{name!r} is not promoted: the journal has not ended to write the promotion "
                f"before, for {TURN_S:g} s. Look at its disk, and try again."
            )
        if self._owner.is_closing:  # which waits for it
            raise ContextError(CLOSED)
        self._fit(name)
        self._given_up = task
        task.cancel()
        await task.ended()

    async def settled(self) -> None:
        """Wait for the end of the promotion under way, whose caller may have gone."""
        while self._task is not None and not self._task.is_done:
            await self._task.done_or_cancelled()

    async def end(self) -> None:
        """Begin no more, and end the one under way."""
        self._is_closing = True
        if self._task is not None and not self._task.is_done:
            self._task.cancel()
            await self._task.ended(through_interrupt=True)

    async def let_go(self, engine: Engine) -> float | None:
        """Let a challenger be closed by itself; it is not promoted any more.

        A promotion of it that was asked for before has half the time to close it.

        Returns:
            The seconds that are left to close it; None for ever.

        Raises:
            ContextError: If it is the one that is served, or its promotion is being written.
        """
        grace_s, time = engine.settings.grace_s, engine.loop.time
        if (task := self._under_way(engine)) is not None:
            began, most_s = time(), CLOSE_S if grace_s is None else grace_s / 2
            await ends_in(task, most_s)
            grace_s = None if grace_s is None else max(0.0, began + grace_s - time())
        is_promoted = self._under_way(engine) is not None
        is_served = engine is self._models.champion and not self._owner.is_closed
        if (is_served or (is_promoted and self._is_written)) and not engine.is_closing:
            raise ContextError(
                f"The model {engine.model!r} is {'served' if is_served else 'being promoted'}, so "
                "it is closed with the learner that has its journal. Promote another one, or close "
                "that learner."
            )
        engine.is_closing = True
        if is_promoted:
            refuse_waiters(engine.saving)
        return grace_s

    def _under_way(self, engine: Engine) -> OwnedTask[int] | None:
        """Return the promotion of an engine that has not ended, if that is the one under way."""
        is_its = engine is self._promoted and self._task is not None and not self._task.is_done
        return self._task if is_its else None

    async def _promote(self, name: str) -> int:
        engine = self._fit(name)
        if engine is self._models.champion:
            return engine.serving.served.version
        while engine.saving.saved_number is None:  # a restart would have nothing to serve
            await engine.saving.request()
            engine = self._fit(name)
        journal = self._owner.journal
        assert journal is not None  # or there is no other
        self._is_written = True
        while True:
            version = max(engine.version, self._models.champion.version) + ROOM
            try:
                await journal.of(name).promote(engine.learning.learned_number, version)
            except JournalError as error:
                await self._require_promoted(name, error)
            if version > max(engine.version, self._models.champion.version):
                break
        self._follow(name, engine, version)
        return version

    def _fit(self, name: str) -> Engine:
        engine = self._models.engines.get(name)
        if engine is None:
            known = ", ".join(map(repr, self._models.engines))
            why = self._models.problems.get(name, f"there are {known}")
            raise ValueError(f"No model {name!r} is open: {why}.")
        if engine is self._models.champion:
            return engine
        state = "closing" if self._is_closing else "detached" if engine.detached else engine.state
        lag = self._owner.intake.last_number - engine.learning.learned_number
        if state == "running" and lag > self._owner.intake.size:
            state = "behind by more than the queue takes"
        if state != "running":
            is_only_paused = state == "paused" and not lag
            behind = "resume it first" if is_only_paused else f"{lag} examples are not learned"
            why = engine.detached or engine.why_failed or engine.learning.retry_error or behind
            raise ValueError(f"Model {name!r} cannot be promoted, as it is {state}: {why}.")
        return engine

    async def _require_promoted(self, name: str, error: JournalError) -> None:
        """Check that a promotion is in the journal, although writing it has failed."""
        assert self._owner.journal is not None
        before = self._models.champion_name
        try:
            really = await self._owner.journal.champion()
        except JournalError:
            raise JournalError(
                f"Nobody knows whether {name!r} is promoted, as the journal can neither be written "
                f"nor read: {error} {before!r} is served until it is tried again, or the program "
                "is started again."
            ) from error
        if really != name:
            raise error

    def _follow(self, name: str, engine: Engine, version: int) -> None:
        """Let everything follow what the journal says."""
        intake, before = self._owner.intake, self._models.champion_name
        engine.renumber(version)
        self._models.champion_name, self._owner.champion = name, engine
        intake.ask(engine.dead)
        for number in intake.followed(engine.learning.learned_number):
            self._models.settle(engine, number, engine.untold.get(number, version))
        self._models.free(engine)
        LOGGER.warning("The model %r is promoted; %r is a challenger.", name, before)
        for each in self._models.engines.values():
            each.changed.give()


def _warn(name: str, what: object) -> None:
    text = f"The challenger {name!r} was not closed in order: {what}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


async def _goes_on(engine: Engine, known: Consumer | None) -> bool:
    """Tell whether a model goes on from its own checkpoints."""
    if known is None or known.detached:
        return False
    return await engine.saving.has_checkpoint()
