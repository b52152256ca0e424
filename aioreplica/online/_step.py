"""Learning: a step over some examples, stacked, split, run, checked, and undone if it went wrong.

A batch that went wrong is learned in halves, down to the examples to blame.
"""

from __future__ import annotations

import asyncio
import logging
import numbers
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, final

import numpy as np

from .._functions import is_async
from ..checkpoint import DescribedState, Savepoint
from ..context import INLINE_STEP
from ..devices import INLINE_BYTES, run_on_host
from ..errors import (
    ContextError,
    DeviceError,
    JournalError,
    LoopMismatchError,
    NonFiniteError,
    StallError,
)
from ..input import split_batch
from ..replica import ReplicaContext
from ..strategies import Strategy, get_replica_context
from ..tree import Tree, leaves
from ..values import PerReplica
from ._example import stack_examples
from ._failures import Backoff, FailuresInARow, blame_of_step, described, has_any
from ._intake import Taken
from ._journal import DeadLetters, OpenJournal
from ._records import ReplicaTiming
from ._ticket import Signal

if TYPE_CHECKING:
    from ._prequential import Judged
    from ._serving import Serving
    from ._settings import Settings

LOGGER = logging.getLogger("aioreplica.online")

INLINE_STEP_BYTES = 256 * 1024
"""An optimizer's step that reads and writes no more than this runs on the event loop, which serves
meanwhile, and so does a check for what is not finite: 20 to 50 µs, as a trip to a thread costs."""

TURN_S = 1e-9
"""A sleep this long ends at once, but after what has come in, and what that has woken; one of 0
seconds ends before."""

StepCheck = Callable[[Mapping[str, float], int], Awaitable[None]]
"""Called with what a step tells and how many examples it had; raises if it is not to be kept."""

BLAMELESS = (DeviceError, LoopMismatchError, MemoryError)
"""Errors that no example is to blame for."""


