"""Rows on a terminal: those that tell of something wrong are red, and no others."""

import pytest

from aioreplica.cli._rows import print_rows

pytest.importorskip("rich")


def test_only_wrong_rows_are_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    print_rows(["name"], [["whole"], ["damaged"]], red=[1])

    coloured = {line for line in capsys.readouterr().out.splitlines() if "\x1b[31m" in line}
    assert len(coloured) == 1
    assert "damaged" in coloured.pop()
