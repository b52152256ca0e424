"""`trace`: the file says what happened, the picture is drawn, another file is refused."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cli import main
from aioreplica.cli._trace import _draw, read_trace
from aioreplica.telemetry._trace import Slice, Timeline
from tests.telemetry.timelines import read_chrome

pytest.importorskip("typer")

Run = Callable[..., tuple[int, str, str]]


async def traced(folder: Path) -> None:
    async def step() -> None:
        ctx = ar.get_replica_context()
        await ctx.run_on_device(np.sum, np.ones(4))
        ctx.record("loss", 0.5)
        await ctx.all_reduce("sum", 1.0)

    async def fails() -> None:
        raise ValueError("no")

    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        strategy.trace(folder / "run.json"),
    ):
        for _ in range(3):
            await strategy.run(step)
        with pytest.raises(ValueError, match="no"):
            await strategy.run(fails)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("traces")
    asyncio.run(traced(made))
    return made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["trace", *map(str, arguments)])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def test_reading_agrees_with_other_readers(folder: Path) -> None:
    found, expected = read_trace(folder / "run.json"), read_chrome(folder / "run.json")

    assert (found.worker, found.pid) == expected.process
    assert list(found.tracks) == expected.tracks
    for first, second in zip(found.slices, expected.slices, strict=True):
        assert (first.track, first.name, first.category) == second[:3]
    assert [each.value for each in found.samples] == [value for _, value in expected.samples]
    assert [(each.track, each.name) for each in found.instants] == expected.instants


def test_the_summary_counts(folder: Path, run: Run) -> None:
    code, out, err = run(folder / "run.json")

    assert (code, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert ["trace", "steps", "4"] in rows
    counts = {tuple(row[1:3]): row[3] for row in rows if row[0] == "time"}
    assert counts["op", "sum"] == "6"
    assert counts["collective", "all_reduce (SUM)"] == "6"
    tracks = {row[1]: row for row in rows if row[0] == "tracks"}
    assert {"steps", "replica 0 (cpu:0)", "replica 1 (cpu:1)", "cpu:0", "cpu:1"} <= set(tracks)
    assert ["counters", "loss", "3", "0.5"] in rows
    assert ["marks", "fault", "ValueError: no", "1"] in rows


@pytest.mark.slow
def test_the_picture_is_a_png_with_a_row_per_track(folder: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    assert run(folder / "run.json", "--png", tmp_path / "run.png")[0] == 0

    picture = imread(tmp_path / "run.png")
    green = np.all(np.abs(picture[:, :, :3] - [0x2F / 255, 0x7D / 255, 0x6D / 255]) < 0.01, axis=2)
    assert green.any()  # ops
    code, _, err = run(folder / "run.json", "--png", tmp_path / "nowhere" / "run.png")
    assert (code, "cannot be written" in err) == (1, True)


def test_a_picture_of_very_many_tracks_is_no_larger_than_one_may_be() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    tracks = [f"cpu:{i}" for i in range(1500)]
    slices = [Slice(track, "f", "op", i, i + 1) for i, track in enumerate(tracks)]
    heights = list[float]()

    class Figure(figure.Figure):  # type: ignore[misc]  # matplotlib may be missing
        def savefig(self, *_: object, **options: float) -> None:
            heights.append(self.get_figheight() * options["dpi"])

    with mock.patch.object(figure, "Figure", Figure):
        _draw(Timeline("worker", 1, tracks, slices, [], []), Path("run.png"), "run.json")

    assert heights[0] < 2**16


def test_a_damaged_trace_is_refused_at_every_length(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "run.json").read_bytes()
    target = tmp_path / "cut"
    for length in range(0, len(whole), 61):
        target.write_bytes(whole[:length])
        try:
            read_trace(target)
        except ValueError:
            continue  # anything else would be a traceback for the user
    for place in range(0, len(whole), 23):
        target.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_trace(target)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b'{"traceEvents": 3}', b"[]", b"\x00\x01", b"hello", b'{"traceEvents": []}',
     b'[{"ph": "X"}]', b"[" * 100_000, b'[{"ph": "X", "name": "a", "ts": Infinity}]',
     b'[{"ph": "C", "name": "a", "ts": 0, "args": [1]}]'],
)  # fmt: skip
def test_a_file_that_is_not_a_trace_is_refused(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)

    code, out, err = run(tmp_path / "file")

    assert (code, out) == (1, "")
    assert str(tmp_path / "file") in err


def test_names_that_would_move_the_cursor_are_shown(run: Run, tmp_path: Path) -> None:
    event = {"ph": "X", "name": "\x1b[31mred", "cat": "op", "pid": 1, "tid": 2, "ts": 0, "dur": 1}
    (tmp_path / "file").write_text(json.dumps([event]))

    code, out, _ = run(tmp_path / "file")

    assert code == 0
    assert "\\x1b[31mred" in out
    assert "\x1b" not in out
