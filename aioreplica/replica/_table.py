"""The errors that the group raises by itself: their texts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..devices import UnfinishedOp
from ..errors import (
    ContextError,
    MergeMismatchError,
    ReplicaCancelledError,
    ReplicaRow,
    StallError,
)
from ._meeting import Call
from ._messages import Transfer

if TYPE_CHECKING:
    from ._rendezvous import Mismatch

MAX_ROWS = 64
_OF_COLLECTIVES = (
    "Every replica must make the same collective calls in the same order. Decide together "
    "with ctx.any, ctx.all or ctx.agree before leaving a loop or skipping a call."
)
_OF_MESSAGES = (
    "Every send needs a receive of the replica it is for, with the same tag, and the other way "
    "round; and no replicas may wait for each other in a circle."
)
_HEAD = ReplicaRow(-1, "device", "state", "collective", "where")


def format_rows(rows: Sequence[ReplicaRow]) -> str:
    """Lay out rows as an aligned table, with a heading.

    Example:
        >>> from aioreplica.errors import ReplicaRow
        >>> print(format_rows([ReplicaRow(0, "cpu:0", "waiting", "barrier #1", "step.py:3")]))
          replica  device  state    collective  where
          0        cpu:0   waiting  barrier #1  step.py:3
    """
    cells = [("replica", *_cells(_HEAD)[1:])] + [_cells(row) for row in rows[:MAX_ROWS]]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f"  ... and {len(rows) - MAX_ROWS} more replicas (all are in `.rows`)")
    return "\n".join(lines)


def with_activities(
    rows: Sequence[ReplicaRow], activities: Sequence[str | None]
) -> tuple[ReplicaRow, ...]:
    """Show replicas that wait for something outside every collective as waiting for that."""
    return tuple(
        row
        if activity is None
        else replace(row, state="waiting", collective=f"{activity}; {row.collective}")
        for row, activity in zip(rows, activities, strict=True)
    )


def _cells(row: ReplicaRow) -> tuple[str, str, str, str, str]:
    return (str(row.replica_id), row.device, row.state, row.collective, row.site)


def mismatch_error(
    mismatch: Mismatch, step: int, unawaited: Sequence[str], history: str
) -> MergeMismatchError:
    """Build the error of a run whose replicas cannot meet."""
    reason, rows = mismatch.reason, mismatch.rows
    forgotten = "".join(f"\nNot awaited so far: {line}." for line in unawaited)
    advice = _OF_MESSAGES if mismatch.is_of_messages else _OF_COLLECTIVES
    return MergeMismatchError(
        f"{reason} (step {step}).\n{format_rows(rows)}{forgotten}{history}\n{advice}",
        step=step,
        reason=reason,
        rows=rows,
    )


def stall_error(
    timeout_s: float,
    step: int,
    rows: tuple[ReplicaRow, ...],
    stacks: tuple[str, ...],
    call: Call | Transfer | None,
    history: str,
) -> StallError:
    """Build the error of a run that stopped making progress, or waited too long in `call`."""
    listing = "\n".join(
        f"Replica {row.replica_id}:\n{stack}" for row, stack in zip(rows, stacks, strict=True)
    )
    if call is None:
        what, cure = f"Step {step} made no progress", "RunOptions(stall_timeout=...)"
    else:
        what = f"{call.describe()} of step {step}, called at {call.site}, found no partners"
        cure = "CommunicationOptions(timeout_seconds=...)"
    return StallError(
        f"{what} for {timeout_s:g} s.\n{format_rows(rows)}{history}\n{listing}\n"
        "A replica that is not waiting in the collective holds up the others; its stack says "
        f"where. Raise {cure} if the work is just slow.",
        step=step,
        timeout_s=timeout_s,
        rows=rows,
        stacks=stacks,
    )


def circle_text(rows: Sequence[ReplicaRow], step: int) -> str:
    """Return the warning of replicas that may wait for each other through handles."""
    return (
        f"Replicas of step {step} seem to wait for each other: each waits in a child task or in "
        f"an op, and what another one waits for has not been called.\n{format_rows(rows)}\n"
        "Await handles in the same order on every replica, or in the replica's own task, where a "
        "circle is an error at once; RunOptions(stall_timeout=...) ends a run that is stuck."
    )


def quiet_text(
    what: str,
    rows: Sequence[ReplicaRow],
    seconds: float,
    absent: Sequence[int] | None,
    *,
    is_merging: bool,
) -> str:
    """Return the warning of a run in which replicas wait and nothing happens.

    `absent` are the workers that have not come, if replicas wait for others; else None, and if then
    all replicas have come (`is_merging`) it is the merge function that waits.
    """
    where, nothing = "", "no other replica came"
    who, they = "A replica that is not waiting in the collective", "others are"
    if absent:
        names = ", ".join(map(str, absent))
        where = f"\nMissing so far: worker{'s' if len(absent) > 1 else ''} {names}."
    elif is_merging:
        nothing = "its merge function, for which all have come, did not end"
        who, they = "The merge function", "merge function is"
    return (
        f"{what} may wait for ever: for {seconds:.0f} s replicas have waited in a collective, no "
        f"device op of the run was queued or running, and {nothing}.\n{format_rows(rows)}{where}\n"
        f"{who} holds up the others, perhaps because it waits for a lock that one of them holds: "
        f"release it before the collective. If the {they} just slow, ignore this; "
        "RunOptions(stall_timeout=...) ends a run that is stuck."
    )


def never_awaited_error(step: int, lines: Sequence[str]) -> ContextError:
    """Build the error of a run in which calls were made and never awaited."""
    return ContextError(
        f"A call was never awaited in step {step}: {'; '.join(lines)}. "
        "Write `await` in front of the call."
    )


def replica_cancelled_error(
    cancelled: BaseException, step: int, fn_name: str
) -> ReplicaCancelledError:
    """Build the error of a replica that was cancelled by other code than its run."""
    error = ReplicaCancelledError(
        f"A replica of step {step} of {fn_name} ended with a CancelledError, although the run was "
        "not cancelled: it awaited something that was cancelled, or its task was cancelled from "
        "outside. Cancel the task that awaits `run`, or handle the CancelledError in the step.",
        step=step,
    )
    error.__cause__ = cancelled
    return error


def left_behind_error(replica_id: int, step: int, left: Sequence[UnfinishedOp]) -> ContextError:
    """Build the error of a replica that returned while ops of its child tasks are unfinished."""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return ContextError(
        f"Replica {replica_id} returned at step {step} while {left[0].describe()}{more} is "
        "unfinished. Await the task before the step returns, or start it in a TaskGroup."
    )


def two_at_once_error(call: Call, held: Call | None) -> ContextError:
    """Build the error of a replica that calls a collective while it is in another one."""
    first = f"{held.describe()} at {held.site}" if held is not None else "another collective"
    return ContextError(
        f"A replica called {call.describe()} at {call.site} while {first} is still in progress. "
        "A replica awaits one collective at a time: await them one after the other, pass several "
        "values to one collective as a tuple or dict, or use ctx.start_all_reduce, whose handles "
        "can be in flight together."
    )
