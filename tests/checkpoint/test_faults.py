"""Every file operation of a save goes wrong once, and the machine crashes at every point."""

import asyncio
import errno
import warnings
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
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

from .simulated_files import Fault, Inode, SimulatedFiles, SimulatedStorage, subsets


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


def names_in(folder: Inode) -> list[str]:
    """Return the paths below a folder."""
    found = []
    for name, inode in sorted(folder.names.items()):
        found += [name, *(f"{name}/{below}" for below in names_in(inode))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same step"])
@pytest.mark.parametrize("kind", ["fail", "truncate", "drop", "flip"])
def test_whatever_operation_goes_wrong_the_old_or_the_new_state_is_restored(
    kind: str, step: int
) -> None:
    async def once(at: int) -> bool:
        files = await disk_with(1, max_to_keep=1)
        before, fault = names_in(files.root), Fault(kind, at)
        files.fault = fault
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

        is_old = isinstance(error, CheckpointNotCommittedError)
        assert await restored(files) == (1 if is_old else 2)
        if is_old and kind in {"fail", "flip"}:
            assert names_in(files.root) == before  # nothing is left
        await manager.save(3, new_state(3))  # the next save is as good as ever
        assert await restored(files) == 3
        return fault.was_met

    async def sweep() -> int:
        at = 0
        while await once(at):
            at += 1
        return at

    assert art.run(sweep) >= (5 if kind == "flip" else 15)


def test_a_step_saved_again_with_an_uncertain_end_counts_as_the_newest() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        storage = SimulatedStorage(files)
        async with CheckpointManager(storage, max_to_keep=3) as manager:
            for step in (1, 2, 3):
                await manager.save(step, new_state(step))
            replace, sync = storage.replace, storage.sync

            def replace_and_break(path: str, data: bytes) -> None:
                replace(path, data)
                storage.sync = refuse

            def refuse(folder: str) -> None:
                raise OSError(errno.EIO, "Input/output error")

            storage.replace = replace_and_break
            with pytest.raises(CheckpointUncertainError, match=r"was saved .* can be restored"):
                await manager.save(1, new_state(4))
            storage.replace, storage.sync = replace, sync
            assert manager.latest() == 1
            await manager.save(5, new_state(5))
            assert manager.steps() == (1, 3, 5)  # step 2 is the oldest one now

    art.run(main)


def test_a_file_that_fails_stops_the_others() -> None:
    async def main() -> None:
        storage, created = SimulatedStorage(SimulatedFiles()), []
        create = storage.create

        def created_and_full(path: str) -> Any:
            created.append(path)
            sink = create(path)
            return SimpleNamespace(write=refuse, finish=sink.finish, discard=sink.discard)

        def refuse(data: memoryview) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        storage.create = created_and_full
        state = [ar.Variable(np.zeros(10)) for _ in range(4)]
        with pytest.raises(CheckpointNotCommittedError, match="No space left"):
            await CheckpointManager(storage).save(1, state)
        assert len(created) == 1

    art.run(main)


def test_a_save_cancelled_before_its_manifest_leaves_no_files() -> None:
    num_saved = []

    async def main() -> None:
        files, state = SimulatedFiles(), new_state(1)
        try:
            await CheckpointManager(SimulatedStorage(files)).save(1, state)
        finally:
            names = names_in(files.root)
            is_saved = "step-0000000001/manifest.json" in names
            num_saved.append(is_saved)
            assert is_saved or not any("data" in name for name in names)

    art.cancel_everywhere(main).check()
    assert {*num_saved} == {True, False}


@pytest.mark.xslow
@pytest.mark.parametrize(
    ("step", "max_to_keep"),
    [
        pytest.param(2, 1, id="another step, the old one removed", marks=pytest.mark.xslow),
        pytest.param(1, 3, id="the same step, the old one kept"),
        pytest.param(2, 3, id="another step, the old one kept", marks=pytest.mark.xslow),
        pytest.param(1, 1, id="the same step, the old one removed", marks=pytest.mark.xslow),
    ],
)
def test_after_a_crash_at_any_point_the_old_or_the_new_state_is_restored(
    step: int, max_to_keep: int
) -> None:
    files = SimulatedFiles()
    assert asyncio.run(crash_everywhere(files, [1], step, max_to_keep=max_to_keep)) > 100


@pytest.mark.xslow
@pytest.mark.parametrize("max_to_keep", [1, 2])
def test_after_a_crash_while_steps_are_removed_none_is_there_by_half(max_to_keep: int) -> None:
    steps = [1, 2, 3]
    count = crash_everywhere(SimulatedFiles(), steps, 4, max_to_keep=max_to_keep)
    assert asyncio.run(count) > 100


def test_the_simulation_would_find_a_sync_that_is_missing() -> None:
    class Unsynced(SimulatedFiles):
        def fsync(self, fd: int) -> None:
            """Promise everything, do nothing."""

    with pytest.raises((AssertionError, CheckpointError)):
        asyncio.run(crash_everywhere(Unsynced(), [1], 2))


async def crash_everywhere(
    files: SimulatedFiles, steps: Sequence[int], step: int, *, max_to_keep: int = 3
) -> int:
    """Save, crash behind every change and sync of the disk, restore; return how many crashes."""
    manager = CheckpointManager(SimulatedStorage(files))
    for value, each in enumerate(steps, 1):
        await manager.save(each, new_state(value))
    points, old, new = recorded(files), len(steps), len(steps) + 1
    manager = CheckpointManager(SimulatedStorage(files), max_to_keep=max_to_keep)
    await manager.save(step, new_state(new))
    is_saved_from, rng, count = len(points), Random(0), 0
    points.append(now(files))
    for number, was_synced in enumerate(points):
        for change, flag in zip(files.changes, was_synced, strict=False):
            change.is_synced = flag
        loose = [change for change in files.changes[: len(was_synced)] if not change.is_synced]
        is_torn = any(change.kind == "write" for change in loose)
        for kept in subsets(loose, rng):
            for torn in (False, True) if is_torn else (False,):
                disk = files.crash_after(len(was_synced), kept, is_torn=torn)
                assert await restored(disk) in ({new} if number >= is_saved_from else {old, new})
                reader = CheckpointManager(SimulatedStorage(disk))
                for each in reader.steps():
                    await reader.verify(each)
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
