"""Engine of an open learner: decides what is next, learns, sets aside, publishes.

Invariants:
    * Every number up to `learned_number` was learned into the variables, or set aside.
    * Between two steps the variables are those of `snapshot`, and nothing else writes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from weakref import WeakSet

from ..checkpoint import CheckpointManager, model_variables
from ..devices import OwnedTask, run_on_host, running_loop
from ..errors import ContextError, JournalError, LoopMismatchError
from ..strategies import Strategy
from ..values import Snapshot
from ._example import unpack_example
from ._intake import Intake, Taken, dead_error
from ._journal import DeadLetters, Journal, OpenJournal
from ._published import publish_snapshot
from ._records import LearnerStatistics, StepRecord
from ._saving import Saving
from ._step import BlamelessError, NotUndoneError, StepResult, learn
from ._ticket import RecordStream, Signal

MAX_ERROR = 2000
"""How many characters of an error are kept with a dead letter."""

CLOSED = "The learner is closed. Use it inside `async with`."


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a learner that stay as they are, see `OnlineLearner`."""

    strategy: Strategy
    variables: Any
    max_batch: int
    max_delay_s: float
    queue_size: int
    journal: Journal | None
    checkpoints: CheckpointManager | None
    checkpoint_every_s: float
    publish_to: Path | None


