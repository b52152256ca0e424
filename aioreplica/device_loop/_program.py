"""The program of one device: take the inputs of a step, call the step function, again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..replica import ReplicaContext
from ._context import MultiStepContext
from ._infeed import Infeed


def run_loop(
    replica: ReplicaContext,
    fn: Callable[..., Any],
    context: MultiStepContext,
    infeed: Infeed,
    num_steps: int,
) -> MultiStepContext:
    """Run up to `num_steps` steps of one replica on the calling device thread.

    Raises:
        TypeError: If the step function gives a coroutine.
        Exception: What the step function raises, with a note that names the step.

    Cancellation:
        Looked for between steps, in every collective, and while the infeed is empty.
    """
    replica_id = replica.replica_id_in_sync_group
    blocking = replica.blocking
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
            error.add_note(f"Raised in step {step} of {num_steps} of run_steps.")
            raise
        if result is not None and inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f"The step function {fn!r} returned a coroutine. A device loop runs plain "
                "functions: use ctx.blocking for collectives, ar.outside_compilation for the rest."
            )
        context.steps_run = step + 1
        blocking.step_ended()
    return context
