"""The command line as a whole: help, unknown commands, a missing package."""

import sys

import pytest

from aioreplica.cli import main

pytest.importorskip("typer")


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])

    assert "python -m aioreplica" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tpo"])

    assert end.value.code == 2
    assert "tpo" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(SystemExit, match=rf"needs {package}.*aioreplica\[cli\]"):
        main(["--help"])
