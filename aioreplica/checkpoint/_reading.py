"""Reading steps back: which there are, their manifests, their tensors, each checked.

Only wrong bytes, and files that are missing, are damage (`DamagedError`). A file that cannot be
read is a CheckpointError: it may be whole, so nothing older may take its place.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from ._writing import Tensor, folder_of, reason

Array = npt.NDArray[Any]

NUM_LOOKS = 20
"""So often a reader begins again because another manager removes and replaces steps meanwhile."""
UNKNOWN_SAVES = 2**20
"""So many saves, and more, may have been numbered behind the newest manifest that is whole."""


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
    """Return the steps that have a manifest, ascending; blocks.

    Raises:
        CheckpointError: If that cannot be read, or changes all the time.
    """
    before = None
    for _ in range(NUM_LOOKS):
        try:
            folders = [m for name in storage.list("") if (m := STEP_FOLDER.fullmatch(name))]
            steps = sorted([int(m[1]) for m in folders if MANIFEST in storage.list(m[0])])
        except (OSError, MemoryError) as error:
            raise CheckpointError(
                f"The steps in {storage} cannot be listed: {reason(error)}. Try again when it can "
                "be read."
            ) from error
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
    folders = [name for name in storage.list("") if STEP_FOLDER.fullmatch(name)]
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
        return FoundStep(step, None, str(error))


def with_sizes(storage: Storage, found: FoundStep) -> FoundStep:
    """Compare the sizes of the files of a step with its manifest; blocks.

    Raises:
        CheckpointError: If one cannot be opened.
    """
    try:
        for file in () if found.manifest is None else found.manifest.files:
            with _opened_data(storage, found.step, file):
                pass
    except DamagedError as error:
        return replace(found, damage=str(error))
    return found


def newest_first(storage: Storage, only: int | None = None) -> list[FoundStep]:
    """Return all steps, or one, by their manifests, the one saved last first; blocks.

    A damaged manifest does not say when it was written: its step counts as saved before the one
    with the next larger number.

    Raises:
        CheckpointError: If a manifest cannot be read, or is of another version of the format.
    """
    steps = [step for step in find_steps(storage) if only in {None, step}]
    return _in_order([look_at(storage, step) for step in steps])


def newest_whole(
    storage: Storage, damaged: Mapping[int, FoundStep], only: int | None = None
) -> tuple[FoundStep | None, dict[int, FoundStep]]:
    """Return the newest step that is whole as far as sizes tell, None if there is none; blocks.

    What is removed or replaced while it is read looks damaged, so a step counts as damaged only if
    it is still there, with the same manifest, when all are listed again.

    Args:
        storage: Where they are.
        damaged: Steps that are known to be damaged.
        only: The only step to look at; None for all.

    Returns:
        The step, and the damaged ones that were passed over.

    Raises:
        CheckpointError: If something cannot be read, or changes all the time.
    """
    for _ in range(NUM_LOOKS):
        whole, passed = None, {}
        for each in newest_first(storage, only):
            known = damaged.get(each.step)
            if known is None or known.manifest != each.manifest:
                known = with_sizes(storage, each)
            if not known.damage:
                whole = known
                break
            passed[each.step] = known
        if passed.keys() <= damaged.keys() and all(damaged[i] is passed[i] for i in passed):
            return whole, passed
        damaged = passed
    raise changing_error(storage)


def by_age(storage: Storage, known: Mapping[int, int]) -> dict[int, int]:
    """Return the sequence of each step, the one saved last first; blocks.

    A damaged manifest may be that of the newest save, so its step gets a sequence above all others.

    Args:
        storage: Where they are.
        known: What an earlier call has returned. Manifests are read only if it lacks a step.

    Raises:
        CheckpointError: If one cannot be read, or is of another version of the format.
    """
    steps = find_steps(storage)
    if known.keys() >= set(steps):
        return {step: known[step] for step in known if step in steps}
    found = newest_first(storage)
    above = UNKNOWN_SAVES + max((m.sequence for each in found if (m := each.manifest)), default=0)
    return {each.step: each.manifest.sequence if each.manifest else above for each in found}


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
        DamagedError: If it is not there, or not what was written.
        CheckpointError: If it cannot be read, or is of another version of the format.
    """
    with _reading_file(storage, step, MANIFEST):
        data = read_all(storage, f"{folder_of(step)}/{MANIFEST}", MAX_MANIFEST_BYTES)
        return parse_manifest(data, step)


async def read_tensors(
    storage: Storage, manifest: Manifest, keys: Collection[str]
) -> dict[str, list[Array]]:
    """Read the tensors of some entries, at the same time, and check each.

    Raises:
        DamagedError: If one is not what was written.
        CheckpointError: If one cannot be read.

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
def _opened_data(storage: Storage, step: int, file: FileRecord) -> Iterator[Source]:
    """Open a file of tensors for a block."""
    path = f"{folder_of(step)}/{file.name}"
    with _reading_file(storage, step, file.name), opened(storage, path) as source:
        if source.size != file.bytes:
            raise DamagedError(f"{file.name} has {source.size} bytes, not {file.bytes}")
        yield source


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
        CheckpointError: If there is no such step, it cannot be read, or is of another version of
            the format; or naming all that is damaged.
    """
    stop = Stop()
    [[found]] = await run_all([partial(_look_at_one, storage, step)], stop)
    problems = [found.damage] if found.damage else []
    if found.manifest is not None:
        count = len(found.manifest.files)
        jobs = [partial(_verify_file, storage, found.manifest, i, stop) for i in range(count)]
        problems = [problem for part in await run_all(jobs, stop) for problem in part]
    if problems:
        await run_all([partial(_look_at_one, storage, step)], stop)  # or it was removed meanwhile
        raise CheckpointError(f"Step {step} in {storage} is damaged: {'; '.join(problems)}.")


def _look_at_one(storage: Storage, step: int) -> list[FoundStep]:
    found = newest_first(storage, step)
    if not found:
        raise no_step_error(storage, step)
    return found


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
