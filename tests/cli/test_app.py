"""The command line as a whole: help, unknown names, a missing package, no colours in a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aioreplica
from aioreplica.cli import _app, _commands, _doctor, main

pytest.importorskip("typer")


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code, *capsys.readouterr()


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ended(capsys)

    assert "python -m aioreplica" in out
    for command in ("bench", "ckpt", "devices", "doctor", "explore", "top", "trace"):
        assert command in out


def test_interrupted_while_it_imports_it_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_app, "_add_commands", interrupted)

    assert ended(capsys, "doctor") == (130, "", "")


def test_its_name_is_the_one_it_was_called_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/aioreplica", "--version"])

    with pytest.raises(SystemExit) as end:
        main()

    assert (end.value.code, capsys.readouterr().out) == (
        0,
        f"aioreplica {aioreplica.__version__}\n",
    )
    assert "Usage: aioreplica " in " ".join(ended(capsys, "--help")[1].split())


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        (["doktor"], "doctor"),
        (["trce"], "trace"),
        (["ckpt", "verfy"], "verify"),
        (["top", "--onse"], "--once"),
        (["devices", "cuad"], "cuda"),
        (["bench", "colectives"], "collectives"),
    ],
)
def test_the_nearest_name_is_suggested(
    capsys: pytest.CaptureFixture[str], given: list[str], nearest: str
) -> None:
    code, out, err = ended(capsys, *given)

    assert (code, out) == (2, "")
    assert given[-1] in err
    assert nearest in err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(SystemExit, match=rf"needs {package}.*aioreplica\[cli\]"):
        main(["devices"])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    whole = " ".join(ended(capsys, "--help")[1].replace("│", "").split())
    monkeypatch.setitem(sys.modules, "typer", None)

    code, out, _ = ended(capsys, *arguments)

    assert code == 0
    assert "pip install 'aioreplica[cli]'" in out
    for name, summary in _app.COMMANDS.items():
        assert f"{name} {summary}" in whole
        assert f"  {name:<8} {summary}\n" in out


@pytest.mark.parametrize("command", _app.COMMANDS)
def test_so_does_the_help_of_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)

    code, out, _ = ended(capsys, command, "--help")

    assert code == 0
    assert _app.COMMANDS[command] in out
    assert ("pip install" in out) == (command != "doctor")


def test_the_version_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)

    assert ended(capsys, "--version") == (0, f"aioreplica {aioreplica.__version__}\n", "")


def test_devices_are_listed_with_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, "devices", "CPU")

    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == [f"cpu:{i}" for i in range(8)]
    assert all("numpy" in row[1].split(", ") for row in rows)


def test_a_kind_without_devices_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "devices", "tpu")

    assert (code, out) == (1, "")
    assert "no device of kind tpu" in err


def test_benchmarks_are_listed_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ended(capsys, "bench")

    assert {line.split("\t")[0] for line in out.splitlines()} >= {"core", "train", "real_bugs"}
    code, out, _ = ended(capsys, "bench", "core", "--help")
    assert (code, "--quick" in out) == (0, True)


def test_benchmarks_outside_the_repository_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = tmp_path / "lib" / "aioreplica" / "cli" / "_commands.py"
    monkeypatch.setattr(_commands, "__file__", str(installed))
    monkeypatch.chdir(tmp_path)

    code, _, err = ended(capsys, "bench", "core")

    assert (code, "in the project's repository" in err) == (1, True)


def test_colours_obey_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    coloured = ended(capsys, "doctor")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = ended(capsys, "doctor")[1]

    assert "\x1b[1;36m" in coloured
    assert "\x1b[3" not in plain
    assert "\x1b[1;36m" not in plain
    assert "numpy" in plain


@pytest.mark.xslow
def test_a_pipe_gets_no_control_characters() -> None:
    for arguments in (["doctor"], ["doktor"]):
        done = subprocess.run(
            [sys.executable, "-m", "aioreplica", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "\x1b" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


WITHOUT_THE_EXTRA = "import sys; sys.modules['rich'] = None\n"


@pytest.mark.xslow
@pytest.mark.parametrize(
    ("before", "options", "arguments"),
    [
        (WITHOUT_THE_EXTRA, (), ["doctor"]),
        pytest.param(WITHOUT_THE_EXTRA, ("-u",), ["doctor"], marks=pytest.mark.xslow),
        (WITHOUT_THE_EXTRA, (), ["--help"]),
        pytest.param(WITHOUT_THE_EXTRA, (), ["--version"], marks=pytest.mark.xslow),
        pytest.param("", (), ["doctor"], marks=pytest.mark.xslow),
        ("", ("-u",), ["doctor"]),
        pytest.param("", (), ["devices"], marks=pytest.mark.xslow),
        pytest.param("", (), ["--help"], marks=pytest.mark.xslow),
        ("", (), ["--version"]),
    ],
)
def test_output_that_nobody_reads_ends_it_as_other_programs(
    before: str, options: tuple[str, ...], arguments: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = f"{before}from aioreplica.cli import main; main({arguments!r})"
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.xslow
@pytest.mark.parametrize("arguments", [["devices"], ["doctor"], ["--version"]])
def test_a_closed_output_is_as_good_as_one_that_nobody_reads(arguments: list[str]) -> None:
    command = f"{sys.executable} -m aioreplica {' '.join(arguments)} >&-"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.xslow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is none")
@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        (["devices"], "PYTHONUNBUFFERED", ""),
        (["devices"], "PYTHONUNBUFFERED", "1"),
        (["devices"], "FORCE_COLOR", "1"),
        (["--version"], "PYTHONUNBUFFERED", ""),
    ],
)
def test_an_output_that_is_full_is_said(arguments: list[str], name: str, text: str) -> None:
    given = {**os.environ, name: text}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "aioreplica", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=given,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("The output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("has_extra", [True, False])
def test_a_broken_pipe_of_a_command_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_extra: bool
) -> None:
    def doctor() -> None:
        raise BrokenPipeError("of a socket")

    for name in ("stdout", "stderr"):  # typer puts something else there
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(_doctor, "doctor", doctor)
    if not has_extra:
        monkeypatch.setitem(sys.modules, "rich", None)

    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["doctor"])
