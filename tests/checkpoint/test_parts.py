"""One tensor of a step, or a part of it, is read without the rest, and checked."""

import json
import os
import shutil
import zlib
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage
from aioreplica.checkpoint._format import CHUNK_BYTES, TensorRecord
from aioreplica.checkpoint._parts import parts_of
from aioreplica.errors import CheckpointError

from .simulated_files import FaultyStorage

STORED = Path(__file__).parent / "stored"
pytestmark = pytest.mark.asyncio


def random_index(rng: Random, shape: tuple[int, ...]) -> Any:
    """Return an index of any kind that NumPy takes without a copy, and `read` too."""
    items: list[Any] = []
    for size in shape[: rng.randint(0, len(shape))]:
        if size and rng.random() < 0.3:
            items.append(rng.randrange(-size, size))
        else:
            step = rng.choice([None, 1, 2, 7, -1, -3])
            ends = [rng.choice([None, rng.randint(-size - 2, size + 2)]) for _ in range(2)]
            items.append(slice(*ends, step))
    if rng.random() < 0.3:
        items.insert(rng.randint(0, len(items)), Ellipsis)
        while len([i for i in items if i is not Ellipsis]) > len(shape):
            items.pop()
    return items[0] if len(items) == 1 and rng.random() < 0.5 else tuple(items)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_format", "_writing", "_parts", "_tensors"):
        monkeypatch.setattr(f"aioreplica.checkpoint.{module}.CHUNK_BYTES", 96)
    monkeypatch.setattr("aioreplica.checkpoint._writing.BLOCK_BYTES", 40)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("order", ["C", "F", "swapped"])
async def test_every_part_is_what_numpy_takes_of_the_whole(order: str, tmp_path: Path) -> None:
    rng, random = Random(order), np.random.default_rng(0)
    shapes = [(), (0,), (1,), (200,), (30, 7), (3, 0, 2), (4, 5, 6), (2, 3, 100), (50, 1, 3)]
    state: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        array = random.integers(0, 100, shape).astype(rng.choice(["f8", "i2", "c16", "f4"]))
        if order == "F":
            array = np.asfortranarray(array)
        state[str(number)] = (
            array.astype(array.dtype.newbyteorder(">")) if order[0] == "s" else array
        )
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, state)
        await manager.verify(1)
        for key, array in state.items():
            whole = await manager.read(1, key)
            assert (whole.tolist(), whole.dtype) == (array.tolist(), array.dtype.newbyteorder("="))
            assert whole.flags.writeable
            for _ in range(40):
                index = random_index(rng, array.shape)
                try:
                    expected = array[index]
                except IndexError:  # the ellipsis has moved it to a shorter axis
                    with pytest.raises(IndexError):
                        await manager.read(1, key, index)
                    continue
                found = await manager.read(1, key, index)
                assert found.shape == expected.shape, index
                assert found.tolist() == expected.tolist(), index


async def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    read: list[int] = []

    class Counting(FaultyStorage):
        def open(self, path: str) -> Any:
            source = super().open(path)
            into = source.read_into
            source.read_into = lambda at, part: (read.append(len(part)), into(at, part))[1]
            return source

    large = np.arange(4 * 2**20, dtype=np.float32).reshape(1024, 4096)
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"large": large, "other": np.ones(2**20)})
    manager = ar.CheckpointManager(Counting(LocalStorage(tmp_path), OSError, None))
    found = await manager.read(1, "large", np.s_[10:12, 5])
    assert found.tolist() == [10 * 4096 + 5, 11 * 4096 + 5]
    assert sum(read) < 2 * CHUNK_BYTES + 20_000


async def test_what_a_reader_sees_of_variables_and_plain_data(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    with pair.scope():
        w = ar.Variable(np.arange(6.0).reshape(2, 3))
        hits = ar.Variable(np.zeros(2), synchronization="on_read", aggregation="sum")

    async def step() -> None:
        await hits.assign_add([1.0, 2.0])

    await pair.run(step)
    history = {"losses": [0.5, 0.25], "best": np.arange(3), "shape": (1, 2)}
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"model": [w, hits], "history": [1, "a"], "kept": Keeper(history)})
        assert (await manager.read(1, "model/0", (1, ...))).tolist() == [3.0, 4.0, 5.0]
        assert (await manager.read(1, "model/1")).tolist() == [2.0, 4.0]
        assert (await manager.read(1, "model/1", 1)).tolist() == 4.0
        assert await manager.read(1, "history") == [1, "a"]
        assert repr(await manager.read(1, "kept")) == repr(history)


class Keeper:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


