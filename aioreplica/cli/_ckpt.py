"""`python -m aioreplica ckpt`: which checkpoints a folder has, if they are whole, what they hold.

`rm` and `gc` remove steps, and what ended saves have left; they take the lock of the folder first.

On a terminal the answer is a table; piped into another program it is one line per row, with tabs
between fields and sizes in bytes. The exit status is 0 if all is well, 1 if something is damaged or
not there, and 2 if the arguments are wrong.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.filesize import decimal

from ..checkpoint import (
    CheckpointManager,
    EntryDescription,
    LocalStorage,
    find_leftovers,
    newest_whole,
    read_listing,
    remove_leftover,
    remove_step,
)
from ..errors import CheckpointError
from ._rows import failed, print_rows

Folder = Annotated[
    Path,
    typer.Argument(exists=True, file_okay=False, readable=True, help="Where a manager saves."),
]
Age = Annotated[str, typer.Option(metavar="AGE", help="Such as 90s, 10m, 2h or 3d.")]
Steps = Annotated[list[int], typer.Argument(min=0, help="Their numbers.")]
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEFT = "no manifest: its save was ended, or is going on"
GONE = "removed meanwhile"
"""State of a step that went between the listing and the look: a manager is saving."""
SOUND = {"whole", "latest", GONE}
OneStep = Annotated[int | None, typer.Argument(min=0, help="Its number.")]


def list_steps(directory: Folder) -> None:
    """List the steps of a folder, and whether their files are there in full length.

    The step marked "latest" is the one that a restore takes: the one saved last that is whole. A
    folder without a manifest is no step; `gc` removes it. A pinned step is kept by all saves.
    """
    left = _leftovers(directory)
    try:
        manager, steps = _opened(directory)
    except typer.Exit:
        _print_states(("step", "entries", "size", "state"), left)
        raise
    latest, pinned = _latest(directory), manager.pinned()
    rows, is_damaged = [], False
    for step in steps:
        try:
            found = manager.describe(step)
            damage, size = found.damage, _size(found.num_bytes)
            num_entries = str(len(found.entries))
        except CheckpointError as error:
            damage, size, num_entries = str(error), "", ""
        if damage and _is_gone(manager, step):
            rows.append((str(step), "", "", GONE))
            continue
        is_damaged = is_damaged or bool(damage)
        state = damage or ("latest" if step == latest else "whole")
        state += ", pinned" if step in pinned else ""
        rows.append((str(step), num_entries, size, state))
    _print_states(("step", "entries", "size", "state"), [*rows, *left])
    if is_damaged:
        raise typer.Exit(1)


def verify_steps(directory: Folder, step: OneStep = None) -> None:
    """Read every byte of one step, or of all, and compare all checksums."""
    manager, steps = _opened(directory, step)
    is_wanted = step is not None  # then it has to be there
    states = [(each, anyio.run(_state_of, manager, each, is_wanted)) for each in steps]
    _print_states(("step", "state"), [(str(each), state) for each, state in states])
    if any(state not in SOUND for _, state in states):
        raise typer.Exit(1)


async def _state_of(manager: CheckpointManager, step: int, is_wanted: bool) -> str:
    try:
        await manager.verify(step)
    except CheckpointError as error:
        return GONE if not is_wanted and _is_gone(manager, step) else str(error)
    return "whole"


def _is_gone(manager: CheckpointManager, step: int) -> bool:
    """Tell whether a step that was listed is there no more: a save keeps the newest ones only."""
    try:
        return step not in manager.steps()
    except OSError:
        return False


def show_step(directory: Folder, step: OneStep = None) -> None:
    """List what a step holds; without a number, the one that a restore would take."""
    manager, steps = _opened(directory, step)
    number = _latest(directory) if step is None else step
    if number is None:
        raise failed(f"None of the steps in {directory} is whole: {', '.join(map(str, steps))}.")
    try:
        found = manager.describe(number)
    except CheckpointError as error:
        raise failed(str(error)) from None
    print_rows(("entry", "kind", "dtype", "shape", "size"), map(_row_of, found.entries))
    if found.damage:
        raise failed(f"Step {number} in {directory} is damaged: {found.damage}.")


def remove_steps(directory: Folder, steps: Steps) -> None:
    """Remove steps of a folder in which nothing is being saved."""
    _, known = _opened(directory)
    for step in steps:
        if step not in known:
            listed = ", ".join(map(str, known))
            raise failed(f"There is no step {step} in {directory}: it has {listed}.")
    removed = []
    try:
        with _locked(directory) as (storage, _):
            for step in dict.fromkeys(steps):
                remove_step(storage, step)
                removed.append((str(step), "removed"))
    finally:  # outside: an output that cannot be written is no error of the folder
        print_rows(("step", "state"), removed)


def collect(directory: Folder, older_than: Age = "0s") -> None:
    """Remove what saves have left that were ended: folders without a manifest, and claims."""
    match = re.fullmatch("([0-9]{1,9})([smhd])", older_than)
    if match is None:
        raise failed(f"An age is a number and s, m, h or d, got {older_than!r}.", 2)
    limit_s = int(match[1]) * SECONDS[match[2]]
    problems, removed, claims = [], [], []
    try:
        with _locked(directory) as (storage, is_exclusive):
            if not is_exclusive and not limit_s:
                raise failed(
                    f"{directory} cannot be locked here: a folder may be that of a save under way. "
                    "Give --older-than."
                )
            for folder in find_leftovers(storage):
                if time.time() - _changed_at(directory / folder) < limit_s:
                    continue
                size = _size(_bytes_in(directory / folder))
                try:
                    remove_leftover(storage, folder)
                except OSError as error:
                    problems.append(f"{folder} cannot be removed: {error}")
                else:
                    removed.append((folder, size, "removed"))
            for name in read_listing(storage).stale_claims():
                if time.time() - (directory / name).lstat().st_mtime >= limit_s:
                    storage.remove(name)
                    claims.append((name, "", "removed"))
    finally:
        print_rows(("folder", "size", "state"), removed)
        print_rows(("claim", "size", "state"), claims)
    if problems:
        raise failed(" ".join(problems))


@contextmanager
def _locked(directory: Path) -> Iterator[tuple[LocalStorage, bool]]:
    """Keep managers out for a block; tell whether the system sees to that.

    Raises:
        typer.Exit: If one has the folder, or something in the block cannot be done.
    """
    storage = LocalStorage(directory)
    try:
        lock = storage.lock()
        try:
            yield storage, lock.is_exclusive
        finally:
            lock.close()
    except OSError as error:
        raise failed(str(error)) from None


def _leftovers(directory: Path) -> list[tuple[str, ...]]:
    try:
        found = find_leftovers(LocalStorage(directory))
        sizes = [(name, _bytes_in(directory / name)) for name in found]
    except OSError as error:
        raise failed(f"{directory} cannot be read: {error}") from None
    return [(str(int(name.rpartition("-")[2])), "", _size(size), LEFT) for name, size in sizes]


def _changed_at(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _bytes_in(folder: Path) -> int:
    """Return the length of all files of a folder; what goes meanwhile, as one saves, is 0 long."""
    total = 0
    with suppress(FileNotFoundError):  # the folder
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.lstat().st_size
    return total


def _row_of(entry: EntryDescription) -> tuple[str, ...]:
    if entry.kind == "value":
        return (entry.key, entry.kind, "", "", _size(entry.num_bytes) if entry.num_bytes else "")
    shape = " x ".join(map(str, entry.shape)) or "scalar"
    if entry.num_components > 1:
        shape += f", {entry.num_components} components"
    if entry.num_parts > 1:
        shape += f", {entry.num_parts} parts"
    return (entry.key, entry.kind, entry.dtype, shape, _size(entry.num_bytes))


def _opened(directory: Path, step: int | None = None) -> tuple[CheckpointManager, Sequence[int]]:
    """Return a manager that reads a folder, and the steps to look at.

    Raises:
        typer.Exit: If there are none, or not the one that was asked for.
    """
    manager = CheckpointManager(directory)
    try:
        steps = manager.steps()
    except OSError as error:
        raise failed(f"{directory} cannot be read: {error}") from None
    if not steps:
        raise failed(f"There is no checkpoint in {directory}.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise failed(f"There is no step {step} in {directory}: it has {known}.")
    return manager, steps if step is None else (step,)


def _latest(directory: Path) -> int | None:
    """Return the step that a restore would take: its files have their sizes, too."""
    try:
        found, _ = newest_whole(LocalStorage(directory), {})
    except CheckpointError:  # a step of another version of the format; its own row says so
        return None
    return None if found is None else found.step


def _size(num_bytes: int) -> str:
    return decimal(num_bytes) if Console().is_terminal else str(num_bytes)


def _print_states(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    red = [i for i, row in enumerate(rows) if row[-1].partition(",")[0] not in SOUND]
    print_rows(head, rows, red=red)
