"""The program of one device: take the inputs of a step, call the step function, again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .._functions import UNFINISHED
from ..context import LOOP, LoopStep
from ..replica import RunningReplica
from ._infeed import Infeed
from ._outputs import MultiStepContext


def run_loop(
    replica: RunningReplica,
    fn: Callable[..., Any],
    context: MultiStepContext,
    loop_step: LoopStep,
    infeed: Infeed,
    num_steps: int,
) -> MultiStepContext:
    """Run up to `num_steps` steps of one replica on the calling device thread.

    Raises:
        TypeError: If the step function gives a coroutine or a generator: none of it has run.
        Exception: What the step function raises; the context keeps it for a note.

    Cancellation:
        Looked for between steps, in every collective, and while the infeed is empty.
    """
    replica_id = replica.replica_id_in_sync_group
    blocking = replica.blocking
    LOOP.set(loop_step)  # in the context variables of this op
    for step in range(num_steps):
        if infeed.is_empty(replica_id):
            with blocking.waiting(f"the infeed for step {step}"):
                inputs = infeed.take(replica_id)
        else:
            inputs = infeed.take(replica_id)
        if inputs is None:
            break
        try:
            result = fn(context, *inputs)
        except Exception as error:
            context.error = error  # gets its note when all threads are done with it
            raise
        if result is not None and (inspect.iscoroutine(result) or type(result) in UNFINISHED):
            raise TypeError(
                f"The step function {fn!r} returned {_refused(result)} (step {step} of {num_steps} "
                "of run_steps). A device loop runs plain functions: use ctx.blocking for "
                "collectives, ar.outside_compilation for the rest."
            )
        context.steps_run = step + 1
        loop_step.ended()
        blocking.step_ended()
    return context


def _refused(result: Any) -> str:
    """Name what will not be run; close it if it would warn of that."""
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine"
    return UNFINISHED[type(result)]
