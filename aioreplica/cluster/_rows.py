"""Texts that workers tell each other: where they are when they differ, and by what they ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import final

from ..devices import is_ctrl_c
from ..errors import MergeMismatchError, ReplicaRow, WorkerLostError
from ..replica import cause_of_unwinding, format_rows

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


def workers_mismatch_error(workers: Sequence[WorkerRows], step: int | None) -> MergeMismatchError:
    """Build the error of workers that are in different operations; the same on all of them."""
    reason = _reason(workers)
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


def _reason(workers: Sequence[WorkerRows]) -> str:
    base = workers[0]
    for rank, other in enumerate(workers[1:], 1):
        if (base.run, base.function) != (other.run, other.function):
            return (
                f"Worker 0 is in {base.what} of run {base.run} ({base.function}) but worker {rank} "
                f"is in {other.what} of run {other.run} ({other.function})"
            )
        if base.what != other.what:
            return f"Worker 0 is in {base.what} but worker {rank} is in {other.what}"
        if base.signature != other.signature:
            return (
                f"Workers 0 and {rank} disagree in {base.what}: {base.signature} on worker 0 and "
                f"{other.signature} on worker {rank}"
            )
    return f"Workers disagree in {base.what}, in what is too long to be shown"
