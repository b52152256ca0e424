"""Arrays and a little text as bytes: rows of the journal, snapshots for other processes.

The bytes are those of a safetensors file: the length of the header as eight little-endian bytes,
the header as JSON, padded to a multiple of 64 so that arrays in a mapped file are aligned, and the
arrays one after the other, largest items first. Whatever is read is distrusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import DTYPES, tensors_header

Array = npt.NDArray[Any]

ALIGNMENT = 64
MAX_HEADER_BYTES = 64 * 1024 * 1024
_NAMES = {name: code for name, code in DTYPES.items() if not name.startswith("complex")}
_NAMES["complex64"] = "C64"
_DTYPES = {label: name for name, label in _NAMES.items()}


@lru_cache(maxsize=256)
def can_store(dtype: np.dtype[Any]) -> bool:
    """Tell whether arrays of a dtype can be stored."""
    return dtype.name in _NAMES and dtype.isnative


def dump_tensors(
    metadata: Mapping[str, str], arrays: Mapping[str, Array]
) -> list[bytes | memoryview]:
    """Return the parts of a file: the header, then C-contiguous arrays in the order they follow.

    Raises:
        TypeError: If a dtype cannot be stored.
        ValueError: If an array has a name that the format keeps for itself.
    """
    if "__metadata__" in arrays:
        raise ValueError("No array can be called '__metadata__': the format keeps that name.")
    for name, array in arrays.items():
        if not can_store(array.dtype):
            raise TypeError(f"{name!r} has dtype {array.dtype}, stored are {', '.join(_NAMES)}.")
    ordered = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    rows: list[tuple[str, Sequence[int], str, int]] = []
    parts: list[bytes | memoryview] = []
    for name in ordered:
        array = np.ascontiguousarray(arrays[name])
        rows.append((name, arrays[name].shape, _NAMES[array.dtype.name], array.nbytes))
        parts.append(array.reshape(-1).view(np.uint8).data)
    return [tensors_header(rows, metadata, ALIGNMENT), *parts]


def load_tensors(data: memoryview) -> tuple[dict[str, str], dict[str, Array], int]:
    """Return metadata, read-only views of the arrays, and where the arrays begin.

    Raises:
        ValueError: If the bytes are not those of `dump_tensors`; says what is wrong.
    """
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size
    if len(data) < 8 or size > MAX_HEADER_BYTES or begin > len(data):
        raise ValueError(f"{len(data)} bytes cannot hold a header of {size}")
    try:
        entries = json.loads(bytes(data[8:begin]))
        metadata = {str(k): str(v) for k, v in entries.pop("__metadata__", {}).items()}
        arrays = {str(name): _view(data, begin, entry) for name, entry in entries.items()}
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"the header cannot be read: {type(error).__name__}: {error}") from None
    return metadata, arrays, begin


def _view(data: memoryview, begin: int, entry: Mapping[str, Any]) -> Array:
    name, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(name)
    numbers = (*shape, start, end)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} are not sizes")
    if math.prod(shape) * dtype.itemsize != end - start or begin + end > len(data):
        raise ValueError(f"an array of shape {shape} and {dtype} is not at {start} to {end}")
    found: Array = np.frombuffer(data[begin + start : begin + end], dtype).reshape(shape)
    if found.flags.writeable:
        found.flags.writeable = False
    return found
