"""Every file operation of a save goes wrong once, and the machine crashes at every point."""

import asyncio
import warnings
from random import Random
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import CheckpointManager
from aioreplica.errors import (
    CheckpointError,
    CheckpointNotCommittedError,
    CheckpointUncertainError,
)

from .simulated_files import Fault, SimulatedFiles, SimulatedStorage, subsets


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files of several writes each, although the state is small."""
    monkeypatch.setattr("aioreplica.checkpoint._writing.FILE_BYTES", 40)
    monkeypatch.setattr("aioreplica.checkpoint._writing.BLOCK_BYTES", 24)
    monkeypatch.setattr("aioreplica.checkpoint._storage.BLOCK_BYTES", 512)  # some for a manifest


def new_state(value: int) -> dict[str, Any]:
    return {
        "model": [ar.Variable(np.full((3, 2), float(value))), ar.Variable(np.full(5, value))],
        "value": value,
    }


def value_of(state: dict[str, Any]) -> int:
    """Return the one value that everything in a state has: it is of one save."""
    found = {float(x) for v in state["model"] for x in v.value.flat} | {float(state["value"])}
    assert len(found) == 1, f"mixed: {found}"
    return int(found.pop())


async def restored(files: SimulatedFiles) -> int:
    """Return the value that a restore finds on a disk."""
    state = new_state(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        await CheckpointManager(SimulatedStorage(files)).restore(state)
    return value_of(state)


async def disk_with(*values: int, max_to_keep: int = 3) -> SimulatedFiles:
    files = SimulatedFiles()
    manager = CheckpointManager(SimulatedStorage(files), max_to_keep=max_to_keep)
    for value in values:
        await manager.save(value, new_state(value))
    return files


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same step"])
@pytest.mark.parametrize("kind", ["fail", "truncate", "drop"])
def test_whatever_operation_goes_wrong_the_old_or_the_new_state_is_restored(
    kind: str, step: int
) -> None:
    async def once(at: int) -> bool:
        files = await disk_with(1, max_to_keep=1)
        fault = files.fault = Fault(kind, at)
        manager = CheckpointManager(SimulatedStorage(files), max_to_keep=1)
        error = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an old step was not removed
            try:
                await manager.save(step, new_state(2))
            except (CheckpointNotCommittedError, CheckpointUncertainError) as raised:
                error = raised
        files.fault = None
        assert files.num_open == 0

        assert await restored(files) == (1 if isinstance(error, CheckpointNotCommittedError) else 2)
        await manager.save(3, new_state(3))  # the next save is as good as ever
        assert await restored(files) == 3
        return fault.was_met

    async def sweep() -> int:
        at = 0
        while await once(at):
            at += 1
        return at

    assert art.run(sweep) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same step"])
@pytest.mark.parametrize("max_to_keep", [1, 3])
def test_after_a_crash_at_any_point_the_old_or_the_new_state_is_restored(
    step: int, max_to_keep: int
) -> None:
    assert asyncio.run(crash_everywhere(SimulatedFiles(), step, max_to_keep)) > 100


def test_the_simulation_would_find_a_sync_that_is_missing() -> None:
    class Unsynced(SimulatedFiles):
        def fsync(self, fd: int) -> None:
            """Promise everything, do nothing."""

    with pytest.raises((AssertionError, CheckpointError)):
        asyncio.run(crash_everywhere(Unsynced(), 2, 3))


async def crash_everywhere(files: SimulatedFiles, step: int, max_to_keep: int) -> int:
    """Save, crash behind every change and sync of the disk, restore; return how many crashes."""
    manager = CheckpointManager(SimulatedStorage(files), max_to_keep=max_to_keep)
    await manager.save(1, new_state(1))
    points = recorded(files)
    await manager.save(step, new_state(2))
    is_saved_from, rng, count = len(points), Random(0), 0
    points.append(now(files))
    for number, was_synced in enumerate(points):
        for change, flag in zip(files.changes, was_synced, strict=False):
            change.is_synced = flag
        loose = [change for change in files.changes[: len(was_synced)] if not change.is_synced]
        for kept in subsets(loose, rng):
            found = await restored(files.crash_after(len(was_synced), kept))
            assert found in ({2} if number >= is_saved_from else {1, 2})
            count += 1
    return count


def now(files: SimulatedFiles) -> list[bool]:
    """Return whether each change so far is sure to survive."""
    return [change.is_synced for change in files.changes]


def recorded(files: SimulatedFiles) -> list[list[bool]]:
    """Return a list that gets what is sure to survive, behind every change and every sync."""
    points = [now(files)]
    change, fsync = files._change, files.fsync

    def noting(made: Any) -> None:
        change(made)
        points.append(now(files))

    def syncing(fd: int) -> None:
        fsync(fd)
        points.append(now(files))

    files._change, files.fsync = noting, syncing  # type: ignore[method-assign]
    return points
