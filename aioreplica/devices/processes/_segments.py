"""Shared memory without names: what one process writes and others map.

A segment is a descriptor (`memfd_create`, or a temporary file that is unlinked at once), so nobody
else can open it, and it is gone with the last process that holds it, however that ends. An `Arena`
writes arrays into extents of its segments; `Mappings` are the segments of an arena as another
process sees them. An extent is written again only when its reader has said that no view of it
lives.

Invariants:
    * An extent is free, or written and held by its readers; never both.
    * A segment has all of its memory when it is made, so a copy into it cannot fail.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SHARED_BYTES = 16 * 1024
"""Buffers of less than this travel in the message: a copy through the pipe costs less."""
SEGMENT_BYTES = 4 * 1024 * 1024
MAX_GROWTH_BYTES = 64 * 1024 * 1024
PAGE = 4096


@final
class NoSharedMemoryError(OSError):
    """There is no shared memory; pickling raises other OSErrors for reasons of its own."""


@final
class Extent(NamedTuple):
    """A piece of a segment, as messages name it."""

    segment_id: int
    offset: int
    num_bytes: int


@final
@dataclass(slots=True, eq=False)
class Segment:
    """Memory of an arena.

    Attributes:
        segment_id: Its number, the same in all processes.
        descriptor: What other processes map; open as long as the segment is in its arena.
        size: In bytes.
        memory: All of it.
        free: What is free, as offset and size, in order and with gaps between.
    """

    segment_id: int
    descriptor: int
    size: int
    memory: Bytes
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if no extent of it is in use."""
        return self.free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Return the offset of so many bytes, the first that are free; None if there are none."""
        for i, (offset, room) in enumerate(self.free):
            if room >= size:
                if room == size:
                    del self.free[i]
                else:
                    self.free[i] = (offset + size, room - size)
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Free bytes that were taken."""
        merged: list[tuple[int, int]] = []
        for begin, room in sorted([*self.free, (offset, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self.free = merged


@final
class Arena:
    """Memory that this process writes for others; used by one thread at a time.

    Attributes:
        segments: By number; one that is given up is missing.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._numbers = count()

    def put(self, data: Any) -> Extent:
        """Copy a contiguous buffer into an extent.

        Raises:
            NoSharedMemoryError: If there is no memory for it.
        """
        source = np.frombuffer(data, np.uint8)
        extent, memory = self.take(source.nbytes)
        np.copyto(memory, source)
        return extent

    def take(self, num_bytes: int) -> tuple[Extent, Bytes]:
        """Return an extent and its memory, to be written now."""
        size = _rounded(num_bytes)
        for segment in self.segments.values():
            offset = segment.take(size)
            if offset is not None:
                break
        else:
            segment, offset = self._grow(size), 0
            segment.free = [(size, segment.size - size)] if segment.size > size else []
        memory = segment.memory[offset : offset + num_bytes]
        return Extent(segment.segment_id, offset, num_bytes), memory

    def free(self, extent: Extent) -> None:
        """Let an extent be written again; of empty segments one is kept."""
        segment = self.segments[extent.segment_id]
        segment.give_back(extent.offset, _rounded(extent.num_bytes))
        empty = [each for each in self.segments.values() if each.is_empty]
        for each in empty[1:]:
            del self.segments[each.segment_id]
            os.close(each.descriptor)

    def close(self) -> None:
        """Give up everything; what other processes have mapped stays with them."""
        for segment in self.segments.values():
            os.close(segment.descriptor)
        self.segments.clear()

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its memory."""
        return sum(segment.size for segment in self.segments.values())

    def _grow(self, size: int) -> Segment:
        size = max(size, SEGMENT_BYTES, min(self.num_bytes, MAX_GROWTH_BYTES))
        try:
            descriptor, memory = _new_memory(size)
        except OSError as error:
            raise NoSharedMemoryError(*error.args) from error
        segment = Segment(next(self._numbers), descriptor, size, memory)
        self.segments[segment.segment_id] = segment
        return segment


@final
class Mappings:
    """The segments of an arena of another process, and the extents that are read here.

    Args:
        is_readonly: Whether they are mapped so that nothing here can write to them.
    """

    def __init__(self, *, is_readonly: bool) -> None:
        self._is_readonly = is_readonly
        self._segments: dict[int, Bytes] = {}
        self._views: dict[Extent, weakref.ref[Bytes]] = {}
        self._released: deque[Extent] = deque()  # whatever thread drops the last view appends

    def add(self, segment_id: int, descriptor: int, size: int) -> None:
        """Map a segment, and close its descriptor."""
        try:
            self._segments[segment_id] = map_segment(
                descriptor, size, is_readonly=self._is_readonly
            )
        finally:
            os.close(descriptor)

    def drop(self, segment_id: int) -> None:
        """Unmap a segment once nothing of it is read any more."""
        self._segments.pop(segment_id, None)

    def view(self, extent: Extent) -> Bytes:
        """Return an extent as an array; it is released when the last array made of it is gone."""
        memory = self._segments[extent.segment_id]
        # A memoryview ends the chain of bases, so that all arrays made of this one keep it alive.
        begin, end = extent.offset, extent.offset + extent.num_bytes
        made = np.frombuffer(memory.data[begin:end], np.uint8)
        released, views = self._released, self._views

        def release(reference: weakref.ref[Bytes]) -> None:
            if views.get(extent) is reference:
                del views[extent]
                released.append(extent)

        views[extent] = weakref.ref(made, release)
        return made

    def pin(self) -> None:
        """Never release what is read now: after a fork the child goes on reading it."""
        self._views.clear()

    def take_released(self) -> list[Extent]:
        """Return the extents that were released since the last call."""
        released = self._released
        return [released.popleft() for _ in range(len(released))]

    @property
    def num_views(self) -> int:
        """Number of extents that are being read."""
        return len(self._views)


def map_segment(descriptor: int, size: int, *, is_readonly: bool) -> Bytes:
    """Map a segment; it is unmapped when the array, and all made of it, are gone."""
    protection = mmap.PROT_READ if is_readonly else mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=protection), np.uint8)


def _new_memory(size: int) -> tuple[int, Bytes]:
    descriptor = _new_descriptor()
    try:
        os.posix_fallocate(descriptor, 0, size)
        return descriptor, map_segment(descriptor, size, is_readonly=False)
    except BaseException:
        os.close(descriptor)
        raise


def _new_descriptor() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("aioreplica", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # mode 0600, without a name from here on
        return os.dup(file.fileno())


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
