"""Reading steps back: which there are, their manifests, their tensors, each checked."""

from __future__ import annotations

import errno
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from ._format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STEP_FOLDER,
    DamagedError,
    EntryRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_of,
    parse_manifest,
)
from ._lane import NUM_THREADS, Stop, run_all
from ._storage import BLOCK_BYTES, Source, Storage, opened, read_all
from ._writing import Tensor, folder_of

Array = npt.NDArray[Any]


@final
@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step that has a manifest.

    Attributes:
        step: Its number.
        manifest: What it holds; None if the manifest is damaged.
        damage: What is wrong, "" if nothing was found so far.
    """

    step: int
    manifest: Manifest | None
    damage: str


def find_steps(storage: Storage) -> list[int]:
    """Return the steps that have a manifest, ascending; blocks."""
    found = [STEP_FOLDER.fullmatch(name) for name in storage.list("")]
    steps = [int(match[1]) for match in found if match and folder_of(int(match[1])) == match[0]]
    return sorted(step for step in steps if MANIFEST in storage.list(folder_of(step)))


def no_step_error(storage: Storage, step: int | None) -> CheckpointError:
    """Return the error of a step that is not there; blocks for a moment."""
    steps = find_steps(storage)
    known = f"It has {', '.join(map(str, steps))}." if steps else "It has none."
    what = "no step" if step is None else f"no step {step}"
    return CheckpointError(f"There is {what} to restore in {storage}. {known}")


def look_at(storage: Storage, step: int) -> FoundStep:
    """Read the manifest of a step and compare the sizes of its files; blocks.

    Raises:
        CheckpointError: If it is of another version of the format.
    """
    manifest = None
    try:
        manifest = read_manifest(storage, step)
        for file in manifest.files:
            with _opened_data(storage, step, file):
                pass
    except DamagedError as error:
        return FoundStep(step, manifest, str(error))
    return FoundStep(step, manifest, "")


def newest_first(storage: Storage) -> list[FoundStep]:
    """Return all steps, the one saved last first; those without a readable manifest last; blocks.

    A damaged manifest does not say when it was written: its step counts as saved before the one
    with the next larger number.
    """
    return _in_order([look_at(storage, step) for step in find_steps(storage)])


def by_age(storage: Storage, known: Mapping[int, int]) -> dict[int, int]:
    """Return the sequence of each step, the one saved last first; 0 if it is not known; blocks.

    Args:
        storage: Where they are.
        known: What an earlier call has returned. Manifests are read only if it lacks a step.

    Raises:
        CheckpointError: If one is of another version of the format.
    """
    steps = find_steps(storage)
    if known.keys() >= set(steps):
        return {step: known[step] for step in known if step in steps}
    found = newest_first(storage)
    return {each.step: each.manifest.sequence if each.manifest else 0 for each in found}


def _in_order(found: Sequence[FoundStep]) -> list[FoundStep]:
    ranks: dict[int, tuple[int, int]] = {}
    above = math.inf
    for each in reversed(found):  # descending steps
        if each.manifest is not None:
            above = each.manifest.sequence
            ranks[each.step] = (each.manifest.sequence, 0)
        else:
            ranks[each.step] = (2**62 if above == math.inf else int(above) - 1, 1)
    return sorted(found, key=lambda each: (*ranks[each.step], each.step), reverse=True)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read the manifest of a step; blocks.

    Raises:
        DamagedError: If it cannot be read, or is not what was written.
        CheckpointError: If it is of another version of the format.
    """
    try:
        data = read_all(storage, f"{folder_of(step)}/{MANIFEST}", MAX_MANIFEST_BYTES)
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error}") from error
    return parse_manifest(data, step)


