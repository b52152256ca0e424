"""Batches as NumPy arrays: read, described, and split into contiguous, balanced parts.

Tables and columns of pandas, polars and Arrow are read too; none of them is imported from here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..devices.backends import find_backends
from ..tree import (
    Array,
    DType,
    Tree,
    TreeSpec,
    flatten,
    leaves,
    map_leaves,
    paths,
    paths_of,
    unflatten,
)
from ..values import DistributedValues

TABLES = {"pandas": ("DataFrame",), "polars": ("DataFrame",), "pyarrow": ("Table", "RecordBatch")}
COLUMNS = {
    "pandas": ("Series", "Index"),
    "polars": ("Series",),
    "pyarrow": ("Array", "ChunkedArray"),
}
WRITABLE = {"pandas": ("DataFrame", "Series"), "torch": ("Tensor",), "cupy": ("ndarray",)}


@final
@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array; None stands for the axis that counts the examples.

    Attributes:
        shape: (None, ...).
        dtype: Its NumPy dtype.

    Source:
        tf.TensorSpec.
    """

    shape: tuple[int | None, ...]
    dtype: DType


def spec_of(batch: object) -> Tree:
    """Return the pytree of specs of a batch of NumPy arrays.

    Example:
        >>> import numpy as np
        >>> spec_of(np.zeros((8, 3), np.float32))
        ArraySpec(shape=(None, 3), dtype=dtype('float32'))
    """
    return map_leaves(lambda array: ArraySpec((None, *array.shape[1:]), array.dtype), batch)


def to_array(leaf: object, path: str) -> Array:
    """Return a leaf as a NumPy array, without a copy where its library allows it.

    Raises:
        TypeError: If it is not an array, or has a mask.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"Leaf {path} is a {type(leaf).__name__}, whose mask would be lost. Fill it with "
            "leaf.filled(value), and pass the mask as a leaf of its own if the step needs it."
        )
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf)  # a subclass becomes the array it is made of
    for backend in find_backends():
        if backend.owns(leaf):
            return np.asarray(backend.get(leaf))
    found = find_array(leaf, path)
    if found is not None:
        return found
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Leaf {path} is a {type(leaf).__name__}, which NumPy cannot read ({error}). Convert "
            "it to a NumPy array in the source."
        ) from error
    if array.dtype.hasobject and not isinstance(leaf, (list, tuple)):
        raise TypeError(
            f"Leaf {path} has type {type(leaf).__name__}, which is not an array. Batches are "
            "pytrees of arrays; drop it, or convert it in the source."
        )
    return array


@final
class BatchReader:
    """Reads the batches of one pass: arrays with one leading axis, always in one structure.

    Args:
        what: What a batch is called in messages, such as "global batch".
        label: Where the batches come from.
    """

    __slots__ = ("_label", "_num_read", "_paths", "_spec", "_what")

    def __init__(self, what: str, label: str) -> None:
        self._what = what
        self._label = label
        self._num_read = 0
        self._spec: TreeSpec | None = None
        self._paths: list[str] = []  # of its leaves, once they are needed: each costs microseconds

    @property
    def name(self) -> str:
        """Name of the batch that was read last."""
        return self._named(self._num_read - 1)

    def read(self, batch: Any) -> tuple[list[Array], TreeSpec]:
        """Return the leaves of a batch, all of one length, and its structure.

        Raises:
            ValueError: If leaves differ in length or are scalars, there is none, or the structure
                is not that of the batches before.
            TypeError: If a leaf is not an array.
        """
        found, spec = flatten(batch)
        for leaf in found:
            if type(leaf) is not np.ndarray:
                batch = columns_of(batch)
                found, spec = flatten(batch)
                break
        if spec != self._spec:
            if self._spec is not None:
                raise ValueError(
                    f"{self._named(self._num_read)} has the structure {spec}, but those before it "
                    f"had {self._spec}. Make the source yield one structure."
                )
            self._spec = spec
        arrays = [
            leaf if type(leaf) is np.ndarray else to_array(leaf, self._path(i))
            for i, leaf in enumerate(found)
        ]
        length = arrays[0].shape[0] if arrays and arrays[0].ndim else None
        for array in arrays:
            if length is None or array.ndim == 0 or array.shape[0] != length:
                raise ValueError(self._uneven(batch, arrays))
        if length is None:
            raise ValueError(self._uneven(batch, arrays))
        self._num_read += 1
        return arrays, spec

    def _path(self, number: int) -> str:
        if not self._paths:
            assert self._spec is not None  # `read` has set it
            self._paths = paths_of(self._spec)
        return self._paths[number]

    def _named(self, number: int) -> str:
        return f"{self._what.capitalize()} {number} of {self._label}"

    def _uneven(self, batch: object, arrays: Sequence[Array]) -> str:
        named = ", ".join(f"{p}: {a.shape}" for p, a in zip(paths(batch), arrays, strict=True))
        if any(array.ndim == 0 and array.dtype.kind in "US" for array in arrays):
            advice = " Text is no array of numbers: encode it in the source, or leave it out."
        elif any(array.ndim == 0 for array in arrays):
            advice = " If the source yields single examples: ar.Dataset(source).batch(batch_size)."
        else:
            advice = " Make the source yield arrays with one row per example."
        return (
            f"{self._named(self._num_read)} needs leaves with one common leading axis, got "
            f"{named or 'no leaf'}.{advice}"
        )


def split_sizes(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Return how many examples each replica gets; sizes differ by at most one.

    Example:
        >>> split_sizes(6, 4)
        (2, 2, 1, 1)
    """
    share, remainder = divmod(num_examples, num_replicas)
    return tuple(share + (i < remainder) for i in range(num_replicas))


