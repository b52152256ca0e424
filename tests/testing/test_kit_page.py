"""The page for those who want only the kit: its programs run, and its bugs are found."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import aioreplica.testing as art

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kit.md"


def run_blocks(*, with_aiohttp: bool) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "kit"}
    for block in blocks:
        if ("aiohttp" in block) == with_aiohttp:
            exec(compile(block, "slots.py", "exec"), names)
    return names


@pytest.mark.slow
def test_the_page_runs() -> None:
    names = run_blocks(with_aiohttp=False)

    failure = names["report"].failure
    assert isinstance(failure.error, art.DeadlockError)
    assert failure.causes[0] in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_aiohttp_loses_a_wake_up() -> None:
    pytest.importorskip("aiohttp")
    names = run_blocks(with_aiohttp=True)

    assert str(names["found"].failure.error).startswith("a request waits")

    async def on_a_real_loop() -> None:
        loop = asyncio.get_running_loop()
        time = loop.time
        loop.time = lambda: time() * 100  # type: ignore[method-assign]  # five seconds are soon over
        await names["three_requests"](lambda tasks: tasks[1].cancel())

    with pytest.raises(AssertionError, match="a request waits"):
        asyncio.run(on_a_real_loop())
