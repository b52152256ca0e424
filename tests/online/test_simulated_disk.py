"""An acknowledgement never precedes the sync: crashes of a disk that keeps what it likes.

Journal and checkpoints are on one simulated disk. After each change and each sync of it the power
fails; of what was not synced any part survives. What was acknowledged by then is learned, once.

SQLite gets to the disk by a VFS of apsw, which does what SQLite's own one for Unix does: a file is
synced when SQLite says so, and with the first sync of a new log its folder too. There is no shared
memory, so the lock is exclusive; reads and writes of the file and of the write-ahead log are the
same.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

import aioreplica as ar
from aioreplica.online import Journal
from tests.checkpoint.simulated_files import ROOT, Change, SimulatedFiles, SimulatedStorage, subsets

from .program import Counting, example

NUM_EXAMPLES = 8
CRASHES = [60, pytest.param(250, marks=pytest.mark.xslow)]

_numbers = itertools.count()


class DiskFile(apsw.VFSFile):
    def __init__(self, files: SimulatedFiles, path: Path, flags: int) -> None:
        # The base class is not initialised: everything it would do is done here.
        self.files, self.path = files, path
        is_new = path.name not in files.listdir(ROOT)
        logs = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
        self.syncs_folder = is_new and bool(flags & logs)
        self.fd = files.open(path, os.O_CREAT if flags & apsw.SQLITE_OPEN_CREATE else 0)

    def xRead(self, amount: int, offset: int) -> bytes:
        buffer = bytearray(amount)
        return bytes(buffer[: self.files.preadv(self.fd, [memoryview(buffer)], offset)])

    def xWrite(self, data: Any, offset: int) -> None:
        self.files.pwrite(self.fd, bytes(data), offset)

    def xTruncate(self, newsize: int) -> None:
        self.files.ftruncate(self.fd, newsize)

    def xSync(self, flags: int) -> None:
        self.files.fsync(self.fd)
        if self.syncs_folder:
            self.syncs_folder = False
            sync_root(self.files)

    def xFileSize(self) -> int:
        return int(self.files.fstat(self.fd).st_size)

    def xClose(self) -> None:
        self.files.close(self.fd)

    def xLock(self, level: int) -> None:
        """Nobody else is there."""

    xUnlock = xLock

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, ptr: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return int(apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE)  # as the VFS for Unix says


class Disk(apsw.VFS):
    """Opens connections to files of a simulated disk, by their name alone."""

    def __init__(self, files: SimulatedFiles) -> None:
        self.files = files
        self.name = f"simulated-{next(_numbers)}"
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> DiskFile:
        path = ROOT / Path(name.filename() if isinstance(name, apsw.URIFilename) else name).name
        flags[1] = flags[0]
        return DiskFile(self.files, path, flags[0])

    def xAccess(self, pathname: str, flags: int) -> bool:
        return Path(pathname).name in self.files.listdir(ROOT)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.files.unlink(ROOT / Path(filename).name)
        if syncdir:
            sync_root(self.files)

    def xFullPathname(self, name: str) -> str:
        return name

    def connect(self, path: str, **_options: Any) -> Any:
        connection = apsw.Connection(path, vfs=self.name)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection


def sync_root(files: SimulatedFiles) -> None:
    fd = files.open(ROOT, 0)
    files.fsync(fd)
    files.close(fd)


class Recorder:
    """What was sure to survive, and what was acknowledged, behind every change and every sync."""

    def __init__(self, files: SimulatedFiles, acknowledged: set[int]) -> None:
        self.points: list[tuple[list[bool], set[int]]] = []
        change, fsync = files._change, files.fsync

        def note() -> None:
            self.points.append(([c.is_synced for c in files.changes], set(acknowledged)))

        def changing(made: Any) -> None:
            change(made)
            note()

        def syncing(fd: int) -> None:
            fsync(fd)
            note()

        files._change, files.fsync = changing, syncing  # type: ignore[method-assign]


def counting(files: SimulatedFiles, folder: Path, connect: Any = None) -> Counting:
    journal = Journal(folder / "journal.db", connect=connect or Disk(files).connect)
    manager = ar.CheckpointManager(SimulatedStorage(files), max_to_keep=2)
    return Counting(journal=journal, checkpoints=manager, max_batch=3)


async def learn(files: SimulatedFiles, folder: Path, connect: Any = None) -> Recorder:
    acknowledged: set[int] = set()
    recorder = Recorder(files, acknowledged)
    async with counting(files, folder, connect) as program:
        for i in range(NUM_EXAMPLES):
            ticket = await program.learner.submit(example(i))
            acknowledged.add(i)
            await ticket
            if i in {3, 5, 6}:
                await program.learner.checkpoint()
    return recorder


def failures(
    files: SimulatedFiles, recorder: Recorder
) -> Iterator[tuple[int, frozenset[Change], set[int]]]:
    """Yield behind how many changes the power fails, what is kept, and what was acknowledged."""
    rng = Random(0)
    for synced, acknowledged in recorder.points:
        for change, flag in zip(files.changes, synced, strict=False):
            change.is_synced = flag
        loose = [c for c in files.changes[: len(synced)] if not c.is_synced]
        for kept in subsets(loose, rng):
            yield len(synced), kept, acknowledged


def crashes(
    files: SimulatedFiles, recorder: Recorder, num_crashes: int, *, seed: int
) -> Iterator[tuple[SimulatedFiles, set[int]]]:
    """Yield disks after a choice of all failures there are; only these are made."""
    found = sum(1 for _ in failures(files, recorder))
    chosen = {*Random(seed).sample(range(found), min(num_crashes, found))}
    for number, (num_changes, kept, acknowledged) in enumerate(failures(files, recorder)):
        if number in chosen:
            yield files.crash_after(num_changes, kept), acknowledged


async def check(disk: SimulatedFiles, folder: Path, acknowledged: set[int]) -> None:
    async with counting(disk, folder) as program:
        while not program.learner.is_ready:
            await asyncio.sleep(0)
        counts = dict(enumerate(program.learned()))
        assert all(counts.get(i) == 1 for i in acknowledged)
        assert max(counts.values(), default=0) <= 1


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Restored step")
@pytest.mark.parametrize("num_crashes", CRASHES)
async def test_acknowledged_examples_survive_any_loss_of_unsynced_data(
    num_crashes: int, folder: Path
) -> None:
    files = SimulatedFiles()
    recorder = await learn(files, folder)
    assert recorder.points[-1][1] == set(range(NUM_EXAMPLES))
    for disk, acknowledged in crashes(files, recorder, num_crashes, seed=0):
        await check(disk, folder, acknowledged)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")
async def test_the_check_finds_acknowledgements_that_come_too_early(folder: Path) -> None:
    """Without the sync of each commit, some crash loses what was acknowledged."""
    files = SimulatedFiles()
    disk = Disk(files)

    class Careless:
        def __init__(self, path: str, **_options: Any) -> None:
            self._inner = disk.connect(path)
            self.close, self.executemany = self._inner.close, self._inner.executemany

        def execute(self, statement: str, *values: Any) -> Any:
            return self._inner.execute(statement.replace("= FULL", "= NORMAL"), *values)

    recorder = await learn(files, folder, Careless)

    async def check_all() -> None:
        for crashed, acknowledged in crashes(files, recorder, 60, seed=0):
            await check(crashed, folder, acknowledged)

    with pytest.raises((AssertionError, ar.errors.JournalError)):
        await check_all()