def cut_leaves(arrays: list[Array], sizes: tuple[int, ...]) -> list[list[Array]]:
    """Return one list of views per replica, contiguous and in order."""
    bounds = []
    start = 0
    for size in sizes:
        bounds.append(slice(start, start + size))
        start += size
    return [[array[cut] for array in arrays] for cut in bounds]


def split_batch(batch: object, num_replicas: int) -> list[Tree]:
    """Cut a pytree of arrays along the leading axis into one contiguous part per replica.

    The parts are views. A replica beyond the batch's size gets an empty part.

    Raises:
        ValueError: If a leaf is a scalar, or leaves have different numbers of examples.

    Shapes:
        Each leaf: (num_examples, ...). Each part: (share, ...).
    """
    arrays, spec = BatchReader("batch", "split_batch").read(batch)
    parts = cut_leaves(arrays, split_sizes(arrays[0].shape[0], num_replicas))
    return [unflatten(spec, part) for part in parts]


def num_examples(batch: object) -> int:
    """Return how many examples a batch holds: a whole one, or a replica's part.

    The weight of a batch: what a total over it has to be divided by.

    Raises:
        ValueError: If there is no array in it.

    Example:
        >>> import numpy as np
        >>> from aioreplica import PerReplica
        >>> num_examples(
        ...     (PerReplica([np.ones(2), np.ones(1)]), PerReplica([np.ones(2), np.ones(1)]))
        ... )
        3
    """
    for leaf in leaves(batch):
        parts = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        if all(getattr(part, "ndim", 0) for part in parts):
            return sum(part.shape[0] for part in parts)
    raise ValueError(f"A batch holds arrays with one row per example, got {batch!r}.")


def columns_of(batch: object) -> Tree:
    """Return a pytree with a dict of columns in place of every table; columns keep their dtypes.

    Raises:
        ValueError: If two columns of a table have one name.
        TypeError: If a table is lazy.
    """
    if not any(name in sys.modules for name in TABLES):
        return batch
    return map_leaves(_table_to_dict, batch)


def copy_item(item: Tree) -> Tree:
    """Return an item whose arrays, tensors and tables may be written into, as they are copies."""
    return map_leaves(_copy_leaf, item)


def _copy_leaf(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray):
        return leaf.copy(order="K")
    library = _library_of(leaf, WRITABLE)
    if library is None:
        return leaf
    return leaf.clone() if library == "torch" else leaf.copy()


def find_array(leaf: Any, path: str) -> Array | None:
    """Return a column of a table as an array of the column's own dtype; None for other leaves.

    Raises:
        ValueError: If it has missing values, for which NumPy would change the dtype.
    """
    library = _library_of(leaf, COLUMNS)
    if library is None:
        return None
    num_missing, array = _READERS[library](leaf)
    dtype = leaf.type if library == "pyarrow" else leaf.dtype
    kind = f"{library} {type(leaf).__name__} of {dtype}"
    if num_missing:
        raise ValueError(
            f"Leaf {path} is a {kind} with {num_missing} missing values, which NumPy has only for "
            "floats. Fill them in the source, and pass which were missing as a column of its own "
            "if the step needs it."
        )
    if array is None or array.dtype.hasobject:
        raise TypeError(
            f"Leaf {path} is a {kind}, which is not an array of numbers. Drop the column, or "
            "convert it in the source."
        )
    return array


def _table_to_dict(leaf: Any) -> object:
    library = _library_of(leaf, TABLES)
    if library is None:
        if _library_of(leaf, {"polars": ("LazyFrame",)}) is not None:
            raise TypeError("A polars LazyFrame has no data yet. Pass what its collect() returns.")
        return leaf
    names = list(leaf.column_names if library == "pyarrow" else leaf.columns)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"A {library} {type(leaf).__name__} has several columns named {double!r}. Rename "
            "them: a batch is a dict of the columns."
        )
    return {name: leaf[name] for name in names}


def _library_of(leaf: object, kinds: dict[str, tuple[str, ...]]) -> str | None:
    for library, names in kinds.items():
        module = sys.modules.get(library)
        if module is not None and isinstance(leaf, tuple(_classes(module, names))):
            return library
    return None


def _classes(module: object, names: Iterable[str]) -> Iterable[type]:
    return (getattr(module, name) for name in names if hasattr(module, name))


def _read_pandas(column: Any) -> tuple[int, Array | None]:
    own = getattr(column.dtype, "numpy_dtype", None)  # of the nullable Int64, boolean, Float64
    if own is None or own.hasobject:
        categories = getattr(column.dtype, "categories", None)
        kind = column.dtype.kind if categories is None else categories.dtype.kind
        # Of dates NumPy has NaT, which is a number as soon as it is cast; of categories it makes
        # floats. Plain integers cannot be missing, and are not looked through.
        if kind in "mM" or (categories is not None and kind in "iub"):
            num_missing = int(column.isna().sum())
            if num_missing:
                return num_missing, None
        return 0, np.asarray(column)
    num_missing = int(column.isna().sum())
    if num_missing and own.kind != "f":
        return num_missing, None
    return 0, column.to_numpy(dtype=own, na_value=np.nan) if num_missing else column.to_numpy(own)


def _read_polars(column: Any) -> tuple[int, Array | None]:
    if column.null_count() and not column.dtype.is_float():
        return column.null_count(), None
    return 0, column.to_numpy()


def _read_arrow(column: Any) -> tuple[int, Array | None]:
    if column.null_count and str(column.type) not in ("float", "double", "halffloat"):
        return column.null_count, None
    if hasattr(column, "chunks"):
        return 0, column.to_numpy()
    return 0, column.to_numpy(zero_copy_only=False)


_READERS: dict[str, Callable[[object], tuple[int, Array | None]]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": _read_arrow,
}
