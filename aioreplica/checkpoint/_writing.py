"""Writing a cut: files of tensors at the same time, then the manifest, whose name commits all.

The order is the whole protocol. Every file is durable before the manifest takes its name, and a
step is saved if and only if its folder has a manifest, so whatever interrupts a save leaves the
state before it or the state after it.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar, final

import numpy as np

from ..errors import CheckpointError, CheckpointNotCommittedError, CheckpointUncertainError
from ..tree import Array
from ._claims import Claim, is_gone, pin_name, read_listing
from ._format import (
    CHUNK_BYTES,
    DATA_FILE,
    FORMAT,
    MANIFEST,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    STORED_AS,
    VERSION,
    WHOLE_VERSION,
    FileRecord,
    Manifest,
    TensorRecord,
    combine_crc32,
    dump_manifest,
    dump_share,
    label_of,
    parse_manifest,
    parse_share,
    tensors_header,
)
from ._lane import LANE, NUM_THREADS, Pace, Stop, run_all
from ._retry import RetriedStorage, new_stop
from ._state import Cut, StoredTensor, dtype_name
from ._storage import BLOCK_BYTES, Sink, Storage, opened, read_all

T = TypeVar("T")
UNNAMED = f"{MANIFEST}.tmp"  # see LocalStorage.replace
Tensor = tuple[str, int]
"""Key of an entry, and the number of the tensor in it."""

FILE_BYTES = 32 * 1024 * 1024
"""A file for each so many bytes, as many as there are threads at most."""
FILE_TENSORS = 100_000
"""A file for each so many tensors: the header of each fits the safetensors package."""
NAME_BYTES = 128
"""About so many bytes of a header are those of one tensor."""
JOINED_BYTES = 4 * 1024
"""Tensors of so many bytes at most are copied into a block, which is written in one go."""
PIECE_TENSORS = 128
"""Python that does something with so many tensors takes less than a millisecond."""


def folder_of(step: int) -> str:
    """Return the folder of a step.

    Example:
        >>> folder_of(42)
        'step-0000000042'
    """
    return f"step-{step:010d}"


async def write_cut(
    storage: Storage,
    step: int,
    cut: Cut,
    begin: Callable[[], int],
    end: Callable[[Stop, int], T],
    pace: Pace | None,
) -> T:
    """Write a cut durably, on one thread unless it has several files; return what `end` returns.

    Args:
        storage: Where to.
        step: Its number.
        cut: What to write.
        begin: Called first, on the thread; makes the claim of the step, and returns its sequence.
        end: Called there once the step is saved, with the length of its data files.
        pace: Of a save that training goes on beside; None writes at once.

    Raises:
        CheckpointNotCommittedError: If it was not written; what was there before still is.
        CheckpointUncertainError: If it was, but not durably; or if that cannot be told.
        Exception: What `begin` or `end` raises.

    Cancellation:
        Before the manifest takes its name nothing is saved, and files are removed again.
    """
    stop = new_stop(storage)
    lane = LANE if pace is None else pace.lane
    write = StepWriter(storage, step, cut, stop, pace)
    results: list[T] = []

    def start() -> list[Callable[[], FileRecord]]:
        if pace is not None:
            pace.pause()
        write.begin(begin())
        files = write.files()
        if len(files) > 1:
            return files
        commit([file() for file in files])
        return []

    def commit(records: Sequence[FileRecord]) -> None:
        stop.check()
        write.commit(records)
        results.append(end(stop, sum(map(attrgetter("bytes"), records))))

    try:
        [files] = await run_all([start], stop, name=lane)
        if files:
            records = await run_all(files, stop, name=lane)
            await run_all([partial(commit, records)], stop, name=lane)
    except GeneratorExit:  # the loop was closed: nothing can be waited for
        raise
    except BaseException as error:
        await run_all([write.clean_up], Stop(), name=lane, shielded=True)
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, CheckpointError):
            raise not_committed(storage, step, error) from error
        raise
    return results[0]


@final
class StepWriter:
    """Writes the files of one step; every method blocks.

    Attributes:
        attempt: Number of this save among those of the step.
        worker: The one that writes its share; None for one that writes all.
        claimed: The claim that workers write their shares under, and its mark; None for one writer.
    """

    def __init__(
        self, storage: Storage, step: int, cut: Cut, stop: Stop, pace: Pace | None = None
    ) -> None:
        self.attempt = 0
        self.worker: int | None = None
        self.claimed: tuple[Claim, str] | None = None
        self._storage = storage
        self._retried = storage if isinstance(storage, RetriedStorage) else None
        self._bare = storage if self._retried is None else self._retried.bare
        self._step = step
        self._sequence = -1  # until it has begun: before, nothing in the folder is its own
        self._cut = cut
        self._stop = stop
        self._paced = _at_once if pace is None else pace.paced
        self._folder = folder_of(step)
        self._groups: list[list[Tensor]] = []
        self._stored: dict[str, dict[int, StoredTensor]] = {key: {} for key in cut.arrays}
        self._made: list[str] = []
        self._may_be_saved = False  # once a manifest may name the files, they are not removed

    def begin(self, sequence: int) -> None:
        """Make the folder, and number the attempt."""
        self._sequence = sequence
        storage, folder = self._storage, self._folder
        storage.make_folder(folder)
        matches = map(DATA_FILE.fullmatch, storage.list(folder))
        # A new name each time: nothing is overwritten, so a save that replaces this step leaves
        # the old one whole until the manifest is renamed (decision 34).
        self.attempt = 1 + max((int(match[1]) for match in matches if match), default=0)

    def files(self) -> list[Callable[[], FileRecord]]:
        """Return what writes each file, under a name that is not there yet."""
        self._groups = _in_files(self._cut)
        who = "" if self.worker is None else f"-w{self.worker:03d}{self._tag}"
        names = [
            f"data-{self.attempt:04d}{who}-{i:03d}.safetensors" for i in range(len(self._groups))
        ]
        write = self._write_file if self._retried is None else self._retry_file
        return [partial(write, *each) for each in enumerate(names)]

    def _describe(
        self, key: str, index: int
    ) -> tuple[tuple[int, tuple[tuple[int, ...], str]], tuple[str, tuple[int, ...], str, int]]:
        """Return number and form of one of the arrays of an entry, and what its file says of it.

        The number is the one that it has among the stored tensors of the entry.
        """
        array, division = self._cut.arrays[key][index], self._cut.divisions.get(key)
        if division is not None:
            index = division.held.index(division.ranges[division.rank])
        shape, dtype = form = array.shape, dtype_name(array.dtype, key)
        shown = (*shape, 2) if dtype.startswith("complex") else shape
        return (index, form), (label_of(key, index), shown, STORED_AS[dtype], array.nbytes)

    def share(self, files: Sequence[FileRecord]) -> bytes:
        """Return what was written, for the worker that writes the manifest.

        From now on only that one may remove files: it may name them.
        """
        if files:
            self._storage.sync(self._folder)
        self._may_be_saved = self._sequence < 0
        return dump_share(
            files,
            {
                key: {number: each.record for number, each in own.items()}
                for key, own in self._stored.items()
                if own
            },
        )

    def add_shares(self, shares: Sequence[bytes]) -> list[FileRecord]:
        """Take over what all workers have written, in rank order; return all files.

        Raises:
            OSError: If a file is not there, or has another length, as this worker sees it.
        """
        files: list[FileRecord] = []
        for data in shares:
            own, tensors = parse_share(data)
            for key, numbers in tensors.items():
                for number, record in numbers.items():
                    there = record._replace(file=record.file + len(files))
                    self._stored[key].setdefault(number, StoredTensor(there, ((), "")))
            files += own
        for file in files:
            _require_size(self._storage, f"{self._folder}/{file.name}", file.bytes)
        return files

    def _retry_file(self, number: int, name: str) -> FileRecord:
        """Write a file, and all of it again if that fails; its tensors are kept meanwhile."""
        assert self._retried is not None
        kept = [self._cut.arrays[key][index] for key, index in self._groups[number]]

        def once() -> FileRecord:
            for (key, index), array in zip(self._groups[number], kept, strict=True):
                self._cut.arrays[key][index] = array
            try:
                return self._write_file(number, name)
            except OSError:
                self._bare.remove(f"{self._folder}/{name}")
                raise

        return self._retried.again(once)

    def _write_file(self, number: int, name: str) -> FileRecord:
        """Write one file of tensors and make it durable."""
        arrays, tensors = self._cut.arrays, self._groups[number]
        described = [self._describe(*tensor) for tensor in self._paced(tensors, PIECE_TENSORS)]
        version = VERSION if self._cut.divisions else WHOLE_VERSION
        header = tensors_header(
            map(itemgetter(1), self._paced(described, PIECE_TENSORS)),
            {"format": FORMAT, "version": str(version)},
        )
        header_crc = crc = zlib.crc32(header)
        size = len(header)
        path = f"{self._folder}/{name}"
        if size > MAX_HEADER_BYTES:
            raise OSError(errno.EFBIG, _LONG_NAMES.format(size, MAX_HEADER_BYTES), path)
        sink = self._bare.create(path)
        self._made.append(name)
        try:
            sink.write(memoryview(header))
            for run in self._paced(_runs([nbytes for _, (*_, nbytes) in described])):
                self._stop.check()
                written = [arrays[key][index] for key, index in tensors[run]]
                crc, sums = self._write_run(sink, written, crc)
                del written
                own = zip(tensors[run], described[run], sums, strict=True)
                for (key, index), ((place, form), (*_, nbytes)), (tensor_crc, marks) in own:
                    record = TensorRecord(number, size, nbytes, tensor_crc, marks)
                    self._stored[key][place] = StoredTensor(record, form)
                    size += nbytes
                    arrays[key][index] = _NOTHING  # its memory is free, if training let go of it
            sink.finish()
        finally:
            sink.discard()
        # A storage that loses a write is found before the step is removed that this one replaces.
        _require_size(self._bare, path, size)
        return FileRecord(name, size, crc, len(header), header_crc)

    def _write_run(
        self, sink: Sink, arrays: Sequence[Array], crc: int
    ) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Write tensors; return the checksum of the file, and those of each and its beginnings."""
        if len(arrays) == 1:
            sums = self._write_tensor(sink, arrays[0])
            return combine_crc32(crc, sums[0], arrays[0].nbytes), [sums]
        data = [b"".join(blocks(array)) for array in arrays]
        joined = b"".join(data)
        sink.write(memoryview(joined))
        return zlib.crc32(joined, crc), [(zlib.crc32(each), ()) for each in data]

    def _write_tensor(self, sink: Sink, array: Array) -> tuple[int, tuple[int, ...]]:
        crc, room, marks = 0, CHUNK_BYTES, []
        for block in self._paced(blocks(array)):
            self._stop.check()
            rest = block
            while len(rest) >= room:
                crc = zlib.crc32(rest[:room], crc)
                marks.append(crc)
                rest, room = rest[room:], CHUNK_BYTES
            crc = zlib.crc32(rest, crc)
            room -= len(rest)
            sink.write(block)
        return crc, tuple(marks[: max(0, array.nbytes - 1) // CHUNK_BYTES])

    def commit(self, files: Sequence[FileRecord]) -> None:
        """Give the manifest its name, then make that durable, then remove what it replaced.

        Raises:
            CheckpointNotCommittedError: If the manifest did not take its name.
            CheckpointUncertainError: If it did, but may not survive a crash of the machine; or if
                it cannot be read, so that it may have.
            OSError: Before it was tried.
        """
        manifest = Manifest(
            self._step,
            self._sequence,
            self._cut.next_steps,
            tuple(files),
            {
                key: self._cut.record_of(key, stored)
                for key, stored in self._paced(self._stored.items(), PIECE_TENSORS)
            },
        )
        data = dump_manifest(manifest, partial(self._paced, each=PIECE_TENSORS))
        path = f"{self._folder}/{MANIFEST}"
        if len(data) > MAX_MANIFEST_BYTES:
            raise OSError(errno.EFBIG, _TOO_LONG.format(len(data), MAX_MANIFEST_BYTES), path)
        # The data files must be in the folder before a manifest that names them is.
        self._storage.sync(self._folder)
        self._may_be_saved = True
        try:
            self._storage.replace(path, data)
            # Read back before anything is removed: an old step may be the only one left.
            self._require_in_place(path, data, None)
            self._storage.sync(self._folder)
        except CheckpointError:
            raise
        except Exception as error:
            # A rename may have happened although its call failed, over a network for one.
            self._require_in_place(path, data, error)
            raise CheckpointUncertainError(
                f"Step {self._step} was saved in {self._storage} and can be restored, but it may "
                f"not survive a crash of the machine: {reason(error)}. Save again."
            ) from error
        with suppress(Exception):  # the step is saved; the next save of it removes the rest
            names = map(attrgetter("name"), files)
            _remove_others(self._storage, self._folder, {MANIFEST, *names})

    def clean_up(self) -> None:
        """Remove what was written, as far as that is possible, unless it may be saved.

        The share of a worker that was taken for lost is not once the claim is gone.
        """
        is_first, names = self._sequence >= 0, self._made
        is_free = not is_first and self.claimed is not None and is_gone(self._bare, *self.claimed)
        if self._may_be_saved and not is_free:
            return
        if is_first:
            with suppress(Exception):
                self._bare.remove(Claim(self._sequence, self._step).name)
        if is_first and self.worker is not None:
            with suppress(Exception):  # those of other workers, which may be gone
                all_names = self._bare.list(self._folder)
                names = [name for name in all_names if f"{self._tag}-" in name]
        for name in names:
            with suppress(Exception):  # what stopped the save is raised, and nothing else
                self._bare.remove(f"{self._folder}/{name}")
        with suppress(Exception):
            if is_first and not self._bare.list(self._folder):
                self._bare.remove_folder(self._folder)

    @property
    def _tag(self) -> str:
        """Part of the names of shares that no other attempt has, though it has the same number."""
        return "" if self.claimed is None else f"-{zlib.crc32(self.claimed[1].encode()):08x}"

    def _require_in_place(self, path: str, data: bytes, failure: Exception | None) -> None:
        """Read the manifest back, and find out whether the step is saved.

        Raises:
            CheckpointNotCommittedError: If there is no manifest, or that of another save.
            CheckpointUncertainError: If that cannot be told.
        """
        try:
            found = read_all(self._storage, path, MAX_MANIFEST_BYTES)
            if found == data:
                return
            parse_manifest(found, self._step)  # that of another save is one
        except FileNotFoundError:
            pass
        except Exception as unread:  # noqa: BLE001 - whatever it is, nothing may be removed
            raise CheckpointUncertainError(
                f"Step {self._step} may have been saved in {self._storage}, or not: its {MANIFEST} "
                f"cannot be read back: {reason(unread)}. Nothing was removed. Save again."
            ) from (failure or unread)
        self._may_be_saved = False
        error = failure or OSError(errno.EIO, "What was written cannot be read back", path)
        raise not_committed(self._storage, self._step, error) from failure


def _require_size(storage: Storage, path: str, size: int) -> None:
    with opened(storage, path) as source:
        found = source.size
    if found != size:
        raise OSError(errno.EIO, f"{found} bytes instead of {size}", path)


_NOTHING: Array = np.empty(0)
_LONG_NAMES = "The names of its tensors have {} bytes, and the limit of the format is {}"
_TOO_LONG = (
    "The manifest has {} bytes, and the limit is {}; put long lists of numbers into arrays, which "
    "are stored in files of their own"
)


def not_committed(storage: Storage, step: int, error: Exception) -> CheckpointNotCommittedError:
    """Return the error of a save that did not take place."""
    return CheckpointNotCommittedError(
        f"Step {step} was not saved in {storage}: {reason(error)}. What was saved before is "
        "unchanged."
    )


def reason(error: Exception) -> str:
    """Return the text of an error, to be put into a sentence."""
    return str(error).rstrip(".") or type(error).__name__


def _in_files(cut: Cut) -> list[list[Tensor]]:
    """Divide the tensors over files of about the same size, in order."""
    sizes = {
        (key, number): array.nbytes
        for key, arrays in cut.arrays.items()
        for number, array in enumerate(arrays)
    }
    total = sum(sizes.values())
    count = max(1, min(NUM_THREADS, total // FILE_BYTES)) if sizes else 0
    count = max(count, -(-len(sizes) // FILE_TENSORS))
    groups: list[list[Tensor]] = [[] for _ in range(count)]
    filled = [0] * count
    for tensor, size in sizes.items():
        smallest = filled.index(min(filled))
        groups[smallest].append(tensor)
        filled[smallest] += size + NAME_BYTES
    return groups


def _at_once(items: Iterable[T], each: int = 1) -> Iterator[T]:
    return iter(items)


def _runs(sizes: Sequence[int]) -> Iterator[slice]:
    """Divide tensors into runs of one, or of several small ones that are written in one go."""
    start = filled = 0
    for number, size in enumerate(sizes):
        is_full = filled + size > BLOCK_BYTES or number - start == PIECE_TENSORS
        if number > start and (is_full or max(size, sizes[start]) > JOINED_BYTES):
            yield slice(start, number)
            start, filled = number, 0
        filled += size
    if sizes:
        yield slice(start, len(sizes))


def blocks(array: Array) -> Iterable[memoryview]:
    """Return the bytes of an array in C order, little-endian, without a copy of the whole.

    Only an array with another layout is copied, block by block.
    """
    is_swapped = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and _IS_BIG)
    if array.flags.c_contiguous and not is_swapped and 0 < array.nbytes <= BLOCK_BYTES:
        return (_bytes_of(array),)
    return _many_blocks(array, is_swapped=is_swapped)


def _many_blocks(array: Array, *, is_swapped: bool) -> Iterator[memoryview]:
    if is_swapped:
        for part in _parts(array):
            yield _bytes_of(part.astype(part.dtype.newbyteorder("<")))
    elif array.flags.c_contiguous:
        whole = _bytes_of(array)
        for start in range(0, len(whole), BLOCK_BYTES):
            yield whole[start : start + BLOCK_BYTES]
    else:
        for part in _parts(array):
            yield _bytes_of(np.ascontiguousarray(part))


_IS_BIG = np.little_endian is False


def _bytes_of(array: Array) -> memoryview:
    data: Any = array.reshape(-1).view(np.uint8)
    return memoryview(data)


def _parts(array: Array) -> Iterator[Array]:
    if array.nbytes <= BLOCK_BYTES or array.ndim == 0:
        if array.size:
            yield array
        return
    row_bytes = array.nbytes // array.shape[0]
    if row_bytes > BLOCK_BYTES:
        for row in array:
            yield from _parts(row)
        return
    num_rows = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, array.shape[0], num_rows):
        yield array[start : start + num_rows]


def _remove_others(storage: Storage, folder: str, kept: set[str]) -> None:
    for name in storage.list(folder):
        if name not in kept:
            storage.remove(f"{folder}/{name}")


def remove_step(storage: Storage, step: int, names: Iterable[str] | None = None) -> None:
    """Remove a step: its name first, so that it is never there by half; blocks.

    Args:
        storage: Where from.
        step: Its number.
        names: Its claims and its pin; None lists them.
    """
    folder = folder_of(step)
    if names is None:
        names = read_listing(storage).names_of(step)
    storage.remove(f"{folder}/{MANIFEST}")
    storage.sync(folder)
    _remove_others(storage, folder, set())
    storage.remove_folder(folder)
    for name in names:
        storage.remove(name)


def pin_step(storage: Storage, step: int) -> None:
    """Keep a step whatever the retention says; blocks.

    Raises:
        CheckpointError: If there is no such step, or the pin cannot be written.
    """
    path = pin_name(step)
    try:
        if MANIFEST in storage.list(folder_of(step)):
            with suppress(FileExistsError):  # it is pinned already
                storage.put_new(path, b"pinned\n")
            if MANIFEST in storage.list(folder_of(step)):
                return
            storage.remove(path)  # the step was removed meanwhile
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"Step {step} in {storage} may not be pinned: {reason(error)}. Try again."
        ) from error
    raise CheckpointError(f"There is no step {step} to pin in {storage}.")


def unpin_step(storage: Storage, step: int) -> None:
    """Take the pin of a step away, if it has one; blocks.

    Raises:
        CheckpointError: If it cannot be removed.
    """
    try:
        storage.remove(pin_name(step))
        storage.sync("")
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"Step {step} in {storage} may still be pinned: {reason(error)}. Try again."
        ) from error


def remove_leftover(storage: Storage, folder: str) -> None:
    """Remove what an ended save has left of a step; blocks. The caller has the lock.

    Raises:
        OSError: If it cannot be removed, or the folder has files that no save makes.
    """
    names = storage.list(folder)
    strange = [name for name in names if not DATA_FILE.fullmatch(name) and name != UNNAMED]
    if MANIFEST in names or strange:
        raise OSError(errno.ENOTEMPTY, f"It has {', '.join(strange or [MANIFEST])}", folder)
    for name in names:
        storage.remove(f"{folder}/{name}")
    storage.remove_folder(folder)
