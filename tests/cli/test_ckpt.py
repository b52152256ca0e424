"""`ckpt ls`, `verify` and `show`: what they print, and how they end."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage, _manager, remove_step
from aioreplica.checkpoint._reading import FoundStep
from aioreplica.cli import main
from tests.strategies.workers import on_workers

pytest.importorskip("typer")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of a state with an on-read variable, and a name that would change colours."""
    asyncio.run(save_steps(tmp_path / "run"))
    return tmp_path / "run"


async def save_steps(directory: Path) -> None:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            weights = ar.Variable(np.ones((64, 10)))
            count = ar.Variable(0, synchronization="on_read", aggregation="sum")
        state = {"model": [weights, count], "epoch": 3, "a\x1b[31m": "b"}
        async with ar.CheckpointManager(directory) as manager:
            for step in (5, 10, 15):
                await manager.save(step, state)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["ckpt", *map(str, arguments)])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def data_file(folder: Path, step: int) -> Path:
    [path] = (folder / f"step-{step:010}").glob("*.safetensors")
    return path


def test_a_pipe_gets_a_line_per_step(folder: Path, run: Run) -> None:
    size = data_file(folder, 5).stat().st_size

    code, out, err = run("ls", folder)

    assert (code, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows == [
        ["5", "4", str(size), "whole"],
        ["10", "4", str(size), "whole"],
        ["15", "4", str(size), "latest"],
    ]


def test_a_step_that_lost_bytes_is_not_the_latest(folder: Path, run: Run) -> None:
    with data_file(folder, 15).open("r+b") as file:
        file.truncate(100)
    (folder / "step-0000000005" / "manifest.json").write_text("{")

    code, out, _ = run("ls", folder)

    first, second, third = (line.split("\t") for line in out.splitlines())
    assert code == 1
    assert "Step 5" in first[-1]
    assert first[1:3] == ["", ""]
    assert second[-1] == "latest"
    assert "has 100 bytes" in third[-1]


def test_a_flipped_bit_is_found_by_verify_alone(folder: Path, run: Run) -> None:
    data = bytearray(data_file(folder, 10).read_bytes())
    data[-1] ^= 1
    data_file(folder, 10).write_bytes(data)

    assert run("ls", folder)[0] == 0
    code, out, _ = run("verify", folder)

    assert code == 1
    whole, damaged, other = out.splitlines()
    assert (whole, other) == ("5\twhole", "15\twhole")
    assert damaged.startswith("10\tStep 10")
    assert "model/1" in damaged
    assert run("verify", folder, "15")[:2] == (0, "15\twhole\n")
    assert run("verify", folder, "10")[0] == 1


def test_show_lists_the_entries_of_the_latest_whole_step(folder: Path, run: Run) -> None:
    data_file(folder, 15).unlink()

    code, out, _ = run("show", folder)

    assert code == 0
    assert [line.split("\t") for line in out.splitlines()] == [
        ["model/0", "variable", "float64", "64 x 10", "5120"],
        ["model/1", "variable", "int64", "scalar, 2 components", "16"],
        ["epoch", "value", "", "", ""],
        ["a\\x1b[31m", "value", "", "", ""],  # no control character of a file reaches a terminal
    ]
    assert run("show", folder, "15")[0] == 1


def test_parts_of_several_workers_are_shown_and_one_that_is_damaged_is_named(
    tmp_path: Path, run: Run
) -> None:
    async def save(strategy: ar.Strategy) -> None:
        with strategy.scope():
            table = ar.Variable(np.ones((7, 2)), sharding=ar.Shard())
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"table": table})

    asyncio.run(on_workers(3, 1, save))
    code, out, _ = run("show", tmp_path)
    assert (code, out) == (0, "table\tvariable\tfloat64\t7 x 2, 3 parts\t112\n")
    assert run("verify", tmp_path)[:2] == (0, "1\twhole\n")

    [path] = tmp_path.glob("step-*/data-*-w001-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert f"'table#1' in {path.name} fails its checksum" in out
    path.unlink()
    code, out, _ = run("ls", tmp_path)
    assert code == 1
    assert f"{path.name} cannot be read" in out


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_missing_checkpoints_and_steps_are_errors(
    tmp_path: Path, folder: Path, run: Run, command: str
) -> None:
    (tmp_path / "empty").mkdir()

    assert run(command, tmp_path / "nowhere")[0] == 2
    assert run(command, data_file(folder, 5))[0] == 2
    code, out, err = run(command, tmp_path / "empty")
    assert (code, out) == (1, "")
    assert "no checkpoint" in err


@pytest.mark.parametrize("command", ["verify", "show"])
def test_an_unknown_step_is_answered_with_those_there_are(
    folder: Path, run: Run, command: str
) -> None:
    code, out, err = run(command, folder, "6")

    assert (code, out) == (1, "")
    assert "no step 6" in err
    assert "5, 10, 15" in err


def test_none_is_whole(folder: Path, run: Run) -> None:
    for step in (5, 10, 15):
        data_file(folder, step).unlink()

    assert run("ls", folder)[0] == 1
    code, _, err = run("show", folder)
    assert code == 1
    assert "None of the steps" in err


def test_a_terminal_gets_a_table(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data_file(folder, 10).unlink()
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    coloured = run("ls", folder)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run("ls", folder)[1]

    assert "\t" not in coloured
    assert "\x1b[31m" in coloured  # red
    assert "5.4 kB" in coloured
    assert "\x1b[3" not in plain
    assert "5.4 kB" in plain


@pytest.mark.slow
def leave_behind(folder: Path, step: int) -> Path:
    """Make what a save leaves that is killed before its manifest takes its name."""
    left = folder / f"step-{step:010}"
    left.mkdir(parents=True)
    (left / "data-0001-000.safetensors").write_bytes(b"12345")
    (left / "manifest.json.tmp").write_bytes(b"{")
    return left


def test_what_a_killed_save_has_left_is_shown_and_removed(folder: Path, run: Run) -> None:
    left = leave_behind(folder, 20)

    code, out, _ = run("ls", folder)
    collected = run("gc", folder)
    again = run("gc", folder)

    assert code == 0
    assert out.splitlines()[-1].split("\t") == [
        "20", "", "6", "no manifest: its save was ended, or is going on"
    ]  # fmt: skip
    assert collected == (0, f"{left.name}\t6\tremoved\n", "")
    assert again == (0, "", "")
    assert not left.exists()
    assert ar.CheckpointManager(folder).steps() == (5, 10, 15)


def test_a_folder_with_nothing_but_leftovers_has_no_checkpoint(tmp_path: Path, run: Run) -> None:
    leave_behind(tmp_path, 20)

    code, out, err = run("ls", tmp_path)

    assert code == 1
    assert out.startswith("20\t")
    assert "There is no checkpoint" in err


def test_what_is_young_is_kept(folder: Path, run: Run) -> None:
    left = leave_behind(folder, 20)
    hour_ago = time.time() - 3600
    for path in (*left.iterdir(), left):
        os.utime(path, (hour_ago, hour_ago))

    assert run("gc", folder, "--older-than", "2h") == (0, "", "")
    assert left.exists()
    assert run("gc", folder, "--older-than", "30m")[0] == 0
    assert not left.exists()
    assert run("gc", folder, "--older-than", "soon")[0] == 2


def test_files_that_no_save_makes_are_left_alone(folder: Path, run: Run) -> None:
    left = leave_behind(folder, 20)
    (left / "notes.txt").write_text("mine")

    code, out, err = run("gc", folder)

    assert (code, out) == (1, "")
    assert "notes.txt" in err
    assert len([*left.iterdir()]) == 3


def test_steps_are_removed(folder: Path, run: Run) -> None:
    assert run("rm", folder, 5, 15) == (0, "5\tremoved\n15\tremoved\n", "")
    assert ar.CheckpointManager(folder).steps() == (10,)

    code, _, err = run("rm", folder, 10, 99)

    assert code == 1
    assert "no step 99" in err
    assert ar.CheckpointManager(folder).steps() == (10,)


@pytest.mark.parametrize("command", [("gc",), ("rm", 5)])
def test_nothing_is_removed_while_a_manager_saves(
    folder: Path, run: Run, command: tuple[object, ...]
) -> None:
    left = leave_behind(folder, 20)
    name, *rest = command
    lock = LocalStorage(folder).lock()
    try:
        code, out, err = run(name, folder, *rest)
    finally:
        lock.close()

    assert (code, out) == (1, "")
    assert "is in use" in err
    assert left.exists()
    assert ar.CheckpointManager(folder).steps() == (5, 10, 15)


# ---- beside a program that saves -----------------------------------------------------------


def test_a_step_that_a_save_removes_meanwhile_is_no_damage(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = ar.CheckpointManager.steps

    def with_one_that_goes(manager: ar.CheckpointManager) -> tuple[int, ...]:
        monkeypatch.setattr(ar.CheckpointManager, "steps", listed)
        return (1, *listed(manager))

    monkeypatch.setattr(ar.CheckpointManager, "steps", with_one_that_goes)
    code, out, _ = run("verify", folder)
    assert (code, out.splitlines()) == (
        0, ["1\tremoved meanwhile", "5\twhole", "10\twhole", "15\twhole"]
    )  # fmt: skip

    monkeypatch.setattr(ar.CheckpointManager, "steps", with_one_that_goes)
    code, out, _ = run("ls", folder)
    assert (code, out.splitlines()[0]) == (0, "1\t\t\tremoved meanwhile")

    monkeypatch.setattr(ar.CheckpointManager, "steps", with_one_that_goes)
    assert run("verify", folder, "1")[0] == 1  # this one was asked for


def test_so_is_one_whose_files_go_behind_its_manifest(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sizes = _manager.with_sizes

    def behind_the_manifest(storage: LocalStorage, found: FoundStep) -> FoundStep:
        if found.step == 5:
            remove_step(storage, 5)
        return with_sizes(storage, found)

    monkeypatch.setattr(_manager, "with_sizes", behind_the_manifest)
    code, out, _ = run("ls", folder)

    assert (code, out.splitlines()[0]) == (0, "5\t\t\tremoved meanwhile")


def test_a_file_of_a_save_that_is_renamed_meanwhile_counts_nothing(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(folder, 20)
    lstat = Path.lstat

    def renamed(path: Path) -> os.stat_result:
        if path.name == "manifest.json.tmp":
            path.rename(path.with_name("other"))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", renamed)
    code, out, err = run("ls", folder)

    assert (code, err) == (0, "")
    assert out.splitlines()[-1].split("\t")[:3] == ["20", "", "5"]


@pytest.mark.xslow
@pytest.mark.parametrize("option", ["-u", "-B"])
def test_steps_are_removed_though_nobody_reads_that(folder: Path, option: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, option, "-m", "aioreplica", "ckpt", "rm", str(folder), "5", "10", "15"],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)

    assert (done.returncode, done.stderr) == (141, "")
    assert ar.CheckpointManager(folder).steps() == ()


@pytest.mark.xslow
def test_it_is_a_command(folder: Path) -> None:
    command = [sys.executable, "-m", "aioreplica", "ckpt", "verify", str(folder)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "5\twhole\n10\twhole\n15\twhole\n"
