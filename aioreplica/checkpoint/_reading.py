"""Reading steps back: which there are, their manifests, their tensors, each checked.

Only wrong bytes, and files that are missing, are damage (`DamagedError`). A file that cannot be
read is a CheckpointError: it may be whole, so nothing older may take its place.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any, final

import numpy as np

from ..errors import CheckpointError
from ..tree import Array
from ._claims import Claim, Listing, not_listed, read_listing
from ._format import (
    CHUNK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    DamagedError,
    EntryRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_of,
    item_bytes,
    parse_manifest,
)
from ._lane import NUM_THREADS, Stop, run_all
from ._retry import new_stop
from ._storage import BLOCK_BYTES, Source, Storage, opened, read_all
from ._writing import Tensor, folder_of, reason

NUM_LOOKS = 20
"""So often a reader begins again because another manager removes and replaces steps meanwhile."""
UNKNOWN_SAVES = 2**20
"""So many saves, and more, may have been numbered behind the newest manifest that is whole."""


@final
@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step that has a folder.

    Attributes:
        step: Its number.
        manifest: What it holds; None if there is no manifest, or it is damaged.
        damage: What is wrong, "" if nothing was found so far.
        is_saved: Whether it has a manifest: else a save was ended, or is going on.
    """

    step: int
    manifest: Manifest | None
    damage: str
    is_saved: bool = True


def find_steps(storage: Storage) -> list[int]:
    """Return the steps that have a manifest, ascending; blocks.

    Raises:
        CheckpointError: If that cannot be read, or changes all the time.
    """
    before = None
    for _ in range(NUM_LOOKS):
        folders = read_listing(storage).folders
        try:
            steps = sorted([s for s in folders if MANIFEST in storage.list(folder_of(s))])
        except (OSError, MemoryError) as error:
            raise not_listed(storage, error) from error
        # Of a folder without a manifest a step may just be removed, after a newer one was saved.
        if len(steps) == len(folders) or steps == before:
            return steps
        before = steps
    raise changing_error(storage)


def find_leftovers(storage: Storage) -> list[str]:
    """Return the folders of steps without a manifest: a save was ended; or is going on. Blocks.

    Raises:
        OSError: If that cannot be read.
    """
    folders = map(folder_of, sorted(read_listing(storage).folders))
    return [name for name in folders if MANIFEST not in storage.list(name)]


def changing_error(storage: Storage) -> CheckpointError:
    """Return the error of a reader that another manager is always ahead of."""
    return CheckpointError(
        f"The steps in {storage} were removed or replaced while they were read, {NUM_LOOKS} times "
        "in turn. Save less often, or keep more steps (max_to_keep)."
    )


def no_step_error(storage: Storage, step: int | None) -> CheckpointError:
    """Return the error of a step that is not there; blocks for a moment."""
    steps = find_steps(storage)
    known = f"It has {', '.join(map(str, steps))}." if steps else "It has none."
    what = "no step" if step is None else f"no step {step}"
    return CheckpointError(f"There is {what} to restore in {storage}. {known}")


def look_at(storage: Storage, step: int) -> FoundStep:
    """Read the manifest of a step; blocks.

    Raises:
        CheckpointError: If it cannot be read, or is of another version of the format.
    """
    try:
        return FoundStep(step, read_manifest(storage, step), "")
    except DamagedError as error:
        is_saved = True
        if isinstance(error.__cause__, FileNotFoundError):  # or a link, a folder, a pipe
            with _reading_file(storage, step, MANIFEST):
                is_saved = MANIFEST in storage.list(folder_of(step))
        return FoundStep(step, None, str(error), is_saved)


def with_sizes(storage: Storage, found: FoundStep) -> FoundStep:
    """Compare the sizes of the files of a step with its manifest; blocks.

    Raises:
        CheckpointError: If one cannot be opened.
    """
    try:
        for file in () if found.manifest is None else found.manifest.files:
            with opened_data(storage, found.step, file):
                pass
    except DamagedError as error:
        return replace(found, damage=str(error))
    return found


def newest_first(storage: Storage, listing: Listing) -> Iterator[FoundStep]:
    """Yield the steps that have a folder, the one saved last first; blocks.

    Manifests are read one by one, as far as the caller goes on. A damaged one does not say when it
    was written: its newest claim does. Folders without claims, as earlier releases left them, have
    their places by the sequences in their manifests, which are all read; a damaged one of these
    counts as saved before the one with the next larger number.

    Raises:
        CheckpointError: If a manifest cannot be read, or is of another version of the format.
    """
    claims = [claim for claim in listing.claims if claim.step in listing.folders]
    without = sorted(listing.folders - {claim.step for claim in claims})
    # Least is newest. What is known of a step, and its claims, of which the newest is read first.
    read = {step: look_at(storage, step) for step in without}
    heap = [(*rank, each.step, True) for rank, each in _ranked(read, claims)]
    heap += [(-claim.sequence, 0, claim.step, False) for claim in claims]
    heapify(heap)
    while heap:
        age, _, step, is_placed = heappop(heap)
        if is_placed:
            yield read[step]
        elif step not in read:
            found = read[step] = look_at(storage, step)
            if found.manifest is not None and found.manifest.sequence < -age:
                # That save was ended, and left the one before it as it was.
                heappush(heap, (-found.manifest.sequence, 0, step, True))
            else:
                yield found


