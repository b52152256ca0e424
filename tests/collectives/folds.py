"""What reductions are compared with: a plain fold from left to right, and trees of all kinds."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from aioreplica.typing import ReduceOp
from aioreplica.values import IndexedSlices

DTYPES = ["f2", "f4", "f8", ">f4", "i1", "i2", "i4", "i8", "u1", "u8", "?", "c8", "c16"]
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def fold(op: ReduceOp, arrays: Sequence[Any]) -> np.ndarray:
    """Combine arrays one after the other; the dtypes are those that DESIGN and NumPy give."""
    dtype = wide = np.asarray(arrays[0]).dtype
    if dtype.kind == "b" and op is ReduceOp.SUM:
        dtype = wide = np.dtype("i8")
    if dtype.kind in "iub" and op is ReduceOp.MEAN:
        dtype = wide = np.dtype("f8")
    if dtype.name in {"float16", "bfloat16"}:
        wide = np.dtype("f4")
    total = np.asarray(arrays[0]).astype(wide)
    for array in arrays[1:]:
        total = UFUNCS[op](total, np.asarray(array).astype(wide))
    if op is ReduceOp.MEAN:
        total = np.asarray(total / wide.type(len(arrays)))
    return np.asarray(total).astype(dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers whose sum depends on the order of adding, where the dtype has such."""
    kind = np.dtype(dtype).kind
    if kind in "fc":
        scale = 10.0 ** rng.integers(-3, 4, shape)
        return np.asarray(rng.normal(size=shape) * scale).astype(dtype)
    return np.asarray(rng.integers(0, 2 if kind == "b" else 20, shape)).astype(dtype)


def mixed_row(seed: int, *, with_slices: bool = True) -> list[Any]:
    """One replica's leaves: of every kind, shape and size, in an order that mixes them."""
    rng = np.random.default_rng(seed)
    row: list[Any] = [3 * seed, float(rng.normal()), complex(seed, 1), seed % 2 == 0]
    for index in range(30):
        dtype = ["f4", "f8", "i4", "f2", "f4"][index % 5]
        shape = [(), (0,), (7,), (3, 5), (1, 2, 3), (600,)][index % 6]
        row.append(numbers(rng, shape, dtype))
    row.append(np.float32(rng.normal()))
    if with_slices:
        indices = rng.integers(0, 6, 4)
        row.insert(5, IndexedSlices(numbers(rng, (4, 2), "f4"), indices, (6, 2)))
    row.append(numbers(rng, (100, 100), "f8"))
    row.append(np.asfortranarray(numbers(rng, (40, 30), "f8")))
    row.append(numbers(rng, (50, 30), "f8")[::2, ::-1])
    return row


def bits(leaf: Any) -> Any:
    """Everything about a leaf that must be reproducible."""
    if type(leaf) is IndexedSlices:
        return bits(leaf.values), bits(leaf.indices), leaf.dense_shape
    if isinstance(leaf, (np.ndarray, np.generic)):
        digest = hashlib.sha256(leaf.tobytes()).hexdigest()
        return type(leaf).__name__, leaf.dtype.str, leaf.shape, digest
    return type(leaf).__name__, repr(leaf)


def all_bits(leaves: Sequence[Any]) -> list[Any]:
    return [bits(leaf) for leaf in leaves]
