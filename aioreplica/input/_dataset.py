"""A small pipeline of host transforms: map, batch, prefetch, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias, final

import numpy as np

from .._functions import is_async, require_finished, require_no_yield
from ..devices import (
    HOST,
    INLINE_BYTES,
    CompletionQueue,
    Op,
    OwnedTask,
    lane_table,
    run_on_host,
    run_on_lane,
)
from ..tree import Array, Tree, TreeSpec, flatten, leaves, paths, unflatten
from ._array_dataset import ArrayDataset, array_source
from ._batches import columns_of, copy_item, to_array
from ._iterables import label_of, source_of
from ._options import as_count
from ._read_ahead import ReadAhead
from ._sharding import Files, files_source
from ._source import Item, Pass, Source, Start


@final
class Dataset:
    """Any source, with transforms that run on the host while the replicas compute.

    Each method returns a new dataset and leaves this one as it is. Give the result to
    `strategy.distribute_dataset`, or iterate over it with `async for` (use `contextlib.aclosing`
    on the iterator if the loop may be left early).

    Args:
        source: Whatever `strategy.distribute_dataset` takes; or single examples, to be put
            together by `batch`.

    Raises:
        TypeError: If `source` is nothing that yields batches or examples.

    Determinism:
        Items keep the order of the source, however many calls of a `map` run at once.

    Example:
        >>> import asyncio
        >>> dataset = Dataset([1, 2, 3]).map(lambda x: x * x).batch(2)
        >>> async def main():
        ...     return [batch.tolist() async for batch in dataset]
        >>> asyncio.run(main())
        [[1, 4], [9]]
    """

    def __init__(self, source: object) -> None:
        self._source = find_source(source)

    def map(self, fn: Callable[[Tree], Tree], *, num_parallel: int = 4) -> Dataset:
        """Apply a function to each item.

        Args:
            fn: Takes an item whole, also if that is a tuple. Items of a list are copied before, so
                it may write into them. A plain function runs on the host's threads, an async one
                on the event loop.
            num_parallel: Calls in progress at once.

        Raises:
            TypeError: If `fn` is not a function, or contains `yield`.
            ValueError: If `num_parallel` is below 1.
        """
        if not callable(fn):
            raise TypeError(f"map takes a function of one item, got {fn!r}.")
        require_no_yield(fn, "map")
        num_parallel = as_count("num_parallel", num_parallel, least=1)
        return Dataset(_mapped(self._source, fn, num_parallel))

    def batch(self, batch_size: int, *, drop_remainder: bool = False) -> Dataset:
        """Stack single examples into batches; every leaf gets a leading axis.

        Args:
            batch_size: Examples per batch.
            drop_remainder: Leave out a last batch that is shorter.

        Raises:
            ValueError: If `batch_size` is below 1.
        """
        size = as_count("batch_size", batch_size, least=1)
        return Dataset(_batched(self._source, size, drop_remainder=drop_remainder))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Read up to `buffer_size` items ahead at this place of the pipeline.

        `strategy.distribute_dataset` reads ahead at the end of it by itself.

        Raises:
            ValueError: If `buffer_size` is below 1.
        """
        size = as_count("buffer_size", buffer_size, least=1)
        source = self._source

        def read(start: Start) -> Pass:
            return ReadAhead(source.read(start), size, source.label)

        return Dataset(replace(source, read=read, is_inline=False))

    async def __aiter__(self) -> AsyncGenerator[Tree, None]:
        """Yield the items of one pass."""
        async with aclosing(self._source.read(Start())) as items:
            async for item in items:
                yield item.value

    def __repr__(self) -> str:
        return f"<Dataset | {self._source.label}>"


