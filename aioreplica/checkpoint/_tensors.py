"""Tensors of a step, each checked: whole or in part, wherever their bytes are stored.

The tensors of one component may be in files of several workers. Who reads sees the component only.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np

from ..errors import CheckpointError
from ..tree import Array
from ._format import (
    CHUNK_BYTES,
    DamagedError,
    EntryRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_of,
    item_bytes,
)
from ._lane import NUM_THREADS, Stop, run_all
from ._retry import new_stop
from ._storage import BLOCK_BYTES, Source, Storage, opened
from ._writing import folder_of, reason


@final
class Piece(NamedTuple):
    """A stored tensor, or a part of it, and what it fills.

    Attributes:
        label: Names it in errors.
        record: Says where it is.
        begin: The first element of it that is read.
        out: What is filled, flat.
    """

    label: str
    record: TensorRecord
    begin: int
    out: Array


async def read_tensors(
    storage: Storage,
    manifest: Manifest,
    keys: Collection[str],
    ranges: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> dict[str, list[Array]]:
    """Read the tensors of some entries, at the same time, and check each.

    Args:
        storage: Where from.
        manifest: Says where they are.
        keys: Which entries.
        ranges: The first element to read and the one after the last, by key; such a part is flat,
            and what was read of the tensor is checked.

    Raises:
        DamagedError: If one is not what was written.
        CheckpointError: If one cannot be read, or they are more than this machine has memory.

    Cancellation:
        Waits until the threads have stopped.
    """
    sizes = (
        item_bytes(entry.form_of(index)[1]) * (end - begin)
        for key in keys
        for entry in [manifest.entries[key]]
        for index in range(entry.num_components)
        for begin, end in [ranges.get(key) or (0, math.prod(entry.form_of(index)[0]))]
    )
    require_memory(storage, manifest, sum(sizes))
    found: dict[str, list[Array]] = {}
    wanted: dict[int, list[Piece]] = {}
    for key in keys:
        entry = manifest.entries[key]
        found[key] = [
            _planned(entry, key, index, ranges.get(key), wanted)
            for index in range(entry.num_components)
        ]
    jobs = []
    for number, pieces in sorted(wanted.items()):
        count = math.ceil(NUM_THREADS / len(wanted))
        size = math.ceil(len(pieces) / count)
        jobs += [(number, pieces[start : start + size]) for start in range(0, len(pieces), size)]
    stop = new_stop(storage)
    await run_all([partial(_read_some, storage, manifest, *job, stop) for job in jobs], stop)
    for arrays in found.values():
        for index, array in enumerate(arrays):
            if not np.little_endian:
                arrays[index] = array.astype(array.dtype.newbyteorder("="))
            arrays[index].flags.writeable = False
    return found


def _planned(
    entry: EntryRecord,
    key: str,
    index: int,
    wanted: tuple[int, int] | None,
    pieces: dict[int, list[Piece]],
) -> Array:
    """Return memory for a component, or elements of it; add what fills it to the pieces by file."""
    shape, name = entry.form_of(index)
    dtype = dtype_of(name).newbyteorder("<")
    first, last = wanted or (0, math.prod(shape))
    array: Array = np.empty(shape if wanted is None else last - first, dtype)
    flat = array.reshape(-1)
    for number, begin, end in entry.pieces_of(index):
        low, high = max(begin, first), min(end, last)
        if low < high or begin == end:
            record = entry.tensors[number]
            piece = Piece(f"{key}#{number}", record, low - begin, flat[low - first : high - first])
            pieces.setdefault(record.file, []).append(piece)
    return array


def require_memory(storage: Storage, manifest: Manifest, num_bytes: int) -> None:
    """Check that so many bytes can be read at all: files with holes may claim any number.

    Raises:
        CheckpointError: If this machine has less memory.
    """
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    if num_bytes > limit > 0:
        raise CheckpointError(
            f"Step {manifest.step} in {storage} has {num_bytes:,} bytes of tensors to be read, but "
            f"this machine has {limit:,} bytes of memory. Read parts of them (`manager.read`)."
        )


def _read_some(
    storage: Storage, manifest: Manifest, number: int, pieces: Sequence[Piece], stop: Stop
) -> None:
    file = manifest.files[number]
    with opened_data(storage, manifest.step, file) as source:
        check_header(source, file)
        for label, record, begin, out in pieces:
            if out.nbytes == record.bytes:
                _read_whole(source, file, record, label, out, stop)
            else:
                tensor = CheckedTensor(source, file, record, label, stop)
                tensor.read(begin * out.itemsize, _bytes_of(out))


@contextmanager
def reading_file(storage: Storage, step: int, name: str) -> Iterator[None]:
    """Say which file could not be read, and what to do; if it is missing, that is damage."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"{name} of step {step} in {storage} cannot be read: {reason(error)}. The step may be "
            "whole, so it is not passed over. Try again; if it stays like this, name another step "
            "to restore, or remove the folder of this one."
        ) from error


@contextmanager
def opened_data(storage: Storage, step: int, file: FileRecord) -> Iterator[Source]:
    """Open a file of tensors for a block."""
    path = f"{folder_of(step)}/{file.name}"
    with reading_file(storage, step, file.name), opened(storage, path) as source:
        if source.size != file.bytes:
            raise DamagedError(f"{file.name} has {source.size} bytes, not {file.bytes}")
        yield source


