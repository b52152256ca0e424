"""Type checkers understand programs of users: those here, and the first page's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(tool: str, *arguments: str) -> None:
    """Run a type checker; `.ci/run` installs both, elsewhere they may be missing."""
    pytest.importorskip(tool)
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_programs_of_users_have_the_types_they_assert(tool: str) -> None:
    check(tool, "tests/typing/programs")


@pytest.mark.slow
def test_pyright_finds_no_error_in_the_example_of_the_readme(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    program = tmp_path / "program.py"
    program.write_text(block[1], encoding="utf-8")

    check("pyright", str(program))
