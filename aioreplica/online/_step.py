"""One step over some examples: stacked, split, run, checked, and undone if it went wrong."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, final

import numpy as np

from .._functions import is_async
from ..checkpoint import DescribedState, Savepoint
from ..context import INLINE_STEP
from ..devices import INLINE_BYTES, run_on_host
from ..errors import ContextError, DeviceError, LoopMismatchError, NonFiniteError, StallError
from ..input import split_batch
from ..replica import ReplicaContext
from ..strategies import Strategy, get_replica_context
from ..tree import leaves
from ..values import PerReplica
from ._example import stack_examples
from ._records import ReplicaTiming
from ._ticket import Signal

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
    work: Coroutine[Any, Any, StepResult], num_examples: int, timeout_s: float | None
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

    def step_function(self) -> Callable[[Any], Any]:
        """Return what the strategy runs on each replica: it calls the step function and listens."""
        step_fn = self._step_fn

        async def step_on_loop(batch: Any) -> None:
            ctx, began = _current_replica(), perf_counter()
            self._hear(ctx, began, await step_fn(ctx, batch))

        def step_on_device(batch: Any) -> None:
            ctx, began = _current_replica(), perf_counter()
            self._hear(ctx, began, step_fn(ctx, batch))

        chosen: Callable[[Any], object] = step_on_loop if is_async(step_fn) else step_on_device
        chosen.__qualname__ = getattr(step_fn, "__qualname__", chosen.__qualname__)
        return chosen

    def _hear(self, ctx: ReplicaContext, began: float, returned: Any) -> None:
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