def check_header(source: Source, file: FileRecord) -> None:
    """Check what comes before the tensors of a file; blocks.

    Raises:
        DamagedError: If it is not what was written.
    """
    header = bytearray(file.header_bytes)
    source.read_into(0, memoryview(header))
    if zlib.crc32(header) != file.header_crc32:
        raise DamagedError(f"the header of {file.name} fails its checksum")


def _read_whole(
    source: Source, file: FileRecord, record: TensorRecord, label: str, array: Array, stop: Stop
) -> None:
    """Fill an array with a tensor, and check it; blocks.

    Raises:
        DamagedError: If it is not what was written.
    """
    buffer = _bytes_of(array)
    crc = 0
    for start in range(0, record.bytes, BLOCK_BYTES):
        stop.check()
        part = buffer[start : start + BLOCK_BYTES]
        if source.read_into(record.offset + start, part) != len(part):
            raise DamagedError(f"{file.name} ends too early")
        crc = zlib.crc32(part, crc)
    if crc != record.crc32:
        raise DamagedError(f"{label!r} in {file.name} fails its checksum")


def check_tensor(
    source: Source, file: FileRecord, record: TensorRecord, key: str, stop: Stop
) -> None:
    """Read a tensor and check it, without memory for all of it; blocks.

    Raises:
        DamagedError: If it is not what was written.
    """
    if crc_of(source, record.offset, record.bytes, stop) != record.crc32:
        raise DamagedError(f"{key!r} in {file.name} fails its checksum")


@final
class CheckedTensor:
    """A stored tensor, whose bytes are checked before they are given."""

    def __init__(
        self, source: Source, file: FileRecord, record: TensorRecord, key: str, stop: Stop
    ) -> None:
        self._source = source
        self._file = file
        self._record = record
        self._key = key
        self._stop = stop
        self._chunk = bytearray()  # the one that was read last
        self._number = -1
        self._is_checked = False
        if (
            record.bytes > CHUNK_BYTES and not record.marks
        ):  # of version 1: it is checked as a whole
            check_tensor(source, file, record, key, stop)
            self._is_checked = True

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte of the tensor on."""
        done = 0
        while done < len(buffer):
            number, within = divmod(start + done, CHUNK_BYTES)
            part = self._read_chunk(number)[within : within + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _read_chunk(self, number: int) -> memoryview:
        if number != self._number:
            self._stop.check()
            record, first = self._record, number * CHUNK_BYTES
            chunk = bytearray(min(CHUNK_BYTES, record.bytes - first))
            if self._source.read_into(record.offset + first, memoryview(chunk)) != len(chunk):
                raise DamagedError(f"{self._file.name} ends too early")
            sums = (0, *record.marks, record.crc32)  # of what is before each chunk
            if not self._is_checked and zlib.crc32(chunk, sums[number]) != sums[number + 1]:
                raise DamagedError(
                    f"bytes {first} to {first + len(chunk)} of {self._key!r} in {self._file.name} "
                    "fail their checksum"
                )
            self._chunk, self._number = chunk, number
        return memoryview(self._chunk)


def crc_of(source: Source, offset: int, size: int, stop: Stop) -> int:
    buffer, crc = bytearray(BLOCK_BYTES), 0
    for start in range(0, size, BLOCK_BYTES):
        stop.check()
        part = memoryview(buffer)[: min(BLOCK_BYTES, size - start)]
        count = source.read_into(offset + start, part)
        crc = zlib.crc32(part[:count], crc)
    return crc


@final
class StoredComponent:
    """A component of an entry, of which any bytes are read; its files are opened when needed.

    Args:
        storage: Where it is.
        manifest: Of its step.
        key: Of the entry.
        index: The component.
        stop: Ends reading early.
        stack: Closes the files.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        key: str,
        index: int,
        stop: Stop,
        stack: ExitStack,
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        self._key = key
        self._entry = entry = manifest.entries[key]
        self._stop = stop
        self._stack = stack
        size = item_bytes(entry.form_of(index)[1])
        self._pieces = [(n, begin * size, end * size) for n, begin, end in entry.pieces_of(index)]
        self._opened: dict[int, CheckedTensor] = {}

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte of the component on.

        Raises:
            DamagedError: If something is not what was written.
            CheckpointError: If it cannot be read.
        """
        stop = start + len(buffer)
        for number, begin, end in self._pieces:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                self._tensor(number).read(low - begin, buffer[low - start : high - start])

    def _tensor(self, number: int) -> CheckedTensor:
        if number not in self._opened:
            record = self._entry.tensors[number]
            file = self._manifest.files[record.file]
            step = self._manifest.step
            source = self._stack.enter_context(opened_data(self._storage, step, file))
            check_header(source, file)
            self._opened[number] = CheckedTensor(
                source, file, record, f"{self._key}#{number}", self._stop
            )
        return self._opened[number]


def _bytes_of(array: Array) -> memoryview:
    data: Any = array.reshape(-1).view(np.uint8)
    return memoryview(data)
