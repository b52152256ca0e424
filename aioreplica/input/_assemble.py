"""From what sources yield to batches for all replicas: split, dealt out, or one source each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..devices import device
from ..tree import TreeSpec
from ._arrays import Array, BatchReader
from ._join import Joiner
from ._split import cut_leaves, split_sizes
from ._stream import Item, Stream


@final
@dataclass(frozen=True, slots=True)
class Sharing:
    """How a global batch is shared out.

    Attributes:
        remainder: What becomes of examples that cannot be shared out evenly.
        num_parts: Over how many replicas a batch is split.
        local: Which of the parts are this worker's.
    """

    remainder: str
    num_parts: int
    local: range

    def sizes(self, num_examples: int, reader: BatchReader) -> tuple[int, ...] | None:
        """Return the size of every part, or None if the batch is left out.

        Raises:
            ValueError: If that is what an uneven batch is.
        """
        share, rest = divmod(num_examples, self.num_parts)
        if rest and self.remainder == "error":
            raise ValueError(
                f"{reader.name} has {num_examples} examples, which {self.num_parts} replicas "
                "cannot share evenly, and remainder='error'. Use a multiple of "
                f"{self.num_parts}, or remainder='weight'."
            )
        if self.remainder == "drop":
            return (share,) * self.num_parts if share else None
        return split_sizes(num_examples, self.num_parts)


@final
class SplitStream(Stream):
    """Splits each global batch over the replicas."""

    def __init__(self, upstream: Stream, sharing: Sharing, joiner: Joiner, label: str) -> None:
        self._upstream = upstream
        self._sharing = sharing
        self._joiner = joiner
        self._label = label
        self._reader = BatchReader("global batch", label)

    async def pull(self) -> Item | None:
        """Return the next batch that is not left out."""
        while (item := await self._upstream.pull()) is not None:
            arrays, spec = self._reader.read(item.value)
            self._joiner.note(arrays, spec)
            sizes = self._sharing.sizes(arrays[0].shape[0], self._reader)
            if sizes is None:
                continue
            parts = cut_leaves(arrays, sizes)
            if len(self._sharing.local) != len(parts):
                parts = [parts[i] for i in self._sharing.local]
            if self._joiner.places:
                parts = await self._joiner.place(parts)
            return Item(self._joiner.join(parts, spec), item.offset, item.own_state)
        return None

    async def aclose(self) -> None:
        """Close the source."""
        await self._upstream.aclose()


@final
class DealStream(Stream):
    """Deals one batch of a source to each replica in turn: so many make a step."""

    def __init__(self, upstream: Stream, row: Row) -> None:
        self._upstream = upstream
        self._row = row
        self._last: Item | None = None

    async def pull(self) -> Item | None:
        """Return a batch for each replica; those at the end may be empty."""
        row = self._row
        value: Any | None = None
        while value is None and not row.has_ended:
            while not row.is_complete:
                item = await self._upstream.pull()
                if item is None:
                    row.add_missing()
                else:
                    row.add(item.value)
                    self._last = item
            value = await row.take()
        if value is None or self._last is None:
            return None
        return Item(value, self._last.offset, self._last.own_state)

    async def aclose(self) -> None:
        """Close the source."""
        await self._upstream.aclose()


@final
class OnDeviceStream(Stream):
    """Reads a source that lives on a device: there `ar.current_device()` is that device."""

    def __init__(self, upstream: Stream, device_name: str) -> None:
        self._upstream = upstream
        self._device_name = device_name

    async def pull(self) -> Item | None:
        """Return the source's next item."""
        with device(self._device_name):
            return await self._upstream.pull()

    async def aclose(self) -> None:
        """Close the source."""
        with device(self._device_name):
            await self._upstream.aclose()


