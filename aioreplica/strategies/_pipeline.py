"""Pipelines: a model in stages, one per replica, which hand micro-batches on by messages.

Stage k runs on replica k's device. A backward pass of a stage runs its function again, so between
the passes only its inputs are kept; how many depends on the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np

from .._functions import is_async, require_no_yield
from ..autodiff import VariableReads, find_adapter
from ..context import PLACE, STAGE
from ..devices import require_threads
from ..devices.backends import Array, backend_of, untraced
from ..errors import ContextError
from ..replica import ReplicaContext, RunningReplica
from ..values import IndexedSlices, Variable, Weighted

Gradient: TypeAlias = Array | IndexedSlices
Schedule: TypeAlias = Literal["1f1b", "gpipe"]
SCHEDULES = ("1f1b", "gpipe")
FORWARD, BACKWARD = "pipeline forward", "pipeline backward"  # tags


async def pipeline(
    stages: Sequence[Callable[..., object]],
    micro_batches: Sequence[tuple[object, object]],
    *,
    schedule: Schedule = "1f1b",
    backend: str = "autograd",
) -> tuple[Any, list[tuple[Gradient, Variable]]]:
    """Run a model that is cut into stages, one per replica; return its loss and its gradients.

    A collective: every replica calls it in its step, with the same stages and micro-batches. What
    a stage reads of variables through `variable.value` is trained.

    Args:
        stages: Plain functions, one per replica, which draw no random numbers: all but the last
            are run again on the way back. The first is called with the inputs of a
            micro-batch as they are, the others with what the stage before returned, an array of
            the backend; each returns one array. The last is called with the targets too, and
            returns the loss of the micro-batch: a scalar, or a `Weighted(total, weight)`. With one
            replica the one stage is called with inputs and targets.
        micro_batches: Pairs of inputs and targets.
        schedule: "1f1b" keeps a stage's inputs of at most as many micro-batches as there are
            stages behind it, and itself; "gpipe" of all of them. Both take as long, and give the
            same bits.
        backend: The library that differentiates: "autograd", "torch" or "jax".

    Returns:
        The loss and `(gradient, variable)` pairs, the same on every replica and read-only: for
        `optimizer.apply_gradients(pairs, aggregate=False)`. Scalars are added up over the
        micro-batches; totals and weights of `Weighted` losses are added apart and divided once.

    Raises:
        ContextError: If called outside a step, or under several workers; if a stage of several
            changes state of a model, such as running statistics.
        DeviceError: If a device of a replica has a process of its own.
        TypeError: If a stage is not a plain function, or another stage than the last returns
            something else than an array.
        ValueError: If there are not as many stages as replicas, no micro-batches, the schedule is
            unknown, or all weights are 0.
        RuntimeError: If a `torch_module` draws random numbers in another stage than the last.
        MergeMismatchError: If replicas have different numbers of micro-batches.

    Cancellation:
        Nothing was written yet: the variables are as before.

    Determinism:
        Gradients are added in the order of the micro-batches, then of the stages: bitwise
        reproducible, whatever the order of events and the schedule.

    Shapes:
        The gradient of a variable has its shape.

    Source:
        Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B, here with a flush).
    """
    ctx = _running_context()
    pairs = _checked(ctx, stages, micro_batches, schedule)
    own = _Part.of(ctx.replica_id_in_sync_group, stages, backend)
    await _take_turns(ctx, len(stages), own, pairs, schedule)
    whole: _Whole = await ctx.merge_call(_put_together, (own,))
    return whole.loss, list(whole.pairs)


async def _take_turns(
    ctx: ReplicaContext,
    num_stages: int,
    own: _Part,
    pairs: Sequence[tuple[object, object]],
    schedule: Schedule,
) -> None:
    """Do one stage's passes forward and backward, in the order of the schedule."""
    index, following = ctx.replica_id_in_sync_group, iter(pairs)
    behind = num_stages - 1 - index
    is_first, is_last = index == 0, behind == 0
    kept: deque[tuple[Any, Any]] = deque()  # inputs and targets of a micro-batch
    for is_forward in _turns(schedule, behind, len(pairs)):
        if is_forward:
            inputs, targets = next(following)
            if not is_first:
                inputs = await ctx.receive(index - 1, FORWARD)
            kept.append((inputs, targets))
            if not is_last:  # its pass forward is part of the one backward
                output = await ctx.run_on_device(_forward, own, inputs, is_first)
                await ctx.send(output, index + 1, FORWARD)
            continue
        inputs, targets = kept.popleft()
        arriving = None if is_last else await ctx.receive(index + 1, BACKWARD)
        leaving = await ctx.run_on_device(_backward, own, is_first, inputs, targets, arriving)
        if not is_first:
            await ctx.send(leaving, index - 1, BACKWARD)


