"""A strategy as its datasets see it, and values made by a function for each replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from .._functions import is_async, require_finished, require_no_yield
from ..collectives import no_data
from ..input import InputContext, InputTarget, OpenLoops
from ..values import PerReplica
from ._runtime import Runtime

if TYPE_CHECKING:
    from ..cluster import Workers

BATCHES_BYTES = 4
MAX_BATCHES = 2 ** (8 * BATCHES_BYTES) - 1


@final
@dataclass(frozen=True, slots=True)
class ValueContext:
    """Given to the function of `distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The replica that the value is for.
        num_replicas_in_sync: How many replicas there are.

    Source:
        tf.distribute.experimental.ValueContext.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def values_from_function(runtime: Runtime, value_fn: Callable[[ValueContext], object]) -> object:
    """Call a function once per replica of this process; return a PerReplica, or the plain value.

    Raises:
        TypeError: If it is not a plain function.
    """
    if not callable(value_fn):
        raise TypeError(f"value_fn must be a function of an ar.ValueContext, got {value_fn!r}.")
    if is_async(value_fn):
        raise TypeError(
            f"value_fn returns a value, but {value_fn!r} is a coroutine function. Make it a "
            "plain function, and await what it needs before."
        )
    require_no_yield(value_fn, "distribute_values_from_function")
    count, here = runtime.num_replicas_in_sync, runtime.num_local_replicas
    first = 0 if runtime.workers is None else runtime.workers.first_replica
    values = [value_fn(ValueContext(first + i, count)) for i in range(here)]
    require_finished(values[0], value_fn, "distribute_values_from_function")
    if runtime.has_plain_values:
        return values[0]
    return PerReplica(values, devices=runtime.device_names)


def input_target(runtime: Runtime) -> InputTarget:
    """Return a strategy as its datasets see it."""
    if runtime.lifecycle.open_loops is None:
        runtime.lifecycle.open_loops = OpenLoops()
    workers = runtime.workers

    def context() -> InputContext:
        if workers is None:
            return InputContext(1, 0, runtime.num_replicas_in_sync)
        return InputContext(workers.num_workers, workers.rank, runtime.num_replicas_in_sync)

    return InputTarget(
        runtime.device_names,
        runtime.has_plain_values,
        context,
        runtime.lifecycle.open_loops,
        runtime.lifecycle.open,
        runtime.lifecycle.gate,
        None if workers is None else partial(agreed_batches, workers),
    )


async def agreed_batches(workers: Workers, num_left: int) -> int:
    """Tell how many batches every worker has, at least: a loop ends on all of them together.

    Args:
        workers: The other workers.
        num_left: How many this one is sure to have.
    """
    own = min(num_left, MAX_BATCHES).to_bytes(BATCHES_BYTES, "little")
    async with workers.operation("next batch", "") as turn:
        slots = await turn.exchange(own, no_data)
    return min(int.from_bytes(slot, "little") for slot in slots)
