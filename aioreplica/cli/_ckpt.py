"""`python -m aioreplica ckpt`: which checkpoints a folder has, if they are whole, what they hold.

On a terminal the answer is a table; piped into another program it is one line per row, with tabs
between fields and sizes in bytes. The exit status is 0 if all is well, 1 if something is damaged or
not there, and 2 if the arguments are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.filesize import decimal

from ..checkpoint import CheckpointManager, EntryDescription
from ..errors import CheckpointError
from ._rows import failed, print_rows

Folder = Annotated[
    Path,
    typer.Argument(exists=True, file_okay=False, readable=True, help="Where a manager saves."),
]
OneStep = Annotated[int | None, typer.Argument(min=0, help="Its number.")]


def list_steps(directory: Folder) -> None:
    """List the steps of a folder, and whether their files are there in full length.

    The step marked "latest" is the one that a restore takes: the one saved last that is whole.
    """
    manager, steps = _opened(directory)
    latest = _latest(manager)
    rows, is_damaged = [], False
    for step in steps:
        try:
            found = manager.describe(step)
            damage, size = found.damage, _size(found.num_bytes)
            num_entries = str(len(found.entries))
        except CheckpointError as error:
            damage, size, num_entries = str(error), "", ""
        is_damaged = is_damaged or bool(damage)
        state = damage or ("latest" if step == latest else "whole")
        rows.append((str(step), num_entries, size, state))
    _print_states(("step", "entries", "size", "state"), rows)
    if is_damaged:
        raise typer.Exit(1)


def verify_steps(directory: Folder, step: OneStep = None) -> None:
    """Read every byte of one step, or of all, and compare all checksums."""
    manager, steps = _opened(directory, step)
    problems = [(each, anyio.run(_problem_of, manager, each)) for each in steps]
    _print_states(("step", "state"), [(str(each), found or "whole") for each, found in problems])
    if any(found for _, found in problems):
        raise typer.Exit(1)


async def _problem_of(manager: CheckpointManager, step: int) -> str:
    try:
        await manager.verify(step)
    except CheckpointError as error:
        return str(error)
    return ""


def show_step(directory: Folder, step: OneStep = None) -> None:
    """List what a step holds; without a number, the one that a restore would take."""
    manager, steps = _opened(directory, step)
    number = _latest(manager) if step is None else step
    if number is None:
        raise failed(f"None of the steps in {directory} is whole: {', '.join(map(str, steps))}.")
    try:
        found = manager.describe(number)
    except CheckpointError as error:
        raise failed(str(error)) from None
    print_rows(("entry", "kind", "dtype", "shape", "size"), map(_row_of, found.entries))
    if found.damage:
        raise failed(f"Step {number} in {directory} is damaged: {found.damage}.")


def _row_of(entry: EntryDescription) -> tuple[str, ...]:
    if entry.kind == "value":
        return (entry.key, entry.kind, "", "", _size(entry.num_bytes) if entry.num_bytes else "")
    shape = " x ".join(map(str, entry.shape)) or "scalar"
    if entry.num_components > 1:
        shape += f", {entry.num_components} components"
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


def _latest(manager: CheckpointManager) -> int | None:
    try:
        return manager.latest()
    except CheckpointError:  # a step of another version of the format; its own row says so
        return None


def _size(num_bytes: int) -> str:
    return decimal(num_bytes) if Console().is_terminal else str(num_bytes)


def _print_states(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    red = [i for i, row in enumerate(rows) if row[-1] not in {"whole", "latest"}]
    print_rows(head, rows, red=red)
