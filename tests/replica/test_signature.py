"""What makes two values equal in one process makes their texts equal on several workers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.replica._signature import equal_values, value_text


def torch(make: Callable[[Any], Any]) -> Any:
    return make(pytest.importorskip("torch"))


def jax(make: Callable[[Any], Any]) -> Any:
    return make(pytest.importorskip("jax").numpy)


def long(value: Any, where: int = 1000) -> Any:
    """Return an array that NumPy, torch and jax would shorten in its repr."""
    array = np.zeros(3000, np.float32)
    array[where] = value
    return array


def masked(*mask: bool) -> Any:
    return np.ma.masked_array([1.0, np.nan], list(mask))


def rows(*indices: int) -> ar.IndexedSlices:
    return ar.IndexedSlices(np.ones((len(indices), 2)), list(indices), (4, 2))


def negative_nan() -> Any:
    return np.frombuffer(np.uint64(0xFFF8_0000_0000_0001).tobytes(), np.float64)


EQUAL: dict[str, Callable[[], tuple[Any, Any]]] = {
    "nan": lambda: (float("nan"), -float("nan")),
    "zero": lambda: (0.0, -0.0),
    "array": lambda: (long(1), long(1)),
    "arrays of nan": lambda: (np.array([np.nan]), negative_nan()),
    "complex": lambda: (np.array([complex(0, np.nan)]), np.array([complex(np.nan, 1)])),
    "no times": lambda: (np.array(["NaT"], "M8[s]"), np.array(["NaT"], "M8[s]")),
    "strings": lambda: (np.array(["cat", "dog"]), np.array(["cat", "dog"])),
    "a string": lambda: (np.str_("cat"), np.str_("cat")),
    "objects": lambda: (np.array(["a", 1], object), np.array(["ab"[:1], 1], object)),
    "sets": lambda: ({8, 16, "a"}, {"a", 16, 8}),
    "masked": lambda: (masked(False, True), masked(False, True)),
    "rows": lambda: (rows(0, 2), rows(0, 2)),
    "tree": lambda: ({"a": (1, np.ones(2))}, {"a": (1, np.ones(2))}),
    "torch": lambda: (torch(lambda t: t.tensor(long(1))), torch(lambda t: t.tensor(long(1)))),
    "torch, half": lambda: (
        torch(lambda t: t.tensor([1.0, float("nan")], dtype=t.bfloat16)),
        torch(lambda t: t.tensor([1.0, -float("nan")], dtype=t.bfloat16)),
    ),
    "torch, with a gradient": lambda: (
        torch(lambda t: t.ones(2, requires_grad=True)),
        torch(lambda t: t.ones(2, requires_grad=True)),
    ),
    "jax": lambda: (jax(lambda j: j.asarray(long(1))), jax(lambda j: j.asarray(long(1)))),
    "jax, half": lambda: (
        jax(lambda j: j.asarray([1.0, np.nan], "bfloat16")),
        jax(lambda j: j.asarray([1.0, np.nan], "bfloat16")),
    ),
}
DIFFERENT: dict[str, Callable[[], tuple[Any, Any]]] = {
    "numbers": lambda: (1, 1.0),
    "structures": lambda: ([1], (1,)),
    "array": lambda: (long(1), long(2)),
    "place": lambda: (long(1), long(1, 1001)),
    "dtypes": lambda: (np.array(1, "i4"), np.array(1, "i8")),
    "shapes": lambda: (np.zeros((2, 3)), np.zeros((3, 2))),
    "strings": lambda: (np.array(["cat", "dog"]), np.array(["cat", "dot"])),
    "sets": lambda: ({1, 2}, {1, 3}),
    "masks": lambda: (masked(False, True), masked(True, True)),
    "rows": lambda: (rows(0, 2), rows(0, 1)),
    "torch": lambda: (torch(lambda t: t.tensor(long(1))), torch(lambda t: t.tensor(long(2)))),
    "torch, the fifth decimal": lambda: (
        torch(lambda t: t.tensor([0.12341])),
        torch(lambda t: t.tensor([0.12342])),
    ),
    "torch, dtypes": lambda: (
        torch(lambda t: t.ones(1)),
        torch(lambda t: t.ones(1, dtype=t.bfloat16)),
    ),
    "jax": lambda: (jax(lambda j: j.asarray(long(1))), jax(lambda j: j.asarray(long(2)))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_are_equal_in_one_process_and_across_several(name: str) -> None:
    first, other = EQUAL[name]()

    assert equal_values(first, other)
    assert value_text(first) == value_text(other)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_differ_in_one_process_and_across_several(name: str) -> None:
    first, other = DIFFERENT[name]()

    assert not equal_values(first, other)
    assert value_text(first) != value_text(other)
