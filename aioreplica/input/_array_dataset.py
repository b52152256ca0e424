"""Arrays in memory or in a mapped file, or a table, as a dataset of global batches."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..devices import INLINE_BYTES, run_on_host
from ..tree import Array, Tree, flatten, paths, unflatten
from ._batches import columns_of, spec_of, to_array
from ._options import as_count
from ._shuffle import KeyedPermutation
from ._source import Item, Pass, Source, Start

NUM_SAMPLES = 16  # rows that tell one dataset from another of the same shape
SAMPLE_SIZE = 256  # elements looked at in each of them

Picked = slice | npt.NDArray[np.int64]


@final
class ArrayDataset:
    """Global batches cut from arrays, shuffled anew in every epoch if asked for.

    Args:
        arrays: A pytree of arrays whose leading axis counts the examples; `np.memmap` arrays are
            read batch by batch, off the event loop. Or a table with `column_names`, such as a
            Hugging Face dataset: a batch is then a dict of its columns.
        batch_size: Examples per global batch.
        shuffle: Whether the order is a random one.
        seed: Seed of the orders, an int >= 0.
        reshuffle_each_epoch: Whether each epoch has an order of its own; if not, all have that of
            epoch 0.
        drop_remainder: Leave out a last batch that is shorter than `batch_size`.

    Raises:
        ValueError: If `batch_size` is below 1, `seed` is not an int >= 0, or the leaves have no
            common leading axis.
        TypeError: If a leaf is not an array, or a flag not a bool.

    Determinism:
        The order is a pure function of (seed, epoch, index): `batches(epoch)` gives the same
        batches whenever and however often it is called, on every platform.

    Without shuffling, batches are read-only views of the arrays: a step that wrote into its batch
    would change the dataset. In a process that has loaded torch, which does not know read-only
    memory, they are copies.

    Example:
        >>> import numpy as np
        >>> dataset = ArrayDataset(np.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in dataset.batches(epoch=0)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        arrays: object,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        reshuffle_each_epoch: bool = True,
    ) -> None:
        self._batch_size = as_count("batch_size", batch_size, least=1)
        self._seed = as_count("seed", seed)
        for name, flag in (
            ("shuffle", shuffle),
            ("drop_remainder", drop_remainder),
            ("reshuffle_each_epoch", reshuffle_each_epoch),
        ):
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {flag!r}.")
        self._rows = rows_of(arrays)
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._reshuffles = reshuffle_each_epoch

    @property
    def num_examples(self) -> int:
        """Number of examples of one epoch."""
        return self._rows.num_examples

    @property
    def batch_size(self) -> int:
        """Examples per global batch; the last one may be shorter."""
        return self._batch_size

    @property
    def element_spec(self) -> Tree:
        """The pytree of `ArraySpec` of a batch."""
        return spec_of(self._rows.like())

    def __len__(self) -> int:
        """Return the number of batches of one epoch."""
        full, rest = divmod(self.num_examples, self._batch_size)
        return full + (rest > 0 and not self._drop_remainder)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tree]:
        """Yield the global batches of an epoch, in order.

        Args:
            epoch: Its number, from 0.
            start: Examples at its beginning to leave out.
        """
        for picked, _ in _cuts(self, Start(epoch, start)):
            yield self._rows.read(picked)

    @property
    def _order_name(self) -> object:
        """Name that tells this order from another one, for states."""
        if not self._shuffle:
            return "in order"
        return self._seed if self._reshuffles else f"{self._seed}, the same in every epoch"

    def __iter__(self) -> Iterator[Tree]:
        """Yield the batches of epoch 0."""
        return self.batches(0)

    def __repr__(self) -> str:
        shuffled = ", shuffled" if self._shuffle else ""
        return (
            f"<ArrayDataset | {self.num_examples} examples in {len(self)} batches of "
            f"{self._batch_size}{shuffled}>"
        )


def array_source(dataset: ArrayDataset) -> Source:
    """Return an ArrayDataset as a source; its offset counts examples, so it fits any batch size."""
    rows, label = dataset._rows, repr(dataset)
    is_inline = rows.is_inline(dataset._batch_size, shuffled=dataset._shuffle)

    async def rest(start: Start) -> AsyncGenerator[Item, None]:
        for picked, offset in _cuts(dataset, start):
            if is_inline:
                yield Item(rows.read(picked), offset)
            else:
                yield Item(await run_on_host(rows.read, picked), offset)

    def read(start: Start) -> Pass:
        if start.offset > dataset.num_examples and not start.may_be_over:
            raise ValueError(
                f"{label} cannot go on after example {start.offset}: it has only "
                f"{dataset.num_examples}. Load the state of this dataset."
            )
        return rest(start)

    def identity() -> tuple[object, ...]:
        order = dataset._order_name
        return ("ArrayDataset", rows.num_examples, order, *rows.shapes(), *rows.sample())

    return Source(
        label,
        read,
        identity,
        lambda: ("ArrayDataset", dataset._shuffle, *rows.shapes()),
        num_items=lambda: len(dataset),
        offset_after=lambda num: min(num * dataset._batch_size, dataset.num_examples),
        like=rows.like,
        is_inline=is_inline,
        counts_examples=True,
    )


