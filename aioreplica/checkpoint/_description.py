"""Descriptions of saved steps, for people and programs that look into a directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..tree import Tree, decode
from ._format import EntryRecord, Manifest
from ._reading import look_at
from ._storage import Storage


@final
@dataclass(frozen=True, slots=True)
class EntryDescription:
    """One entry of a saved state.

    Attributes:
        key: Its name.
        kind: "variable", "array" or "value".
        shape: Of each component; () for a value.
        dtype: Its dtype; "" for a value.
        num_components: How many arrays are stored.
        num_bytes: How many bytes they have together.
        num_parts: In how many parts each is stored: workers write theirs of a divided variable.
    """

    key: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_components: int
    num_bytes: int
    num_parts: int = 1


@final
@dataclass(frozen=True, slots=True)
class StepDescription:
    """Contents of a step.

    Attributes:
        step: Its number.
        num_bytes: Length of its files of tensors together.
        files: Their names.
        entries: The state, in order.
        damage: What is wrong with its files as far as their sizes tell; "" if nothing is.
    """

    step: int
    num_bytes: int
    files: tuple[str, ...]
    entries: tuple[EntryDescription, ...]
    damage: str


def description_of(manifest: Manifest, damage: str) -> StepDescription:
    """Return what a manifest says, and what is known to be wrong."""
    entries = tuple(
        EntryDescription(
            key,
            entry.kind,
            entry.shape,
            entry.dtype,
            entry.num_components,
            sum(tensor.bytes for tensor in entry.tensors),
            max(1, len(entry.parts)),
        )
        for key, entry in manifest.entries.items()
    )
    files = manifest.files
    return StepDescription(
        manifest.step,
        sum(file.bytes for file in files),
        tuple(file.name for file in files),
        entries,
        damage,
    )


def plain_value(storage: Storage, step: int, key: str) -> Tree:
    """Return the plain data of an entry, by the manifest alone; arrays in it are None. Blocks.

    Returns:
        The data; None if there is no such entry, or the manifest is damaged.

    Raises:
        CheckpointError: If the manifest cannot be read.
    """
    manifest = look_at(storage, step).manifest
    record = None if manifest is None else manifest.entries.get(key)
    return None if record is None else plain_data(record)


def plain_data(record: EntryRecord) -> Tree:
    """Return the plain data of an entry; arrays in it are None."""
    return decode(record.value, [None] * len(record.tensors))
