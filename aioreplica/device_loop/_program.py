"""The program of one device in a loop of many steps, and the outputs of the loop."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import CodeType
from typing import Any, final

from .._functions import UNFINISHED
from ..collectives import require_reducible
from ..context import LOOP, LoopStep
from ..devices import follow_others
from ..errors import ContextError, MergeMismatchError, ReplicaRow
from ..replica import INFEED, CallSite, RunningReplica, add_note_once
from ..telemetry import EventLog, source_line
from ..tree import Tree, leaves
from ..typing import OpName, ReduceOp
from ..values import PerReplica, regroup_results
from ._infeed import Infeed


def run_loop(
    replica: RunningReplica,
    fn: Callable[..., object],
    context: MultiStepContext,
    loop_step: LoopStep,
    infeed: Infeed,
    num_steps: int,
    *,
    meets_workers: bool = False,
) -> MultiStepContext:
    """Run up to `num_steps` steps of one replica on the calling device thread.

    How many elements there are differs between workers. So their replicas agree on the number of
    steps that all have inputs for, and on the next when those are done: no collective of a step
    comes between, and they stop at one step.

    Raises:
        TypeError: If the step function gives a coroutine or a generator: none of it has run.
        Exception: What the step function raises; the context keeps it for a note.

    Cancellation:
        Looked for between steps, in every collective, and while the infeed is empty.
    """
    replica_id = replica.local_replica_id
    blocking = replica.blocking
    LOOP.set(loop_step)  # in the context variables of this op
    num_agreed = 0 if meets_workers else num_steps
    for step in range(num_steps):
        if step == num_agreed:
            num_agreed += _agree(replica, infeed, step, num_steps)
            if step == num_agreed:
                break
        if infeed.is_empty(replica_id):
            with blocking.waiting(f"the infeed for step {step}"):
                inputs = infeed.take(replica_id)
        else:
            inputs = infeed.take(replica_id)
        if inputs is None:
            break
        try:
            result = fn(context, *follow_others(inputs))
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


def _agree(replica: RunningReplica, infeed: Infeed, step: int, num_steps: int) -> int:
    """Return for how many more steps all workers have elements; 0 if one of them has no more."""
    blocking = replica.blocking
    with blocking.waiting(f"the infeed for step {step}"):
        num_ready = infeed.num_ready(replica.local_replica_id)
    if not num_ready and infeed.has_failed:
        return 0  # run_steps raises why, which tells the other workers: they wait in this meeting
    site = CallSite.of(sys._getframe())
    agreed: int = blocking.meet(INFEED, f"of {num_steps} steps", (num_ready,), site)
    return agreed


def _refused(result: object) -> str:
    """Name what will not be run; close it if it would warn of that."""
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine"
    return UNFINISHED[type(result)]


Reduce = Callable[[ReduceOp, Tree], Awaitable[Tree]]


@final
class MultiStepContext:
    """Outputs of a device loop: written by the steps, returned by `run_steps`.

    Inside the loop every replica has its own, the first argument of the step function. What
    `run_steps` returns holds the outputs of all replicas together.

    Args:
        last_step_outputs: The values to begin with.
        non_tensor_outputs: Those set so far.
        steps_run: How many steps are complete.
        events: Where `record` goes; None outside a loop.
        replica_id: Whose it is, among those of all workers; None for that of all replicas.
        first_step: Number of the loop's first step in its strategy, for events.

    Attributes:
        last_step_outputs: By name: what the last step that set it has set, or the initial value.
            Inside the loop the replica's own value; afterwards reduced, or PerReplica.
        non_tensor_outputs: By name: any objects; afterwards PerReplica.
        steps_run: How many steps are complete.
        error: What a step raised; noted and dropped when the loop ends.

    Source:
        tf.distribute's MultiStepContext.
    """

    __slots__ = (
        "_events", "_first_step", "_is_open", "_ops", "_replica_id", "_sites",
        "error", "last_step_outputs", "non_tensor_outputs", "steps_run",
    )  # fmt: skip

    def __init__(
        self,
        last_step_outputs: Mapping[str, object] | None = None,
        non_tensor_outputs: Mapping[str, object] | None = None,
        steps_run: int = 0,
        events: EventLog | None = None,
        replica_id: int | None = None,
        first_step: int = 0,
    ) -> None:
        self.last_step_outputs: dict[str, Tree] = dict(last_step_outputs or {})
        self.non_tensor_outputs: dict[str, Any] = dict(non_tensor_outputs or {})
        self.steps_run = steps_run
        self.error: Exception | None = None
        self._events = events
        self._replica_id = replica_id
        self._first_step = first_step
        self._is_open = replica_id is not None
        self._ops: dict[str, ReduceOp | None] = {}
        self._sites: dict[str, tuple[CodeType, int]] = {}

    def set_last_step_output(
        self, name: str, value: object, reduce_op: ReduceOp | OpName | None = None
    ) -> None:
        """Set an output, which the next step finds in `last_step_outputs`.

        Args:
            name: The same names on all replicas, or the loop ends with a MergeMismatchError.
            value: Any pytree.
            reduce_op: How `run_steps` combines the last values of all replicas; None keeps them
                apart, as a PerReplica. Nothing is combined between steps.

        Raises:
            TypeError: If `name` is not a str, or a leaf that is to be reduced is not a number.
            ValueError: If `reduce_op` is unknown.
            ContextError: If called after the loop.
        """
        self._require_loop("set_last_step_output")
        op = None
        if reduce_op is not None:
            op = ReduceOp.parse(reduce_op)
            for leaf in leaves(value):
                require_reducible(leaf, f"The reduction of output {name!r}", op)
        self._note(name)
        self._ops[name] = op
        self.last_step_outputs[name] = value

    def set_non_tensor_output(self, name: str, value: object) -> None:
        """Set an output that is any object and is never combined.

        Args:
            name: The same names on all replicas.
            value: Kept whole.

        Raises:
            TypeError: If `name` is not a str.
            ContextError: If called after the loop.
        """
        self._require_loop("set_non_tensor_output")
        self._note(name)
        self.non_tensor_outputs[name] = value

    def record(self, name: str, value: float | str) -> None:
        """Record a number or a line of text in `strategy.events`; replica 0's only are kept.

        Args:
            name: What it is, such as "loss".
            value: A number (or an array of one) or a text.

        Raises:
            TypeError: If it is neither.
            ContextError: If called after the loop.
        """
        self._require_loop("record")
        if self._events is not None and self._replica_id == 0:
            step = self._first_step + self.steps_run
            self._events.add_scalar(step, self._replica_id, name, value)

    def close(self, num_steps: int) -> None:
        """Refuse further outputs, and note in what a step raised which one of how many it was.

        Called by the strategy, where no replica runs any more: several may raise one object.
        """
        self._is_open = False
        error, self.error = self.error, None
        if error is not None:
            add_note_once(error, f"Raised in step {self.steps_run} of {num_steps} of run_steps.")

    def take_outputs(
        self,
        steps_run: int,
        ops: Mapping[str, ReduceOp | None],
        sites: Mapping[str, tuple[CodeType, int]],
    ) -> None:
        """Take what compiled steps know of the outputs, whose values are set already."""
        self.steps_run = steps_run
        self._ops.update(ops)
        self._sites.update(sites)

    def reduce_op(self, name: str) -> ReduceOp | None:
        """Return how an output is to be combined; None for one that stays apart."""
        return self._ops.get(name)

    def site(self, name: str) -> str:
        """Return `file:line` of where an output was set last; "-" if no `set_` method did."""
        if name not in self._sites:
            return "-"
        code, instruction = self._sites[name]
        return f"{code.co_filename}:{source_line(code, instruction)}"

    def _note(self, name: str) -> None:
        if type(name) is not str:
            raise TypeError(f"The name of an output must be a str, got {name!r}.")
        frame = sys._getframe(2)
        self._sites[name] = (frame.f_code, frame.f_lasti)

    def _require_loop(self, what: str) -> None:
        if not self._is_open:
            where = "what run_steps returned" if self._replica_id is None else "a loop's context"
            raise ContextError(
                f"{what} was called on {where}, after the loop. Call it in the step function, on "
                "its first argument."
            )

    def __repr__(self) -> str:
        names = ", ".join([*self.last_step_outputs, *self.non_tensor_outputs]) or "no outputs"
        return f"<MultiStepContext | {self.steps_run} steps run, {names}>"


async def combine_outputs(
    contexts: Sequence[MultiStepContext],
    device_names: Sequence[str],
    reduce: Reduce,
    *,
    has_plain_values: bool,
) -> MultiStepContext:
    """Return one context for all replicas, which have set the same outputs.

    Args:
        contexts: One per replica.
        device_names: One per replica.
        reduce: Combines a distributed value, as `strategy.reduce` does.
        has_plain_values: Whether values stay plain (the default strategy).

    Raises:
        ValueError: If shapes of what is to be reduced differ.
    """
    first = contexts[0]
    outputs: dict[str, object] = {}
    outputs.update(dict.fromkeys(first.last_step_outputs))
    for name in sorted(outputs):  # as on all workers
        values = [context.last_step_outputs[name] for context in contexts]
        value = values[0] if has_plain_values else regroup_results(values, device_names)
        op = first.reduce_op(name)
        try:
            outputs[name] = value if op is None else await reduce(op, value)
        except Exception as error:
            add_note_once(error, f"Raised by the reduction of output {name!r}, {first.site(name)}.")
            raise
    others = {
        name: first.non_tensor_outputs[name]
        if has_plain_values
        else PerReplica([c.non_tensor_outputs[name] for c in contexts], devices=device_names)
        for name in first.non_tensor_outputs
    }
    return MultiStepContext(outputs, others, first.steps_run)


def require_equal_outputs(
    contexts: Sequence[MultiStepContext], device_names: Sequence[str], step: int
) -> str:
    """Check that all replicas have set the same outputs; return them, described for other workers.

    Args:
        contexts: One per replica.
        device_names: One per replica.
        step: Number of the loop's first step, for errors.

    Raises:
        MergeMismatchError: If an output was set on some replicas only, or is to be reduced in
            different ways.
    """
    everything = [_described(context) for context in contexts]
    for described in everything[1:]:
        differing = described.keys() ^ everything[0].keys() or {
            name for name, how in described.items() if how != everything[0][name]
        }
        if differing:
            raise _outputs_error(min(differing), everything, contexts, device_names, step)
    return "; ".join(f"{name!r} {how}" for name, how in sorted(everything[0].items()))


def _described(context: MultiStepContext) -> dict[str, str]:
    """Say of every output how it was set."""
    found = {}
    for name in context.last_step_outputs:
        op = context.reduce_op(name)
        found[name] = "as an output" if op is None else f"to be reduced by {op.name}"
    for name in context.non_tensor_outputs:
        found[name] = f"{found[name]} and as an object" if name in found else "as an object"
    return found


def _outputs_error(
    name: str,
    everything: Sequence[dict[str, str]],
    contexts: Sequence[MultiStepContext],
    device_names: Sequence[str],
    step: int,
) -> MergeMismatchError:
    rows = tuple(
        ReplicaRow(
            context._replica_id or 0, device, "returned", described.get(name, "did not set it"),
            context.site(name),
        )
        for device, described, context in zip(device_names, everything, contexts, strict=True)
    )  # fmt: skip
    reason = f"Output {name!r} of a device loop was not set alike on all replicas"
    table = "\n".join(
        f"  replica {row.replica_id} ({row.device}): {row.collective} at {row.site}" for row in rows
    )
    return MergeMismatchError(
        f"{reason} (step {step}).\n{table}\nSet every output on every replica, with the same "
        "reduce_op.",
        step=step,
        reason=reason,
        rows=rows,
    )
