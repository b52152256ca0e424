"""Reading steps back: which there are, their manifests, and whether every byte is right.

Only wrong bytes, and files that are missing, are damage (`DamagedError`). A file that cannot be
read is a CheckpointError: it may be whole, so nothing older may take its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, final

from ..errors import CheckpointError
from ._claims import Claim, Listing, not_listed, read_listing
from ._format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    DamagedError,
    EntryRecord,
    Manifest,
    parse_manifest,
)
from ._lane import Stop, run_all
from ._retry import new_stop
from ._state import State, below
from ._storage import Storage, read_all
from ._tensors import check_header, check_tensor, crc_of, opened_data, reading_file
from ._writing import folder_of

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
            with reading_file(storage, step, MANIFEST):
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
    with reading_file(storage, step, MANIFEST):
        data = read_all(storage, f"{folder_of(step)}/{MANIFEST}", MAX_MANIFEST_BYTES)
        return parse_manifest(data, step)


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
            if crc_of(source, 0, file.bytes, stop) == file.crc32:
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


def gathered(state: State, manifest: Manifest) -> Manifest:
    """Return a manifest in which each list or dict of scalars is one value.

    Releases up to 0.1.0 had an entry for each if one is NumPy's, or a key is a bool.
    """
    entries = dict(manifest.entries)
    for key, entry in state.entries.items():
        if key not in entries and entry.composite is None and type(entry.thing) in {list, dict}:
            own = {each: entries[each] for each in entries if each.startswith(f"{key}/")}
            record = _gathered_value(key, entry.thing, own)
            if record is not None:
                entries = {each: entries[each] for each in entries if each not in own}
                entries[key] = record
    return replace(manifest, entries=entries)


def _gathered_value(key: str, thing: object, own: Mapping[str, EntryRecord]) -> EntryRecord | None:
    """Return the records of what is in a container as one; None if it is not numbers alone."""
    scalars: list[EntryRecord] = []
    taken: set[str] = set()

    def gather(key: str, thing: object) -> Any:
        record = own.get(key)
        if record is not None:
            taken.add(key)
            if record.kind == "array" and record.shape == ():
                scalars.append(record)
                return {"$scalar": len(scalars) - 1}
            if record.kind == "value" and not record.tensors:
                return record.value
        elif isinstance(thing, dict):
            items = [[name, gather(below(key, str(name)), thing[name])] for name in thing]
            return {"$items": items}
        elif isinstance(thing, list):
            inside = [each.removeprefix(f"{key}/") for each in own if each.startswith(f"{key}/")]
            count = len({each.partition("/")[0] for each in inside})
            children = [*thing[:count], *[None] * (count - len(thing))]
            return [gather(below(key, str(i)), child) for i, child in enumerate(children)]
        raise LookupError(key)

    try:
        value = gather(key, thing)
    except LookupError:
        return None
    if not taken or len(taken) < len(own):
        return None
    tensors = tuple(each.tensors[0] for each in scalars)
    forms = tuple((each.shape, each.dtype) for each in scalars)
    return EntryRecord("value", value=value, tensors=tensors, forms=forms)