async def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(3, {"a": np.ones((2, 3)), "b": 1})
        with pytest.raises(CheckpointError, match=r"no step 4 to restore in .* It has 3\."):
            await manager.read(4, "a")
        with pytest.raises(CheckpointError, match=r"no entry 'c'\. It has 'a', 'b'\."):
            await manager.read(3, "c")
        with pytest.raises(TypeError, match="'b' is plain data, which has no parts"):
            await manager.read(3, "b", 0)
        for index in (2, (0, -4), (0, 0, 0)):
            with pytest.raises(IndexError):
                await manager.read(3, "a", index)
        for wrong in ([0], None, np.array([0]), True, 0.5):
            with pytest.raises(TypeError, match="named by integers, slices"):
                await manager.read(3, "a", (wrong,))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("marked", [True, False], ids=["version 2", "version 1"])
async def test_a_part_with_a_wrong_byte_is_an_error(
    marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not marked:
        monkeypatch.setattr(
            "aioreplica.checkpoint._writing.TensorRecord", lambda *parts: TensorRecord(*parts[:4])
        )
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"a": np.arange(100.0)})
    [path] = tmp_path.glob("step-*/data-*")
    data = bytearray(path.read_bytes())
    data[-8 * 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"Step 1 in .* is damaged: .*'a#?0?' in .* checksum"):
        await manager.read(1, "a", np.s_[48:52])
    if marked:  # the rest of it is as good as ever
        assert (await manager.read(1, "a", np.s_[:12])).tolist() == [*range(12)]
    else:
        with pytest.raises(CheckpointError, match="checksum"):
            await manager.read(1, "a", np.s_[:12])


async def test_a_step_of_an_older_version_is_read(tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    manager = ar.CheckpointManager(tmp_path)
    assert (await manager.read(4, "array", (slice(None), 0))).tolist() == [1, 3]
    assert (await manager.read(4, "model/0")).dtype == np.float32


# --- the limits -------------------------------------------------------------------------------


async def test_a_file_with_holes_that_claims_a_tebibyte_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"kept": Keeper(np.arange(4, dtype=np.uint8))})
    [path], [file] = tmp_path.glob("step-*/manifest.json"), tmp_path.glob("step-*/data-*")
    body: Any = json.loads(path.read_bytes())["manifest"]
    entry, grown = body["entries"]["kept"], 2**40
    entry["forms"], entry["tensors"][0][2] = [[[grown], "uint8"]], grown
    entry["tensors"][0][4:] = []
    body["files"][0]["bytes"] += grown - 4
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32":"%08x","manifest":%s}\n' % (zlib.crc32(text), text))
    try:
        os.truncate(file, body["files"][0]["bytes"])
    except OSError:
        pytest.skip("this file system has no files of 1 TiB")

    said = (
        r"has 1,099,511,627,776 bytes of tensors to be read, but this machine has .*manager\.read"
    )
    state = {"kept": Keeper("as it was")}
    with pytest.raises(CheckpointError, match=said):
        await manager.restore(state)
    assert state["kept"].state == "as it was"
    with pytest.raises(CheckpointError, match=said):
        await manager.read(1, "kept")


async def test_many_entries_are_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.checkpoint._writing.FILE_TENSORS", 100)
    state = {str(i): np.full(i % 3, i) for i in range(950)}
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, state)
        await manager.verify(1)
        restored = {key: np.zeros_like(array) for key, array in state.items()}
        assert await manager.restore(restored) == 1
    assert all(restored[key].tolist() == state[key].tolist() for key in state)
    assert len([*tmp_path.glob("step-*/data-*")]) == 10


async def test_names_that_do_not_fit_a_header_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.checkpoint._writing.MAX_HEADER_BYTES", 5000)
    async with ar.CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"names of its tensors have \d+ bytes"):
            await manager.save(1, {"k" * 5000: np.ones(2)})
        assert manager.steps() == ()


FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8")]


@pytest.mark.parametrize("name", FLOAT8)
async def test_float8(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = np.array([0.5, 1.0, 2.0, 4.0]).astype(dtype)
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"a": values, "kept": Keeper([values[:2]])})
        state = {"a": np.ones(4, dtype), "kept": Keeper(None)}
        await manager.restore(state)
        part = await manager.read(1, "a", np.s_[1:3])
    for found, expected in ((state["a"], values), (state["kept"].state[0], values[:2])):
        assert (found.dtype, found.tobytes()) == (dtype, expected.tobytes())
    assert (part.dtype, part.tobytes()) == (dtype, values[1:3].tobytes())
    safetensors = pytest.importorskip("safetensors")
    [path] = tmp_path.glob("step-*/data-*")
    with safetensors.safe_open(path, "numpy") as file:
        assert file.get_slice("a").get_shape() == [4]


async def test_parts_name_ranges() -> None:
    assert parts_of((5, 4), (..., -1)) == ([range(5), range(3, 4)], (5,))
    assert parts_of((5,), slice(None, None, -2)) == ([range(4, -1, -2)], (3,))
