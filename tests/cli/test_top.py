"""`python -m aioreplica top`: a picture of another process, and what it says without one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioreplica.cli import main

pytest.importorskip("typer")

PROGRAM = """
import asyncio, sys
import aioreplica as ar
from aioreplica.integrations import live

async def step():
    await ar.get_replica_context().barrier()

async def main():
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
    async with strategy, live.serve(strategy):
        await strategy.run(step)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "aioreplica"


@pytest.fixture
def process(runtime: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that opted in; it ends when its input does."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.stdin.close()
        assert started.wait(60) == 0
    assert list(runtime.iterdir()) == []


@pytest.mark.xslow
def test_the_only_process_is_found_or_named(
    process: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for named in ([], [str(process.pid)], [str(runtime / f"{process.pid}.sock")]):
        with pytest.raises(SystemExit) as end:
            main(["top", "--once", "--interval", "0.05", *named])

        assert end.value.code == 0
        text = capsys.readouterr().out
        assert f"process {process.pid}" in text
        assert "MirroredStrategy  open  step 1" in text
        assert "cpu:1" in text

    for coloured in ("", "1"):  # colours do not make a terminal of it
        monkeypatch.setenv("FORCE_COLOR", coloured)
        with pytest.raises(SystemExit) as end:
            main(["top"])  # into a pipe it does not go on either
        text = capsys.readouterr().out
        assert (end.value.code, "cpu:1" in text, "\x1b[?1049h" in text) == (0, True, False)


def test_no_process_says_how_to_opt_in(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["top"])

    assert end.value.code == 1
    error = capsys.readouterr().err
    assert f"none has a socket in {runtime}" in error
    assert "live.serve(strategy)" in error


@pytest.mark.usefixtures("runtime")
def test_a_process_that_has_not_opted_in_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["top", str(os.getpid())])

    assert end.value.code == 1
    assert f"{os.getpid()}.sock" in capsys.readouterr().err


def test_several_processes_are_listed(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import aioreplica as ar
    from aioreplica.integrations import live

    runtime.mkdir(mode=0o700)
    strategy = ar.DefaultStrategy()

    async def two() -> None:
        async with (
            live.serve(strategy, path=runtime / "1.sock"),
            live.serve(strategy, path=runtime / "2.sock"),
        ):
            with pytest.raises(SystemExit) as end:
                await asyncio.to_thread(main, ["top", "--once"])
            assert end.value.code == 1

    asyncio.run(two())

    assert "Several processes can be watched: 1, 2. Name one: top 1" in capsys.readouterr().err