def newest_whole(
    storage: Storage,
    damaged: Mapping[int, FoundStep],
    only: int | None = None,
    *,
    with_files: bool = True,
) -> tuple[FoundStep | None, dict[int, FoundStep]]:
    """Return the newest step that is whole as far as sizes tell, None if there is none; blocks.

    What is removed or replaced while it is read looks damaged, or as if it was never saved, so a
    step counts as that only if it is, with the same manifest, when all are listed again.

    Args:
        storage: Where they are.
        damaged: Steps that are known to be damaged, or to have no manifest.
        only: The only step to look at; None for all.
        with_files: Whether to compare sizes, too.

    Returns:
        The step, and those that were passed over.

    Raises:
        CheckpointError: If something cannot be read, or changes all the time.
    """
    for _ in range(NUM_LOOKS):
        whole, passed, listing = None, {}, read_listing(storage)
        if only is not None:
            listing = replace(listing, folders=listing.folders & {only})
        for each in newest_first(storage, listing):
            known = damaged.get(each.step)
            if known is None or _differs(known, each):
                known = with_sizes(storage, each) if with_files else each
            if not known.damage:
                whole = known
                break
            passed[each.step] = known
        if passed.keys() <= damaged.keys() and all(damaged[i] is passed[i] for i in passed):
            return whole, passed
        damaged = passed
    raise changing_error(storage)


def _differs(known: FoundStep, now: FoundStep) -> bool:
    if now.manifest is None:
        return (known.is_saved, known.damage) != (now.is_saved, now.damage)
    return known.manifest != now.manifest


@final
@dataclass(frozen=True, slots=True)
class Known:
    """Order of the steps of a directory, as one manager has read it and goes on with.

    Attributes:
        steps: The one saved last first.
        unsaved: Steps with a folder and no manifest.
        newest: The largest sequence that any save may have had.
    """

    steps: tuple[int, ...]
    unsaved: frozenset[int]
    newest: int


def read_known(storage: Storage) -> Known:
    """Read all manifests once, to number saves above them and to know what to remove; blocks.

    A damaged manifest without a claim may be that of the newest save, whatever its sequence.

    Raises:
        CheckpointError: If one cannot be read, or is of another version of the format.
    """
    listing = read_listing(storage)
    found = [*newest_first(storage, listing)]
    claimed = {claim.step for claim in listing.claims}
    sequences = [each.manifest.sequence for each in found if each.manifest is not None]
    newest = max([0, *sequences, *(claim.sequence for claim in listing.claims)])
    is_unsure = any(e.is_saved and not e.manifest and e.step not in claimed for e in found)
    return Known(
        tuple(each.step for each in found if each.is_saved),
        frozenset(each.step for each in found if not each.is_saved),
        newest + UNKNOWN_SAVES * is_unsure,
    )


