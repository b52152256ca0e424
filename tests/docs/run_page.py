"""Run the Python blocks of a page, in order: `python -m tests.docs.run_page docs/guide.md`.

Blocks share their names, may `await`, and begin with `np`, `ar`, `asyncio` and a strategy of two
replicas. What else a block needs is said by comments of the page, which readers do not see:

    <!-- setup: code -->         runs before the next block
    <!-- in a step -->           the next block is the body of a step of `strategy`, with `ctx`
    <!-- in a device program --> the same of a plain function
    <!-- raises: ValueError -->  the next block ends with that error
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELUDE = """
import asyncio
import numpy as np
import aioreplica as ar
ar.set_logical_devices("cpu", 8)
strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
"""
BODIES = {
    "in a step": "async def _step():\n    ctx = ar.get_replica_context()\n",
    "in a device program": "def _step():\n    ctx = ar.get_replica_context()\n",
}
PIECE = re.compile(
    r"^```python\n(?P<code>.*?)^```$"
    r"|^<!-- (?P<word>setup: ?|in a step|in a device program|raises: )(?P<rest>.*?)-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, and what the comments before it say."""

    line: int
    code: str
    setup: str = ""
    body_of: str = ""
    error: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    setup = body_of = error = ""
    for piece in PIECE.finditer(text):
        word = (piece["word"] or "").strip(": ")
        if piece["code"] is not None:
            line = text.count("\n", 0, piece.start()) + 2
            yield Block(line, piece["code"], setup, body_of, error)
            setup = body_of = error = ""
        elif word == "setup":
            setup += textwrap.dedent(piece["rest"]) + "\n"
        elif word == "raises":
            error = piece["rest"].strip()
        else:
            body_of = word


class PageRun:
    """Runs the blocks of one page with one event loop."""

    def __init__(self, page: Path, runner: asyncio.Runner) -> None:
        self._page = page
        self._runner = runner
        module = types.ModuleType("page")  # where pickle and frameworks look names up
        sys.modules["page"] = module
        self.names: dict[str, Any] = vars(module)
        self._execute(PRELUDE, "prelude")

    def run(self, block: Block) -> None:
        """Run a block, with what comes before it."""
        where = f"{self._page.name}:{block.line}"
        if block.setup:
            self._execute(block.setup, f"{where} (setup)")
        code = block.code
        if block.body_of:
            code = BODIES[block.body_of] + textwrap.indent(code, "    ")
            code += "\nawait strategy.run(_step)\n"
        if not block.error:
            self._execute(code, where)
            return
        try:
            self._execute(code, where)
        except Exception as error:
            if type(error).__name__ == block.error:
                return
            raise
        raise AssertionError(f"{where} does not raise {block.error}")

    def _execute(self, code: str, where: str) -> None:
        linecache.cache[where] = (len(code), None, code.splitlines(keepends=True), where)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled = compile(code, where, "exec", flags=flags, dont_inherit=True)
        if not compiled.co_flags & inspect.CO_COROUTINE:
            exec(compiled, self.names)  # may call asyncio.run by itself
            return

        async def play() -> None:
            await eval(compiled, self.names)

        self._runner.run(play())

    def close(self) -> None:
        """Close the strategies that the page has made."""

        async def close() -> None:
            for value in list(self.names.values()):
                if hasattr(value, "aclose") and hasattr(value, "num_replicas_in_sync"):
                    await value.aclose()

        self._runner.run(close())


def main(page: Path) -> None:
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        run = PageRun(page, runner)
        for block in blocks(page):
            run.run(block)
        run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