@final
@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step that was kept.

    Attributes:
        scalars: As in `StepRecord`, like the following.
        began: When it began.
        step_s: How long it took.
        replicas: One timing per replica.
    """

    scalars: Mapping[str, float]
    began: float
    step_s: float
    replicas: tuple[ReplicaTiming, ...]


@final
class UnderWay:
    """Steps under way: whether there are some, and since when the one that runs does.

    Args:
        changed: Given when they have ended.
    """

    def __init__(self, changed: Signal) -> None:
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._is_stepping = False
        self._began: float | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Note that steps are under way while a block runs."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping, self._began = False, None
            self._changed.give()

    def begin(self) -> None:
        """Note that one begins."""
        self._began = self._loop.time()

    async def ended(self) -> None:
        """Wait until no step is under way."""
        while self._is_stepping:
            await self._changed.wait()

    @property
    def running_s(self) -> float:
        """Seconds since the step that runs has begun; 0 if there is none."""
        return 0.0 if self._began is None else self._loop.time() - self._began


@final
class Learning:
    """Learns batches into the variables, undoes what fails, and finds out who is to blame.

    Args:
        settings: Those of the learner.
        step_fn: The step function, see `step_fn` below.
        serving: Gets each version.
        dead: Gets the examples that are set aside.
        changed: Given when steps have ended.

    Attributes:
        step_fn: The next step uses it.
        state: Everything that steps change.
        learned_number: Every number up to it was learned into the variables, or set aside.
        last_version: No greater version was ever published, as far as is known.
        failures: The examples that failed since the last step that was kept.
        has_failed: Whether something has failed since then.
        has_skipped: Whether `last_version` is behind all versions of before.
        retries: Whether errors of `retry_on` are tried again.
        retry_error: Why something is tried again; "" if nothing is.
        backoff: When it is.
        under_way: The steps under way.

    The other ones are as in `LearnerStatistics`.
    """

    def __init__(
        self,
        settings: Settings,
        step_fn: Callable[..., object],
        serving: Serving,
        dead: DeadLetters,
        changed: Signal,
    ) -> None:
        self.step_fn = step_fn
        self.state = DescribedState(settings.variables)
        self.learned_number = 0
        self.last_version = 0
        self._failure = ""
        self.failures = FailuresInARow(settings.max_failures_in_a_row)
        self.has_failed = False
        self.has_skipped = True
        self.retries = True
        self.retry_error = ""
        self.backoff = Backoff(0.1, 30.0)
        self.under_way = UnderWay(changed)
        self.num_learned = 0
        self.num_steps = 0
        self.num_rollbacks = 0
        self.num_retries = 0
        self.step_s = 0.0
        self._settings = settings
        self._serving = serving
        self._dead = dead

    @property
    def failure(self) -> str:
        """The reason why nothing is learned any more, which is logged; "" if something is."""
        return self._failure

    @failure.setter
    def failure(self, text: str) -> None:
        if text and text != self._failure:
            LOGGER.error("Nothing is learned any more: %s", text)
        self._failure = text

    @property
    def settled_number(self) -> int:
        """The number up to which all is learned or set aside for good: that of a checkpoint."""
        return self.failures.before if self.failures.failed else self.learned_number

    async def learn(
        self,
        batch: list[Taken],
        done: Callable[[int], None],
        settle: Callable[[Taken, str], None],
        tell: Callable[[list[Taken], StepResult, tuple[int, ...]], None],
    ) -> list[Taken]:
        """Learn a batch; what fails is learned in halves, down to the examples to blame.

        Args:
            batch: Some examples, in order.
            done: Called with how many of them, in order, were learned or set aside.
            settle: Called with one that was set aside, and why.
            tell: Called with those of a step that was kept, its result, and drifts.

        Returns:
            Examples that were set aside before, and are to be learned again.

        Raises:
            ContextError: If a step went wrong and could not be undone: nothing may be learned,
                saved or shown after that.
        """
        settings, parts, judged = self._settings, [batch], None
        if settings.prequential is not None:
            limit_s = settings.step_timeout_s
            judged = await settings.prequential.look(self._serving.newest, batch, limit_s)
        while parts:
            part = parts.pop()
            try:
                result = await self._step(part)
            except NotUndoneError as error:
                ended = _not_undone(error.__cause__ or error)
                self.failure = str(ended)
                raise ended from error.__cause__
            except BlamelessError as error:
                return self._give_up_or_retry(error.__cause__ or error)
            except Exception as error:  # noqa: BLE001 - whatever it is, one of them may be to blame
                self.has_failed = True
                self.num_rollbacks += 1
                if has_any(error, settings.retry_on):
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
                settle(part[0], text)
                self.learned_number = part[0].number
                done(1)
            else:
                self.learned_number = part[-1].number
                done(len(part))
                await self._keep(part, result, judged, tell)
        return []

    async def _set_aside(self, taken: Taken, text: str) -> None:
        if not self._dead.num_added:
            LOGGER.warning(
                "Example %s was set aside, the first one. Further ones are counted, in "
                "statistics().num_dead: %s", taken.number, text,
            )  # fmt: skip
        await self._dead.add(taken.number, taken.example, text)

    async def _step(self, part: list[Taken]) -> StepResult:
        self.under_way.begin()
        return await learn(
            self._settings.strategy,
            self.step_fn,
            self.state,
            [taken.example for taken in part],
            self._settings.step_timeout_s,
            self._serving.judge_as(self.last_version + 1),
        )

    async def _keep(
        self,
        part: list[Taken],
        result: StepResult,
        judged: Judged | None,
        tell: Callable[[list[Taken], StepResult, tuple[int, ...]], None],
    ) -> None:
        """Publish what a step has made, and tell of it.

        Cancellation:
            Ends the gate or the hook that it waits for; the step is kept and told all the same.
        """
        drifts, limit_s = tuple[int, ...](), self._settings.step_timeout_s
        self.last_version += 1
        if self.has_failed:
            self._forget_failures()
        self.num_steps += 1
        self.num_learned += len(part)
        self.step_s += result.step_s
        try:
            await self._serving.offer(self.last_version, result.scalars, len(part), limit_s)
            if self._settings.prequential is not None:
                drifts = await self._settings.prequential.add(judged, part, limit_s)
        finally:
            tell(part, result, drifts)

    async def skip_versions(self, journal: OpenJournal) -> None:
        """Go behind all versions that may have been published; a full disk is asked again."""
        try:
            self.last_version = await journal.skip_versions(self.learned_number, self.last_version)
        except JournalError as error:
            self.retry_error = str(error)
            self.backoff.failed(asyncio.get_running_loop().time())
        else:
            self._forget_failures()
        self.has_skipped = not self.retry_error

    def reading_failed(self, error: Exception, *, is_last: bool) -> None:
        """Try again later where the disk has failed; a damaged row stops learning at once."""
        if is_last or not isinstance(error.__cause__, sqlite3.OperationalError):
            self.failure = str(error)
        else:
            self.retry_error, self.has_failed = str(error), True
            self.backoff.failed(asyncio.get_running_loop().time())

    def pass_to(self, number: int) -> None:
        """Go on behind numbers that the journal has no examples of."""
        self.learned_number = number
        if self.retry_error:
            self._forget_failures()

    def _forget_failures(self) -> None:
        self.has_failed, self.retry_error = False, ""
        self.failures.kept()
        self.backoff.succeeded()

    def resume(self, *, set_aside: bool) -> None:
        """See `OnlineLearner.resume`."""
        self.failure = ""
        self.backoff.succeeded()
        if set_aside:
            self.has_failed = True
            self.failures.lift()

    def _give_up_or_retry(self, error: BaseException) -> list[Taken]:
        """Stop learning after an error that no example is to blame for, or try again later."""
        text, self.has_failed = described(error), True
        if not has_any(error, self._settings.retry_on):
            self.failure = text
        elif not self.retries:
            self.failure = f"It was closed while it tried again: {text}"
        else:
            self.num_retries += 1
            self.retry_error = text
            self.backoff.failed(asyncio.get_running_loop().time())
        return []

    async def _take_back(self, number: int, text: str) -> list[Taken]:
        """Give up, as the step is to blame: the last that were set aside are no dead letters."""
        failed = self.failures.failed
        first = failed[0].number if failed else number
        try:
            found = await self._dead.take_back([taken.number for taken in failed])
        except JournalError as error:
            self.failure = f"The dead letters from {first} on could not be taken back: {error}"
            return []  # so the next failure is once more the last straw
        self.learned_number = self.settled_number
        again = self.failures.take_back(found)
        self.failure = blame_of_step(len(failed) + 1, first, number, text)
        return again


def _not_undone(cause: BaseException) -> ContextError:
    return ContextError(
        "The learner has ended, as a step went wrong and could not be undone: "
        f"{described(cause)}. Restart the program; journal and checkpoints are as they were "
        "before the step."
    )


@final
class BlamelessError(Exception):
    """Raised inside the package when a step was undone and its examples are not to blame."""


@final
class NotUndoneError(Exception):
    """Raised inside the package when a step went wrong and could not be undone, for its cause."""


async def learn(
    strategy: Strategy,
    step_fn: Callable[..., object],
    state: DescribedState,
    examples: Sequence[object],
    timeout_s: float | None = None,
    check: StepCheck | None = None,
) -> StepResult:
    """Run a step over examples; if anything is wrong with it, nothing of it is left.

    Raises:
        BlamelessError: If it failed for a reason that has nothing to do with the examples, which is
            the cause: a StallError after `timeout_s`, once the step has ended.
        NonFiniteError: If it wrote what is not finite.
        NotUndoneError: If it went wrong, and what it wrote could not be put back.
        Exception: What it raised, or `check` about it.

    Between the parts of its work on the event loop others have their turn.

    Cancellation:
        Undoes the step, then goes on.
    """
    await asyncio.sleep(TURN_S)
    savepoint = Savepoint(state)
    try:
        await asyncio.sleep(TURN_S)
        work = _run_and_check(strategy, step_fn, examples, savepoint, check)
        result = await _in_time(work, len(examples), timeout_s)
    except BaseException as error:
        try:
            savepoint.put_back()
        except Exception as failure:
            raise NotUndoneError from failure
        if isinstance(error, Exception):
            _require_blame(strategy, error)
        raise
    return result


async def _in_time(
    work: Coroutine[object, None, StepResult], num_examples: int, timeout_s: float | None
) -> StepResult:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # the step's own
            raise
        text = f"A step of {num_examples} examples took longer than {timeout_s:g} s; it was ended."
        raise StallError(text, timeout_s=timeout_s) from None


async def _run_and_check(
    strategy: Strategy,
    step_fn: Callable[..., object],
    examples: Sequence[object],
    savepoint: Savepoint,
    check: StepCheck | None,
) -> StepResult:
    result = await _run(strategy, step_fn, examples)
    await asyncio.sleep(TURN_S)
    await _require_finite(savepoint)
    if check is not None:
        await check(result.scalars, len(examples))
    return result


async def _run(
    strategy: Strategy, step_fn: Callable[..., object], examples: Sequence[object]
) -> StepResult:
    size = sum(getattr(leaf, "nbytes", 8) for leaf in leaves(examples[0])) * len(examples)
    on_host = size > INLINE_BYTES
    batch = await run_on_host(stack_examples, examples) if on_host else stack_examples(examples)
    parts = split_batch(batch, strategy.num_replicas_in_sync)
    report = _Report(step_fn, [len(leaves(part)[0]) for part in parts])
    arg = parts[0] if strategy._runtime.has_plain_values else PerReplica(parts)
    await asyncio.sleep(TURN_S)
    inline = INLINE_STEP.set(INLINE_STEP_BYTES)
    try:
        await strategy.run(report.step_function(), args=(arg,))
    finally:
        INLINE_STEP.reset(inline)
    return report.result(strategy._runtime.device_names)


async def _require_finite(savepoint: Savepoint) -> None:
    """Check what a step has written.

    Raises:
        NonFiniteError: If it is not finite; names the entry of the state.
    """
    arrays = [(key, array) for key, array in savepoint.written() if array.dtype.kind in "fcV"]
    size = sum(array.nbytes for _, array in arrays)
    find = _first_non_finite
    await asyncio.sleep(TURN_S)
    found = await run_on_host(find, arrays) if size > INLINE_STEP_BYTES else find(arrays)
    if found is not None:
        key, index, value = found
        raise NonFiniteError(
            f"The step wrote {value} to {key!r} at {index}.", variable=key, index=index
        )


def _first_non_finite(
    arrays: Sequence[tuple[str, Any]],
) -> tuple[str, tuple[int, ...], object] | None:
    for key, array in arrays:
        is_finite = np.isfinite(array)
        if not is_finite.all():
            index = tuple(int(i) for i in np.argwhere(~is_finite)[0])
            return key, index, array[index]
    return None


def _require_blame(strategy: Strategy, error: Exception) -> None:
    """Check that the examples may be to blame for an error.

    Raises:
        BlamelessError: If they are not.
    """
    group = error if isinstance(error, ExceptionGroup) else None
    if isinstance(error, StallError) and not error.rows:  # of `_run_in_time`, not of the strategy
        raise BlamelessError from error
    if isinstance(error, BLAMELESS) or (group and group.split(BLAMELESS)[0]):
        raise BlamelessError from error
    try:
        strategy._runtime.open()
    except (ContextError, LoopMismatchError) as closed:
        raise BlamelessError from closed


@final
class _Report:
    """Reports of the replicas during a step."""

    def __init__(self, step_fn: Callable[..., Any], sizes: Sequence[int]) -> None:
        self._step_fn = step_fn
        self._sizes = sizes
        self._told: list[tuple[float, float, Mapping[str, float]]] = [(0.0, 0.0, {})] * len(sizes)
        self._began = time()
        self._start = perf_counter()

    def step_function(self) -> Callable[[Tree], object]:
        """Return what the strategy runs on each replica: it calls the step function and listens."""
        step_fn = self._step_fn

        async def step_on_loop(batch: Tree) -> None:
            ctx, began = _current_replica(), perf_counter()
            self._hear(ctx, began, await step_fn(ctx, batch))

        def step_on_device(batch: Tree) -> None:
            ctx, began = _current_replica(), perf_counter()
            self._hear(ctx, began, step_fn(ctx, batch))

        chosen: Callable[[Tree], object] = step_on_loop if is_async(step_fn) else step_on_device
        chosen.__qualname__ = getattr(step_fn, "__qualname__", chosen.__qualname__)
        return chosen

    def _hear(self, ctx: ReplicaContext, began: float, returned: object) -> None:
        scalars = _scalars(returned)
        self._told[ctx.replica_id_in_sync_group] = (
            began - self._start, perf_counter() - self._start, scalars
        )  # fmt: skip

    def result(self, device_names: Sequence[str]) -> StepResult:
        """Return what they told; scalars averaged over the examples."""
        totals: dict[str, list[float]] = {}
        for size, (_, _, scalars) in zip(self._sizes, self._told, strict=True):
            for name, value in scalars.items():
                if size:  # a mean over no examples is not a number
                    total = totals.setdefault(name, [0.0, 0])
                    total[0] += value * size
                    total[1] += size
        rows = zip(device_names, self._sizes, self._told, strict=True)
        return StepResult(
            {name: total / count for name, (total, count) in totals.items()},
            self._began,
            perf_counter() - self._start,
            tuple(
                ReplicaTiming(number, device, size, began, ended)
                for number, (device, size, (began, ended, _)) in enumerate(rows)
            ),
        )


def _current_replica() -> ReplicaContext:
    ctx = get_replica_context()
    assert ctx is not None  # a step runs on a replica
    return ctx


def _scalars(returned: Any) -> Mapping[str, float]:
    if returned is None:
        return {}
    found = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in found.items():
        is_scalar = isinstance(value, np.ndarray) and value.ndim == 0
        is_number = is_scalar or isinstance(value, numbers.Real)
        if not is_number or not isinstance(name, str):
            raise TypeError(
                f"A step function returns None, a number or a dict of numbers by name, got "
                f"{name!r}: {value!r} ({type(value).__name__})."
            )
    return {name: float(value) for name, value in found.items()}