def _cuts(dataset: ArrayDataset, start: Start) -> Iterator[tuple[Picked, int]]:
    """Yield the rows of each batch of an epoch, and the offset behind them."""
    size, end = dataset._batch_size, dataset.num_examples
    if dataset._drop_remainder:
        end -= (end - start.offset) % size
    order = None
    if dataset._shuffle:
        epoch = start.epoch if dataset._reshuffles else 0
        order = KeyedPermutation(
            dataset.num_examples, seed=dataset._seed, epoch=epoch, version=start.version
        )
    for first in range(start.offset, end, size):
        last = min(first + size, end)
        yield slice(first, last) if order is None else order(np.arange(first, last)), last


@runtime_checkable
class Table(Protocol):
    """Examples by number, in named columns: a Hugging Face dataset, among others."""

    @property
    def column_names(self) -> Any:
        """The columns, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Mapping[str, object]: ...


class Rows(ABC):
    """Examples that can be read by number, in any order.

    Attributes:
        num_examples: How many there are.
    """

    num_examples: int

    @abstractmethod
    def is_inline(self, num_rows: int, *, shuffled: bool) -> bool:
        """Return True if so many rows are read in microseconds, without touching a disk."""

    @abstractmethod
    def read(self, picked: Picked) -> Tree:
        """Return the chosen rows as a pytree of arrays."""

    @abstractmethod
    def like(self) -> Tree:
        """Return a small batch with the structure, shapes and dtypes of the others."""

    def shapes(self) -> list[str]:
        """Return a line per leaf that says what it is."""
        leaves, spec = flatten(self.like())
        named = paths(unflatten(spec, leaves))
        return [
            f"{path} {leaf.dtype} {leaf.shape[1:]}"
            for path, leaf in zip(named, leaves, strict=True)
        ]

    def sample(self) -> list[bytes]:
        """Return some bytes of some rows."""
        if self.num_examples == 0:
            return []
        step = max(1, self.num_examples // NUM_SAMPLES)
        picked = np.arange(0, self.num_examples, step, dtype=np.int64)
        leaves, _ = flatten(self.read(picked))
        return [
            leaf[row].flat[:SAMPLE_SIZE].tobytes()
            if leaf.ndim > 1
            else leaf[row : row + 1].tobytes()
            for leaf in leaves
            if not leaf.dtype.hasobject
            for row in range(len(leaf))
        ]


@final
class ArrayRows(Rows):
    """Rows of a pytree of arrays with one common leading axis.

    Slices are read-only views: a step that wrote into its batch would change the dataset for all
    later epochs. torch writes through them, so where it is loaded they are copies. Rows of a mapped
    file are copied too, so that reading the disk happens here.
    """

    def __init__(self, arrays: object) -> None:
        leaves, self._spec = flatten(arrays)
        self._is_mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
        named = paths(arrays)
        self._arrays = [
            _read_only(to_array(leaf, path)) for path, leaf in zip(named, leaves, strict=True)
        ]
        lengths = {array.shape[0] if array.ndim else -1 for array in self._arrays}
        if len(lengths) != 1 or -1 in lengths:
            shown = ", ".join(f"{p}: {a.shape}" for p, a in zip(named, self._arrays, strict=True))
            raise ValueError(
                "ArrayDataset needs arrays with one common leading axis, got "
                f"{shown or 'no array'}."
            )
        self.num_examples = lengths.pop()
        self._row_bytes = sum(array.nbytes // max(1, self.num_examples) for array in self._arrays)

    def is_inline(self, num_rows: int, *, shuffled: bool) -> bool:
        """Return True if the rows are views, or small."""
        if self._is_mapped:
            return False
        return not (shuffled or _is_torch_loaded()) or num_rows * self._row_bytes < INLINE_BYTES

    def like(self) -> Tree:
        """Return an empty batch."""
        return self.read(slice(0, 0))

    def read(self, picked: Picked) -> Tree:
        """Return views of a slice, copies of anything else."""
        chosen = [array[picked] for array in self._arrays]
        if type(picked) is slice and (self._is_mapped or _is_torch_loaded()):
            chosen = [array.copy() for array in chosen]
        return unflatten(self._spec, chosen)


@final
class TableRows(Rows):
    """Rows of a table; a batch is a dict of its columns."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.num_examples = len(table)

    def is_inline(self, num_rows: int, *, shuffled: bool) -> bool:
        """Never: a table may have to read a file."""
        return False

    def like(self) -> Tree:
        """Return one row: an empty column has lost its dtype."""
        return self.read(slice(0, 1))

    def read(self, picked: Picked) -> Tree:
        """Return a dict of arrays."""
        rows: object = picked if isinstance(picked, slice) else picked.tolist()
        columns = self._table[rows]
        batch = {name: to_array(columns[name], f"[{name!r}]") for name in self._table.column_names}
        if _is_torch_loaded():  # a column may be a view of the table's memory, even of a file's
            batch = {name: column.copy() for name, column in batch.items()}
        return batch


def rows_of(arrays: object) -> Rows:
    """Return a reader of arrays or of a table."""
    arrays = columns_of(arrays)
    if isinstance(arrays, Table) and not isinstance(arrays, (Mapping, Sequence)):
        return TableRows(arrays)
    return ArrayRows(arrays)


def _is_torch_loaded() -> bool:
    """Return True if views have to be copied: torch takes an array's address, not its flags.

    A copy always would tax programs without torch; a warning would leave the dataset changed.
    """
    return "torch" in sys.modules


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
