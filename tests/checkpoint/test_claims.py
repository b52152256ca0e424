"""Claims: one listing tells what was saved last, and a second writer is seen."""

import asyncio
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import FsspecStorage, LocalStorage, Storage
from aioreplica.checkpoint._claims import Claim
from aioreplica.checkpoint._reading import read_known
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError

from .simulated_files import FaultyStorage, SimulatedFiles, SimulatedStorage

STORED = Path(__file__).parent / "stored"
pytestmark = pytest.mark.asyncio


class Calls(list[str]):
    """Calls that were made, in order."""

    def counts(self) -> Counter[str]:
        found = Counter(self)
        self.clear()
        return found


def watched(storage: Storage) -> tuple[Any, Calls]:
    faulty, calls = FaultyStorage(storage, OSError, None), Calls()
    faulty.calls = calls
    return faulty, calls


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    files = fsspec.filesystem("memory")
    for name in files.ls("/", detail=False):
        files.rm(name, recursive=True)


@pytest.fixture(params=["local", "fsspec"])
def storage(request: pytest.FixtureRequest, folder: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(folder)
    return FsspecStorage(f"memory://{folder.name}")


# --- one listing ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_latest_of_many_steps_takes_one_listing_and_one_open(storage: Storage) -> None:
    (file, calls), count = watched(storage), 60
    state = [ar.Variable(np.ones(3))]
    async with ar.CheckpointManager(file, max_to_keep=count) as manager:
        for step in range(count):
            await manager.save(step, state)
        assert len(manager.steps()) == count

        calls.clear()
        assert manager.latest() == count - 1
        assert calls.counts() == {"list": 1, "open": 1, "read": 1, "close": 1}

        await manager.save(count, state)  # removes step 0
        found = calls.counts()
        assert (found["list"], found["put_new"]) == (
            1 + 2 + 1,
            1,
        )  # its own folder twice, that of 0

        assert await ar.CheckpointManager(file).restore(state) == count
        found = calls.counts()
        assert found["list"] == 1
        assert found["open"] <= 3


# --- two writers ------------------------------------------------------------------------------


async def test_a_second_writer_is_seen_by_the_first_and_sees_nothing(tmp_path: Path) -> None:
    url, state = f"memory://{tmp_path.name}", {"x": 1}
    first, second = ar.CheckpointManager(url), ar.CheckpointManager(url)
    await first.save(1, state)
    await second.save(2, {"x": 2})  # as after a crash of the first one's machine

    said = rf"Step 3 was not saved .* claim-0000000002-0000000002 was made by process {os.getpid()}"
    for _ in range(2):  # it stays shut out
        with pytest.raises(CheckpointNotCommittedError, match=said):
            await first.save(3, state)
    assert first.steps() == (1, 2)
    await second.save(4, {"x": 4})
    assert await first.restore(state) == 4

    await first.aclose()  # as the text says
    await first.save(5, state)
    assert first.latest() == 5
    with pytest.raises(CheckpointNotCommittedError, match="another manager saves there"):
        await second.save(6, state)


@pytest.mark.parametrize("steps", [(7, 7), (7, 8)], ids=["the same step", "different steps"])
@pytest.mark.slow
async def test_of_two_saves_at_the_same_time_at_most_one_is_saved(steps: tuple[int, int]) -> None:
    """Every order of the calls of two writers that begin on the same directory."""
    ends: Counter[str] = Counter()

    async def main() -> None:
        files = SimulatedFiles()
        managers = [ar.CheckpointManager(SimulatedStorage(files)) for _ in range(2)]
        for manager in managers:
            manager._writer._take(manager._storage)
            manager._writer._known = read_known(manager._storage)
            manager._writer._fence = 0
        results = await asyncio.gather(
            *(m.save(s, {"by": i}) for i, (m, s) in enumerate(zip(managers, steps, strict=True))),
            return_exceptions=True,
        )
        failed = [each for each in results if each is not None]
        assert all(isinstance(each, CheckpointNotCommittedError) for each in failed), results
        assert failed, "Neither has seen the other one."
        saved = [s for s, each in zip(steps, results, strict=True) if each is None]
        assert list(ar.CheckpointManager(SimulatedStorage(files)).steps()) == saved
        ends[f"{len(saved)} saved"] += 1

    await asyncio.to_thread(lambda: art.explore(main, schedules=100).check())
    assert ends["1 saved"]


async def test_a_name_that_two_want_is_given_to_one(storage: Storage) -> None:
    storage.make_folder("")
    storage.put_new("claim", b"first")
    with pytest.raises(FileExistsError):
        storage.put_new("claim", b"second")
    assert storage.list("") == ["claim"]


async def test_a_store_that_cannot_create_exclusively_looks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FsspecStorage(f"memory://{tmp_path.name}")
    put = storage._files.pipe_file

    def refuses_modes(path: str, data: bytes) -> None:
        put(path, data)

    monkeypatch.setattr(storage._files, "pipe_file", refuses_modes)
    await test_a_name_that_two_want_is_given_to_one(storage)


async def test_a_claim_whose_answer_was_lost_is_its_own() -> None:
    files = SimulatedFiles()
    storage = SimulatedStorage(files)
    put = storage.put_new

    def put_twice(path: str, data: bytes) -> None:
        put(path, data)
        put(path, data)  # as a client that tries again by itself

    storage.put_new = put_twice
    await ar.CheckpointManager(storage).save(1, {"x": 1})
    assert ar.CheckpointManager(storage).latest() == 1


async def test_a_failure_of_a_claim_does_not_remove_that_of_another_writer() -> None:
    files = SimulatedFiles()
    storage = SimulatedStorage(files)
    put = storage.put_new

    def put_late(path: str, data: bytes) -> None:
        put(path, b"somebody else's")
        raise TimeoutError(errno.ETIMEDOUT, "Timed out")

    manager = ar.CheckpointManager(storage)
    storage.put_new = put_late
    with pytest.raises(CheckpointNotCommittedError, match="Timed out"):
        await manager.save(1, {"x": 1})
    assert Claim(1, 1).name in files.root.names


# --- the order --------------------------------------------------------------------------------


async def test_a_save_that_was_ended_behind_its_claim_is_not_the_latest(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            await manager.save(step, {"x": step})
    for claim in (Claim(3, 1), Claim(4, 7), Claim(5, 9)):  # of a step that is there, and new ones
        (tmp_path / claim.name).touch()
    (tmp_path / "step-0000000009").mkdir()

    state = {"x": 0}
    async with ar.CheckpointManager(tmp_path, max_to_keep=2) as manager:
        assert manager.latest() == 2
        assert (await manager.restore(state), state) == (2, {"x": 2})
        await manager.save(4, {"x": 4})
        assert manager.steps() == (2, 4)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        ".lock", "step-0000000002", "step-0000000004", Claim(2, 2).name, Claim(6, 4).name
    }  # fmt: skip


async def test_folders_without_claims_are_read_as_before(tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    async with ar.CheckpointManager(tmp_path, max_to_keep=2) as manager:
        assert manager.latest() == 4
        await manager.save(2, {"x": 2})
        assert manager.latest() == 2
        assert manager.steps() == (2, 4)
        await manager.save(3, {"x": 3})
        assert manager.steps() == (2, 3)
        for name in {each.name for each in tmp_path.glob("claim-*")}:  # somebody has removed them
            (tmp_path / name).unlink()
        assert manager.latest() == 3
        with pytest.raises(CheckpointError, match=f"{Claim(3, 3).name} is missing"):
            await manager.verify(3)
        await manager.save(1, {"x": 1})
        assert manager.steps() == (1, 3)


def naive_order(folder: Path) -> list[int]:
    """Return the steps by the sequences in their manifests alone."""
    manager = ar.CheckpointManager(folder)
    return sorted(manager.steps(), key=lambda s: sequence_of(folder, s), reverse=True)


def sequence_of(folder: Path, step: int) -> int:
    from aioreplica.checkpoint._reading import read_manifest

    return read_manifest(LocalStorage(folder), step).sequence


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_the_order_is_that_of_the_manifests_whatever_became_of_claims(
    seed: int, folder: Path
) -> None:
    rng = Random(seed)
    for _ in range(12):
        async with ar.CheckpointManager(folder, max_to_keep=rng.choice([3, None])) as manager:
            for _ in range(rng.randint(1, 4)):
                await manager.save(rng.randint(1, 9), {"x": rng.random()})
        for step in range(1, 10):  # as a release without claims would leave it
            for path in folder.glob(f"claim-*-{step:010d}") if rng.random() < 0.2 else ():
                path.unlink()
        if rng.random() < 0.5:  # a save that was ended
            newest = read_known(LocalStorage(folder)).newest
            (folder / Claim(newest + 1, rng.randint(1, 9)).name).touch()
        if rng.random() < 0.3:
            (folder / f"step-{rng.randint(1, 9):010d}").mkdir(exist_ok=True)
        expected = naive_order(folder)
        assert [*read_known(LocalStorage(folder)).steps] == expected
        assert ar.CheckpointManager(folder).latest() == (expected or [None])[0]


# --- pins -------------------------------------------------------------------------------------


async def test_a_damaged_folder_without_a_claim_is_older_than_the_next_larger_step(
    tmp_path: Path,
) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(3, {"value": 3})
    (tmp_path / "step-0000000003").rename(tmp_path / "step-0000000009")  # its manifest says 3

    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(20, {"value": 20})

        assert await manager.restore(state := {"value": 0}) == 20  # and nothing is warned of
        assert state == {"value": 20}
        assert manager.latest() == 20


async def test_a_pinned_step_stays_until_it_is_unpinned(storage: Storage) -> None:
    async with ar.CheckpointManager(storage, max_to_keep=2) as manager:
        for step in range(1, 4):
            await manager.save(step, {"x": step})
        await manager.pin(2)
        await manager.pin(2)  # it has it already
        for step in (4, 5, 6):
            await manager.save(step, {"x": step}, wait=step == 6)
        assert manager.steps() == (2, 5, 6)
        assert manager.pinned() == (2,)

    async with ar.CheckpointManager(storage, max_to_keep=2) as manager:  # pins stay
        await manager.save(7, {"x": 7})
        assert manager.steps() == (2, 6, 7)
        await manager.unpin(2)
        await manager.unpin(2)
        assert manager.pinned() == ()
        assert manager.steps() == (2, 6, 7)
        await manager.save(8, {"x": 8})
        assert manager.steps() == (7, 8)


async def test_a_step_that_is_not_there_cannot_be_pinned(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match="There is no step 3 to pin"):
            await manager.pin(3)
        assert manager.pinned() == ()


async def test_a_pin_waits_for_the_save_that_would_remove_its_step() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        async with ar.CheckpointManager(SimulatedStorage(files), max_to_keep=1) as manager:
            await manager.save(1, {"x": 1})
            await manager.save(2, {"x": 2}, wait=False)
            with suppress(CheckpointError):
                await manager.pin(1)
            await manager.save(3, {"x": 3})
            assert set(manager.pinned()) <= set(manager.steps())

    await asyncio.to_thread(lambda: art.explore(main, schedules=30).check())


@pytest.mark.parametrize("call", ["pin", "unpin"])
async def test_a_pin_that_cannot_be_written_is_an_error(call: str) -> None:
    files = SimulatedFiles()
    await ar.CheckpointManager(SimulatedStorage(files)).save(1, {"x": 1})

    def denied() -> OSError:
        return PermissionError(errno.EACCES, "Permission denied")

    broken: Callable[[int], Any] = getattr(
        ar.CheckpointManager(FaultyStorage(SimulatedStorage(files), denied, 0)), call
    )
    with pytest.raises(CheckpointError, match=r"pinned: .*Permission denied.* Try again"):
        await broken(1)


async def test_cli_shows_pins_and_removes_stale_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    from aioreplica.cli import main

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as end:
            main(["ckpt", *map(str, arguments)])
        assert end.value.code == 0
        return capsys.readouterr().out

    async with ar.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            await manager.save(step, {"x": step})
        await manager.pin(1)
    (tmp_path / Claim(3, 7).name).touch()

    assert [line.split("\t")[-1] for line in run("ls", tmp_path).splitlines()] == [
        "whole, pinned", "latest"
    ]  # fmt: skip
    assert run("gc", tmp_path) == f"{Claim(3, 7).name}\t\tremoved\n"
    await asyncio.to_thread(run, "verify", tmp_path)
    run("rm", tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "step-0000000002", Claim(2, 2).name
    }  # fmt: skip