def _ranked(
    found: Mapping[int, FoundStep], claims: Sequence[Claim]
) -> list[tuple[tuple[float, int], FoundStep]]:
    """Return steps without claims, each with what orders it: less is newer."""
    ranks: list[tuple[tuple[float, int], FoundStep]] = []
    claimed = {step: sequence for sequence, step in reversed(claims)}  # by the newest of each
    above: float = math.inf
    for step in sorted(found.keys() | claimed, reverse=True):
        if step in claimed:
            above = claimed[step]
            continue
        each = found[step]
        if each.manifest is not None:
            above = each.manifest.sequence
            ranks.append(((-above, 0), each))
        else:
            ranks.append(((-above if above == math.inf else 1 - above, -1), each))
    return ranks


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read the manifest of a step; blocks.

    Raises:
        DamagedError: If it is not there, or not what was written.
        CheckpointError: If it cannot be read, or is of another version of the format.
    """
    with _reading_file(storage, step, MANIFEST):
        data = read_all(storage, f"{folder_of(step)}/{MANIFEST}", MAX_MANIFEST_BYTES)
        return parse_manifest(data, step)


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
    wanted: dict[int, list[tuple[Tensor, EntryRecord]]] = {}
    for key in keys:
        entry = manifest.entries[key]
        for index, tensor in enumerate(entry.tensors):
            wanted.setdefault(tensor.file, []).append(((key, index), entry))
    jobs = []
    for number, tensors in sorted(wanted.items()):
        count = math.ceil(NUM_THREADS / len(wanted))
        size = math.ceil(len(tensors) / count)
        jobs += [(number, tensors[start : start + size]) for start in range(0, len(tensors), size)]
    sizes = (
        item_bytes(entry.dtype) * (ranges[key][1] - ranges[key][0])
        if key in ranges
        else entry.tensors[index].bytes
        for tensors in wanted.values()
        for (key, index), entry in tensors
    )
    require_memory(storage, manifest, sum(sizes))
    stop = new_stop(storage)
    read = await run_all(
        [partial(_read_some, storage, manifest, *job, ranges, stop) for job in jobs], stop
    )
    arrays = {tensor: array for part in read for tensor, array in part.items()}
    return {
        key: [arrays[key, index] for index in range(len(manifest.entries[key].tensors))]
        for key in keys
    }


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
    storage: Storage,
    manifest: Manifest,
    number: int,
    wanted: Sequence[tuple[Tensor, EntryRecord]],
    ranges: Mapping[str, tuple[int, int]],
    stop: Stop,
) -> dict[Tensor, Array]:
    file = manifest.files[number]
    arrays = {}
    with opened_data(storage, manifest.step, file) as source:
        check_header(source, file)
        for (key, index), entry in wanted:
            shape, name = entry.form_of(index)
            record = entry.tensors[index]
            dtype = dtype_of(name).newbyteorder("<")
            if key in ranges:
                begin, end = ranges[key]
                array: Array = np.empty(end - begin, dtype)
                tensor = CheckedTensor(source, file, record, f"{key}#{index}", stop)
                data: Any = array.view(np.uint8)
                tensor.read(begin * dtype.itemsize, memoryview(data))
            else:
                array = np.empty(shape, dtype)
                read_tensor(source, file, record, key, array, stop)
            if not np.little_endian:
                array = array.astype(array.dtype.newbyteorder("="))
            array.flags.writeable = False
            arrays[key, index] = array
    return arrays


@contextmanager
def _reading_file(storage: Storage, step: int, name: str) -> Iterator[None]:
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
    with _reading_file(storage, step, file.name), opened(storage, path) as source:
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


def read_tensor(
    source: Source, file: FileRecord, record: TensorRecord, key: str, array: Array, stop: Stop
) -> None:
    """Fill an array with a tensor, and check it; blocks.

    Raises:
        DamagedError: If it is not what was written.
    """
    data: Any = array.reshape(-1).view(np.uint8)
    buffer = memoryview(data)
    crc = 0
    for start in range(0, record.bytes, BLOCK_BYTES):
        stop.check()
        part = buffer[start : start + BLOCK_BYTES]
        if source.read_into(record.offset + start, part) != len(part):
            raise DamagedError(f"{file.name} ends too early")
        crc = zlib.crc32(part, crc)
    if crc != record.crc32:
        raise DamagedError(f"{key!r} in {file.name} fails its checksum")


def check_tensor(
    source: Source, file: FileRecord, record: TensorRecord, key: str, stop: Stop
) -> None:
    """Read a tensor and check it, without memory for all of it; blocks.

    Raises:
        DamagedError: If it is not what was written.
    """
    if _crc_of(source, record.offset, record.bytes, stop) != record.crc32:
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


def _crc_of(source: Source, offset: int, size: int, stop: Stop) -> int:
    buffer, crc = bytearray(BLOCK_BYTES), 0
    for start in range(0, size, BLOCK_BYTES):
        stop.check()
        part = memoryview(buffer)[: min(BLOCK_BYTES, size - start)]
        count = source.read_into(offset + start, part)
        crc = zlib.crc32(part[:count], crc)
    return crc


async def verify_step(storage: Storage, step: int) -> None:
    """Read every byte of a step.

    Raises:
        CheckpointError: If there is no such step, it cannot be read, or is of another version of
            the format; or naming all that is damaged.
    """
    stop = new_stop(storage)
    [[found]] = await run_all([partial(_look_at_one, storage, step)], stop)
    problems = [found.damage] if found.damage else []
    if found.manifest is not None:
        count = len(found.manifest.files)
        jobs = [partial(_verify_file, storage, found.manifest, i, stop) for i in range(count)]
        problems += [problem for part in await run_all(jobs, stop) for problem in part]
    if problems:
        await run_all([partial(_look_at_one, storage, step)], stop)  # or it was removed meanwhile
        raise CheckpointError(f"Step {step} in {storage} is damaged: {'; '.join(problems)}.")


def _look_at_one(storage: Storage, step: int) -> list[FoundStep]:
    listing = read_listing(storage)
    found = look_at(storage, step)
    if not found.is_saved:
        raise no_step_error(storage, step)
    manifest = found.manifest
    if manifest is not None and manifest.version > 1:
        claim = Claim(manifest.sequence, step)
        if claim not in listing.claims:
            return [replace(found, damage=f"{claim.name} is missing")]
    return [found]


def _verify_file(storage: Storage, manifest: Manifest, number: int, stop: Stop) -> list[str]:
    file = manifest.files[number]
    problems = []
    try:
        with opened_data(storage, manifest.step, file) as source:
            if _crc_of(source, 0, file.bytes, stop) == file.crc32:
                return []
            try:
                check_header(source, file)
            except DamagedError as error:
                problems.append(str(error))
            for key, entry in manifest.entries.items():
                for index, record in enumerate(entry.tensors):
                    if record.file == number:
                        try:
                            check_tensor(source, file, record, f"{key}#{index}", stop)
                        except DamagedError as error:
                            problems.append(str(error))
            return problems or [f"{file.name} fails its checksum"]
    except DamagedError as error:
        return [str(error)]
