"""Engine of an open learner: its tasks, and what is done next.

Between two steps the variables are those of `serving.newest`, and nothing else writes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import final

from ..checkpoint import Savepoint, model_variables
from ..context import Living
from ..devices import OwnedTask, running_loop
from ..errors import JournalError, LoopMismatchError
from ..tree import Tree
from ._control import (
    CLOSED,
    RollbackRequest,
    answer_request,
    close,
    end,
    end_source,
    end_task,
    finish,
)
from ._intake import Intake, Taken, dead_error
from ._journal import DeadLetters, OpenJournal
from ._journal_format import MAIN
from ._models import Models
from ._publishing import Publishing
from ._records import StepRecord
from ._saving import Saving
from ._serving import Serving
from ._settings import Settings
from ._sources import followers
from ._step import Learning, StepResult
from ._ticket import RecordStream, Signal


@final
class Engine:
    """The tasks of an open learner, and what they share."""

    def __init__(
        self,
        settings: Settings,
        step_fn: Callable[..., object],
        before: Engine | None,
        model: str = MAIN,
        owner: Engine | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.owner = self if owner is None else owner
        self.champion = self  # of the owner: the one whose model is served
        self._before = before  # of the same learner, closed
        self.loop = asyncio.get_running_loop()
        journal, schema = settings.journal, settings.schema
        self.journal = None if journal is None else OpenJournal(journal, schema)
        if owner is None:
            self.models = Models(self, settings.challengers, settings.max_lag)
        else:
            self.models, self.journal = owner.models, owner.journal and owner.journal.of(model)
        self.reads = self.models.has_others  # from the journal, and takes nothing from the queue
        self.least_version = 0  # that it may serve
        self.began = ""
        self.detached = ""
        self.untold: dict[int, str] = {}  # errors of examples that others may be asked about
        self.changed = Signal()
        self.saving = Saving(settings, self.journal, self.changed.give)
        self.streams: Living[RecordStream] = Living()
        self.dead = DeadLetters(self.journal)
        self.prequential = settings.prequential
        self.serving = serving = Serving(settings.step_check, settings.publish_if)
        self.publishing = Publishing(
            settings.publish_to,
            lambda: self.champion.serving.served,
            self.changed,
            schema.version,
        )
        self.learning = Learning(settings, step_fn, serving, self.dead, self.changed)
        self.was_open = before is not None and before.learning.learned_number > 0
        self.requests: deque[RollbackRequest] = deque()
        self.in_step: list[Taken] = []  # out of the queue, and perhaps not settled
        self.is_paused = False
        self.is_closing = False
        self.is_closed = False
        self.is_finished = False  # closing: all is learned, and saved if that could be
        self.close_by: float | None = None  # by the loop's clock; None for no limit
        self.closing: OwnedTask[None] | None = None  # of the others, by the owner
        self.backlog_end = 0
        self._waits_since: float | None = None  # when rows were seen that are not read yet
        self._num_dead_told = 0
        self._main: OwnedTask[None] | None = None

    # ---- opening and closing -------------------------------------------------------------

    async def open(self) -> None:
        """Open the journal, restore, and start the tasks; nothing is left open if that fails."""
        async with AsyncExitStack() as undo:
            if self.journal is not None and self.is_owner:
                await self.journal.open()
                undo.push_async_callback(self.journal.aclose)
                self.models.look_at(self.journal.facts.champion)
            undo.callback(Savepoint(self.learning.state).put_back)
            undo.push_async_callback(self.saving.aclose)
            self.began = await self.models.begin(self)
            learning, version = self.learning, self.saving.version
            model = model_variables(learning.state)
            learning.learned_number, learning.last_version = self.saving.learned, version
            self.serving.open(model, version, self.saving.about("served"))
            before, self._before = self._before, None  # what it learned is not learned twice
            if before is not None and _still_holds(self, before):
                learning.learned_number = before.learning.learned_number
                learning.last_version = before.version
                self.dead.take_over(before.dead)
                self.serving.take_over(before.serving)
            elif self.prequential is not None:
                self.prequential.load(self.saving.about("judged"))
            self.backlog_end = max(self._last_number, learning.learned_number)
            if self.journal is not None:
                await self.journal.try_migrations(learning.learned_number, self.backlog_end)
            is_below = learning.last_version < self.least_version
            if self.has_backlog or self.saving.has_gone_back or self.reads or is_below:
                await self._skip_versions()
            self.intake = Intake(
                self.settings.queue_size,
                self.journal,
                self.backlog_end,
                self.changed,
                is_read=self.reads,
            )
            if self.is_owner:
                undo.push_async_callback(self.models.end)
                await self.models.open()
            else:
                self.intake.close(f"{self.model!r} is a challenger: it takes no examples itself.")
            self.intake.ask(self.champion.dead)
            own, size = self.settings, min(self.settings.max_batch, self.settings.queue_size)
            self.followers = followers(own.sources, own.validate, size, self.intake, self.journal)
            await self.publishing.open()
            self._main = OwnedTask(self._run(), f"online learner {self.model}")
            undo.pop_all()

    @property
    def is_owner(self) -> bool:
        """True if it has the journal, takes examples, and opens the challengers."""
        return self.owner is self

    @property
    def served(self) -> Engine:
        """The engine whose model readers get: the champion, or a challenger that is asked."""
        return self.champion if self.is_owner else self

    @property
    def _last_number(self) -> int:
        """The newest example there is to learn, as far as that is known."""
        if not self.is_owner:
            return self.owner.intake.last_number
        return 0 if self.journal is None else self.journal.facts.last_number

    async def _skip_versions(self) -> None:
        if self.journal is None:
            return
        learning = self.learning
        is_below = learning.last_version < self.least_version
        await learning.skip_versions(self.journal)
        if is_below:  # an earlier champion may have served what is restored under that number
            learning.last_version += 1
            await learning.skip_versions(self.journal)
            self.renumber(learning.last_version)

    async def aclose(self, grace_s: float | None = None) -> None:
        """See `OnlineLearner.aclose`; `grace_s` takes the place of the setting."""
        main = self._main
        if main is not None:
            if not self.loop.is_closed():
                require_loop(self)
            self.is_closing, self.learning.retries = True, False
            self.intake.close(CLOSED)
            try:
                await close(self, main, self.settings.grace_s if grace_s is None else grace_s)
            finally:
                self._main = None

    async def _run(self) -> None:
        commits = publishing = None
        async with AsyncExitStack() as ends:
            ends.callback(end, self)
            if self.journal is not None and self.is_owner:
                ends.push_async_callback(self.journal.aclose)
                ends.push_async_callback(self.models.end)
                watching = OwnedTask(self.models.watch(), "online models")
                ends.push_async_callback(end_task, watching)
                commits = OwnedTask(self.intake.commit_forever(), "online commits")
                ends.push_async_callback(end_task, commits)
                commits.when_done(lambda _error: self.changed.give())
                self.closing = OwnedTask(self.models.close(commits), "online models closing")
                ends.push_async_callback(end_task, self.closing)
            for each in self.followers:
                following = OwnedTask(each.run(), f"online source {each.name}")
                ends.push_async_callback(end_source, following)
            ends.push_async_callback(self.saving.aclose)
            if self.settings.publish_to is not None:
                publishing = OwnedTask(self.publishing.run(), "online snapshots")
                ends.push_async_callback(end_task, publishing)
            while not (self._is_drained and (commits is None or commits.is_done)):
                await self._act()
            await finish(self)
            if publishing is not None:
                await end_task(publishing)  # else its older version may be the last to be written
                await self.publishing.finish()

    @property
    def _is_drained(self) -> bool:
        """True if nothing is left to do for a learner that closes."""
        has_work = self.intake.queue or self.learning.learned_number < self.read_end
        return self.is_closing and not (has_work and self._is_able)

    @property
    def _is_able(self) -> bool:
        return not self.learning.failure and not self.detached

    # ---- what to do next -----------------------------------------------------------------

    @property
    def has_backlog(self) -> bool:
        """True if examples of earlier learners are not learned yet."""
        return self.learning.learned_number < self.backlog_end

    @property
    def read_end(self) -> int:
        """The last example that is read from the journal, not taken from the queue."""
        return self.owner.intake.last_number if self.reads else self.backlog_end

    @property
    def state(self) -> str:
        """State of the learner, see `OnlineLearner.state`."""
        if self.is_closing:
            return "closed" if self.is_closed else "closing"
        if self.detached:
            return "detached"
        if self.why_failed:
            return "failed"
        if self.is_paused:
            return "paused"
        if self.learning.retry_error:
            return "retrying"
        return "recovering" if self.has_backlog else "running"

    @property
    def why_failed(self) -> str:
        """Reason why nothing is learned any more; "" if it is."""
        limit, running_s = self.settings.step_timeout_s, self.learning.under_way.running_s
        if self.learning.failure or limit is None or running_s <= limit:
            return self.learning.failure
        return f"A step has been running for {running_s:.1f} s, longer than {limit:g} s."

    def resume(self, *, set_aside: bool) -> None:
        """See `OnlineLearner.resume`."""
        self.is_paused = False
        self.learning.resume(set_aside=set_aside)
        self.changed.give()

    async def _act(self) -> None:
        """Do what is to be done next, or wait until something changes."""
        await self.dead.try_again(self.owner.intake.num_commits)
        learning, now = self.learning, asyncio.get_running_loop().time()
        if self is self.owner.champion:
            self.owner.intake.settle_followers(learning.learned_number, self.version)
        due_at = self.saving.due_at(learning.settled_number)
        may_learn = self._is_able and (self.is_closing or not self.is_paused)
        queue = self.intake.queue
        if self.requests:
            await answer_request(self, self.requests.popleft())
        elif self.saving.is_due(now):
            await self._save()
        elif may_learn and now < learning.backoff.until and not self.is_closing:
            until = learning.backoff.until
            await self.changed.wait(until if due_at is None else min(until, due_at))
        elif may_learn and self.journal is not None and not learning.has_skipped:
            await learning.skip_versions(self.journal)
            if learning.retry_error and self.is_closing:
                learning.failure = learning.retry_error
        elif may_learn and learning.learned_number < self.read_end:
            await self._read_or_wait(now, due_at)
        elif may_learn and queue:
            ready_at = queue[0].since + self.settings.max_delay_s
            if len(queue) >= self.settings.max_batch or now >= ready_at or self.is_closing:
                await self._learn_queued()
            else:
                await self.changed.wait(ready_at if due_at is None else min(ready_at, due_at))
        else:
            await self.changed.wait(due_at)

    async def _read_or_wait(self, now: float, due_at: float | None) -> None:
        """Learn what is in the journal, as soon as there is a batch or the first has waited."""
        if self._waits_since is None:
            self._waits_since = now
        ready_at = self._waits_since + self.settings.max_delay_s
        is_full = self.read_end - self.learning.learned_number >= self.settings.max_batch
        if self.has_backlog or is_full or now >= ready_at or self.is_closing:
            self._waits_since = None
            await self._learn_backlog()
        else:
            await self.changed.wait(ready_at if due_at is None else min(ready_at, due_at))

    async def _save(self) -> None:
        problem = await self.dead.save()  # no checkpoint may leave them behind
        if problem:
            self.saving.fail(problem)
        else:
            await self.saving.begin(self.learning.settled_number, self.version, self.kept)

    async def _learn_backlog(self) -> None:
        learning, journal, end = self.learning, self.journal, self.read_end
        assert journal is not None  # or there is no backlog
        with learning.under_way.stepping():
            try:
                rows = await journal.rows(learning.learned_number, self.settings.max_batch)
                rows = [row for row in rows if row.number <= end]
                batch = [Taken(row.number, journal.example_of(row), None, 0.0) for row in rows]
            except (JournalError, ValueError) as error:
                learning.reading_failed(error, is_last=self.is_closing)
                return
            if not batch:
                learning.pass_to(end)
                self.models.free(self)
                return
            free = self.models.free
            taken_back = await learning.learn(
                batch, lambda _size: free(self), self._settle, self._tell
            )
            for taken in taken_back:
                self.untold.pop(taken.number, None)

    async def _learn_queued(self) -> None:
        with self.learning.under_way.stepping():
            batch = self.in_step = self.intake.next_batch(self.settings.max_batch)
            left, again = deque(batch), list[Taken]()

            def done(size: int) -> None:
                for _ in range(size):
                    left.popleft()
                self.intake.free(size)

            try:
                taken_back = await self.learning.learn(batch, done, self._settle, self._tell)
                again = [taken for taken in taken_back if taken.number > self.backlog_end]
            finally:
                self.in_step = []
                self.intake.put_back(again, left)

    # ---- what comes of it ----------------------------------------------------------------

    def _tell(self, part: list[Taken], result: StepResult, drifts: tuple[int, ...]) -> None:
        """Tell everybody of a step that was kept."""
        for taken in part:
            self._settle(taken, self.version)
        record = _record(self, part, result, self.dead.num_added - self._num_dead_told, drifts)
        self._num_dead_told = self.dead.num_added
        for stream in self.streams:
            stream.add(record)
        self.changed.give()
        self.owner.changed.give()

    def _settle(self, taken: Taken, outcome: int | str) -> None:
        """Tell those who wait for an example the version that has it, or its error."""
        if self.reads:
            self.models.settle(self, taken.number, outcome)
        else:
            told = dead_error(taken.number, outcome) if isinstance(outcome, str) else outcome
            self.intake.settle(taken, told)

    def renumber(self, version: int) -> None:
        """Serve what is served under a version that is larger than all before."""
        self.learning.last_version = self.serving.renumber(version)

    @property
    def kept(self) -> Mapping[str, Tree]:
        """Facts for a checkpoint, beside the variables and how far they have learned."""
        judged = {} if self.prequential is None else self.prequential.kept
        return {"served": self.serving.kept, "judged": judged}

    @property
    def version(self) -> int:
        """The newest version, that of the variables."""
        return self.serving.newest.version


def _record(
    engine: Engine,
    part: list[Taken],
    result: StepResult,
    num_dead: int,
    drifts: tuple[int, ...],
) -> StepRecord:
    return StepRecord(
        version=engine.version,
        first_number=part[0].number,
        last_number=part[-1].number,
        num_examples=len(part),
        num_dead=num_dead,
        scalars=result.scalars,
        queue_depth=engine.intake.depth,
        began=result.began,
        step_s=result.step_s,
        replicas=result.replicas,
        held=engine.serving.held,
        drifts=drifts,
    )


def _still_holds(engine: Engine, before: Engine) -> bool:
    """Tell whether the variables are as a learner that was closed has left them.

    If no checkpoint was restored, they would else learn the whole journal once more.
    """
    was_restored = engine.began or engine.saving.saved_number is not None
    if was_restored or _journal_id(engine) != _journal_id(before):
        return False
    left = before.serving.newest.components
    return all(
        new is old
        for variable in model_variables(engine.settings.variables).values()
        for new, old in zip(variable.components, left[variable], strict=True)
    )


def _journal_id(engine: Engine) -> str:
    return "" if engine.journal is None else engine.journal.facts.id


def require_loop(engine: Engine) -> None:
    """Check that the caller is on the event loop of an engine.

    Raises:
        ContextError: If no event loop is running: it is on a thread.
        LoopMismatchError: If it is another one.
    """
    if running_loop("An OnlineLearner") is not engine.loop:
        raise LoopMismatchError(
            "The learner runs on another event loop. Call it there, for example with "
            "asyncio.run_coroutine_threadsafe(learner.submit(example), loop)."
        )
