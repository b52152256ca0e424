"""Texts that workers tell each other: who meets, where they differ, and by what they ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import final

from ..devices import is_ctrl_c
from ..errors import ContextError, MergeMismatchError, ReplicaRow, WorkerLostError
from ..replica import cause_of_unwinding, format_rows
from ._communicator import AGREE, BROADCAST, CROSSED, Call, Communicator, Failure
from ._frame import Frame, FrameKind, digest_of

SHOWN = 600
"""Characters of a signature in an error."""


@final
@dataclass(frozen=True, slots=True)
class WorkerRows:
    """Position of one worker's replicas.

    Attributes:
        run: Number of its run.
        function: Name of its step function.
        what: The operation, such as "all_reduce #3 (SUM)".
        signature: What has to be equal on all workers.
        rows: One row per replica of the worker, with global ids.
    """

    run: int
    function: str
    what: str
    signature: str
    rows: tuple[ReplicaRow, ...]

    def encode(self) -> bytes:
        """Return it as JSON."""
        rows = [astuple(row) for row in self.rows]
        return json.dumps(
            [self.run, self.function, self.what, self.signature[:SHOWN], rows]
        ).encode()

    @staticmethod
    def decode(data: bytes) -> WorkerRows:
        """Read what `encode` gave."""
        run, function, what, signature, rows = json.loads(data)
        return WorkerRows(run, function, what, signature, tuple(ReplicaRow(*row) for row in rows))


def workers_mismatch_error(
    workers: Sequence[WorkerRows], step: int | None, ranks: Sequence[int]
) -> MergeMismatchError:
    """Build the error of workers that are in different operations; the same on all of them."""
    reason = _reason(workers, ranks)
    rows = tuple(row for worker in workers for row in worker.rows)
    return MergeMismatchError(
        f"{reason}.\n{format_rows(rows)}\n"
        "Every worker must run the same program: the same steps in the same order, with the same "
        "collective calls. Decide together with ctx.any, ctx.all or ctx.agree before leaving a "
        "loop or skipping a call.",
        step=step,
        reason=reason,
        rows=rows,
    )


def workers_closed_error(
    ranks: tuple[int, ...], cause: str, rank: int, label: str
) -> WorkerLostError:
    """Build the error of a worker that others have left.

    Args:
        ranks: Who has.
        cause: By what the first of them has; empty if by none.
        rank: The number of this worker.
        label: Names its strategy.
    """
    others = tuple(each for each in ranks if each != rank) or ranks
    names = ", ".join(map(str, others))
    if cause and rank not in ranks:
        text = (
            f"Worker {names} has left its strategy by {cause}. {label} of worker {rank} can "
            "meet it no more; see that worker's traceback."
        )
    else:
        text = (
            f"Worker {names} has closed its strategy, so {label} of worker {rank} can meet it no "
            "more. Let all workers do the same number of steps, and close together."
        )
    return WorkerLostError(text, ranks=others)


def broken_error(
    error: BaseException, label: str, rank: int, *, can_shrink: bool
) -> WorkerLostError:
    """Build the error of a worker that cannot send anything any more, because of another error.

    Args:
        error: The other one.
        label: Names its strategy.
        rank: The number of this worker.
        can_shrink: Whether a worker was lost, so that the others may go on without it.
    """
    text = f"{label} of worker {rank} cannot meet the other workers any more: {error}"
    instead = (
        "; or go on without the lost one by `await strategy.shrink()`, where the engine can"
        if can_shrink
        else ""
    )
    return WorkerLostError(
        f"{text} Start all workers again, from the newest checkpoint{instead}.",
        ranks=getattr(error, "ranks", ()),
    )


def no_loss_error(error: BaseException | None, label: str, rank: int) -> ContextError:
    """Build the error of `shrink` where no worker was lost, but others may have left it."""
    text = f"{label} of worker {rank} has lost no worker, so there is nothing to shrink."
    if error is not None:
        text += f" {error} Start all workers again, from the newest checkpoint."
    return ContextError(text)


def closed_meanwhile_error(label: str, what: str) -> ContextError:
    """Build the error of what waited for others, or for runs before, when its strategy closed."""
    return ContextError(f"{label} was closed while {what} waited, for the runs before or others.")


def cause_of(error: BaseException) -> str:
    """Name an error in a line, for the other workers; Ctrl-C comes as a cancellation."""
    if isinstance(error, asyncio.CancelledError) and is_ctrl_c():
        return "KeyboardInterrupt"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cause_of_interrupt() -> BaseException:
    """Return by what the interpreter is being interrupted; called where a cancellation came."""
    if is_ctrl_c():
        return KeyboardInterrupt("the program was interrupted.")
    cause = cause_of_unwinding(sys.exception())  # that of a runner, which cancels all tasks
    if cause is None or isinstance(cause, Exception):
        return RuntimeError("its event loop was closed in a run.")
    return cause


def _reason(workers: Sequence[WorkerRows], ranks: Sequence[int]) -> str:
    base, first = workers[0], ranks[0]
    for rank, other in zip(ranks[1:], workers[1:], strict=True):
        if (base.run, base.function) != (other.run, other.function):
            return (
                f"Worker {first} is in {base.what} of run {base.run} ({base.function}) but worker "
                f"{rank} is in {other.what} of run {other.run} ({other.function})"
            )
        if base.what != other.what:
            return f"Worker {first} is in {base.what} but worker {rank} is in {other.what}"
        if base.signature != other.signature:
            return (
                f"Workers {first} and {rank} disagree in {base.what}: {base.signature} on worker "
                f"{first} and {other.signature} on worker {rank}"
            )
    return f"Workers disagree in {base.what}, in what is too long to be shown"


async def greet(
    communicator: Communicator, label: str, ranks: Sequence[int], num_replicas: int
) -> None:
    """Meet the other workers, of these ranks, for the first time; see `Workers.connect`."""
    rank = ranks[communicator.rank]
    slot = num_replicas.to_bytes(4, "little")
    group = digest_of(communicator._name)  # whose messages these are
    hello = Frame(FrameKind.COLLECTIVE, -1, digest=group, slot=slot)
    communicator._what = f"the first meeting of {label}"
    rows = await communicator.all_gather(hello.encode())
    frames = list(map(Frame.decode, rows))
    if any(frame.digest != group for frame in frames):
        raise ContextError(
            f"{label} of worker {rank} has met a strategy of another group of workers. Split the "
            "communicator in the same order on all workers."
        )
    counts = [int.from_bytes(frame.slot, "little") for frame in frames]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The workers have {counts} replicas, in rank order, but all must have as many. Give "
            "each worker the same number of devices."
        )


def stall_text(missing: tuple[int, ...], what: str, timeout: float | None) -> str:
    """Say who did not come to a call before the timeout."""
    who = workers_in_words(missing) if missing else "Some worker"
    return (
        f"{who} did not come to {what} within {timeout:g} s. Look what that worker does (it may "
        "have ended its step early), or raise the timeout."
    )


def crossed_failure(
    own: int, here: tuple[str, str], elsewhere: Mapping[int, tuple[str, str]], timeout: float | None
) -> Failure:
    """Return the failure of a worker that waits for some who wait in calls of other groups.

    Args:
        own: The worker.
        here: In which call it waits, and of which group.
        elsewhere: The same of those for whom it waits.
        timeout: How long it has waited, in seconds.
    """
    where = ", ".join(
        f"worker {each} waits in {what} of {group}"
        for each, (what, group) in sorted(elsewhere.items())
    )
    text = (
        f"Worker {own} has waited {timeout:g} s in {here[0]} of {here[1]}, while {where}. Workers "
        "must make the calls of groups that overlap in one order."
    )
    return Failure(CROSSED, text, tuple(sorted((own, *elsewhere))), timeout)


def group_in_words(ranks: tuple[int, ...]) -> str:
    """Return, for example, "the split of workers 0 and 2"; of no ranks, the group of all."""
    return f"the split of {workers_in_words(ranks).lower()}" if ranks else "the group of all"


def closed_text(gone: tuple[int, ...], call: Call) -> str:
    """Say who has closed its communicator while others wait for it."""
    has = "have" if len(gone) > 1 else "has"
    return (
        f"{workers_in_words(gone)} {has} closed the communicator before {call.describe()}, which "
        "others wait in. Every worker must make the same calls."
    )


def difference_of(calls: list[Call], ranks: Sequence[int]) -> str | None:
    """Say which of the workers has made another call than the first; None if all made one."""
    first = _signature(calls[0])
    for rank, call in zip(ranks, calls, strict=True):
        other = _signature(call)
        if other != first:
            return (
                f"Worker {rank} called {other} where worker {ranks[0]} called {first}, as call "
                f"#{call.number}. Every worker must make the same calls."
            )
    return None


def _signature(call: Call) -> str:
    # Rows that tell of a failure come with any operator; those that agree say theirs themselves.
    options = f", {call.op.name}" if call.op is not None and call.kind != AGREE else ""
    if call.kind == BROADCAST:
        options = f", root={call.root}"
    if call.sizes:
        options += f", sizes={list(call.sizes)}"
    return f"{call.kind}({call.array.dtype}{list(call.array.shape)}{options})"


def workers_in_words(ranks: tuple[int, ...]) -> str:
    """Return, for example, "Worker 1" or "Workers 1 and 3"."""
    if len(ranks) == 1:
        return f"Worker {ranks[0]}"
    return f"Workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