@final
class Engine:
    """The tasks of an open learner, and what they share."""

    def __init__(
        self, settings: Settings, step_fn: Callable[..., Any], before: Engine | None
    ) -> None:
        self.settings = settings
        self.step_fn = step_fn
        self._before = before  # of the same learner, closed
        self.loop = asyncio.get_running_loop()
        self.journal = None if settings.journal is None else OpenJournal(settings.journal)
        self.changed = Signal()
        self.saving = Saving(
            settings.checkpoints,
            settings.variables,
            self.journal,
            settings.checkpoint_every_s,
            self.changed.give,
        )
        self.streams: WeakSet[RecordStream] = WeakSet()
        self.dead = DeadLetters(self.journal)
        self.is_paused = False
        self.is_closing = False
        self.is_closed = False
        self.failure = ""
        self.learned_number = 0
        self.backlog_end = 0
        self.num_learned = 0
        self.num_steps = 0
        self.num_rollbacks = 0
        self.step_s = 0.0
        self.publish_error = ""
        self._is_stepping = False
        self._version = 0  # the number of the newest version that may have been published ever
        self._num_dead_told = 0
        self._published_version = -1
        self._main: OwnedTask[None] | None = None

    # ---- opening and closing -------------------------------------------------------------

    async def open(self) -> None:
        """Open the journal, restore, and start the tasks; nothing is left open if that fails."""
        async with AsyncExitStack() as undo:
            if self.journal is not None:
                await self.journal.open()
                undo.push_async_callback(self.journal.aclose)
            await self.saving.restore()
            self._model = model_variables(self.settings.variables)
            self.learned_number, self._version = self.saving.learned, self.saving.version
            before, self._before = self._before, None  # what it learned is not learned twice
            if before is not None and _still_holds(self, before):
                self.learned_number, self._version = before.learned_number, before.version
                self.dead.take_over(before.dead)
            last = 0 if self.journal is None else self.journal.facts.last_number
            self.backlog_end = max(last, self.learned_number)
            self._take_snapshot(self._version)
            if self.journal is not None and self.has_backlog:
                self._version = await self.journal.skip_versions(self.learned_number, self._version)
            self.intake = Intake(
                self.settings.queue_size, self.journal, self.backlog_end, self.changed
            )
            if self.settings.publish_to is not None:
                await self._write_snapshot(self.settings.publish_to, is_required=True)
            self._main = OwnedTask(self._run(), "online learner")
            undo.pop_all()

    @property
    def journal_id(self) -> str:
        """Identifier of its journal; "" without one."""
        return "" if self.journal is None else self.journal.facts.id

    async def aclose(self) -> None:
        """See `OnlineLearner.aclose`."""
        main = self._main
        if main is None:
            return
        if not self.loop.is_closed():
            require_loop(self)
        self.is_closing = True
        self.intake.close(CLOSED)
        self.changed.give()
        try:
            await main.done_or_cancelled()
        except asyncio.CancelledError:
            main.cancel()
            await main.ended(through_interrupt=True)
            raise
        finally:
            self._main = None
            if main.is_done and not self.is_closed:  # it was cancelled before it had begun
                if self.journal is not None:
                    await self.journal.aclose()
                self._end()
        if not main.task.cancelled():  # by another caller, or the end of the loop
            await main

    async def _run(self) -> None:
        commits = publishing = None
        async with AsyncExitStack() as ends:
            ends.callback(self._end)
            if self.journal is not None:
                ends.push_async_callback(self.journal.aclose)
                commits = OwnedTask(self.intake.commit_forever(), "online commits")
                ends.push_async_callback(_end_task, commits)
                commits.when_done(lambda _error: self.changed.give())
            ends.push_async_callback(self.saving.aclose)
            if self.settings.publish_to is not None:
                publishing = OwnedTask(self._publish(self.settings.publish_to), "online snapshots")
                ends.push_async_callback(_end_task, publishing)
            while not (self._is_drained and (commits is None or commits.is_done)):
                await self._act()
            problem = await self.dead.save()
            if problem:
                raise JournalError(f"Dead letters were not written down: {problem}")
            await self.saving.finish(self.learned_number, self.version)
            if publishing is not None and self.settings.publish_to is not None:
                await _end_task(publishing)  # else its older version may be the last to be written
                await self._write_snapshot(self.settings.publish_to)

    def _end(self) -> None:
        self.is_closing = self.is_closed = True
        self.intake.close(CLOSED)
        self.intake.abandon(
            "The learner was closed before the example was learned. "
            + ("The journal has it." if self.journal is not None else "It is lost.")
        )
        for stream in self.streams:
            stream.close()
        self.changed.give()

    @property
    def _is_drained(self) -> bool:
        """True if nothing is left to do for a learner that closes."""
        has_work = bool(self.intake.queue) or self.has_backlog
        return self.is_closing and (not has_work or bool(self.failure))

    # ---- what to do next -----------------------------------------------------------------

    @property
    def has_backlog(self) -> bool:
        """True if examples of earlier learners are not learned yet."""
        return self.learned_number < self.backlog_end

    async def _act(self) -> None:
        """Do what is to be done next, or wait until something changes."""
        now = asyncio.get_running_loop().time()
        self.intake.settle_followers(self.learned_number, self.version)
        due_at = self.saving.due_at(self.learned_number)
        may_learn = not self.failure and (self.is_closing or not self.is_paused)
        queue = self.intake.queue
        if self.saving.is_due(now):
            await self._save()
        elif may_learn and self.has_backlog:
            await self._learn_backlog()
        elif may_learn and queue:
            ready_at = queue[0].since + self.settings.max_delay_s
            if len(queue) >= self.settings.max_batch or now >= ready_at or self.is_closing:
                await self._learn_queued()
            else:
                await self.changed.wait(ready_at if due_at is None else min(ready_at, due_at))
        else:
            await self.changed.wait(due_at)

    async def idle(self) -> None:
        """Wait until no step is under way."""
        while self._is_stepping:
            await self.changed.wait()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self.changed.give()

    async def _save(self) -> None:
        problem = await self.dead.save()  # no checkpoint may leave them behind
        if problem:
            self.saving.fail(problem)
        else:
            await self.saving.begin(self.learned_number, self.version)

    async def _learn_backlog(self) -> None:
        assert self.journal is not None  # or there is no backlog
        with self._stepping():
            try:
                rows = await self.journal.rows(self.learned_number, self.settings.max_batch)
                rows = [row for row in rows if row.number <= self.backlog_end]
                batch = [Taken(row.number, unpack_example(row.body), None, 0.0) for row in rows]
            except (JournalError, ValueError) as error:
                self.failure = str(error)
                return
            if not batch:
                self.learned_number = self.backlog_end
                return
            await self._learn(batch, lambda _size: None)

    async def _learn_queued(self) -> None:
        with self._stepping():
            batch = self.intake.next_batch(self.settings.max_batch)
            left = deque(batch)

            def done(size: int) -> None:
                for _ in range(size):
                    left.popleft()
                self.intake.free(size)

            try:
                await self._learn(batch, done)
            finally:
                self.intake.queue.extendleft(reversed(left))  # first again, in their order

    async def _learn(self, batch: list[Taken], done: Callable[[int], None]) -> None:
        """Learn a batch; what fails is learned in halves, down to the examples to blame.

        Args:
            batch: Some examples, in order.
            done: Called with how many of them, in order, were learned or set aside.
        """
        parts = [batch]
        while parts:
            part = parts.pop()
            try:
                result = await learn(
                    self.settings.strategy,
                    self.step_fn,
                    self.settings.variables,
                    [taken.example for taken in part],
                )
            except NotUndoneError as error:  # nothing may be learned, saved or shown after that
                raise _not_undone(error.__cause__ or error) from error.__cause__
            except BlamelessError as error:
                self.failure = _described(error.__cause__ or error)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, one of them may be to blame
                self.num_rollbacks += 1
                if len(part) > 1:
                    # Halves: n examples with one bad among them cost 2 log2(n) further steps.
                    middle = (len(part) + 1) // 2
                    parts += [part[middle:], part[:middle]]
                    continue
                await self._set_aside(part[0], error)
                self.learned_number = part[0].number
                done(1)
            else:
                self.learned_number = part[-1].number
                done(len(part))
                self._keep(part, result)

    # ---- what comes of it ----------------------------------------------------------------

    def _keep(self, part: list[Taken], result: StepResult) -> None:
        """Publish what a step has made, and tell everybody."""
        self._version += 1
        self._take_snapshot(self._version)
        self.num_steps += 1
        self.num_learned += len(part)
        self.step_s += result.step_s
        for taken in part:
            self.intake.settle(taken, self._version)
        num_dead, self._num_dead_told = (
            self.dead.num_added - self._num_dead_told,
            self.dead.num_added,
        )
        record = StepRecord(
            version=self._version,
            first_number=part[0].number,
            last_number=part[-1].number,
            num_examples=len(part),
            num_dead=num_dead,
            scalars=result.scalars,
            queue_depth=self.intake.depth,
            began=result.began,
            step_s=result.step_s,
            replicas=result.replicas,
        )
        for stream in self.streams:
            stream.add(record)
        self.changed.give()

    async def _set_aside(self, taken: Taken, error: Exception) -> None:
        text = _described(error)
        await self.dead.add(taken.number, taken.example, text)
        self.intake.settle(taken, dead_error(taken.number, text))

    def statistics(self, state: str) -> LearnerStatistics:
        """See `OnlineLearner.statistics`."""
        intake, saving = self.intake, self.saving
        return LearnerStatistics(
            state=state,
            version=self.version,
            num_taken=intake.num_taken,
            num_duplicates=intake.num_duplicates,
            num_refused=intake.num_refused,
            num_learned=self.num_learned,
            num_dead=self.dead.num_added,
            num_steps=self.num_steps,
            num_rollbacks=self.num_rollbacks,
            queue_depth=intake.depth,
            queue_size=self.settings.queue_size,
            backlog=max(0, self.backlog_end - self.learned_number),
            last_number=intake.last_number,
            learned_number=self.learned_number,
            step_s=self.step_s,
            num_commits=intake.num_commits,
            commit_s=intake.commit_s,
            journal_error=intake.journal_error,
            checkpoint_number=saving.saved_number,
            num_checkpoints=saving.num_saved,
            checkpoint_error=saving.error,
            publish_error=self.publish_error,
            failure=self.failure,
        )

    # ---- snapshots -----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that is published."""
        return self.snapshot.version

    def _take_snapshot(self, version: int) -> None:
        self.snapshot = Snapshot(
            version, {variable: variable.components for variable in self._model.values()}
        )

    async def _publish(self, path: Path) -> None:
        """Write new snapshots for other processes; of those that come meanwhile the newest."""
        while True:
            if self._published_version == self.version:
                await self.changed.wait()
            else:
                await self._write_snapshot(path)

    async def _write_snapshot(self, path: Path, *, is_required: bool = False) -> None:
        snapshot = self.snapshot
        if snapshot.version == self._published_version:
            return
        arrays = {key: snapshot[variable] for key, variable in self._model.items()}
        try:
            await run_on_host(publish_snapshot, path, snapshot.version, arrays)
        except OSError as error:
            self.publish_error = str(error)
            if is_required:
                raise
        else:
            self.publish_error = ""
        self._published_version = snapshot.version


