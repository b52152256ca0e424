"""Putting the outputs of all replicas together at the end of a device loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..errors import MergeMismatchError, ReplicaRow
from ..replica import add_note_once
from ..typing import ReduceOp
from ..values import PerReplica, regroup_results
from ._context import MultiStepContext

Reduce = Callable[[ReduceOp, Any], Awaitable[Any]]


async def combine_outputs(
    contexts: Sequence[MultiStepContext],
    device_names: Sequence[str],
    step: int,
    reduce: Reduce,
    *,
    has_plain_values: bool,
) -> MultiStepContext:
    """Return one context for all replicas.

    Args:
        contexts: One per replica.
        device_names: One per replica.
        step: Number of the loop's first step, for errors.
        reduce: Combines a distributed value, as `strategy.reduce` does.
        has_plain_values: Whether values stay plain (the default strategy).

    Raises:
        MergeMismatchError: If an output was set on some replicas only, or is to be reduced in
            different ways.
        ValueError: If shapes of what is to be reduced differ.
    """
    first = contexts[0]
    _require_equal_names(contexts, device_names, step)
    outputs: dict[str, Any] = {}
    for name in first.last_step_outputs:
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


def _require_equal_names(
    contexts: Sequence[MultiStepContext], device_names: Sequence[str], step: int
) -> None:
    everything = [_described(context) for context in contexts]
    for described in everything[1:]:
        differing = described.keys() ^ everything[0].keys() or {
            name for name, how in described.items() if how != everything[0][name]
        }
        if differing:
            raise _outputs_error(min(differing), everything, contexts, device_names, step)


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
        ReplicaRow(i, device, "returned", described.get(name, "did not set it"), context.site(name))
        for i, (device, described, context) in enumerate(
            zip(device_names, everything, contexts, strict=True)
        )
    )
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
