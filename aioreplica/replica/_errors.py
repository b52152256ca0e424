"""Errors of a run, with their texts and tables: those of the group, and of misused contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..context import PLACE, Place
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
from ._replica import Replica

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


def unless_asked_for(
    error: BaseException, task: asyncio.Task[object] | None = None
) -> BaseException:
    """Return an error of an iterator; another one for a CancelledError that nobody sent to it.

    Args:
        error: What the iterator raised.
        task: The task that it runs in; None on a thread, where no cancellation arrives.
    """
    if not isinstance(error, asyncio.CancelledError) or (task is not None and task.cancelling()):
        return error
    misled = RuntimeError(
        f"The iterator of run_steps raised {error!r}, which would look like a cancellation of the "
        "loop, which was not asked for. Catch it in the iterator, and raise an error that says "
        "what happened."
    )
    misled.__cause__ = error
    return misled


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


_TWINS = {
    "all_reduce": "strategy.reduce(op, value)",
    "all_gather": "strategy.gather(value, axis)",
    "run_on_device": "ar.run_on_host(fn) or an @ar.device_op",
    "merge_call": "a direct call, merge_fn(strategy, ...),",
    "update": "strategy.extended.update(var, fn, args)",
    "variable": "ar.Variable(initial_value)",
}
_OWNERS = {
    "assign": "variable",
    "assign_add": "variable",
    "assign_sub": "variable",
    "apply_gradients": "optimizer",
    "minimize": "optimizer",
    "add": "accumulator",
    "apply": "accumulator",
}


def misuse_error(what: str, replica: Replica, step: int, live: Place | None) -> ContextError:
    """Build the error of calling `what` on a context.

    Args:
        what: Name of the method.
        replica: The context's replica.
        step: Its run.
        live: The one place where the context may be used; None after the run.
    """
    place = PLACE.get()
    me = f"the context of replica {replica.replica_id} (step {step})"
    if live is None:
        if place.replica is not None and replica.op is not None:
            return _awaitable_in_thread_error(what, place)
        return ContextError(
            f"{what} was called on {me} after its run. Get a new one with "
            "ar.get_replica_context() inside each step."
        )
    if (place is live or place.replica is None) and not is_loop_running():
        return _off_the_loop_error(what, me)
    twin = _TWINS.get(what)
    advice = f" Use {twin} there." if place.replica is None and twin else ""
    return ContextError(
        f"{what} was called on {me} from {place.describe()}. A context belongs "
        f"to its own replica: call ar.get_replica_context() where you need one.{advice}"
    )


def foreign_error(what: str, replica: Replica, step: int) -> ContextError:
    """Build the error of using a context elsewhere than in its replica, on whatever thread."""
    where = "after its run" if replica.is_over else f"from {PLACE.get().describe()}"
    return ContextError(
        f"{what} was called on the context of replica {replica.replica_id} (step {step}) {where}. "
        "A context belongs to its own replica and run: call ar.get_replica_context() where you "
        "need one."
    )


def held_by_op_error(what: str, fn_name: str) -> ContextError:
    """Build the error of a collective on the loop while an op of the replica starts others."""
    return ContextError(
        f"{what} was called while {fn_name}, an op of the same replica, starts collectives from "
        "its thread: their order would be chance. Await the op before."
    )


def outlived_op_error(what: str, fn_name: str) -> ContextError:
    """Build the error of a collective started from a thread whose op had ended."""
    return ContextError(
        f"{what} was called on a thread that outlived {fn_name}, the op it belongs to: its order "
        "would be chance. Join the thread, or wait for its work, before the op returns."
    )


def _off_the_loop_error(what: str, me: str) -> ContextError:
    """Build the error of a collective on a thread that does not run the event loop."""
    if what == "start_all_reduce":
        return ContextError(
            f"{what} was called on {me} from a thread while no op of the replica runs. It can be "
            "started from any thread as long as a function of ctx.run_on_device runs."
        )
    return ContextError(
        f"{what} was called on {me} from another thread than the event loop's. Await it in the "
        f"step; in a function of ctx.run_on_device use {_blocking_name(what)}, which waits on the "
        "thread, or ctx.start_all_reduce."
    )


def is_loop_running() -> bool:
    """Tell whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _awaitable_in_thread_error(what: str, place: Place) -> ContextError:
    """Build the error of an awaitable method in a plain step function, or in its host calls."""
    if place.is_outside and what == "run_on_device":
        return ContextError(
            "run_on_device was called in outside_compilation, while the device is busy with the "
            "program that waits for that. Use `await ar.run_on_host(fn)`, or call the function in "
            "the device program."
        )
    if what == "read":
        return ContextError(
            "read was called in a plain function, on the device thread of its replica, where "
            "nothing can be awaited. Make the step function `async def`; or read the variable "
            "before the run, on all workers, and pass the value."
        )
    if place.is_outside:
        return ContextError(
            f"{what} was called in outside_compilation, while the device program waits for that. "
            f"Return the value from the outside function, and call {_blocking_name(what)} in the "
            "device program."
        )
    if what == "run_on_device":
        return ContextError(
            "run_on_device was called in a plain function, on the device thread of its replica. "
            "Call the function directly: it runs on the device already."
        )
    return ContextError(
        f"{what} was called in a plain function, on the device thread of its replica, where "
        f"nothing can be awaited. Use {_blocking_name(what)}(...), which waits on the thread; or "
        "make the step function `async def`."
    )


def blocking_misuse_error(
    what: str, replica: Replica, step: int, live: Place | None, is_async: bool
) -> ContextError:
    """Build the error of a blocking call that was made elsewhere than on its device thread.

    Args:
        what: Name of the method.
        replica: The context's replica.
        step: Its run.
        live: The place of the device program; None where none runs.
        is_async: Whether the replica is a coroutine.
    """
    name, place = _blocking_name(what), PLACE.get()
    if is_async:
        twin = name.replace(".blocking", "")
        return ContextError(
            f"{name} was called under an `async def` step or outside every step, on a thread that "
            f"others need. Use `await {twin}(...)`; blocking calls are for device threads: plain "
            "step functions, run_steps, and functions that ctx.run_on_device runs."
        )
    if live is None:
        return ContextError(
            f"{name} was called after the step of replica {replica.replica_id} (step {step}). Get "
            "a new context with ar.get_replica_context() inside each step."
        )
    if place is live:
        return ContextError(
            f"{name} was called on another thread than the replica's device thread. Call it in the "
            "step function itself."
        )
    where = "outside_compilation" if place.is_outside else place.describe()
    return ContextError(
        f"{name} was called in {where}, but it belongs to the device thread of its replica. Call "
        "it in the step function itself."
    )


def no_blocking_handle_error() -> ContextError:
    """Build the error of starting a collective that a thread would have to come back to."""
    return ContextError(
        "start_all_reduce has no blocking twin: nothing goes on for a thread that does not wait. "
        "Use ctx.blocking.all_reduce, or an `async def` step."
    )


def _blocking_name(what: str) -> str:
    if what == "outside_compilation":
        return f"ar.{what}"
    what = {"start_all_reduce": "all_reduce", "apply_accumulated": "apply"}.get(what, what)
    return f"{_OWNERS.get(what, 'ctx')}.blocking.{what}"
