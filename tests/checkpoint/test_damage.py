"""Bad files: every flipped byte is found, and what is forged is refused before it does harm."""

import json
import os
import pickle
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError

pytestmark = pytest.mark.asyncio

OLD, NEW = "step-0000000001", "step-0000000002"


def new_state(value: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "w": ar.Variable([value, 1.0]),
        "n": ar.Variable(int(value)),
        "epoch": value,
        "rng": rng,
    }


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> Path:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, new_state(1.0))
        await manager.save(2, new_state(2.0))
    return tmp_path


def value_of(state: dict[str, Any]) -> float:
    [value] = {float(state["w"].value[0]), float(state["n"].value), state["epoch"]}
    return float(value)


async def falls_back(folder: Path, said: str) -> None:
    """Check that a restore takes the older step and says why, naming both."""
    state = new_state(-1.0)
    with pytest.warns(RuntimeWarning, match=f"Restored step 1 .*step 2 .*{said}"):
        assert await ar.CheckpointManager(folder).restore(state) == 1
    assert value_of(state) == 1.0
    with pytest.raises(CheckpointError, match="step 2"):
        await ar.CheckpointManager(folder).restore(state, 2)


@pytest.mark.xslow
async def test_every_flipped_byte_is_found(folder: Path) -> None:
    manager = ar.CheckpointManager(folder)
    count = 0
    for path in sorted((folder / NEW).iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match=f"Step 2 .*{path.name}"):
                await manager.verify(2)
            state = new_state(-1.0)
            with pytest.warns(RuntimeWarning, match="Restored step 1 .*step 2"):
                await manager.restore(state)
            assert value_of(state) == 1.0
            count += 1
        path.write_bytes(data)
    assert count > 300
    assert await manager.restore(new_state(0.0)) == 2


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write another manifest, whose checksum is right."""
    path = folder / NEW / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    manifest = change(manifest) or manifest
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


def set_in(*way: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = way

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        for name in path:
            node = node[name]
        node[last] = value

    return change


FORGED = {
    "name above": (
        set_in("files", 0, "name", f"../{OLD}/data-0001-000.safetensors"),
        "not the name",
    ),
    "absolute name": (set_in("files", 0, "name", "/etc/passwd"), "not the name of a data file"),
    "device": (set_in("files", 0, "name", "/dev/zero"), "not the name of a data file"),
    "other file": (set_in("files", 0, "name", "data-0009-000.safetensors"), "cannot be read"),
    "more bytes": (set_in("files", 0, "bytes", 2**50), "has [0-9]+ bytes, not"),
    "huge header": (set_in("files", 0, "header_bytes", 2**40), "cannot be in data-0001-000"),
    "huge tensor": (set_in("entries", "w", "shape", [2**40, 2**40]), "where they cannot be"),
    "tensor outside": (set_in("entries", "w", "tensors", 0, 1, 2**40), "where they cannot be"),
    "tensor in the header": (set_in("entries", "w", "tensors", 0, 1, 0), "where they cannot be"),
    "no such file": (set_in("entries", "w", "tensors", 0, 0, 7), "where they cannot be"),
    "negative size": (set_in("entries", "w", "shape", [-2]), "not a natural number"),
    "object dtype": (set_in("entries", "w", "dtype", "object"), "an array cannot have shape"),
    "many dimensions": (set_in("entries", "w", "shape", [1] * 100), "an array cannot have shape"),
    "kind": (set_in("entries", "w", "kind", "pickle"), "kind 'pickle' is unknown"),
    "a list": (lambda manifest: [manifest], "is not a manifest"),
    "other step": (set_in("step", 9), "is that of step 9"),
    "deep": (set_in("files", None), "is not a manifest"),
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_manifest_is_damage(name: str, folder: Path) -> None:
    change, said = FORGED[name]
    forge(folder, change)
    await falls_back(folder, said)


@pytest.mark.xslow
async def test_a_million_tensors_without_records_are_damage(folder: Path) -> None:
    def many(manifest: dict[str, Any]) -> None:
        entry = manifest["entries"]["w"]
        entry["tensors"] = [[]] * 1_000_000

    forge(folder, many)
    await falls_back(folder, "is not a manifest")


async def test_another_version_is_said_and_nothing_else_restored(folder: Path) -> None:
    forge(folder, set_in("version", 4))
    with pytest.raises(CheckpointError, match=r"step 2 has version 4 of .*reads up to version 3"):
        await ar.CheckpointManager(folder).restore(new_state(0.0))


def overwrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated manifest": (lambda new: os.truncate(new / "manifest.json", 100), "checksum"),
    "empty manifest": (lambda new: os.truncate(new / "manifest.json", 0), "checksum"),
    "deep manifest": (lambda new: overwrite(new / "manifest.json", b"[" * 10**5), "checksum"),
    "pickle": (lambda new: overwrite(new / "manifest.json", pickle.dumps([1])), "checksum"),
    "truncated data": (lambda new: os.truncate(data_of(new), 10), "has 10 bytes"),
    "no data": (lambda new: data_of(new).unlink(), "cannot be read"),
    "link to data": (lambda new: link(data_of(new)), "cannot be read"),
    "link to manifest": (lambda new: link(new / "manifest.json"), "cannot be read"),
    "pipe": (lambda new: pipe(data_of(new)), "cannot be read"),
    "folder": (lambda new: (data_of(new).unlink(), data_of_name(new).mkdir()), "cannot be read"),
}


def data_of(new: Path) -> Path:
    [path] = new.glob("data-*")
    return path


def data_of_name(new: Path) -> Path:
    return new / "data-0001-000.safetensors"


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_entry_of_a_step_is_damage(name: str, folder: Path) -> None:
    plant, said = PLANTED[name]
    plant(folder / NEW)
    await falls_back(folder, said)


async def test_a_link_to_a_step_is_not_listed(folder: Path) -> None:
    (folder / NEW).rename(folder / "elsewhere")
    (folder / NEW).symlink_to(folder / "elsewhere")
    manager = ar.CheckpointManager(folder)
    assert manager.steps() == (1,)
    with pytest.raises(CheckpointNotCommittedError, match="Not a directory"):
        await manager.save(2, new_state(3.0))
    assert value_of_file(folder / "elsewhere") == 2.0


def value_of_file(folder: Path) -> float:
    manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    return float(manifest["entries"]["epoch"]["value"])


async def test_all_steps_damaged(folder: Path) -> None:
    for step in (OLD, NEW):
        os.truncate(folder / step / "manifest.json", 5)
    manager = ar.CheckpointManager(folder)
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match=r"No step in .* step 2: .*; step 1: .* checksum"):
        await manager.restore(new_state(0.0))


async def test_after_a_damaged_step_the_next_save_is_the_newest(folder: Path) -> None:
    data = data_of(folder / NEW)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    async with ar.CheckpointManager(folder, max_to_keep=2) as manager:
        with pytest.warns(RuntimeWarning, match="Restored step 1"):
            await manager.restore(new_state(0.0))
        await manager.save(2, new_state(4.0))  # in the place of the damaged one
        state = new_state(0.0)
        assert await manager.restore(state) == 2
        assert value_of(state) == 4.0


async def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(CheckpointNotCommittedError, match=r"Step 1 was not saved.*directory"):
        await ar.CheckpointManager(path).save(1, new_state(1.0))
    assert path.read_text() == "x"


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="root may write everywhere")
async def test_a_directory_that_is_not_writable() -> None:
    """Not even for root, who may write where others must not."""
    manager = ar.CheckpointManager("/sys/kernel/aioreplica")
    with pytest.raises(CheckpointNotCommittedError, match=r"Step 1 was not saved in /sys/kernel/"):
        await manager.save(1, new_state(1.0))
    await manager.save(2, new_state(1.0), wait=False)
    with pytest.raises(CheckpointNotCommittedError, match="Step 2 was not saved"):
        await manager.wait()


async def test_a_full_quota_leaves_the_old_step(folder: Path) -> None:
    """A real limit of the kernel: files may not grow above some KiB."""
    manager = ar.CheckpointManager(folder)
    state = new_state(2.0) | {"large": ar.Variable(np.zeros(100_000))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with pytest.raises(CheckpointNotCommittedError, match=r"Step 3 was not saved.*too large"):
            await manager.save(3, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.steps() == (1, 2)
    assert not (folder / "step-0000000003").exists()
    await manager.save(3, state)
    assert manager.latest() == 3
