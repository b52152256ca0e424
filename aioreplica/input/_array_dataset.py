"""Arrays in memory or in a mapped file as a dataset of global batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from ..devices import run_on_host
from ._natural import as_natural
from ._rows import Picked, Rows, rows_of
from ._shuffle import KeyedPermutation
from ._spec import spec_of
from ._stream import Item, Source, Start, Stream


@final
class ArrayDataset:
    """Global batches cut from arrays, shuffled anew in every epoch if asked for.

    Args:
        arrays: A pytree of arrays whose leading axis counts the examples; `np.memmap` arrays are
            read batch by batch, off the event loop. Or a table with `column_names`, such as a
            Hugging Face dataset: a batch is then a dict of its columns.
        batch_size: Examples per global batch.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the orders, an int >= 0.
        drop_remainder: Leave out a last batch that is shorter than `batch_size`.

    Raises:
        ValueError: If `batch_size` is below 1, `seed` is no natural number, or the leaves have no
            common leading axis.
        TypeError: If a leaf is no array, or `shuffle` or `drop_remainder` no bool.

    Determinism:
        The order is a pure function of (seed, epoch, index): `batches(epoch)` gives the same
        batches whenever and however often it is called, on every platform.

    Without shuffling, batches are read-only views of the arrays: a step that wrote into its batch
    would change the dataset.

    Example:
        >>> import numpy as np
        >>> dataset = ArrayDataset(np.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in dataset.batches(epoch=0)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self._batch_size = as_natural("batch_size", batch_size, least=1)
        self._seed = as_natural("seed", seed)
        for name, flag in (("shuffle", shuffle), ("drop_remainder", drop_remainder)):
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {flag!r}.")
        self._rows = rows_of(arrays)
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder

    @property
    def num_examples(self) -> int:
        """How many examples one epoch holds."""
        return self._rows.num_examples

    @property
    def batch_size(self) -> int:
        """Examples per global batch; the last one may be shorter."""
        return self._batch_size

    @property
    def element_spec(self) -> Any:
        """The pytree of `ArraySpec` of a batch."""
        return spec_of(self._rows.like())

    def __len__(self) -> int:
        """How many batches one epoch has."""
        full, rest = divmod(self.num_examples, self._batch_size)
        return full + (rest > 0 and not self._drop_remainder)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the global batches of an epoch, in order.

        Args:
            epoch: Its number, from 0.
            start: Examples at its beginning to leave out.
        """
        cut = _Cut(self, epoch, start)
        while (picked := cut.next_rows()) is not None:
            yield self._rows.read(picked)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of epoch 0."""
        return self.batches(0)

    def __repr__(self) -> str:
        shuffled = ", shuffled" if self._shuffle else ""
        return (
            f"<ArrayDataset | {self.num_examples} examples in {len(self)} batches of "
            f"{self._batch_size}{shuffled}>"
        )


@final
class ArraySource(Source):
    """An ArrayDataset as a source; its offset counts examples."""

    def __init__(self, dataset: ArrayDataset) -> None:
        self._dataset = dataset
        self._rows: Rows = dataset._rows

    @property
    def label(self) -> str:
        """The dataset's description."""
        return repr(self._dataset)

    @property
    def is_inline(self) -> bool:
        """Whether batches are views or small."""
        return self._rows.is_inline(self._dataset._batch_size, shuffled=self._dataset._shuffle)

    @property
    def counts_examples(self) -> bool:
        """Yes, so a state fits any batch size."""
        return True

    @property
    def identity(self) -> tuple[Any, ...]:
        """Sizes, dtypes, order, and a sample of the rows."""
        order = self._dataset._seed if self._dataset._shuffle else "in order"
        rows = self._rows
        return ("ArrayDataset", rows.num_examples, order, *rows.shapes(), *rows.sample())

    def open(self, start: Start) -> Stream:
        """Return the rest of an epoch.

        Raises:
            ValueError: If the epoch has fewer examples than were delivered.
        """
        if start.offset > self._dataset.num_examples:
            raise ValueError(
                f"{self.label} cannot go on after example {start.offset}: it has only "
                f"{self._dataset.num_examples}. Load the state of this dataset."
            )
        cut = _Cut(self._dataset, start.epoch, start.offset)
        return _ArrayStream(self._rows, cut, is_inline=self.is_inline)

    def num_items(self) -> int:
        """The batches of an epoch."""
        return len(self._dataset)

    def offset_after(self, num_items: int) -> int:
        """The examples in the first batches."""
        return min(num_items * self._dataset._batch_size, self._dataset.num_examples)

    def first(self) -> Any:
        """A small batch, which has the structure and the dtypes of the others."""
        return self._rows.like()


@final
class _Cut:
    """Which rows make up each batch of an epoch.

    Attributes:
        offset: Examples in the batches cut so far.
    """

    __slots__ = ("_batch_size", "_end", "_order", "offset")

    def __init__(self, dataset: ArrayDataset, epoch: int, start: int) -> None:
        self.offset = start
        self._batch_size = dataset._batch_size
        self._end = dataset.num_examples
        if dataset._drop_remainder:
            self._end -= (self._end - start) % self._batch_size
        self._order = (
            KeyedPermutation(dataset.num_examples, seed=dataset._seed, epoch=epoch)
            if dataset._shuffle
            else None
        )

    def next_rows(self) -> Picked | None:
        start, end = self.offset, min(self.offset + self._batch_size, self._end)
        if start >= end:
            return None
        self.offset = end
        return slice(start, end) if self._order is None else self._order(np.arange(start, end))


@final
class _ArrayStream(Stream):
    def __init__(self, rows: Rows, cut: _Cut, *, is_inline: bool) -> None:
        self._rows = rows
        self._cut = cut
        self._is_inline = is_inline

    async def pull(self) -> Item | None:
        picked = self._cut.next_rows()
        if picked is None:
            return None
        if self._is_inline:
            return Item(self._rows.read(picked), self._cut.offset)
        return Item(await run_on_host(self._rows.read, picked), self._cut.offset)

    async def aclose(self) -> None:
        self._cut.offset = self._cut._end