@final
@dataclass(slots=True)
class _Part:
    """One stage: its function, and what has been added up of its passes.

    Attributes:
        stage: The function.
        backend: The library that differentiates it.
        is_repeated: Whether it is run again on the way back; None if it is the whole model.
        gradients: Sums over the micro-batches.
        losses: Of the last stage, one per micro-batch.
    """

    stage: Callable[..., Any]
    backend: str
    is_repeated: bool | None
    gradients: dict[Variable, Gradient] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)  # Any: numbers or Weighted

    @classmethod
    def of(cls, index: int, stages: Sequence[Callable[..., Any]], backend: str) -> Self:
        """Make the part of one stage of several."""
        last = len(stages) - 1
        return cls(stages[index], backend, index < last if last else None)

    def call(self, *args: object) -> Any:
        """Call the function, where models refuse what a stage cannot do."""
        token = STAGE.set(self.is_repeated)
        try:
            return self.stage(*args)
        finally:
            STAGE.reset(token)


@final
@dataclass(frozen=True, slots=True)
class _Whole:
    """Loss and gradients of all stages."""

    loss: Any  # Any: a number of any library
    pairs: list[tuple[Gradient, Variable]]


def _turns(schedule: Schedule, behind: int, count: int) -> Iterator[bool]:
    """Yield what a stage does, True for a pass forward.

    Example:
        >>> "".join("BF"[turn] for turn in _turns("1f1b", 1, 3))
        'FFBFBB'
        >>> "".join("BF"[turn] for turn in _turns("gpipe", 1, 3))
        'FFFBBB'
    """
    ahead = count if schedule == "gpipe" else min(behind, count)
    yield from [True] * ahead
    for _ in range(count - ahead):
        yield True
        yield False
    yield from [False] * ahead


# ---- on the device ---------------------------------------------------------------------------


def _forward(part: _Part, inputs: object, is_first: bool) -> object:
    """Return what a stage makes of its inputs, as an array of NumPy."""
    adapter, reads = find_adapter(part.backend), VariableReads()

    def run() -> Any:
        return part.call(inputs if is_first else adapter.constant(inputs))

    try:
        output = reads.trace(run, adapter.constant, adapter.constant)
    finally:
        reads.release()
    return _as_array(part, output)


def _as_array(part: _Part, output: object) -> object:
    try:
        backend = backend_of(output)
        array = np.asarray(backend.get(untraced(output)))
    except (TypeError, ValueError) as error:
        raise _no_array_error(part, output) from error
    if array.dtype.name == "bfloat16":  # in which NumPy cannot compute; torch's comes so, too
        return array.astype(np.float32)
    if array.dtype.kind != "f":
        raise _no_array_error(part, output, f" of {array.dtype}")
    return array


def _no_array_error(part: _Part, output: object, dtype: str = "") -> TypeError:
    return TypeError(
        f"Stage {part.stage!r} returned {type(output).__name__}{dtype}, and the next stage takes "
        "one array of floating point. Join several along an axis, and split them in the next stage."
    )


def _backward(
    part: _Part, is_first: bool, inputs: object, targets: object, arriving: object
) -> Array | None:
    """Run a stage again and go back through it; return the gradient of its inputs.

    `arriving` is the gradient of its output, None for the last stage, whose output is the loss.
    """
    adapter, reads = find_adapter(part.backend), VariableReads()

    def loss(watched: object) -> object:
        if arriving is None:
            return part.call(watched, targets)
        return (part.call(watched) * adapter.constant(arriving)).sum()

    def differentiated(watch: Callable[[Array], Array]) -> object:
        watched = inputs if is_first else watch(inputs)
        return reads.trace(lambda: loss(watched), watch, adapter.constant)

    try:
        value, gradients = adapter.differentiate(differentiated)
    finally:
        reads.release()
    if arriving is None:
        part.losses.append(value)
    own = gradients if is_first else gradients[1:]
    for variable, gradient in reads.gradients(own).items():
        before = part.gradients.get(variable)
        part.gradients[variable] = gradient if before is None else _added(before, gradient)
    return None if is_first else gradients[0]


