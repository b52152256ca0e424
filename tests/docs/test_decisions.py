"""Decisions name places of the code that are there."""

import re
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aioreplica"
WITHOUT_GIL = ROOT / "docs" / "decisions" / "0043-without-the-gil.md"


def places() -> list[str]:
    """Return the first cell of each row about what threads share."""
    rows = [line for line in WITHOUT_GIL.read_text().splitlines() if line.startswith("| ")]
    cells = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    return [cell for cell in cells if "`" in cell]


def named_in(place: str) -> tuple[list[Path], list[str]]:
    """Return the files of a place and the names in them; a file alone is of the folder before."""
    folder, files, names = PurePosixPath(), list[Path](), list[str]()
    for word in re.findall(r"`([^`]+)`", place):
        if not word.endswith(".py"):
            names += word.split(".")
            continue
        if "/" in word:
            folder = PurePosixPath(word).parent
        files.append(PACKAGE / folder / PurePosixPath(word).name)
    return files, names


@pytest.mark.parametrize("place", places())
def test_what_threads_share_without_a_gil_is_where_its_guard_is_told(place: str) -> None:
    files, names = named_in(place)

    missing = [str(file.relative_to(ROOT)) for file in files if not file.is_file()]
    assert not missing
    texts = [file.read_text() for file in files]
    assert [name for name in names if not any(has(text, name) for text in texts)] == []


def has(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def test_the_table_is_read() -> None:
    assert len(places()) > 30
    assert named_in("`a/b.py` `f`, `c.py`") == ([PACKAGE / "a/b.py", PACKAGE / "a/c.py"], ["f"])
