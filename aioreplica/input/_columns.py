"""Tables and columns of pandas, polars and Arrow as arrays; none of them is imported from here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tree import map_leaves

Array = npt.NDArray[Any]

TABLES = {"pandas": ("DataFrame",), "polars": ("DataFrame",), "pyarrow": ("Table", "RecordBatch")}
COLUMNS = {
    "pandas": ("Series", "Index"),
    "polars": ("Series",),
    "pyarrow": ("Array", "ChunkedArray"),
}


def columns_of(batch: Any) -> Any:
    """Return a pytree with a dict of columns in place of every table; columns keep their dtypes.

    Raises:
        ValueError: If two columns of a table have one name.
        TypeError: If a table is lazy.
    """
    if not any(name in sys.modules for name in TABLES):
        return batch
    return map_leaves(_table_to_dict, batch)


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
            f"Leaf {path} is a {kind}, which is no array of numbers. Drop the column, or convert "
            "it in the source."
        )
    return array


def _table_to_dict(leaf: Any) -> Any:
    library = _library_of(leaf, TABLES)
    if library is None:
        if _library_of(leaf, {"polars": ("LazyFrame",)}) is not None:
            raise TypeError("A polars LazyFrame has no data yet. Pass what its collect() returns.")
        return leaf
    names = list(leaf.column_names if library == "pyarrow" else leaf.columns)
    double = [name for i, name in enumerate(names) if name in names[:i]]
    if double:
        raise ValueError(
            f"A {library} {type(leaf).__name__} has several columns named {double[0]!r}. Rename "
            "them: a batch is a dict of the columns."
        )
    return {name: leaf[name] for name in names}


def _library_of(leaf: Any, kinds: dict[str, tuple[str, ...]]) -> str | None:
    for library, names in kinds.items():
        module = sys.modules.get(library)
        if module is not None and isinstance(leaf, tuple(_classes(module, names))):
            return library
    return None


def _classes(module: Any, names: Iterable[str]) -> Iterable[type]:
    return (getattr(module, name) for name in names if hasattr(module, name))


def _read_pandas(column: Any) -> tuple[int, Array | None]:
    own = getattr(column.dtype, "numpy_dtype", None)  # of the nullable Int64, boolean, Float64
    if own is None or own.hasobject:
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


_READERS: dict[str, Callable[[Any], tuple[int, Array | None]]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": _read_arrow,
}
