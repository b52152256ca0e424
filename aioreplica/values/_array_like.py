"""Operators that make a variable behave like its value in expressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..tree import Array, DType


def is_floating(dtype: DType) -> bool:
    """Tell whether a dtype is floating-point: bfloat16 too, for which NumPy has no kind."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


class ArrayLike(NDArrayOperatorsMixin, ABC):
    """Something with a `value` that takes part in NumPy expressions with it.

    Comparisons are elementwise, as of arrays: `v == w` is an array of booleans; only `v == None`
    is False. The hash is that of the object, so that sets and dicts tell such objects apart by
    identity. `v in a_list` is of little use: Python compares with `==` and asks the result for its
    truth value, which an array of several elements does not have. Use
    `any(v is w for w in a_list)`, or a set.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def value(self) -> Any:
        """The array."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for errors."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> Any:
        for part in kwargs.get("out", ()):
            if isinstance(part, ArrayLike):
                raise TypeError(
                    f"Variable {part.name!r} cannot be changed in place. Write it with "
                    "`await variable.assign_add(x)`, `assign_sub` or `assign`."
                )
        return getattr(ufunc, method)(*map(_value_of, inputs), **kwargs)

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a mixin sets None

    def __eq__(self, other: object) -> Any:
        return NotImplemented if other is None else self.value == _value_of(other)

    def __ne__(self, other: object) -> Any:
        return NotImplemented if other is None else self.value != _value_of(other)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __format__(self, spec: str) -> str:
        if not spec and np.ndim(self.value):
            return str(self)
        return format(self.value, spec)

    def __getitem__(self, index: object) -> Any:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    # Python would index row by row: each of the value of its moment, and a scalar has none.

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __reversed__(self) -> Any:
        return reversed(self.value)

    def __contains__(self, item: object) -> bool:
        return _value_of(item) in self.value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype=dtype, copy=copy)


def _value_of(part: object) -> object:
    return part.value if isinstance(part, ArrayLike) else part
