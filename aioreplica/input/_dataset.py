"""A small pipeline of host transforms: map, batch, prefetch, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, final

from ._batch import BatchedSource
from ._find_source import find_source
from ._map import MappedSource
from ._natural import as_natural
from ._read_ahead import ReadAheadStream
from ._stream import Source, Start, Stream


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

    def __init__(self, source: Any) -> None:
        self._source = find_dataset(source)

    def map(self, fn: Callable[[Any], Any], *, num_parallel: int = 4) -> Dataset:
        """Apply a function to each item.

        Args:
            fn: Takes an item whole, also if that is a tuple. A plain function runs on the host's
                threads, an async one on the event loop.
            num_parallel: Calls in progress at once.

        Raises:
            TypeError: If `fn` is no function.
            ValueError: If `num_parallel` is below 1.
        """
        if not callable(fn):
            raise TypeError(f"map takes a function of one item, got {fn!r}.")
        num_parallel = as_natural("num_parallel", num_parallel, least=1)
        return Dataset(MappedSource(self._source, fn, num_parallel))

    def batch(self, batch_size: int, *, drop_remainder: bool = False) -> Dataset:
        """Stack single examples into batches; every leaf gets a leading axis.

        Args:
            batch_size: Examples per batch.
            drop_remainder: Leave out a last batch that is shorter.

        Raises:
            ValueError: If `batch_size` is below 1.
        """
        size = as_natural("batch_size", batch_size, least=1)
        return Dataset(BatchedSource(self._source, size, drop_remainder=drop_remainder))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Read up to `buffer_size` items ahead at this place of the pipeline.

        `strategy.distribute_dataset` reads ahead at the end of it by itself.

        Raises:
            ValueError: If `buffer_size` is below 1.
        """
        size = as_natural("buffer_size", buffer_size, least=1)
        return Dataset(PrefetchedSource(self._source, size))

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """Yield the items of one pass."""
        stream = self._source.open(Start())
        try:
            while (item := await stream.pull()) is not None:
                yield item.value
        finally:
            await stream.aclose()

    def __repr__(self) -> str:
        return f"<Dataset | {self._source.label}>"


@final
class PrefetchedSource(Source):
    """Another source, read ahead."""

    def __init__(self, upstream: Source, buffer_size: int) -> None:
        self._upstream = upstream
        self._buffer_size = buffer_size

    @property
    def label(self) -> str:
        """That of the other source."""
        return self._upstream.label

    @property
    def identity(self) -> tuple[Any, ...]:
        """That of the other source."""
        return self._upstream.identity

    def open(self, start: Start) -> Stream:
        """Return a new pass."""
        return ReadAheadStream(self._upstream.open(start), self._buffer_size, self.label)

    @property
    def counts_examples(self) -> bool:
        """As the other source does."""
        return self._upstream.counts_examples

    def num_items(self) -> int | None:
        """As many as the other source has."""
        return self._upstream.num_items()

    def offset_after(self, num_items: int) -> int:
        """As in the other source."""
        return self._upstream.offset_after(num_items)

    def first(self) -> Any | None:
        """That of the other source."""
        return self._upstream.first()

    async def aclose(self) -> None:
        """Close the other source."""
        await self._upstream.aclose()


def find_dataset(dataset: Any) -> Source:
    """Return a source for whatever a user may call a dataset.

    Raises:
        TypeError: If it is nothing that yields batches.
    """
    return dataset._source if isinstance(dataset, Dataset) else find_source(dataset)
