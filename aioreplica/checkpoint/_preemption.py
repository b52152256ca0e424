"""Saving when a program is told to stop: between two steps, never in the middle of one."""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from ..context import REGISTRY
from ..devices import OwnedTask, wait_until_done
from ..errors import CheckpointNotCommittedError, ContextError
from ..replica import ReplicaGroup, running_ops
from ..values import DividedVariable, StepGate, Variable, between_steps, workers_of
from ._state import Cut, Entry, look_at_home, read_state

T = TypeVar("T")

LOOPS = frozenset({"asyncio", "uvloop"})
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
UNWIND_S = 1.0
"""So long cancelled work has at least to end, before it is left behind."""


async def run_and_save(
    work: Coroutine[object, None, T],
    state: object,
    step: Callable[[], int],
    write: Callable[[int, Cut], Awaitable[None]],
    grace_s: float,
    *,
    on_sigterm: bool,
) -> T:
    """Run `work` to its end; when the caller is cancelled or told to stop, save first.

    `work` is a task of its own, so a cancellation does not reach into a step: it ends, and the next
    one is held back while the state is read. Then `work` is cancelled where it waits. If it was
    failing by then, or was cancelled by others in a step (with every task of a loop that is closed,
    say), the state may hold a part of a step: an error is raised, nothing is saved.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()

    def wake(_error: BaseException | None = None) -> None:
        if not told.done():
            told.set_result(None)

    signals: list[int] = []

    def sigterm() -> None:
        signals.append(signal.SIGTERM)
        wake()

    with ExitStack() as stack:
        try:
            if not isinstance(grace_s, Real):
                raise TypeError(f"grace_s must be seconds as a number, got {grace_s!r}.")
            if not grace_s >= 0:  # nor NaN
                raise ValueError(f"grace_s must be at least 0, got {grace_s!r}.")
            if on_sigterm:
                stack.enter_context(_called_on_sigterm(loop, sigterm))
        except BaseException:  # not the main thread, or Windows: nothing has begun
            work.close()
            raise
        training = OwnedTask(work, "training")
        training.when_done(wake)
        stop = partial(_save_and_stop, training, state, step, write, grace_s)
        try:
            await told
            if on_sigterm and not signals:
                await asyncio.sleep(0)  # a signal that came before the end is told after it
        except asyncio.CancelledError:
            await _whole(stop(), "save on cancel")
            raise
        if training.is_done and not signals:
            return await training
        await _whole(stop(), "save on SIGTERM")
        raise SystemExit(EXIT_CODE)


@contextmanager
def _called_on_sigterm(loop: asyncio.AbstractEventLoop, fn: Callable[[], None]) -> Iterator[None]:
    """Call a function on SIGTERM, in a block.

    Raises:
        ContextError: If another block does: only one can end the program when it has saved.
    """
    users = REGISTRY.once("users_of_sigterm", list[asyncio.AbstractEventLoop])
    if any(not each.is_closed() for each in users):
        raise ContextError(
            "SIGTERM is waited for already, by another `save_on_cancel`, and ends the program once "
            "that has saved. Save all in one call: the works in a `gather`, the states in a dict."
        )
    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, fn)
    users[:] = [loop]
    try:
        yield
    finally:
        users.clear()
        loop.remove_signal_handler(signal.SIGTERM)
        owner = str(getattr(before, "__module__", None)).partition(".")[0]
        if before is not None and owner not in LOOPS:  # those go by a list that has lost it
            signal.signal(signal.SIGTERM, before)


async def _whole(work: Coroutine[object, None, None], name: str) -> None:
    """Wait for `work` through cancellations and interrupts; its error comes before them."""
    task = OwnedTask(work, name)
    try:
        await task.ended(through_interrupt=True)
    finally:
        await task  # it has ended


async def _save_and_stop(
    training: OwnedTask[Any],
    state: object,
    step: Callable[[], int],
    write: Callable[[int, Cut], Awaitable[None]],
    grace_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    grace, started = asyncio.timeout(grace_s), loop.time()
    gates: Collection[StepGate] = ()
    taken: tuple[int, Cut] | None = None
    failure: BaseException | None = None
    try:
        gates = read_state(state).gates
        if training.task.cancelling() and any(gate.running for gate in gates):
            raise CheckpointNotCommittedError(
                "Nothing was saved: what trains was cancelled in the middle of a step, by other "
                "code or with all tasks of a loop that is being closed, so the state may hold a "
                "part of it. Cancel only the task that awaits `save_on_cancel`, and wait for it."
            )
        async with grace, between_steps(gates):
            cut = await look_at_home(read_state(state), state)
            cut.check()
            require_whole(cut.entries)
            taken = step(), cut  # together: bringing the cut home may have let other code run
            training.cancel()
    except Exception as error:  # noqa: BLE001 - raised below, once the work has ended
        failure = error
        if isinstance(error, TimeoutError) and grace.expired():
            failure = CheckpointNotCommittedError(
                f"Nothing was saved: a step did not end within {grace_s} s. {_hanging_in(gates)} "
                "What was saved before is unchanged. Give a longer grace_s."
            )
        training.cancel()
    task = training.task
    if not await _ended_in(training, max(grace_s - (loop.time() - started), UNWIND_S)):
        for run in _runs_of(gates):
            run.give_up()
        training.cancel()  # again: it may have swallowed the first one
        if not await _ended_in(training, UNWIND_S):
            warnings.warn(_LEFT.format(_place_of(task), grace_s), RuntimeWarning, stacklevel=2)
    if task.done() and not task.cancelled() and task.exception() is not None:
        failure = task.exception()
    if failure is not None:
        raise failure
    assert taken is not None  # or there is a failure
    await write(*taken)


def require_whole(entries: Mapping[str, Entry]) -> None:
    """Refuse state of which other workers have parts.

    Raises:
        CheckpointNotCommittedError: If there is some.
    """
    for key, entry in entries.items():
        thing = entry.thing
        if not isinstance(thing, Variable) or thing.is_mirrored:
            continue
        if isinstance(thing, DividedVariable):
            held = "is divided among workers"
        elif (workers := workers_of(thing)) is not None and workers.num_workers > 1:
            held = "has a value of its own for each replica (on_read) of all workers"
        else:
            continue
        raise CheckpointNotCommittedError(
            f"Nothing was saved: {key!r} {held}, which are told to stop at different steps, and "
            "none has the whole. Save with `await manager.save(...)` at a step that all workers "
            "agree on. What was saved before is unchanged."
        )


async def _ended_in(training: OwnedTask[Any], seconds: float) -> bool:
    """Wait until the work has ended, so long at most; through cancellations, which come after."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(_error: BaseException | None = None) -> None:
        if not over.done():
            over.set_result(None)

    training.when_done(end)
    timer = loop.call_later(seconds, end)
    cancelled: list[asyncio.CancelledError] = []
    try:
        await wait_until_done(over, cancelled.append, through_interrupt=True)
    finally:
        timer.cancel()
    if cancelled:
        raise cancelled[0]
    return training.is_done


def _runs_of(gates: Collection[StepGate]) -> list[ReplicaGroup]:
    runs = [run for gate in gates for run in gate.running if isinstance(run, ReplicaGroup)]
    return sorted(runs, key=lambda run: run.step)


def _hanging_in(gates: Collection[StepGate]) -> str:
    """Name the steps under way, and their ops that run."""
    lines = []
    for run in _runs_of(gates):
        ops = "; ".join(text for _, text in running_ops(run)) or "no op of it runs on a device"
        lines.append(f"Step {run.step} of {run.fn_name} is under way ({ops}).")
    return " ".join(lines)


def _place_of(task: asyncio.Task[object]) -> str:
    """Return the innermost `file:line` of a task."""
    frames = task.get_stack()
    return f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "-"


_LEFT = (
    "What trains was cancelled and goes on at {}, {} s and more after it was told to stop; nothing "
    "waits for it any more. Let it end when it is cancelled."
)
