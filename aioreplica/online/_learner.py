"""The learner: examples are taken, learned in micro-batches, and served as snapshots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from ..checkpoint import CheckpointManager
from ..errors import ContextError
from ..strategies import Strategy
from ..tree import Tree
from ..values import Snapshot
from ._control import CLOSED, pin, request_rollback, unpin
from ._engine import Engine, require_loop
from ._intake import ExampleGroup, checked_group
from ._journal import Journal
from ._journal_format import MAIN
from ._labels import expect, expected, label, replayed, taken_again
from ._migration import Migration
from ._prequential import Prequential
from ._records import DeadLetter
from ._serving import GateFunction
from ._settings import (
    StepFunction,
    Validation,
    checked_step_fn,
    optimizers_of,
    settings_of,
)
from ._sources import Source
from ._statistics import LearnerStatistics, statistics_of
from ._ticket import RecordStream, Ticket


@final
class OnlineLearner:
    """Learns examples as they come, in steps of a strategy, while others read whole snapshots.

    Use it in `async with`. Entering restores the newest good checkpoint and goes on with the
    journal; leaving takes no more examples, learns those that were taken, saves a checkpoint and
    closes the journal. The learner saves the checkpoints itself, and nothing else may write its
    variables while it is open.

    A batch is what was taken in the order of the journal: up to `max_batch` examples, or fewer once
    `max_delay_s` have passed since the first one. Its leaves are stacked and split over the
    replicas, contiguous and balanced; a part may be empty.

    A step that raises or writes numbers that are not finite is undone, all of it. Then its batch is
    learned in halves, and what fails alone is set aside as a dead letter. Errors that no example
    can be blamed for (a lost device, another event loop, no memory), and too many examples in a row
    that fail alone, put the learner into the state "failed" instead: it keeps what it has, serves
    snapshots, and goes on after `resume`.

    Args:
        strategy: Runs the steps.
        step_fn: Called on each replica as `step_fn(ctx, batch)`, in the way of `strategy.run`. It
            returns None, a number (called "loss") or a dict of numbers, which are recorded.
        variables: Everything that steps change, as for `CheckpointManager.save`: a dict or list of
            variables, optimizers, metrics and so on. It is undone and saved as a whole.
        max_batch: Most examples of a step.
        max_delay_s: How long an example may wait for others, in seconds.
        queue_size: How many examples may be taken and not learned.
        journal: A path, or a `Journal`: examples are durable before they are acknowledged.
        checkpoints: A `CheckpointManager` for this learner alone. The number of a checkpoint is
            that of the last example that it has learned.
        checkpoint_every_s: A checkpoint is saved behind the first step after so many seconds.
        validate: Called with each example before it is taken; what it returns is taken in its
            place, and what it raises is raised by the submission. See `ExampleSpec`.
        publish_to: A path for each `SnapshotReader` of another process.
        max_failures_in_a_row: So many examples that fail alone, and no step that is kept between
            them, are the step's fault: none of them is a dead letter, and the state is "failed".
            None blames examples always.
        retry_on: Classes of errors that go away by themselves, such as ConnectionError. A step that
            raises one is undone and tried again with its batch after 0.1 s, 0.2 s and so on up to
            30 s; the state is "retrying" meanwhile. When the learner is closed it tries once.
        step_timeout_s: Seconds after which a step is ended and undone, and the state "failed"; so
            it is already while a function on a device's thread, which nothing ends, goes on.
        grace_s: Seconds that closing may take; then the step under way is ended and undone, and the
            journal has the rest. None waits until all is learned.
        step_check: Judges each step before it is kept, such as `StepLimits(change=10.0)`. It gets a
            `Candidate`; a step that it refuses, with a text or False, is undone, and the example
            to blame found, as if the step had raised.
        publish_if: Judges each version that was kept, in the same way, before it is served. What
            it refuses is held back: `snapshot()` and `publish_to` stay, and learning goes on. So
            is what it takes longer for than `step_timeout_s`.
        prequential: Predicts each batch before it is learned: figures, and drift.
        sources: Read by the learner itself, by name, such as `FolderSource`; needs a journal.
        challengers: Learners by name that learn the same examples, in batches of their own, until
            one is promoted. They are opened and closed with this one, which needs a journal and
            checkpoints. Each has a strategy, variables and checkpoints of its own, and no journal;
            its `queue_size` is of no use.
        max_lag: A model that is not served is detached once it is so many examples behind.
        spec_version: Version of the form of examples, and of the keys of `variables`.
        migrate: Steps from older versions, by version; examples are tried when the learner opens.

    Raises:
        ValueError: If a number is out of range, `variables` no container, or some do not fit.
        TypeError: If an argument is of the wrong type.
    """

    def __init__(
        self,
        strategy: Strategy,
        step_fn: StepFunction,
        variables: object,
        *,
        max_batch: int,
        max_delay_s: float,
        queue_size: int,
        journal: Journal | str | os.PathLike[str] | None = None,
        checkpoints: CheckpointManager | None = None,
        checkpoint_every_s: float = 60.0,
        validate: Validation | None = None,
        publish_to: str | os.PathLike[str] | None = None,
        max_failures_in_a_row: int | None = 5,
        retry_on: type[Exception] | tuple[type[Exception], ...] = (),
        step_timeout_s: float | None = None,
        grace_s: float | None = None,
        step_check: GateFunction | None = None,
        publish_if: GateFunction | None = None,
        prequential: Prequential | None = None,
        sources: Mapping[str, Source] | None = None,
        challengers: Mapping[str, OnlineLearner] | None = None,
        max_lag: int = 100_000,
        spec_version: int = 1,
        migrate: Mapping[int, Migration] | None = None,
    ) -> None:
        self._settings = settings_of(
            strategy, variables, max_batch, max_delay_s, queue_size, journal, checkpoints,
            checkpoint_every_s, validate, publish_to, max_failures_in_a_row, retry_on,
            step_timeout_s, grace_s, step_check, publish_if, prequential, sources, challengers,
            max_lag, spec_version, migrate,
        )  # fmt: skip
        self._step_fn = checked_step_fn(step_fn)
        self._engine: Engine | None = None
        self._is_opening = False

    # ---- examples in ---------------------------------------------------------------------

    async def submit(self, example: object, *, key: str | None = None) -> Ticket:
        """Take an example; when it returns, the example is durable if there is a journal.

        Waits for a place in the queue, first come first served.

        Args:
            example: Dicts (with text as keys), lists and tuples of NumPy arrays and numbers.
            key: An idempotency key: a second submission with it and the same example gives the
                first one's number and takes nothing. Needs a journal, which remembers keys for
                its `keep_keys_s`.

        Returns:
            Its ticket; await that to wait until it was learned.

        Raises:
            TypeError: If it is not of these types.
            ValueError: If `validate` refuses it, or there is a key and no journal.
            KeyReusedError: If the key came with another example before.
            JournalError: If the journal could not keep it.
            ContextError: If the learner is not open, or no event loop runs on this thread.
            LoopMismatchError: If another one does than the learner's.

        Cancellation:
            While it waits for a place, nothing is taken. Later the example may be taken.
        """
        [ticket] = await self.submit_many([example], key=key)
        return ticket

    def submit_nowait(self, example: object, *, key: str | None = None) -> Ticket:
        """Take an example if there is room; `await ticket.saved()` until it is durable.

        Raises:
            anyio.WouldBlock: If the queue is full.
            Exception: As `submit`; errors of the journal are raised by the ticket.
        """
        [ticket] = self.submit_many_nowait([example], key=key)
        return ticket

    async def submit_many(
        self, examples: Sequence[object], *, key: str | None = None
    ) -> tuple[Ticket, ...]:
        """Take several examples with consecutive numbers, all or none; otherwise as `submit`.

        Raises:
            ValueError: If there are more than the queue can ever hold.
            Exception: As `submit`.
        """
        try:
            submission = self._group(examples, key)
        except (TypeError, ValueError):
            if known := await replayed(self._open_engine(), key, len(examples)):
                return known
            raise
        await self._open_engine().intake.take(submission)
        await submission.tickets[0].saved()
        return submission.tickets

    def submit_many_nowait(
        self, examples: Sequence[object], *, key: str | None = None
    ) -> tuple[Ticket, ...]:
        """Take several examples if there is room for all; otherwise as `submit_nowait`."""
        submission = self._group(examples, key)
        self._open_engine().intake.take_nowait(submission)
        return submission.tickets

    # ---- labels that come later ----------------------------------------------------------

    def expect(
        self, x: object, prediction: object = None, *, prediction_id: str | None = None
    ) -> str:
        """Keep an input until its label comes; returns its id at once.

        It is written with the next commit of the journal, whose `label_ttl_s` says for how long. A
        crash before that commit forgets it.

        Args:
            x: The "input" of the example.
            prediction: Kept beside it, see `expected`.
            prediction_id: What the label names it by; one is drawn if there is none. Use each once:
                a later one takes its place, and a label of the first counts for both.

        Raises:
            anyio.WouldBlock: If too many are not written yet.
            TypeError: If it is not what examples are made of.
            ContextError: If the learner is not open, or its journal has no `label_ttl_s`.
        """
        return expect(self._open_engine(), x, prediction, prediction_id)

    async def expected(self, prediction_id: str) -> Mapping[str, Tree]:
        """Return what `expect` keeps: "input", and "prediction" if there was one.

        Raises:
            KeyError: If there is none of that id, any more.
        """
        return await expected(self._open_engine(), prediction_id)

    async def label(self, prediction_id: str, target: object) -> Ticket:
        """Take the example `{"input": ..., "target": ...}` of an input that waits for its label.

        In one transaction the input goes and the example comes. The same label again takes nothing
        and gives the first one's number, as long as the journal remembers keys.

        Raises:
            KeyError: If there is none of that id, any more; `statistics().num_unknown_labels`.
            KeyReusedError: If it had another label.
            Exception: As `submit`.
        """
        return await label(self._open_engine(), prediction_id, target)

    @property
    def keeps_inputs(self) -> bool:
        """True if `expect` keeps inputs: the journal has `label_ttl_s`."""
        journal = self._settings.journal
        return journal is not None and journal.label_ttl_s is not None

    # ---- what is served ------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the values that are served, of all variables but slots, also by their keys.

        They are those after the last step that was kept, unless `publish_if` holds that back, or
        another version is pinned. Costs nothing; from any thread. Its `version` is that of the
        learner.

        Raises:
            ContextError: If the learner was never opened.
        """
        return _opened(self._engine).served.serving.served

    @property
    def version(self) -> int:
        """Number of the published snapshot.

        It grows with each step. With a journal and checkpoints no number is used twice, whatever
        crashes happen.
        """
        return self.snapshot().version

    async def pin(self, version: int | None = None) -> None:
        """Serve one version, whatever is learned, until `unpin`; checkpoints keep that.

        Args:
            version: The one that is served, which None stands for, or the newest one, also if
                `publish_if` holds it back. `statistics()` has both.

        Raises:
            ValueError: If it is another one.
            CheckpointError: If no checkpoint could be saved: it is pinned until a restart.

        Cancellation:
            Stops waiting; it is pinned.
        """
        await pin(self._open_engine(), version)

    async def unpin(self) -> None:
        """Serve the newest version again, unless `publish_if` holds it back; as `pin`.

        One that is being judged is served once it is let through.
        """
        await unpin(self._open_engine())

    @property
    def state(self) -> str:
        """State of the learner.

        "new", "recovering" (learning what earlier learners left), "running", "paused", "retrying"
        (after an error of `retry_on`), "failed", "closing" or "closed".
        """
        return "new" if self._engine is None else self._engine.state

    @property
    def is_ready(self) -> bool:
        """True if what is served learns or is paused, has caught up, and examples are taken."""
        if self._engine is None or self._engine.served.state not in {"running", "paused"}:
            return False
        return not self._engine.served.has_backlog and not self._engine.intake.journal_error

    @property
    def queue_size(self) -> int:
        """Most examples that may be taken and not learned."""
        return self._settings.queue_size

    def records(self, *, buffer_size: int = 256) -> RecordStream:
        """Return a stream of records, one per published step, from now on."""
        stream = RecordStream(buffer_size)
        self._open_engine().streams.add(stream)
        return stream

    def statistics(self) -> LearnerStatistics:
        """Return what it has done and where it stands."""
        return statistics_of(_opened(self._engine))

    # ---- several models ------------------------------------------------------------------

    @property
    def champion(self) -> str:
        """Name of the model that is served: "main", which is this one's, or a challenger's."""
        return _opened(self._engine).models.champion_name

    async def promote(self, model: str) -> int:
        """Serve another model from now on, also after a restart: a challenger, or "main" again.

        It is one transaction of the journal; the champion before goes on as a challenger. One
        promotion comes behind another; who asks for the model that is being promoted joins that.

        Returns:
            The first version of it that is served, larger than all before.

        Raises:
            ValueError: If there is none of that name, or it is not learning, or too far behind.
            CheckpointError: If it has no checkpoint, and none could be saved.
            JournalError: If the journal could not be written: nothing has changed.
            ContextError: If the learner is not open, or is a challenger itself; or if there is no
                checkpoint 10 s after another model was asked for that is fit, which goes first
                then: a challenger, or the champion, which stays so.

        Cancellation:
            Not promoted if it waits behind another promotion; otherwise it is, all the same.
        """
        engine = self._open_engine()
        if not engine.is_owner:
            raise ContextError(f"{engine.model!r} is a challenger. Promote it with its champion.")
        return await engine.models.promotions.promote(model)

    # ---- while it runs -------------------------------------------------------------------

    async def pause(self) -> None:
        """Begin no more steps; return when none is under way. Examples are taken until it is full.

        Cancellation:
            Stops waiting; it is paused.
        """
        engine = self._open_engine()
        engine.is_paused = True
        await engine.learning.under_way.ended()

    def resume(self, *, set_aside: bool = False) -> None:
        """Go on after `pause` or a failure, or try again now.

        Args:
            set_aside: Whether examples that fail alone are set aside, however many they are in a
                row, until a step is kept: for when they are to blame after all.
        """
        self._open_engine().resume(set_aside=set_aside)

    @property
    def step_fn(self) -> StepFunction:
        """The step function; the next step uses a new one."""
        return self._step_fn

    @step_fn.setter
    def step_fn(self, value: StepFunction) -> None:
        self._step_fn = checked_step_fn(value)
        if self._engine is not None:
            self._engine.learning.step_fn = value

    @property
    def learning_rate(self) -> Any:
        """Learning rate of all optimizers in `variables`; a new one takes effect at the next step.

        It is a setting of the program: no checkpoint has it.

        Raises:
            ValueError: If there is no optimizer in `variables`, or the rate is not finite.
        """
        return optimizers_of(self._settings.variables)[0].learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        for optimizer in optimizers_of(self._settings.variables):
            optimizer.learning_rate = value

    async def checkpoint(self) -> int:
        """Save a checkpoint now, behind the step under way; return when it is durable.

        Returns:
            The number of the last example that it has learned.

        Raises:
            CheckpointError: If it could not be saved.
            ContextError: If the learner is not open, or has no `checkpoints`.

        Cancellation:
            Stops waiting; it is saved.
        """
        engine = self._open_engine()
        if self._settings.checkpoints is None:
            raise ContextError("The learner has no checkpoints. Pass checkpoints=manager.")
        return await engine.saving.request()

    async def rollback(self, to: int, skip: Sequence[int] = ()) -> int:
        """Forget what was learned behind a number, and learn it again without some examples.

        The newest checkpoint at or before `to` is restored, between two steps, and the journal's
        examples behind it are learned again, but for dead letters. Meanwhile the state is
        "recovering", examples are taken, and what was restored is served. Durable when it returns.

        Args:
            to: A number of an example; `statistics().rollback_from` is the smallest.
            skip: Examples behind `to` that become dead letters.

        Returns:
            The number of the checkpoint.

        Raises:
            ValueError: If `to` is too far back or not learned yet, or an example to skip is not
                behind it, or not in the journal. Nothing has changed, as with the next two.
            CheckpointError: If the checkpoint cannot be restored.
            JournalError: If the journal could not be written.
            ContextError: If the learner is not open, or has no journal or no `checkpoints`.

        Cancellation:
            Stops waiting; it is rolled back all the same.
        """
        return await request_rollback(self._open_engine(), to, skip)

    async def ticket(self, number: int) -> Ticket:
        """Return a ticket of an example that was taken before, also by earlier learners.

        That a dead letter was discarded or taken again is known for the journal's `keep_keys_s`.

        Raises:
            KeyError: If none of that number was taken.
            ContextError: If the learner is not open, or has no journal.
            JournalError: If the journal cannot be read.
        """
        engine = self._open_engine()
        ticket, served = await engine.intake.ticket_of(number), engine.served
        engine.intake.settle_followers(served.learning.learned_number, served.version)
        return ticket

    # ---- dead letters --------------------------------------------------------------------

    async def dead_letters(
        self, *, after: int = 0, before: int | None = None, limit: int = 100
    ) -> tuple[DeadLetter, ...]:
        """Return examples that were set aside, by number; without a journal the newest 1,000.

        Args:
            after: Leaves out those up to this number.
            before: If given, leaves out those from this number on, and returns the last ones.
            limit: Returns so many at most: the first ones without `before`.
        """
        return await self._open_engine().dead.list(after, limit, before)

    async def retry(self, number: int) -> Ticket:
        """Take a dead letter again, as a new example with a new number.

        Without a journal it does not wait for a place in the queue.

        Raises:
            KeyError: If there is no dead letter of that number.
            anyio.WouldBlock: If the queue is full, without a journal.
            Exception: As `submit`.
        """
        return await (await taken_again(self._open_engine(), number)).saved()

    async def discard(self, number: int) -> None:
        """Delete a dead letter for good.

        Raises:
            KeyError: If there is no dead letter of that number.
            JournalError: If the journal could not be written.
        """
        await self._open_engine().dead.discard(number)

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Take no more examples, learn those taken, save a checkpoint, close the journal.

        Idempotent. Also learns while it is paused.

        Raises:
            CheckpointError: If the checkpoint could not be saved.
            StallError: If a step on a device's thread does not end within `grace_s`.
            LoopMismatchError: If called on another event loop.
            ContextError: If it is a challenger that is served, or its promotion is being written.

        Cancellation:
            The step under way is ended and undone, what is left stays in the journal, no
            checkpoint is saved; then it goes on. A challenger that waits for its own promotion
            stays open.
        """
        if (engine := self._engine) is not None:
            grace_s = engine.settings.grace_s
            if not (engine.is_owner or engine.is_closing or engine.loop.is_closed()):
                require_loop(engine)
                grace_s = await engine.models.promotions.let_go(engine)
            await engine.aclose(grace_s)

    async def __aenter__(self) -> Self:
        await self._open_as(MAIN, None)
        return self

    async def _open_as(self, model: str, owner: Engine | None) -> Engine:
        before = self._engine
        if self._is_opening or (before is not None and not before.is_closed):
            raise ContextError("The learner is open already. Enter it once.")
        self._is_opening = True
        try:
            engine = Engine(self._settings, self._step_fn, before, model, owner)
            await engine.open()
        finally:
            self._is_opening = False
        self._engine = engine
        return engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _group(self, examples: Sequence[object], key: str | None) -> ExampleGroup:
        self._open_engine()
        own = self._settings
        return checked_group(examples, key, own.queue_size, own.validate, own.journal is not None)

    def _open_engine(self) -> Engine:
        engine = self._engine
        if engine is None or engine.is_closing:
            raise ContextError(CLOSED)
        require_loop(engine)
        return engine

    def __repr__(self) -> str:
        engine = self._engine
        about = "" if engine is None else f", version {self.version}, {engine.intake.depth} queued"
        return f"<OnlineLearner | {self.state}{about}>"


def _opened(engine: Engine | None) -> Engine:
    if engine is None:
        raise ContextError("The learner was never opened. Use it in `async with`.")
    return engine
