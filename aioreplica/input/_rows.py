"""Reading rows of what an ArrayDataset was made of: arrays, mapped files, or a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..devices import INLINE_BYTES
from ..tree import flatten, paths, unflatten
from ._arrays import to_array

NUM_SAMPLES = 16  # rows that tell one dataset from another of the same shape
SAMPLE_SIZE = 256  # elements looked at in each of them

Picked = slice | npt.NDArray[np.int64]


@runtime_checkable
class Table(Protocol):
    """Examples by number, in named columns: a Hugging Face dataset, among others."""

    @property
    def column_names(self) -> Any:
        """The columns, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Mapping[str, Any]: ...


class Rows(ABC):
    """Examples that can be read by number, in any order.

    Attributes:
        num_examples: How many there are.
    """

    num_examples: int

    @abstractmethod
    def is_inline(self, num_rows: int, *, shuffled: bool) -> bool:
        """Whether so many rows are read in microseconds, without touching a disk."""

    @abstractmethod
    def read(self, picked: Picked) -> Any:
        """Return the chosen rows as a pytree of arrays."""

    @abstractmethod
    def like(self) -> Any:
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
    later epochs. Rows of a mapped file are copied, so that reading the disk happens here.
    """

    def __init__(self, arrays: Any) -> None:
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
        """Whether the rows are views, or small."""
        if self._is_mapped:
            return False
        return not shuffled or num_rows * self._row_bytes < INLINE_BYTES

    def like(self) -> Any:
        """Return an empty batch."""
        return self.read(slice(0, 0))

    def read(self, picked: Picked) -> Any:
        """Return views of a slice, copies of anything else."""
        chosen = [array[picked] for array in self._arrays]
        if self._is_mapped and isinstance(picked, slice):
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

    def like(self) -> Any:
        """Return one row: an empty column has lost its dtype."""
        return self.read(slice(0, 1))

    def read(self, picked: Picked) -> Any:
        """Return a dict of arrays."""
        rows: Any = picked if isinstance(picked, slice) else picked.tolist()
        columns = self._table[rows]
        return {name: to_array(columns[name], f"[{name!r}]") for name in self._table.column_names}


def rows_of(arrays: Any) -> Rows:
    """Return a reader of arrays or of a table."""
    if isinstance(arrays, Table) and not isinstance(arrays, (Mapping, Sequence)):
        return TableRows(arrays)
    return ArrayRows(arrays)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