async def read_tensors(
    storage: Storage, manifest: Manifest, keys: Collection[str]
) -> dict[str, list[Array]]:
    """Read the tensors of some entries, at the same time, and check each.

    Raises:
        DamagedError: If one is not what was written.

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
    stop = Stop()
    read = await run_all([partial(_read_some, storage, manifest, *job, stop) for job in jobs], stop)
    arrays = {tensor: array for part in read for tensor, array in part.items()}
    return {
        key: [arrays[key, index] for index in range(len(manifest.entries[key].tensors))]
        for key in keys
    }


def _read_some(
    storage: Storage,
    manifest: Manifest,
    number: int,
    wanted: Sequence[tuple[Tensor, EntryRecord]],
    stop: Stop,
) -> dict[Tensor, Array]:
    file = manifest.files[number]
    arrays = {}
    with _opened_data(storage, manifest.step, file) as source:
        _check_header(source, file)
        for (key, index), entry in wanted:
            shape, name = entry.form_of(index)
            record = entry.tensors[index]
            array = np.empty(shape, dtype_of(name).newbyteorder("<"))
            if _fill(source, file, record, array, stop) != record.crc32:
                raise DamagedError(f"{key!r} in {file.name} fails its checksum")
            if not np.little_endian:
                array = array.astype(array.dtype.newbyteorder("="))
            array.flags.writeable = False
            arrays[key, index] = array
    return arrays


@contextmanager
def _opened_data(storage: Storage, step: int, file: FileRecord) -> Iterator[Source]:
    """Open a file of tensors for a block; what goes wrong with it is damage."""
    try:
        with opened(storage, f"{folder_of(step)}/{file.name}") as source:
            if source.size != file.bytes:
                raise DamagedError(f"{file.name} has {source.size} bytes, not {file.bytes}")
            yield source
    except OSError as error:
        if isinstance(error, CheckpointError) or error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise DamagedError(f"{file.name} cannot be read: {error}") from error


def _check_header(source: Source, file: FileRecord) -> None:
    header = bytearray(file.header_bytes)
    source.read_into(0, memoryview(header))
    if zlib.crc32(header) != file.header_crc32:
        raise DamagedError(f"the header of {file.name} fails its checksum")


def _fill(source: Source, file: FileRecord, record: TensorRecord, array: Array, stop: Stop) -> int:
    data: Any = array.reshape(-1).view(np.uint8)
    buffer = memoryview(data)
    crc = 0
    for start in range(0, record.bytes, BLOCK_BYTES):
        stop.check()
        part = buffer[start : start + BLOCK_BYTES]
        if source.read_into(record.offset + start, part) != len(part):
            raise DamagedError(f"{file.name} ends too early")
        crc = zlib.crc32(part, crc)
    return crc


async def verify_step(storage: Storage, step: int) -> None:
    """Read every byte of a step.

    Raises:
        DamagedError: Naming all that is damaged.
        CheckpointError: If it is of another version of the format.
    """
    stop = Stop()
    [manifest] = await run_all([partial(read_manifest, storage, step)], stop)
    found = await run_all(
        [partial(_verify_file, storage, manifest, i, stop) for i in range(len(manifest.files))],
        stop,
    )
    problems = [problem for part in found for problem in part]
    if problems:
        raise DamagedError("; ".join(problems))


def _verify_file(storage: Storage, manifest: Manifest, number: int, stop: Stop) -> list[str]:
    file = manifest.files[number]
    problems = []
    try:
        with _opened_data(storage, manifest.step, file) as source:
            buffer, crc = bytearray(BLOCK_BYTES), 0
            for start in range(0, file.bytes, BLOCK_BYTES):
                stop.check()
                part = memoryview(buffer)[: min(BLOCK_BYTES, file.bytes - start)]
                source.read_into(start, part)
                crc = zlib.crc32(part, crc)
            if crc == file.crc32:
                return []
            try:
                _check_header(source, file)
            except DamagedError as error:
                problems.append(str(error))
            for key, entry in manifest.entries.items():
                for index, record in enumerate(entry.tensors):
                    if record.file == number:
                        array = np.empty(record.bytes, np.uint8)
                        if _fill(source, file, record, array, stop) != record.crc32:
                            problems.append(f"{key!r}#{index} in {file.name} fails its checksum")
            return problems or [f"{file.name} fails its checksum"]
    except DamagedError as error:
        return [str(error)]
