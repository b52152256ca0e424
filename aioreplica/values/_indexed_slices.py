"""IndexedSlices: some rows of an array and where they belong, the form of a sparse gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, final

import numpy as np

from ..tree import Array, DType

_HALF = ("float16", "bfloat16")
_BLOCK = 16 * 1024  # elements whose flat positions are held at a time
_WIDE = 512  # from this width on a row is added by one call of its own


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IndexedSlices:
    """Rows of an array whose other rows are 0: what the gradient of a lookup is.

    It is not a pytree node but a leaf: reductions join the rows of all replicas, which need not
    have the same number of them.

    Attributes:
        values: The rows. Not copied: do not change them afterwards.
        indices: Which row of the dense array each one is; an index may come more than once,
            and then its rows add up.
        dense_shape: Shape of the whole array.

    Raises:
        TypeError: If `values` are not numbers, `indices` not integers, or `dense_shape` is not a
            tuple of ints.
        ValueError: If an index is out of range (negative ones are), or shapes do not fit.

    Shapes:
        values: (num_rows, ...) with the rest as in `dense_shape`. indices: (num_rows,).

    Example:
        >>> IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [2, 0], (3, 2)).to_dense()
        array([[3., 4.],
               [0., 0.],
               [1., 2.]])

    Source:
        tf.IndexedSlices.
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = _checked_shape(self.dense_shape)
        values = _checked_values(self.values, shape)
        indices = _checked_indices(self.indices, shape, len(values))
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "dense_shape", shape)

    @property
    def dtype(self) -> DType:
        """Dtype of the rows."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Size of the rows and their indices in bytes."""
        return self.values.nbytes + self.indices.nbytes

    def combined(self) -> IndexedSlices:
        """Add up rows with the same index; indices are ascending and unique then.

        Determinism:
            Rows of one index are added in their order here, left to right. Half precision is
            accumulated in float32 and rounded once.

        Example:
            >>> twice = IndexedSlices([1.0, 2.0, 4.0], [3, 0, 3], (5,)).combined()
            >>> twice.indices, twice.values
            (array([0, 3]), array([2., 5.]))
        """
        if bool(np.all(self.indices[1:] > self.indices[:-1])):
            return self
        values = self.values
        if values.dtype.name in _HALF:
            values = values.astype(np.float32)
        unique, rows = _sum_duplicates(self.indices, values)
        return IndexedSlices(rows.astype(self.dtype, copy=False), unique, self.dense_shape)

    def to_dense(self) -> Array:
        """Return the whole array, new, with rows of the same index added up as in `combined`."""
        once = self.combined()
        dense = np.zeros(self.dense_shape, self.dtype)
        dense[once.indices] = once.values
        return dense

    __array_ufunc__ = None  # so that `np.float32(2) * slices` asks `__rmul__`

    def __mul__(self, factor: object) -> IndexedSlices:
        """Multiply every row by a number.

        Example:
            >>> (IndexedSlices([1.0, 2.0], [3, 0], (5,)) * 2).values
            array([2., 4.])
        """
        return self._scaled(np.multiply, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> IndexedSlices:
        """Divide every row by a number."""
        return self._scaled(np.divide, divisor)

    def __neg__(self) -> IndexedSlices:
        """Turn the sign of every row."""
        return IndexedSlices(-self.values, self.indices, self.dense_shape)

    def _scaled(self, ufunc: np.ufunc, number: Any) -> IndexedSlices:
        if np.ndim(number) or not isinstance(number, (int, float, complex, np.generic, np.ndarray)):
            return NotImplemented  # type: ignore[no-any-return]  # Python asks the other side
        return IndexedSlices(ufunc(self.values, number), self.indices, self.dense_shape)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return IndexedSlices, (self.values, self.indices, self.dense_shape)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            f"An IndexedSlices of dense shape {self.dense_shape} is not an array. Use "
            "`.to_dense()`, or `.values` and `.indices`."
        )

    def __repr__(self) -> str:
        return f"<IndexedSlices {len(self.indices)} rows | {self.dtype} {self.dense_shape}>"


