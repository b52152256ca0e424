"""batch: single examples stacked into batches."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from ..devices import INLINE_BYTES, run_on_host
from ..tree import TreeSpec, flatten, paths, unflatten
from ._arrays import Array, to_array
from ._stream import Item, Source, Start, Stream


@final
class BatchedSource(Source):
    """Batches of `batch_size` items of another source."""

    def __init__(self, upstream: Source, batch_size: int, *, drop_remainder: bool) -> None:
        self._upstream = upstream
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    @property
    def label(self) -> str:
        """The other source and the size."""
        return f"{self._upstream.label}.batch({self._batch_size})"

    @property
    def identity(self) -> tuple[Any, ...]:
        """That of the other source: offsets are its own."""
        return self._upstream.identity

    def open(self, start: Start) -> Stream:
        """Return a new pass."""
        upstream = self._upstream.open(start)
        return _BatchStream(upstream, self._batch_size, self.label, self._drop_remainder)

    def num_items(self) -> int | None:
        """Whole batches, and a short one if it is kept."""
        num_items = self._upstream.num_items()
        if num_items is None:
            return None
        full, rest = divmod(num_items, self._batch_size)
        return full + (rest > 0 and not self._drop_remainder)

    def offset_after(self, num_items: int) -> int:
        """The other source's offset behind the items of so many batches."""
        taken = num_items * self._batch_size
        available = self._upstream.num_items()
        return self._upstream.offset_after(taken if available is None else min(taken, available))

    async def aclose(self) -> None:
        """Close the other source."""
        await self._upstream.aclose()


@final
class _BatchStream(Stream):
    def __init__(self, upstream: Stream, size: int, label: str, drop_remainder: bool) -> None:
        self._upstream = upstream
        self._size = size
        self._label = label
        self._drop_remainder = drop_remainder
        self._held: list[Item] = []  # kept if a pull is cancelled
        self._num_batches = 0

    async def pull(self) -> Item | None:
        while len(self._held) < self._size:
            item = await self._upstream.pull()
            if item is None:
                break
            self._held.append(item)
        held = self._held
        if not held or (len(held) < self._size and self._drop_remainder):
            return None
        columns, spec = self._columns([item.value for item in held])
        num_bytes = sum(column[0].nbytes for column in columns) * len(held)
        if num_bytes < INLINE_BYTES:
            stacked = _stack(columns)
        else:
            stacked = await run_on_host(_stack, columns)
        self._held = []
        self._num_batches += 1
        return held[-1]._replace(value=unflatten(spec, stacked))

    async def aclose(self) -> None:
        self._held = []
        await self._upstream.aclose()

    def _columns(self, examples: list[Any]) -> tuple[list[list[Array]], TreeSpec]:
        """Return one list of arrays per leaf, all of one shape."""
        rows: list[list[Array]] = []
        _, spec = flatten(examples[0])
        names = paths(examples[0])
        for example in examples:
            leaves, other = flatten(example)
            if other != spec:
                raise ValueError(
                    f"{self._where(len(rows))} has the structure {other}, but example 0 of the "
                    f"batch has {spec}. Make the source yield one structure."
                )
            rows.append([to_array(leaf, name) for leaf, name in zip(leaves, names, strict=True)])
        columns = [list(column) for column in zip(*rows, strict=True)]
        for name, column in zip(names, columns, strict=True):
            for number, array in enumerate(column):
                if array.shape != column[0].shape:
                    raise ValueError(
                        f"{self._where(number)} has shape {array.shape} at {name}, but example 0 "
                        f"of the batch has {column[0].shape}. Pad them in a map before batch."
                    )
        if not columns:
            raise ValueError(f"{self._where(0)} holds no array, got {examples[0]!r}.")
        return columns, spec

    def _where(self, number: int) -> str:
        return f"Example {number} of batch {self._num_batches} of {self._label}"


def _stack(columns: list[list[Array]]) -> list[Array]:
    return [np.stack(column) for column in columns]
