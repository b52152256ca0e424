"""Locks on files: one holder, and what a fork does with them."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioreplica.checkpoint import CheckpointManager, FileLock
from aioreplica.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]

OUTLIVED = """
import asyncio, os, sys
from aioreplica.checkpoint import CheckpointManager

manager = CheckpointManager(sys.argv[1])
asyncio.run(manager.save(1, {"x": 1}))
if os.fork() == 0:
    try:
        asyncio.run(manager.save(2, {"x": 2}))
    except OSError as error:
        print(error, flush=True)
    os.write(1, b"child\\n")
    os.read(0, 1)
    os._exit(0)
os.wait3(os.WNOHANG)
os.read(0, 1)
os._exit(0)
"""

FORKED_IN_A_BEGIN = """
import asyncio, os, sys, threading
from pathlib import Path
from aioreplica.checkpoint import CheckpointManager, LocalStorage
from aioreplica.errors import CheckpointUncertainError

class Held(LocalStorage):
    process, has_come, may_go_on = os.getpid(), threading.Event(), threading.Event()

    def lock(self):
        if os.getpid() == self.process:
            self.has_come.set()
            self.may_go_on.wait()
        return super().lock()

async def begin():
    await manager.save(1, {"x": 1}, wait=False)
    while not Held.has_come.is_set():
        await asyncio.sleep(0.001)

async def save():
    try:
        await manager.wait()
    except CheckpointUncertainError:
        await manager.save(2, {"x": 2})

manager = CheckpointManager(Held(Path(sys.argv[1])))
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
loop.close()
child = os.fork()
if child == 0:
    asyncio.run(save())
    os._exit(10 + max(manager.steps()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_second_lock_names_the_process_that_has_the_first(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")

    with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
        FileLock(tmp_path / "lock")
    lock.close()
    lock.close()
    FileLock(tmp_path / "lock").close()


def test_a_lock_in_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing" / "lock")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    """It would hold the directory for as long as it lives, and save there beside its parent."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OUTLIVED, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        said = parent.stdout.readline()
        assert "is in use" in said, said
        assert parent.stdout.readline() == "child\n"
        manager = CheckpointManager(tmp_path)
        with pytest.raises(CheckpointError, match=f"process {parent.pid} saves there"):
            asyncio.run(manager.save(2, {"x": 2}))
        parent.kill()
        parent.wait()
        asyncio.run(manager.save(2, {"x": 2}))  # the child lives, and waits for its input
        asyncio.run(manager.aclose())
        parent.stdin.close()


# --- what killed saves leave ------------------------------------------------------------------


def leave_behind(folder: Path, step: int) -> Path:
    left = folder / f"step-{step:010}"
    left.mkdir(parents=True)
    (left / "data-0001-000.safetensors").write_bytes(b"12345")
    return left


@pytest.mark.asyncio
async def test_the_first_save_removes_what_killed_saves_left(tmp_path: Path) -> None:
    left = leave_behind(tmp_path, 3)
    async with CheckpointManager(tmp_path) as manager:
        await manager.save(4, {"x": 1})
        assert not left.exists()
        later = leave_behind(tmp_path, 5)
        await manager.save(6, {"x": 1})
        assert later.exists()  # looked for once: every save would list all steps again
    assert manager.steps() == (4, 6)


@pytest.mark.asyncio
async def test_without_a_lock_that_keeps_others_out_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave_behind(tmp_path, 3)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    async with CheckpointManager(tmp_path) as manager:
        await manager.save(4, {"x": 1})
    assert left.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
async def test_where_the_file_system_has_no_locks_it_saves_all_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_fd: int, _flags: int) -> None:
        raise OSError(getattr(errno, name), "no locks here")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", flock)
    left = leave_behind(tmp_path, 3)
    async with CheckpointManager(tmp_path) as manager:
        await manager.save(4, {"x": 1})
        assert manager.steps() == (4,)
    assert left.exists()  # it may be that of another writer


@pytest.mark.asyncio
async def test_a_lock_that_cannot_be_taken_for_another_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_fd: int, _flags: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", flock)
    with pytest.raises(CheckpointError, match="broken"):
        await CheckpointManager(tmp_path).save(4, {"x": 1})


@pytest.mark.asyncio
async def test_files_of_others_are_left_alone_and_said(tmp_path: Path) -> None:
    left = leave_behind(tmp_path, 3)
    (left / "notes.txt").write_text("mine")
    async with CheckpointManager(tmp_path) as manager:
        with pytest.warns(RuntimeWarning, match="left in step-0000000003 .*notes.txt"):
            await manager.save(4, {"x": 1})
    assert len([*left.iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    """One that begins a save holds the turn of the manager, and is not in the child."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_IN_A_BEGIN, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout == "12\n", done.stderr