def scatter(old: Array, slices: IndexedSlices, ufunc: np.ufunc | None) -> Array:
    """Return a new array: `old` with rows combined into it.

    Args:
        old: The array.
        slices: The rows. Those of one index are added up first if they are added or subtracted,
            else combined one after the other; of those that replace a row the last one counts.
        ufunc: How a row of `old` and a new one are combined; None replaces it.

    Raises:
        ValueError: If the dense shape differs from that of `old`, or the dtype would lose its kind
            (floats into integers, or integers divided).

    Example:
        >>> scatter(np.ones(3), IndexedSlices([1.0, 2.0], [2, 2], (3,)), np.subtract)
        array([ 1.,  1., -2.])
    """
    if slices.dense_shape != old.shape:
        raise ValueError(
            f"IndexedSlices of dense shape {slices.dense_shape} do not fit an array of shape "
            f"{old.shape}."
        )
    if not np.can_cast(slices.dtype, old.dtype, "same_kind"):
        raise ValueError(
            f"IndexedSlices of dtype {slices.dtype} do not fit an array of dtype {old.dtype}. Cast "
            f"their values with .astype({str(old.dtype)!r}) first."
        )
    if ufunc is np.divide and old.dtype.kind in "iu":
        raise ValueError(f"Rows of dtype {old.dtype} cannot be divided. Use floats.")
    new = np.array(old)
    if ufunc is np.add or ufunc is np.subtract:
        once = slices.combined()
        rows = once.values.astype(old.dtype, copy=False)
        new[once.indices] = ufunc(old[once.indices], rows)
        return new
    rows = slices.values.astype(old.dtype, copy=False)
    if ufunc is None:
        new[slices.indices] = rows
    else:
        ufunc.at(new, slices.indices, rows)
    return new


def _sum_duplicates(indices: Array, values: Array) -> tuple[Array, Array]:
    """Return ascending unique indices and the sum of the rows of each, left to right."""
    order = np.argsort(indices, kind="stable")
    ascending = indices[order]
    is_first = np.ones(len(indices), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    rows = np.take(values, order[is_first], axis=0)  # not 0 + first: that would turn -0.0 into 0.0
    if not is_first.all():
        positions = np.empty_like(indices)
        positions[order] = np.cumsum(is_first) - 1
        rest = np.ones(len(indices), bool)
        rest[order[is_first]] = False
        _add_rows(rows, positions[rest], values[rest])
    return ascending[is_first], rows


def _add_rows(total: Array, positions: Array, rows: Array) -> None:
    """Add each row to `total` at its position, one after the other."""
    width = math.prod(total.shape[1:])
    if width >= _WIDE:
        for position, row in zip(positions.tolist(), rows, strict=True):
            total[position] += row
        return
    flat, columns = total.reshape(-1), np.arange(width)
    step = max(1, _BLOCK // max(1, width))
    for start in range(0, len(rows), step):  # add.at is fast for flat positions only
        where = positions[start : start + step, None] * width + columns
        np.add.at(flat, where.reshape(-1), rows[start : start + step].reshape(-1))


def _checked_shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(
        isinstance(size, (int, np.integer)) and not isinstance(size, bool) for size in shape
    ):
        raise TypeError(f"dense_shape must be a tuple of ints, got {shape!r}.")
    if not shape or min(shape) < 0:
        raise ValueError(
            f"dense_shape needs at least one axis and no negative size, got {shape!r}."
        )
    return tuple(int(size) for size in shape)


def require_unmasked(value: object, where: str) -> None:
    """Check that a value has no mask, which an array of its numbers would not have.

    Raises:
        TypeError: If it is a masked array of NumPy.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where} would drop the mask of {value!r}. Pass value.filled(number).")


def require_no_mask(value: object, where: str) -> None:
    """Check that none of a value's elements is masked.

    Raises:
        TypeError: If one is.
    """
    if np.ma.is_masked(value):
        require_unmasked(value, where)


def _checked_values(values: object, shape: tuple[int, ...]) -> Array:
    if type(values) is not np.ndarray:
        require_no_mask(values, "IndexedSlices")
    array = np.asarray(values)
    if array.dtype.kind not in "fiuc" and array.dtype.name != "bfloat16":
        raise TypeError(
            f"IndexedSlices needs values that can be added, got dtype {array.dtype}. Use floats, "
            "integers or complex numbers."
        )
    if array.ndim != len(shape) or array.shape[1:] != shape[1:]:
        raise ValueError(
            f"values have shape {array.shape}, but dense_shape is {shape}. They need shape "
            f"{('num_rows', *shape[1:])}.".replace("'num_rows'", "num_rows")
        )
    return array


def _checked_indices(indices: object, shape: tuple[int, ...], num_rows: int) -> Array:
    array = np.asarray(indices)
    if array.size == 0 and isinstance(indices, (list, tuple)):
        array = array.astype(np.intp)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got dtype {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"indices must have one axis, got shape {array.shape}.")
    if len(array) != num_rows:
        raise ValueError(f"Need one index per row, got {len(array)} for {num_rows} rows.")
    if num_rows:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(
                f"Index {wrong} at position {int(np.argmax(array == wrong))} is out of range: "
                f"dense_shape {shape} has rows 0 to {shape[0] - 1}."
                if shape[0]
                else f"Index {wrong} is out of range: dense_shape {shape} has no rows."
            )
    own = array.astype(np.intp)  # a copy, so that what was checked stays true
    own.flags.writeable = False
    return own
