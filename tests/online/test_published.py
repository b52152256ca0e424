"""Snapshots for other processes: each read is one version, whatever is published meanwhile."""

import asyncio
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioreplica import testing as art
from aioreplica.errors import CheckpointError
from aioreplica.online import PublishedSnapshot, SnapshotReader, publish_snapshot
from aioreplica.online import _published as published
from tests.growth import assert_nothing_grows

from .program import Counting, example

READER = """
import sys, time
from aioreplica.online import SnapshotReader
reads, versions, newest = 0, set(), -1
with SnapshotReader(sys.argv[1]) as reader:
    print("reading", flush=True)
    while newest < int(sys.argv[2]):
        snapshot = reader.read()
        held = {name: array for name, array in snapshot.items()}
        for name, array in held.items():
            assert (array == snapshot.version % 127).all(), (name, snapshot.version)
        assert snapshot.version >= newest, (snapshot.version, newest)
        newest = snapshot.version
        versions.add(newest)
        reads += 1
print(reads, len(versions))
"""


@pytest.mark.xslow
def test_readers_in_other_processes_see_whole_versions(folder: Path) -> None:
    path, last = folder / "model", 200

    def publish(version: int) -> None:
        shapes = {"a": (300, 40), "b": (7,), "c": (), "d": (0, 3), "e": (999,)}
        arrays = {
            name: np.full(shape, version % 127, dtype)
            for (name, shape), dtype in zip(
                shapes.items(), (np.float64, np.int8, np.float32, np.int64, np.uint16), strict=True
            )
        }
        publish_snapshot(path, version, arrays)

    publish(0)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(path), str(last)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        for version in range(1, last + 1):
            publish(version)
        for reader in readers:
            assert reader.stdout is not None
            reads, versions = map(int, reader.stdout.read().split())
            assert reader.wait(60) == 0
            assert reads >= versions >= 1
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert [each.name for each in folder.iterdir()] == ["model"]


@settings(max_examples=25)
@given(
    arrays=st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(
            st.sampled_from([np.bool_, np.int8, np.uint16, np.float16, np.float64, np.complex64]),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=5,
    )
)
def test_arrays_come_back_as_they_were(arrays: dict[str, np.ndarray]) -> None:
    with tempfile.TemporaryDirectory() as made:
        publish_snapshot(f"{made}/model", 5, arrays)
        with SnapshotReader(f"{made}/model") as reader:
            found = reader.read()
            assert found.version == 5
            assert found.keys() == arrays.keys()
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype
                assert found[name].shape == array.shape
                assert found[name].tobytes() == array.tobytes()
                assert not found[name].flags.writeable
                assert found[name].flags.aligned


def test_a_snapshot_that_is_held_stays_as_it_is(folder: Path) -> None:
    path = folder / "model"
    with SnapshotReader(path) as reader:
        assert not reader.is_published
        with pytest.raises(FileNotFoundError):
            reader.read()
        publish_snapshot(path, 1, {"w": np.arange(1000.0)})
        first = reader.read()
        assert reader.read() is first
        for version in range(2, 30):
            publish_snapshot(path, version, {"w": np.full(1000, float(version))})
            assert reader.read().version == version
        path.unlink()
        assert np.array_equal(first["w"], np.arange(1000.0))
    assert np.array_equal(first["w"], np.arange(1000.0))


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_reader_holds_one_version_however_many_it_has_read(folder: Path) -> None:
    with SnapshotReader(folder / "model") as reader:

        async def read(number: int) -> None:
            publish_snapshot(folder / "model", number, {"w": np.ones(3)})
            assert reader.read().version == number

        await assert_nothing_grows(read, folder)