def _still_holds(engine: Engine, before: Engine) -> bool:
    """Tell whether the variables are as a learner that was closed has left them.

    If no checkpoint was restored, they would else learn the whole journal once more.
    """
    if engine.saving.saved_number is not None or engine.journal_id != before.journal_id:
        return False
    left = before.snapshot.components
    return all(
        new is old
        for variable in model_variables(engine.settings.variables).values()
        for new, old in zip(variable.components, left[variable], strict=True)
    )


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


def _described(error: BaseException) -> str:
    group = ""
    while isinstance(error, BaseExceptionGroup):
        group = group or f" ({error.message})"
        error = error.exceptions[0]
    try:
        text = f"{type(error).__name__}: {error}{group}"
    except Exception:  # noqa: BLE001 - its `__str__` is not ours
        text = f"{type(error).__name__}, whose text cannot be shown{group}"
    text = text.encode(errors="backslashreplace").decode()  # SQLite takes no lone surrogates
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


def _not_undone(cause: BaseException) -> ContextError:
    return ContextError(
        "The learner has ended, as a step went wrong and could not be undone: "
        f"{_described(cause)}. Restart the program; journal and checkpoints are as they were "
        "before the step."
    )


async def _end_task(task: OwnedTask[None]) -> None:
    task.cancel()
    await task.ended(through_interrupt=True)
