"""The tutorial: its code runs, in order, and its bug is found and mended."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


@pytest.mark.xslow
def test_the_tutorial_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "tutorial"}

    for block in blocks:
        exec(compile(block, "testing.md", "exec"), names)

    assert len(blocks) >= 7
    assert names["report"].failed
    assert str(names["report"].failure.error) == "loaded 2 times"