def find_source(dataset: object) -> Source:
    """Return a source for whatever a user may call a dataset.

    Raises:
        TypeError: If it is nothing that yields batches.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, Dataset):
        return dataset._source
    if isinstance(dataset, ArrayDataset):
        return array_source(dataset)
    if isinstance(dataset, Files):
        return files_source(dataset)
    return source_of(dataset)


# ---- map -------------------------------------------------------------------------------------

_Call: TypeAlias = Op[Any] | OwnedTask[Any]


def _mapped(source: Source, fn: Callable[[Tree], Tree], num_parallel: int) -> Source:
    """Return what `fn` makes of each item of a source; its offsets are those of the source."""
    label = f"{source.label}.map({label_of(fn).removeprefix('function ')})"

    def read(start: Start) -> Pass:
        items = source.read(start)
        return _map(_copies(items) if source.is_kept else items, fn, num_parallel, label)

    return replace(
        source,
        label=label,
        read=read,
        like=lambda: None,  # `fn` would have to be called
        is_inline=False,
        counts_examples=False,  # a batch may come out of any size
    )


async def _copies(items: Pass) -> AsyncGenerator[Item, None]:
    """Copy items of which the user has the only one, a large one on a thread."""
    async with aclosing(items):
        async for item in items:
            if sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves(item.value)) < INLINE_BYTES:
                value = copy_item(item.value)
            else:
                value = await run_on_host(copy_item, item.value)
            yield item._replace(value=value)


async def _map(
    items: Pass, fn: Callable[[Tree], Tree], num_parallel: int, label: str
) -> AsyncGenerator[Item, None]:
    """Wait for the calls in order, while a task reads on and starts the next ones.

    The task matters: an item whose call is done must not wait for the source's next item.
    """
    calls: deque[_Call] = deque()
    started: Pass = _start_calls(items, fn, calls)
    if num_parallel > 1:  # one call is waited for here, the others are in the queue
        started = ReadAhead(started, num_parallel - 1, label)
    try:
        async for item in started:
            value = await item.value
            if inspect.isawaitable(value):
                value = await value
            require_finished(value, fn, "map")
            calls.popleft()
            yield item._replace(value=value)
    finally:
        cancelled = [*calls]
        for call in cancelled:
            call.cancel()
        try:
            await started.aclose()
        finally:  # a source that does not heed its cancellation may have given one more item
            for call in [*calls][len(cancelled) :]:
                call.cancel()
            await asyncio.gather(*map(_ended, calls), return_exceptions=True)
            calls.clear()


async def _start_calls(
    items: Pass, fn: Callable[[Tree], Tree], calls: deque[_Call]
) -> AsyncGenerator[Item, None]:
    """Give items with a started call in place of each value.

    Each call is put into `calls` in order; what takes its result removes it.
    """
    runs_on_loop = is_async(fn)
    async with aclosing(items):
        async for item in items:
            call: _Call
            if runs_on_loop:
                call = OwnedTask(fn(item.value), "aioreplica input: map")
            else:
                port = CompletionQueue.of_running_loop()
                call = run_on_lane(lane_table().lane(HOST), port, fn, (item.value,), {})
                call.put()
            calls.append(call)
            yield item._replace(value=call)


async def _ended(call: _Call) -> None:
    if isinstance(call, OwnedTask):
        await call.ended()
    else:
        await call


# ---- batch -----------------------------------------------------------------------------------


def _batched(source: Source, size: int, *, drop_remainder: bool) -> Source:
    """Return batches of so many items of a source; its offsets are those of the source."""
    label = f"{source.label}.batch({size})"

    def read(start: Start) -> Pass:
        return _batch(source.read(start), size, label, drop_remainder=drop_remainder)

    def num_items() -> int | None:
        available = source.num_items()
        if available is None:
            return None
        full, rest = divmod(available, size)
        return full + (rest > 0 and not drop_remainder)

    def offset_after(num_batches: int) -> int:
        taken, available = num_batches * size, source.num_items()
        return source.offset_after(taken if available is None else min(taken, available))

    return Source(
        label,
        read,
        source.identity,
        source.common_identity,
        num_items=num_items,
        offset_after=offset_after,
        aclose=source.aclose,
        check_start=source.check_start,
        differs=source.differs,
    )


async def _batch(
    items: Pass, size: int, label: str, *, drop_remainder: bool
) -> AsyncGenerator[Item, None]:
    held: list[Item] = []
    num_batches = 0
    async with aclosing(items):
        async for item in items:
            held.append(item)
            if len(held) == size:
                yield await _stacked(held, f"batch {num_batches} of {label}")
                num_batches += 1
                held.clear()
    if held and not drop_remainder:
        yield await _stacked(held, f"batch {num_batches} of {label}")


async def _stacked(items: list[Item], where: str) -> Item:
    columns, spec = _columns([columns_of(item.value) for item in items], where)
    num_bytes = sum(column[0].nbytes for column in columns) * len(items)
    if num_bytes < INLINE_BYTES:
        stacked = _stack(columns)
    else:
        stacked = await run_on_host(_stack, columns)
    return items[-1]._replace(value=unflatten(spec, stacked))


def _columns(examples: list[object], where: str) -> tuple[list[list[Array]], TreeSpec]:
    """Return one list of arrays per leaf, all of one shape."""
    rows: list[list[Array]] = []
    _, spec = flatten(examples[0])
    names = paths(examples[0])
    for number, example in enumerate(examples):
        leaves, other = flatten(example)
        if other != spec:
            raise ValueError(
                f"Example {number} of {where} has the structure {other}, but example 0 of the "
                f"batch has {spec}. Make the source yield one structure."
            )
        rows.append([to_array(leaf, name) for leaf, name in zip(leaves, names, strict=True)])
    columns = [list(column) for column in zip(*rows, strict=True)]
    for name, column in zip(names, columns, strict=True):
        for number, array in enumerate(column):
            if array.shape != column[0].shape:
                raise ValueError(
                    f"Example {number} of {where} has shape {array.shape} at {name}, but example 0 "
                    f"of the batch has {column[0].shape}. Pad them in a map before batch."
                )
    if not columns:
        raise ValueError(f"Example 0 of {where} holds no array, got {examples[0]!r}.")
    return columns, spec


def _stack(columns: list[list[Array]]) -> list[Array]:
    return [np.stack(column) for column in columns]
