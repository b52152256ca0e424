"""Comparing two results of benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compare_results, main


def result(**ratios: tuple[float, float, float]) -> dict[str, Any]:
    rows = [
        {"name": name, "loop": "asyncio", "num_replicas": 2, "against": "a barrier",
         "ratio": middle, "lowest": low, "highest": high}
        for name, (middle, low, high) in ratios.items()
    ]  # fmt: skip
    return {"benchmark": "core", "rows": rows}


BEFORE = result(merge=(2.0, 1.9, 2.1), run=(1.0, 0.9, 1.1), hop=(3.0, 2.9, 3.3), gone=(1, 1, 1))
AFTER = result(merge=(2.5, 2.2, 2.6), run=(1.1, 1.0, 1.3), hop=(2.0, 1.9, 2.1), new=(1, 1, 1))


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_a_row_is_slower_if_its_rounds_lie_above_those_of_before() -> None:
    verdicts = {change.key[0]: change.verdict for change in compare_results(BEFORE, AFTER)}

    assert verdicts == {"merge": "slower", "run": "", "hop": "faster"}
    assert list(verdicts) == ["merge", "run", "hop"]  # the worst first


def test_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([written(tmp_path / "a.json", BEFORE), written(tmp_path / "b.json", AFTER)])

    printed = capsys.readouterr().out
    assert "2.00 (1.90-2.10)  2.50 (2.20-2.60)  1.25    slower" in printed
    assert "1 of 3 rows slower, 1 faster, outside the noise." in printed


def test_commits_are_kept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history.jsonl"
    lines = [{"commit": "aaaa11", **AFTER}, {"commit": "aaaa11", **BEFORE}]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))

    main(["--keep", written(tmp_path / "b.json", AFTER), "--history", str(history)])
    kept = json.loads(history.read_text().splitlines()[-1])
    main(["aaaa", kept["commit"], "--history", str(history)])

    assert "1 of 3 rows slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "two results"),
        (["one"], "two results"),
        (["unknown", "other"], "no file and no commit"),
        (["{folder}/empty.json", "{folder}/empty.json"], "has no rows"),
        (["{folder}/none.json", "{folder}/none.json"], "no row in common"),
    ],
)
def test_bad_arguments(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "empty.json", {})
    written(tmp_path / "none.json", result())
    arguments = [argument.format(folder=tmp_path) for argument in arguments]

    with pytest.raises(SystemExit):
        main([*arguments, "--history", str(tmp_path / "history.jsonl")])

    assert text in capsys.readouterr().err
