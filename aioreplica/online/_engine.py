"""Engine of an open learner: decides what is next, learns, sets aside, publishes.

Invariants:
    * Every number up to `learned_number` was learned into the variables, or set aside.
    * Between two steps the variables are those of `serving.newest`, and nothing else writes them.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, final

from ..checkpoint import DescribedState, model_variables
from ..context import Living
from ..devices import OwnedTask, running_loop
from ..errors import ContextError, JournalError, LoopMismatchError, StallError
from ._example import unpack_example
from ._failures import Backoff, FailuresInARow, blame_of_step, described, has_any
from ._intake import Intake, Taken, dead_error
from ._journal import DeadLetters, OpenJournal
from ._prequential import Judged
from ._publishing import Publishing
from ._records import StepRecord
from ._rollback import RollbackRequest, answer_request, refuse_all
from ._saving import Saving
from ._serving import Serving
from ._settings import Settings
from ._sources import Follower
from ._step import BlamelessError, NotUndoneError, StepResult, UnderWay, learn
from ._ticket import RecordStream, Signal

UNDO_S = 1.0
"""Seconds that a step may take to end and be undone after the time to close is over."""

CLOSED = "The learner is closed. Use it inside `async with`."


@final
class Engine:
    """The tasks of an open learner, and what they share."""

    def __init__(
        self, settings: Settings, step_fn: Callable[..., Any], before: Engine | None
    ) -> None:
        self.settings = settings
        self.step_fn = step_fn
        self._state = DescribedState(settings.variables)
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
        self.streams: Living[RecordStream] = Living()
        self.dead = DeadLetters(self.journal)
        self.failures = FailuresInARow(settings.max_failures_in_a_row)
        self.prequential = settings.prequential
        self.serving = serving = Serving(settings.step_check, settings.publish_if)
        self.publishing = Publishing(settings.publish_to, lambda: serving.served, self.changed)
        self.requests: deque[RollbackRequest] = deque()
        self.is_paused = False
        self.is_closing = False
        self.is_closed = False
        self.failure = ""
        self.learned_number = 0
        self.backlog_end = 0
        self.num_learned = 0
        self.num_steps = 0
        self.num_rollbacks = 0
        self.num_retries = 0
        self.retry_error = ""
        self.step_s = 0.0
        self._backoff = Backoff(0.1, 30.0)
        self.under_way = UnderWay(self.changed)
        self._version = 0  # the number of the newest version that may have been published ever
        self._has_failed = False  # since the last step that was kept
        self._has_skipped = True
        self._num_dead_told = 0
        self._main: OwnedTask[None] | None = None

    # ---- opening and closing -------------------------------------------------------------

    async def open(self) -> None:
        """Open the journal, restore, and start the tasks; nothing is left open if that fails."""
        async with AsyncExitStack() as undo:
            if self.journal is not None:
                await self.journal.open()
                undo.push_async_callback(self.journal.aclose)
            await self.saving.restore()
            model = model_variables(self._state)
            self.learned_number, self._version = self.saving.learned, self.saving.version
            self.serving.open(model, self._version, self.saving.about("served"))
            before, self._before = self._before, None  # what it learned is not learned twice
            if before is not None and _still_holds(self, before):
                self.learned_number, self._version = before.learned_number, before.version
                self.dead.take_over(before.dead)
                self.serving.take_over(before.serving)
            elif self.prequential is not None:
                self.prequential.load(self.saving.about("judged"))
            last = 0 if self.journal is None else self.journal.facts.last_number
            self.backlog_end = max(last, self.learned_number)
            if self.journal is not None and (self.has_backlog or self.saving.has_gone_back):
                await self._skip_versions(self.journal)
            self.intake = Intake(
                self.settings.queue_size, self.journal, self.backlog_end, self.changed
            )
            self.followers = _followers(self.settings, self.intake, self.journal)
            await self.publishing.open(model)
            self._main = OwnedTask(self._run(), "online learner")
            undo.pop_all()

    async def _skip_versions(self, journal: OpenJournal) -> None:
        """Go behind all versions that may have been published; a full disk is asked again."""
        try:
            self._version = await journal.skip_versions(self.learned_number, self._version)
        except JournalError as error:
            self.retry_error = str(error)
            self._backoff.failed(self.loop.time())
        else:
            self._forget_failures()
        self._has_skipped = not self.retry_error

    async def aclose(self) -> None:
        """See `OnlineLearner.aclose`."""
        main = self._main
        if main is not None:
            await _close(self, main)

    async def _run(self) -> None:
        commits = publishing = None
        async with AsyncExitStack() as ends:
            ends.callback(self._end)
            if self.journal is not None:
                ends.push_async_callback(self.journal.aclose)
                commits = OwnedTask(self.intake.commit_forever(), "online commits")
                ends.push_async_callback(_end_task, commits)
                commits.when_done(lambda _error: self.changed.give())
            for each in self.followers:
                following = OwnedTask(each.run(), f"online source {each.name}")
                ends.push_async_callback(_end_source, following)
            ends.push_async_callback(self.saving.aclose)
            if self.settings.publish_to is not None:
                publishing = OwnedTask(self.publishing.run(), "online snapshots")
                ends.push_async_callback(_end_task, publishing)
            while not (self._is_drained and (commits is None or commits.is_done)):
                await self._act()
            problem = await self.dead.save()
            if problem:
                raise JournalError(f"Dead letters were not written down: {problem}")
            await self.saving.finish(self.settled_number, self.version, self.kept)
            if publishing is not None:
                await _end_task(publishing)  # else its older version may be the last to be written
                await self.publishing.finish()

    def _end(self) -> None:
        self.is_closing = self.is_closed = True
        self.intake.close(CLOSED)
        self.intake.abandon(
            "The learner was closed before the example was learned. "
            + ("The journal has it." if self.journal is not None else "It is lost.")
        )
        refuse_all(self.requests)
        for stream in self.streams:
            stream.close()
        self.changed.give()

    @property
    def _is_drained(self) -> bool:
        """True if nothing is left to do for a learner that closes."""
        has_work = not self.failure and (self.intake.queue or self.has_backlog)
        return self.is_closing and not has_work

    # ---- what to do next -----------------------------------------------------------------

    @property
    def has_backlog(self) -> bool:
        """True if examples of earlier learners are not learned yet."""
        return self.learned_number < self.backlog_end

    @property
    def settled_number(self) -> int:
        """The number up to which all is learned or set aside for good: that of a checkpoint."""
        return self.failures.before if self.failures.failed else self.learned_number

    def resume(self, *, set_aside: bool) -> None:
        """See `OnlineLearner.resume`."""
        self.is_paused, self.failure = False, ""
        self._backoff.succeeded()
        if set_aside:
            self._has_failed = True
            self.failures.lift()
        self.changed.give()

    async def _act(self) -> None:
        """Do what is to be done next, or wait until something changes."""
        now = asyncio.get_running_loop().time()
        self.intake.settle_followers(self.learned_number, self.version)
        due_at = self.saving.due_at(self.settled_number)
        may_learn = not self.failure and (self.is_closing or not self.is_paused)
        queue = self.intake.queue
        if self.requests:
            await answer_request(self, self.requests.popleft())
        elif self.saving.is_due(now):
            await self._save()
        elif may_learn and now < self._backoff.until and not self.is_closing:
            until = self._backoff.until
            await self.changed.wait(until if due_at is None else min(until, due_at))
        elif may_learn and self.journal is not None and not self._has_skipped:
            await self._skip_versions(self.journal)
            if self.retry_error and self.is_closing:
                self.failure = self.retry_error
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

    async def _save(self) -> None:
        problem = await self.dead.save()  # no checkpoint may leave them behind
        if problem:
            self.saving.fail(problem)
        else:
            await self.saving.begin(self.settled_number, self.version, self.kept)

    async def _learn_backlog(self) -> None:
        assert self.journal is not None  # or there is no backlog
        with self.under_way.stepping():
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
        with self.under_way.stepping():
            batch = self.intake.next_batch(self.settings.max_batch)
            left, again = deque(batch), list[Taken]()

            def done(size: int) -> None:
                for _ in range(size):
                    left.popleft()
                self.intake.free(size)

            try:
                again = await self._learn(batch, done)
            finally:
                self.intake.put_back(again, left)

    async def _learn(self, batch: list[Taken], done: Callable[[int], None]) -> list[Taken]:
        """Learn a batch; what fails is learned in halves, down to the examples to blame.

        Args:
            batch: Some examples, in order.
            done: Called with how many of them, in order, were learned or set aside.

        Returns:
            Examples of the queue that were set aside before, and are to be learned again.
        """
        parts, judged = [batch], None
        if self.prequential is not None:
            limit_s = self.settings.step_timeout_s
            judged = await self.prequential.look(self.serving.newest, batch, limit_s)
        while parts:
            part = parts.pop()
            self.under_way.begin()
            try:
                result = await learn(
                    self.settings.strategy,
                    self.step_fn,
                    self._state,
                    [taken.example for taken in part],
                    self.settings.step_timeout_s,
                    self.serving.judge_as(self._version + 1),
                )
            except NotUndoneError as error:  # nothing may be learned, saved or shown after that
                raise _not_undone(error.__cause__ or error) from error.__cause__
            except BlamelessError as error:
                return self._give_up_or_retry(error.__cause__ or error)
            except Exception as error:  # noqa: BLE001 - whatever it is, one of them may be to blame
                self._has_failed = True
                self.num_rollbacks += 1
                if has_any(error, self.settings.retry_on):
                    return self._give_up_or_retry(error)
                if len(part) > 1:
                    # Halves: n examples with one bad among them cost 2 log2(n) further steps.
                    middle = (len(part) + 1) // 2
                    parts += [part[middle:], part[:middle]]
                    continue
                text = described(error)
                if self.failures.is_last_straw:
                    return await self._take_back(part[0].number, text)
                self.failures.add(part[0], self.learned_number)
                await self._set_aside(part[0], text)
                self.learned_number = part[0].number
                done(1)
            else:
                self.learned_number = part[-1].number
                done(len(part))
                await self._keep(part, result, judged)
        return []

    def _forget_failures(self) -> None:
        self._has_failed, self.retry_error = False, ""
        self.failures.kept()
        self._backoff.succeeded()

    def _give_up_or_retry(self, error: BaseException) -> list[Taken]:
        """Stop learning after an error that no example is to blame for, or try again later."""
        text, self._has_failed = described(error), True
        if not has_any(error, self.settings.retry_on):
            self.failure = text
        elif self.is_closing:
            self.failure = f"It was closed while it tried again: {text}"
        else:
            self.num_retries += 1
            self.retry_error = text
            self._backoff.failed(self.loop.time())
        return []

    async def _take_back(self, number: int, text: str) -> list[Taken]:
        """Give up, as the step is to blame: the last that were set aside are no dead letters."""
        failed = self.failures.failed
        first = failed[0].number if failed else number
        try:
            found = await self.dead.take_back([taken.number for taken in failed])
        except JournalError as error:
            self.failure = f"The dead letters from {first} on could not be taken back: {error}"
            return []  # so the next failure is once more the last straw
        self.learned_number = self.settled_number
        again = self.failures.take_back(found)
        self.failure = blame_of_step(len(failed) + 1, first, number, text)
        return [taken for taken in again if taken.number > self.backlog_end]

    # ---- what comes of it ----------------------------------------------------------------

    async def _keep(self, part: list[Taken], result: StepResult, judged: Judged | None) -> None:
        """Publish what a step has made, and tell everybody."""
        self._version += 1
        await self.serving.offer(self._version, result.scalars, len(part))
        drifts: tuple[int, ...] = ()
        if self.prequential is not None:
            drifts = await self.prequential.add(judged, part, self.settings.step_timeout_s)
        if self._has_failed:
            self._forget_failures()
        self.num_steps += 1
        self.num_learned += len(part)
        self.step_s += result.step_s
        for taken in part:
            self.intake.settle(taken, self._version)
        record = _record(self, part, result, self.dead.num_added - self._num_dead_told, drifts)
        self._num_dead_told = self.dead.num_added
        for stream in self.streams:
            stream.add(record)
        self.changed.give()

    async def _set_aside(self, taken: Taken, text: str) -> None:
        await self.dead.add(taken.number, taken.example, text)
        self.intake.settle(taken, dead_error(taken.number, text))

    @property
    def kept(self) -> Mapping[str, Any]:
        """Facts for a checkpoint, beside the variables and how far they have learned."""
        judged = {} if self.prequential is None else self.prequential.kept
        return {"served": self.serving.kept, "judged": judged}

    @property
    def version(self) -> int:
        """The newest version, that of the variables."""
        return self.serving.newest.version


def _followers(
    settings: Settings, intake: Intake, journal: OpenJournal | None
) -> tuple[Follower, ...]:
    if journal is None:  # then there are no sources
        return ()
    size = min(settings.max_batch, settings.queue_size)
    return tuple(
        Follower(name, source, settings.validate, size, intake, journal)
        for name, source in settings.sources.items()
    )


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
    if engine.saving.saved_number is not None or _journal_id(engine) != _journal_id(before):
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


def _not_undone(cause: BaseException) -> ContextError:
    return ContextError(
        "The learner has ended, as a step went wrong and could not be undone: "
        f"{described(cause)}. Restart the program; journal and checkpoints are as they were "
        "before the step."
    )


async def _close(engine: Engine, main: OwnedTask[None]) -> None:
    """Let an engine learn what was taken, within its grace, and save."""
    if not engine.loop.is_closed():
        require_loop(engine)
    engine.is_closing = True
    engine.intake.close(CLOSED)
    engine.changed.give()
    try:
        async with asyncio.timeout(engine.settings.grace_s):
            await main.done_or_cancelled()
    except TimeoutError:
        await _cut_short(engine, main)
    except asyncio.CancelledError:
        main.cancel()
        await main.ended(through_interrupt=True)
        raise
    finally:
        engine._main = None
        if main.is_done and not engine.is_closed:  # it was cancelled before it had begun
            if engine.journal is not None:
                await engine.journal.aclose()
            engine._end()
    if not main.task.cancelled():  # by another caller, or the end of the loop
        await main


async def _cut_short(engine: Engine, main: OwnedTask[None]) -> None:
    """End a learner whose time to close is over; the step under way is undone.

    Raises:
        StallError: If that step does not end, as it is on a thread.
    """
    grace_s, left = engine.settings.grace_s, engine.intake.last_number - engine.learned_number
    main.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(UNDO_S):
            await main.done_or_cancelled()
        where = "the journal has them" if engine.journal is not None else "they are lost"
        warnings.warn(
            f"The learner was closed after {grace_s:g} s with {left} examples left: {where}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    running_s = engine.under_way.running_s
    step = f"a step has been running for {running_s:.1f} s on the thread of a device, where nothing"
    what = f"{step} can end it" if running_s else "the disk does not take what it has to write"
    raise StallError(
        f"The learner cannot be closed: {what}. End the process; the next one on the journal "
        "learns what is left.",
        timeout_s=grace_s,
    )


async def _end_task(task: OwnedTask[None]) -> None:
    task.cancel()
    await task.ended(through_interrupt=True)


async def _end_source(task: OwnedTask[None]) -> None:
    """End a task that runs code of users, which may swallow a cancellation."""
    while not task.is_done:
        task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(UNDO_S):
                await task.done_or_cancelled()
