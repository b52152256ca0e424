"""A disk that is full: a small tmpfs, on which a save finds less and less space."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

import aioreplica as ar
from aioreplica.errors import CheckpointNotCommittedError

DISK_BYTES = 1024 * 1024
NUM_ELEMENTS = 8_000
PAGE_BYTES = 4096


@final
@dataclass(slots=True)
class FullDisk:
    """What became of saves on a disk with little space.

    Attributes:
        num_saves: How many there were.
        num_refused: How many found no space, and said so.
        num_wrong: After how many of all another state was there than the error said: must be 0.
        why_not: Why there were none, if there were none.
    """

    num_saves: int = 0
    num_refused: int = 0
    num_wrong: int = 0
    why_not: str = ""


def fill_up(every: int = 1) -> FullDisk:
    """Save with so many pages of a real file system left, from none to enough.

    Args:
        every: How many pages more each time.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, small_disk(folder, DISK_BYTES) as disk:
            return asyncio.run(_fill_up(disk, every))
    except PermissionError as error:
        return FullDisk(why_not=str(error))


@contextmanager
def small_disk(folder: str, num_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs for a block.

    Raises:
        PermissionError: If that is not allowed, or there is none.
    """
    if sys.platform != "linux":
        raise PermissionError("tmpfs is mounted on Linux only")
    options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip() or f"mount ended with {done.returncode}")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", folder], check=True)


async def _fill_up(disk: Path, every: int) -> FullDisk:
    found, ballast, pages = FullDisk(), disk / "ballast", 0
    while found.num_saves == found.num_refused:  # the first one that has space is the last one
        manager = ar.CheckpointManager(disk / "run", max_to_keep=1)
        await manager.save(1, _state(1.0))
        take_all_space(ballast, but=pages * PAGE_BYTES)
        expected = 2.0
        try:
            await manager.save(2, _state(2.0))
        except CheckpointNotCommittedError as error:
            found.num_refused += "No space left on device" in str(error)
            expected = 1.0
        found.num_saves += 1
        found.num_wrong += await _restored(disk / "run") != expected
        ballast.unlink()
        await manager.save(3, _state(3.0))  # as good as ever once there is space again
        found.num_wrong += await _restored(disk / "run") != 3.0
        await manager.aclose()
        pages += every
    return found


def _state(value: float) -> dict[str, Any]:
    return {"model": [ar.Variable(np.full(NUM_ELEMENTS, value))], "value": value}


async def _restored(folder: Path) -> float | None:
    """Return the value that a restore finds; None if it fails, warns or mixes two saves."""
    state = _state(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            await ar.CheckpointManager(folder).restore(state)
        except (OSError, RuntimeWarning):
            return None
    values = {*state["model"][0].value.tolist(), state["value"]}
    return float(values.pop()) if len(values) == 1 else None


def take_all_space(path: Path, *, but: int) -> None:
    """Write a file that leaves so many bytes of the disk."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE_BYTES))
        except OSError:
            file.truncate(max(0, file.tell() - but))