# ---- at the end ------------------------------------------------------------------------------


def _put_together(_strategy: object, parts: Any) -> _Whole:
    """Add up the stages' gradients, of variables that several of them read too."""
    stages: Sequence[_Part] = parts.values if hasattr(parts, "values") else (parts,)
    found: dict[Variable, Gradient] = {}
    for part in stages:
        for variable, gradient in part.gradients.items():
            before = found.get(variable)
            found[variable] = gradient if before is None else _added(before, gradient)
    losses = stages[-1].losses
    if not any(isinstance(each, Weighted) for each in losses):
        return _Whole(sum(losses[1:], losses[0]), [(_read_only(g), v) for v, g in found.items()])
    total, weight = _sums(losses)
    pairs = [(_read_only(_divided(g, weight)), v) for v, g in found.items()]
    return _Whole(total / weight, pairs)


def _read_only(gradient: Gradient) -> Gradient:
    """Return a gradient that cannot be written, as all replicas get the same one."""
    if isinstance(gradient, IndexedSlices):
        values = _read_only_view(gradient.values)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return _read_only_view(gradient)


def _read_only_view(array: Array) -> Array:
    if not isinstance(array, np.ndarray):  # a number, or of another library
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def _sums(losses: Sequence[Any]) -> tuple[object, Any]:
    if not all(isinstance(each, Weighted) for each in losses):
        raise TypeError("The last stage returned a Weighted for some micro-batches only.")
    total = sum([each.total for each in losses[1:]], losses[0].total)
    weight = sum([each.weight for each in losses[1:]], losses[0].weight)
    if not weight:
        raise ValueError(
            f"The weights of all {len(losses)} micro-batches are 0, so their loss has no mean."
        )
    return total, weight


def _added(first: Gradient, other: Gradient) -> Gradient:
    if isinstance(first, IndexedSlices) and isinstance(other, IndexedSlices):
        values = np.concatenate([first.values, other.values])
        indices = np.concatenate([first.indices, other.indices])
        return IndexedSlices(values, indices, first.dense_shape)
    dense = [
        each.to_dense() if isinstance(each, IndexedSlices) else each for each in (first, other)
    ]
    return dense[0] + dense[1]


def _divided(gradient: Gradient, weight: object) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values / weight, gradient.indices, gradient.dense_shape)
    return gradient / weight


# ---- what is refused -------------------------------------------------------------------------


def _running_context() -> ReplicaContext:
    replica = PLACE.get().replica
    if not isinstance(replica, RunningReplica):
        raise ContextError(
            "ar.pipeline was called outside a step. Await it in the `async def` step that "
            "strategy.run gets, on every replica."
        )
    runtime = replica.runtime
    if runtime.workers is not None:
        raise ContextError(
            "ar.pipeline was called under several workers: its stages hand arrays over in memory. "
            "Use a strategy of one worker, such as ar.MirroredStrategy."
        )
    require_threads(runtime.device_names, "A pipeline", "Use devices whose ops run in threads")
    return replica.context


def _checked(
    ctx: ReplicaContext,
    stages: Sequence[Callable[..., object]],
    micro_batches: Sequence[tuple[object, object]],
    schedule: str,
) -> list[tuple[object, object]]:
    """Return the micro-batches as pairs."""
    num_replicas = ctx.num_replicas_in_sync
    if len(stages) != num_replicas:
        raise ValueError(
            f"pipeline got {len(stages)} stages for {num_replicas} replicas. Give one to each "
            "replica: join some, or use a strategy with another number of devices."
        )
    for stage in stages:
        if not callable(stage) or is_async(stage):
            raise TypeError(f"pipeline needs plain functions as its stages, got {stage!r}.")
        require_no_yield(stage, "pipeline")
    if schedule not in SCHEDULES:
        legal = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"Unknown schedule {schedule!r}. Use one of {legal}.")
    pairs = list(micro_batches)
    if not pairs:
        raise ValueError("pipeline got no micro-batches. Split the batch into one at least.")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                f"Micro-batch {number} must be a pair of inputs and targets, got "
                f"{type(pair).__name__}."
            )
    return [(inputs, targets) for inputs, targets in pairs]
