"""Distributing datasets: from what a user gives to a DistributedDataset."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import final

from ..devices import device
from ..values import StepGate
from ._assemble import Joiner, Sharing, dealt_source, split_source, zipped_source
from ._dataset import find_source
from ._distributed_dataset import DistributedDataset, DistributedIterator
from ._epoch import LOGGER, GoOn, OpenLoops
from ._iterables import iterable_source
from ._options import InputContext, InputOptions
from ._sharding import Files, chosen_sharding, describe, files_source, local_replicas
from ._source import Source


@final
@dataclass(frozen=True, slots=True)
class InputTarget:
    """The replicas that a dataset is distributed to.

    Attributes:
        device_names: One per local replica.
        has_plain_values: Whether batches stay plain (the default strategy).
        context_now: Says which of how many workers this is, and how many replicas they have
            together; a worker that was lost changes that.
        open_loops: Where the strategy finds epochs to close.
        on_begin: Called when an epoch begins; raises if the strategy is closed.
        gate: Closed while a save or restore waits for steps to end.
        go_on: Asks the other workers how many batches they have; None if there are none.
    """

    device_names: tuple[str, ...]
    has_plain_values: bool
    context_now: Callable[[], InputContext]
    open_loops: OpenLoops
    on_begin: Callable[[], object]
    gate: StepGate
    go_on: GoOn | None = None


def distribute_dataset(
    target: InputTarget, dataset: object, options: InputOptions | None
) -> DistributedDataset:
    """Split each global batch of a dataset over the replicas.

    Raises:
        TypeError: If `dataset` is nothing that yields batches, or `options` no InputOptions.
        ValueError: If the options ask for one dataset per replica, or cannot be met.
    """
    options = _checked(options)
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise TypeError(f"{dataset!r} is distributed already. Iterate over it with `async for`.")
    if options.is_per_replica:
        raise ValueError(
            "distribute_dataset splits one dataset over the replicas, but the options ask for one "
            "dataset per replica (PER_REPLICA). Use distribute_datasets_from_function."
        )
    source, sharding = _sharded(dataset, options, target.context_now)
    joiner = _joiner(target, options)

    def sharing_now() -> Sharing:
        context = target.context_now()
        total, local = local_replicas(
            sharding,
            context.num_input_pipelines,
            context.input_pipeline_id,
            len(target.device_names),
            context.num_replicas_in_sync,
        )
        return Sharing(options.remainder, total, local)

    worker = _own_worker(target.context_now()) if sharding == "off" else None
    source = split_source(source, options, sharing_now, joiner)
    return _distributed(target, source, joiner, 1, worker)


def distribute_from_function(
    target: InputTarget, dataset_fn: Callable[[InputContext], object], options: InputOptions | None
) -> DistributedDataset:
    """Feed each replica whole batches of a dataset that `dataset_fn` makes.

    Raises:
        TypeError: If `dataset_fn` is not a function, returns nothing that yields batches, or
            `options` no InputOptions.
        ValueError: If the options share files out, which is the function's own task.
    """
    options = _checked(options)
    if not callable(dataset_fn):
        raise TypeError(f"dataset_fn must be a function of an ar.InputContext, got {dataset_fn!r}.")
    if inspect.iscoroutinefunction(dataset_fn):
        raise TypeError(
            f"dataset_fn returns a dataset, but {dataset_fn!r} is a coroutine function. Make it a "
            "plain function; what has to be awaited goes into an async generator that it returns."
        )
    if options.sharding not in ("auto", "off"):
        raise ValueError(
            f"sharding={options.sharding!r} is for distribute_dataset. In dataset_fn, read what "
            "context.input_pipeline_id says."
        )
    joiner, context = _joiner(target, options), target.context_now()
    worker = _own_worker(context)
    if not options.is_per_replica:
        source = _made(dataset_fn, context)
        source = dealt_source(source, options, joiner, len(target.device_names))
        return _distributed(target, source, joiner, context.num_input_pipelines, worker)
    lives_on_device = options.place_on_device and not target.has_plain_values
    sources = []
    num_local = len(target.device_names)
    first = context.input_pipeline_id * num_local
    num_in_sync = context.num_replicas_in_sync
    for i, name in enumerate(target.device_names):
        context = InputContext(num_in_sync, first + i, num_in_sync)
        if lives_on_device:
            with device(name):
                sources.append(_made(dataset_fn, context))
        else:
            sources.append(_made(dataset_fn, context))
    names = target.device_names if lives_on_device else ()
    source = zipped_source(sources, options, joiner, names)
    return _distributed(target, source, joiner, num_in_sync, worker)


def _own_worker(context: InputContext) -> int | None:
    """Return which of several workers this is, where each reads a dataset of its own."""
    return context.input_pipeline_id if context.num_input_pipelines > 1 else None


def _made(dataset_fn: Callable[[InputContext], object], context: InputContext) -> Source:
    """Call the function now; for an iterator, which can be read once only, also per epoch."""
    made = dataset_fn(context)
    if isinstance(made, (Iterator, AsyncIterator)):
        is_async = not isinstance(made, Iterator)
        return iterable_source(
            made, lambda: dataset_fn(context), is_async=is_async, first_made=made
        )
    return find_source(made)


def _sharded(
    dataset: object, options: InputOptions, context_now: Callable[[], InputContext]
) -> tuple[Source, str]:
    """Return a source of what this worker reads, and how it is shared out."""
    context = context_now()
    num_pipelines, pipeline_id = context.num_input_pipelines, context.input_pipeline_id
    source = find_source(dataset)
    label = source.label
    sharding = chosen_sharding(options.sharding, dataset, source, num_pipelines)
    if sharding == "file":
        if not isinstance(dataset, Files):
            raise ValueError(
                f"sharding='file' shares out files, but {source.label} is not made of any. Use "
                "ar.input.Files(paths, read), or sharding='data'."
            )
        label = repr(dataset.shard(num_pipelines, pipeline_id))  # raises if they are too few
        source = files_source(dataset, context_now, is_shared=True)
    if sharding != "off" or num_pipelines > 1:
        is_auto = options.sharding == "auto"
        LOGGER.info(describe(sharding, label, num_pipelines, pipeline_id, is_auto=is_auto))
    return source, sharding


def _distributed(
    target: InputTarget, source: Source, joiner: Joiner, num_pipelines: int, worker: int | None
) -> DistributedDataset:
    return DistributedDataset(
        source,
        lambda: joiner.element_spec,
        target.open_loops,
        target.on_begin,
        num_pipelines,
        lambda: target.context_now().num_replicas_in_sync,
        target.gate,
        target.go_on,
        worker,
    )


def _joiner(target: InputTarget, options: InputOptions) -> Joiner:
    return Joiner(
        target.device_names,
        has_plain_values=target.has_plain_values,
        to_devices=options.fetch_to_device or options.place_on_device,
    )


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be an ar.InputOptions, got {options!r}.")
    return options
