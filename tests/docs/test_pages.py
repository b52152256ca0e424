"""The pages: every Python block runs, and every picture is the one that the code draws."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs._diagrams.drawing import LIGHT, Picture
from docs._diagrams.pictures import files
from tests.docs.run_page import blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OWN_TESTS = {"README.md", "kit.md", "testing.md", "tutorial.md"}
"""Run by tests that also look at what comes out."""
WITH_BLOCKS = [page for page in PAGES if page.name not in OWN_TESTS and any(blocks(page))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.xslow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=named)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.docs.run_page", str(page)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.xslow
def test_the_tutorial_is_one_program_for_any_machine(tmp_path: Path) -> None:
    """Run its chapters as a reader does, on two cores at most."""
    code = "\n\n".join(block.code for block in blocks(DOCS / "tutorial.md"))
    (tmp_path / "line.py").write_text(code, encoding="utf-8")
    cores = sorted(os.sched_getaffinity(0))[:2]
    run = f"import os, runpy; os.sched_setaffinity(0, {cores}); runpy.run_path('line.py')"

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    one, four, error, said, *_, many = done.stdout.splitlines()
    for line in (one, four, many):
        weights = re.search(r"\[ *(\S+) +(\S+) *\]", line)
        assert weights is not None, line
        assert [round(float(each), 1) for each in weights.groups()] == [2, -1]
    assert float(error) < 0.02
    assert said == "Replica 1 returned while replicas 0, 2 and 3 wait in barrier #1 (step 49)."
    assert many.startswith("4 replicas:")


def test_there_are_pages_to_run() -> None:
    assert {"guide.md", "input.md", "embedding.md"} <= {page.name for page in WITH_BLOCKS}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_block_hides_from_being_run(page: Path) -> None:
    languages = set(re.findall(r"^ *(?:```|:::)(\S+)", page.read_text(encoding="utf-8"), re.M))

    assert {name for name in languages if name.startswith(("py", "ipython", "doctest"))} <= {
        "python"
    }
    indented = re.findall(r"^ +```python", page.read_text(encoding="utf-8"), re.M)
    assert indented == []


def test_the_pictures_are_what_the_code_draws() -> None:
    there = {path.name: path.read_text("utf-8") for path in (DOCS / "_static").glob("*.svg")}

    assert there == files(), "python -m docs._diagrams draws them anew"


def test_text_that_does_not_fit_is_refused() -> None:
    pen = Picture(100, 100, "a picture", LIGHT)

    with pytest.raises(ValueError, match="does not fit"):
        pen.box(0, 0, 50, 20, "a long line of text")
    with pytest.raises(ValueError, match="leaves the picture"):
        pen.label(60, 10, "a long line of text")