@final
class ZipStream(Stream):
    """Takes one batch of each replica's own source; a source that has ended gives empty ones.

    Its offset counts steps.
    """

    def __init__(self, upstreams: Sequence[Stream], row: Row, offset: int) -> None:
        self._upstreams = upstreams
        self._row = row
        self._offset = offset

    async def pull(self) -> Item | None:
        """Return a batch for each replica, until all sources have ended."""
        row = self._row
        value: Any | None = None
        while value is None and not row.has_ended:
            while not row.is_complete:
                item = await self._upstreams[row.length].pull()
                if item is None:
                    row.add_missing()
                else:
                    row.add(item.value)
            value = await row.take()
            self._offset += 1
        return None if value is None else Item(value, self._offset)

    async def aclose(self) -> None:
        """Close all sources, and raise the first error after the last was closed."""
        error: BaseException | None = None
        for upstream in self._upstreams:
            try:
                await upstream.aclose()
            except BaseException as caught:  # noqa: BLE001 - raised below, once all are closed
                error = error or caught
        if error is not None:
            raise error


@final
class Row:
    """One batch per replica on its way to become one step's batch.

    It is kept when a pull is cancelled between two replicas, so that nothing is lost.

    Args:
        num_replicas: Local replicas.
        remainder: What becomes of a step in which replicas get different numbers of examples.
        joiner: Makes the batch.
        label: Names the source in errors.
    """

    def __init__(self, num_replicas: int, remainder: str, joiner: Joiner, label: str) -> None:
        self._num_replicas = num_replicas
        self._remainder = remainder
        self._joiner = joiner
        self._label = label
        self._reader = BatchReader("batch", label)
        self._parts: list[list[Array] | None] = []
        self._like: list[list[Array] | None] = [None] * num_replicas
        self._spec: TreeSpec | None = None
        self._num_steps = 0
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether there will be no further step."""
        return self._has_ended

    @property
    def length(self) -> int:
        """How many replicas have got something, or are known to get nothing."""
        return len(self._parts)

    @property
    def is_complete(self) -> bool:
        """Whether every replica has been seen to."""
        return len(self._parts) == self._num_replicas

    def add(self, batch: Any) -> None:
        """Give a batch to the next replica."""
        arrays, self._spec = self._reader.read(batch)
        self._joiner.note(arrays, self._spec)
        self._like[len(self._parts)] = [np.empty_like(array[:0]) for array in arrays]
        self._parts.append(arrays)

    def add_missing(self) -> None:
        """Give nothing to the next replica."""
        self._parts.append(None)

    async def take(self) -> Any | None:
        """Return the step's batch and begin the next; None if it is left out, or at the end.

        Raises:
            ValueError: If replicas get different numbers of examples and that is an error.
        """
        if self._spec is None or self._is_the_end():
            self._has_ended = True
            return None
        full = self._even(self._filled())
        if full is None:
            self._parts = []
            return None
        placed = await self._joiner.place(full) if self._joiner.places else full
        self._parts = []
        self._num_steps += 1
        return self._joiner.join(placed, self._spec)

    def _is_the_end(self) -> bool:
        """Whether nobody has got a batch, or not everybody where parts have to be equal."""
        is_missing = [part is None for part in self._parts]
        return any(is_missing) if self._remainder == "drop" else all(is_missing)

    def _filled(self) -> list[list[Array]]:
        """Return the parts, empty arrays in place of what is missing."""
        template = next(like for like in self._like if like is not None)
        return [
            part if part is not None else (own or template)
            for part, own in zip(self._parts, self._like, strict=True)
        ]

    def _even(self, parts: list[list[Array]]) -> list[list[Array]] | None:
        """Return what the replicas get of parts of different sizes; None if that is nothing."""
        sizes = [part[0].shape[0] for part in parts]
        share = min(sizes)
        if self._remainder == "drop":
            return [[array[:share] for array in part] for part in parts] if share else None
        if self._remainder == "weight" or share == max(sizes):
            return parts
        raise ValueError(
            f"Step {self._num_steps} of {self._label} gives the replicas {sizes} examples, "
            "and remainder='error'. Make all batches equal, or use remainder='weight'."
        )