def test_a_damaged_file_is_refused_at_every_byte(folder: Path) -> None:
    path = folder / "model"
    publish_snapshot(path, 1, {"w": np.arange(4.0), "b": np.ones(3, np.int8)})
    whole = path.read_bytes()
    for damaged in (b"", b"x", whole[:-1], whole[:100], bytes(len(whole)), b"\xff" * 8 + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a published snapshot, or was damaged"):
            SnapshotReader(path).read()
    begin = len(whole) - 35
    for place in range(begin, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="checksum"):
            SnapshotReader(path).read()


def test_a_reader_goes_on_with_the_version_it_holds_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = folder / "model", time.time() + 1000.0
    publish_snapshot(path, 1, {"w": np.arange(4.0)})
    with SnapshotReader(path, max_age_s=2000.0) as reader:
        assert not reader.is_current
        assert reader.age_s == math.inf
        first = reader.read()
        assert reader.is_current
        monkeypatch.setattr(published, "time", lambda: now)
        assert first.age_s == pytest.approx(1000.0, abs=60.0)
        assert reader.age_s == pytest.approx(1000.0, abs=60.0)
        for number, broken in enumerate((b"", b"damaged", None)):
            other = folder / f"other {number}"
            if broken is None:
                path.unlink()
            else:
                other.write_bytes(broken)
                other.replace(path)
            for _ in range(3):
                assert reader.read() is first
            assert ("No such file" if broken is None else "damaged by a crash") in reader.error
        now += 1500.0
        assert reader.age_s == pytest.approx(2500.0, abs=60.0)
        assert not reader.is_current
        assert first["w"].sum() == 6.0
        publish_snapshot(path, 2, {"w": np.ones(4)})
        assert (reader.read().version, reader.error) == (2, "")


def test_a_damaged_file_is_read_once_and_not_at_each_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    load = published._load

    def counted(*args: Any) -> Any:
        loads.append(1)
        return load(*args)

    monkeypatch.setattr(published, "_load", counted)
    path = folder / "model"
    publish_snapshot(path, 1, {"w": np.ones(2)})
    with SnapshotReader(path) as reader:
        reader.read()
        (folder / "bad").write_bytes(b"bad")
        (folder / "bad").replace(path)
        for _ in range(5):
            assert reader.read().version == 1
    assert len(loads) == 2


OVERWRITING = """
import sys
import numpy as np
from aioreplica.online import SnapshotReader, publish_snapshot
path = sys.argv[1]
publish_snapshot(path, 1, {"w": np.ones(100_000)})
with SnapshotReader(path) as reader:
    assert reader.read()["w"].sum() == 100_000
    whole = open(path, "rb").read()
    open(path, "wb").write(whole[:5000])  # in place: reading what is mapped behind it kills
    try:
        reader.read()["w"].sum()
    except OSError as error:
        print(error)
    open(path, "wb").write(whole)
    print(reader.read()["w"].sum())
"""


@pytest.mark.xslow
def test_a_file_that_is_written_over_in_place_kills_no_reader(folder: Path) -> None:
    program = [sys.executable, "-c", OVERWRITING, str(folder / "model")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "was damaged by a crash" in done.stdout
    assert done.stdout.endswith("100000.0\n")


def test_a_sign_of_life_changes_neither_the_file_nor_when_it_was_written(folder: Path) -> None:
    path = folder / "model"
    publish_snapshot(path, 1, {"w": np.ones(2)})
    before = path.stat()
    with SnapshotReader(path) as reader:
        first = reader.read()
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # it has the resolution of a tick
            published.touch_snapshot(path)
        after = path.stat()
        assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
        assert reader.read() is first


def test_a_learner_without_news_gives_signs_of_life_and_writes_a_lost_file_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Path] = []

    def touch(path: Path) -> None:
        touched.append(path)
        published.touch_snapshot(path)

    async def main() -> None:
        path = folder / "published"
        async with Counting(publish_to=path) as program:
            await (await program.learner.submit(example(0)))
            await asyncio.sleep(21.0)
            assert touched == [path] * 4
            path.unlink()
            await asyncio.sleep(20.0)
            with SnapshotReader(path) as reader:
                assert reader.read().version == program.learner.version
            assert program.learner.statistics().publish_error == ""

    monkeypatch.setattr("aioreplica.online._publishing.touch_snapshot", touch)
    art.run(main)


@pytest.mark.asyncio
async def test_a_learner_publishes_what_it_has_learned(folder: Path) -> None:
    path = folder / "published"
    async with Counting(folder, publish_to=path) as program:
        with SnapshotReader(path) as reader:
            assert reader.read().version == 0  # before the first example
            assert set(reader.read()) == {"counts", "sums", "weight"}
            await (await program.learner.submit(example(3)))
            while reader.read().version == 0:
                await asyncio.sleep(0.001)
            assert reader.read()["counts"][3] == 1
        await program.learner.submit_many([example(i) for i in range(9)])
    with SnapshotReader(path) as reader:  # the last version is there after closing
        assert reader.read().version == program.learner.version
        assert np.array_equal(reader.read()["counts"], program.counts.value)
    with pytest.raises(FileNotFoundError):
        async with Counting(folder, publish_to=folder / "missing" / "published"):
            pass
    async with Counting(folder):  # the journal was given back
        pass


def test_a_snapshot_that_could_not_be_published_is_written_later_without_another_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries: list[int] = []

    def full(*_: object, **__: object) -> None:
        num_tries.append(1)
        raise OSError(28, "No space left on device")

    async def main() -> None:
        path = folder / "published"
        async with Counting(publish_to=path) as program:
            learner = program.learner
            with monkeypatch.context() as patch:
                patch.setattr("aioreplica.online._publishing.publish_snapshot", full)
                await (await learner.submit(example(0)))
                await asyncio.sleep(10.0)
                assert "No space" in learner.statistics().publish_error
                assert len(num_tries) == 5  # after 0, 0.5, 1.5, 3.5 and 7.5 s
            await asyncio.sleep(10.0)
            assert learner.statistics().publish_error == ""
            with SnapshotReader(path) as reader:
                assert reader.read().version == learner.version == 1

    art.run(main)


def test_threads_share_a_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are read on a thread while the loop predicts: neither closes what the other opens."""
    path = folder / "model"
    publish_snapshot(path, 1, {"w": np.ones(3)})
    load, pool = published._load, ThreadPoolExecutor(1)
    others: list[Future[PublishedSnapshot]] = []

    def overtaken(*args: Any) -> Any:
        found = load(*args)
        if not others:  # another thread reads while this one is between mapping and keeping
            others.append(pool.submit(reader.read))
            wait(others, 0.1)
        return found

    monkeypatch.setattr(published, "_load", overtaken)
    with pool, SnapshotReader(path) as reader:
        num_open = len([*Path("/proc/self/fd").iterdir()])
        assert reader.read() is others[0].result(30)
        assert len([*Path("/proc/self/fd").iterdir()]) == num_open + 2  # the file, and its mapping


def test_the_name_that_the_format_keeps_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'__metadata__'"):
        publish_snapshot(folder / "model", 1, {"__metadata__": np.ones(1)})
    assert not [*folder.iterdir()]


def test_a_snapshot_that_an_older_version_has_published(tmp_path: Path) -> None:
    """Readers and learners may be of different versions, in both directions."""
    stored = Path(__file__).parent / "stored" / "snapshot"
    arrays = {
        "w": np.arange(4, dtype=np.float32), "n": np.array(7), "b": np.ones((2, 2), np.bool_)
    }  # fmt: skip
    with SnapshotReader(stored) as reader:
        snapshot = reader.read()
    assert snapshot.version == 12
    assert repr(dict(snapshot)) == repr({name: arrays[name] for name in snapshot})

    publish_snapshot(tmp_path / "snapshot", 12, arrays)
    assert (tmp_path / "snapshot").read_bytes() == stored.read_bytes()
