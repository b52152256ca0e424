"""Reading one entry of a step, or a part of a tensor, without the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..tree import Array
from ..values import as_slice, parts_of
from ._format import (
    CHUNK_BYTES,
    DamagedError,
    EntryRecord,
    Manifest,
    dtype_of,
)
from ._lane import Stop
from ._reading import look_at, no_step_error
from ._restoring import aggregated, value_of
from ._storage import Storage
from ._tensors import StoredComponent, require_memory

NUM_LISTED = 8


def read_entry(storage: Storage, step: int, key: str, index: object, stop: Stop) -> object:
    """Return an entry of a step, or a part of it; blocks.

    Args:
        storage: Where from.
        step: Its number.
        key: Of the entry.
        index: The part: what NumPy takes as basic index; None for all.
        stop: Ends it early.

    Raises:
        CheckpointError: If there is no such step or entry, or it is damaged or cannot be read.
        IndexError: If an index is out of bounds.
        TypeError: If `index` is none, or the entry is plain data.
    """
    found = look_at(storage, step)
    if not found.is_saved:
        raise no_step_error(storage, step)
    if found.manifest is None:
        raise CheckpointError(f"Step {step} in {storage} is damaged: {found.damage}.")
    entry = found.manifest.entries.get(key)
    if entry is None:
        raise _no_entry(storage, found.manifest, key)
    if entry.kind == "value" and index is not None:
        raise TypeError(f"{key!r} is plain data, which has no parts. Leave `slice` out.")
    try:
        return _read(storage, found.manifest, key, entry, index, stop)
    except DamagedError as error:
        raise CheckpointError(f"Step {step} in {storage} is damaged: {error}.") from error


def _no_entry(storage: Storage, manifest: Manifest, key: str) -> CheckpointError:
    known = [*manifest.entries]
    more = f" and {len(known) - NUM_LISTED} more" if len(known) > NUM_LISTED else ""
    listed = ", ".join(map(repr, known[:NUM_LISTED])) or "nothing"
    return CheckpointError(
        f"Step {manifest.step} in {storage} has no entry {key!r}. It has {listed}{more}."
    )


def _read(
    storage: Storage, manifest: Manifest, key: str, entry: EntryRecord, index: object, stop: Stop
) -> object:
    ranges, kept = parts_of(entry.shape, index)
    arrays = []
    for number in range(entry.num_components):
        shape, name = entry.form_of(number)
        if entry.kind == "value":
            ranges, kept = parts_of(shape, None)
        dtype = dtype_of(name).newbyteorder("<")
        size = math.prod(map(len, ranges)) * dtype.itemsize
        require_memory(storage, manifest, size * entry.num_components)
        array: Array = np.empty([*map(len, ranges)], dtype)
        if array.size:
            with ExitStack() as stack:
                stored = StoredComponent(storage, manifest, key, number, stop, stack)
                _fill(stored, array, 0, shape, ranges)
        arrays.append(array.reshape(kept).astype(dtype.newbyteorder("="), copy=False))
    if entry.kind == "value":
        return value_of(key, entry, arrays)
    return np.array(aggregated(entry, arrays)) if len(arrays) > 1 else arrays[0]


def _fill(
    tensor: StoredComponent, out: Array, offset: int, shape: Sequence[int], ranges: Sequence[range]
) -> None:
    """Fill an array with what ranges name of a tensor of a shape, which begins at an offset."""
    if not shape:
        tensor.read(offset, _bytes_of(out))
        return
    rows, row_bytes = ranges[0], math.prod(shape[1:]) * out.itemsize
    has_all = all(r == range(n) for r, n in zip(ranges[1:], shape[1:], strict=True))
    if has_all and (rows.step == 1 or len(rows) == 1):
        tensor.read(offset + rows[0] * row_bytes, _bytes_of(out))
        return
    if row_bytes > CHUNK_BYTES:
        for each, row in zip(out, rows, strict=True):
            _fill(tensor, each, offset + row * row_bytes, shape[1:], ranges[1:])
        return
    count = max(1, CHUNK_BYTES // (row_bytes * abs(rows.step)))
    inner = tuple(map(as_slice, ranges[1:]))
    for start in range(0, len(rows), count):
        group = rows[start : start + count]
        first, last = min(group[0], group[-1]), max(group[0], group[-1])
        read: Array = np.empty((last - first + 1, *shape[1:]), out.dtype)
        tensor.read(offset + first * row_bytes, _bytes_of(read))
        own = as_slice(range(group.start - first, group.stop - first, group.step))
        out[start : start + count] = read[own, *inner]


def _bytes_of(array: Array) -> memoryview:
    data: Any = array.reshape(-1).view(np.uint8)
    return memoryview(data)
