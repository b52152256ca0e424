"""Result buffers that are used again once no result in them is referenced."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, final

import numpy as np

from ..values import CAN_COUNT_REFERENCES

POOLED_BYTES = 128 * 1024  # from there on the allocator gives fresh pages
KEPT_CALLS = 8  # how many reductions a buffer may go unused


@final
class BufferPool:
    """Lends the memory of large results.

    A fresh large array costs a page fault every 4 KiB, which for 64 MiB takes as long as summing
    two arrays. A buffer is free if nothing but the pool refers to it: arrays that lie in it do.

    Invariants:
        * A buffer that was not lent for `KEPT_CALLS` calls is let go.
    """

    __slots__ = ("_buffers", "_call", "_lock")

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Any]] = []  # when each was lent last, and the buffer
        self._call = 0
        self._lock = threading.Lock()  # the default strategy's pool serves every loop

    def next_call(self) -> None:
        """Begin a reduction: let go of buffers that have not been of use."""
        with self._lock:
            self._call += 1
            oldest = self._call - KEPT_CALLS
            self._buffers = [entry for entry in self._buffers if entry[0] >= oldest]

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a C-contiguous array with whatever numbers are in it."""
        size = math.prod(shape) * dtype.itemsize
        if size < POOLED_BYTES or not CAN_COUNT_REFERENCES:
            return np.empty(shape, dtype)
        with self._lock:
            return self._buffer(size).view(dtype).reshape(shape)

    def clear(self) -> None:
        """Let go of every buffer."""
        with self._lock:
            self._buffers.clear()

    def _buffer(self, size: int) -> Any:
        for index, entry in enumerate(self._buffers):
            buffer = entry[1]
            # Its references here: the entry, `buffer`, and the argument of getrefcount.
            if buffer.size == size and sys.getrefcount(buffer) == 3:
                self._buffers[index] = (self._call, buffer)
                return buffer
        buffer = np.empty(size, np.uint8)
        self._buffers.append((self._call, buffer))
        return buffer

    def __repr__(self) -> str:
        total = sum(buffer.size for _, buffer in self._buffers)
        return f"<BufferPool | {len(self._buffers)} buffers, {total} bytes>"
