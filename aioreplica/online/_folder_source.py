"""Examples in the lines of files of a folder, in the order of the files' names."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from .._functions import is_async, require_no_yield
from ..devices import run_on_host
from ._journal import checked_seconds

MAX_LINES = 1000
MAX_BYTES = 1 << 20
"""Most that one read returns, but for one longer line, and empty lines before the first."""

LOGGER = logging.getLogger("aioreplica.online")


@final
class FolderSource:
    """Reads the lines of files in a folder, each once: a source of an `OnlineLearner`.

    Files are read in the order of their names, so a file that comes later needs a later name: one
    with an earlier name is not read, and a warning is logged. Lines may be appended to the last
    file. A line is read once it ends, or once there is a later file. Files may be deleted after
    they were read. Empty lines are left out.

    Args:
        folder: Where they are. It may be made later.
        pattern: Names of the files.
        parse: Makes an example of the text of a line.
        poll_s: Seconds between two looks when there is nothing new.

    Raises:
        TypeError: If `parse` is an async function or a generator function.
        ValueError: If `poll_s` is not a positive number.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        pattern: str = "*.jsonl",
        parse: Callable[[str], object] = json.loads,
        poll_s: float = 1.0,
    ) -> None:
        require_no_yield(parse, "FolderSource")
        if is_async(parse):
            raise TypeError(f"parse must be a plain function, got {parse!r}.")
        self._folder = Path(folder)
        self._pattern = pattern
        self._parse = parse
        self._poll_s = checked_seconds("poll_s", poll_s)
        if not poll_s:
            raise ValueError("poll_s must be greater than 0.")
        self._seen: set[str] | None = None  # names of all files that were ever there

    async def read(self, *, after: str | None) -> Sequence[tuple[str, object]]:
        """Return examples behind an offset, each with its own; wait until there are some.

        Raises:
            ValueError: If the offset is of another source, or a file has become shorter.
            OSError: If a file cannot be read.
        """
        while True:
            found = await run_on_host(self._read, after)
            if found:
                return found
            await asyncio.sleep(self._poll_s)

    def _read(self, after: str | None) -> list[tuple[str, object]]:
        position, _, current = ("0", "", "") if after is None else after.partition(" ")
        if not position.isdecimal():
            raise ValueError(f"{after!r} is no offset of a FolderSource.")
        names = sorted(path.name for path in self._folder.glob(self._pattern) if path.is_file())
        self._look_for_late_ones(names, current)
        ahead = [name for name in names if name >= current]
        for name in ahead:
            start = int(position) if name == current else 0
            found = self._lines(name, start, is_last=name == ahead[-1])
            if found:
                return found
        return []

    def _look_for_late_ones(self, names: Sequence[str], current: str) -> None:
        seen = {*names} if self._seen is None else self._seen
        for name in names:
            if name < current and name not in seen:
                LOGGER.warning(
                    "%s is not read: a file with a later name was read before it came.",
                    self._folder / name,
                )
        self._seen = seen | {*names}

    def _lines(self, name: str, start: int, *, is_last: bool) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        with (self._folder / name).open("rb") as file:
            size, position = os.fstat(file.fileno()).st_size, start
            if size < start:
                raise ValueError(
                    f"{self._folder / name} has {size} bytes, and {start} of it were read: write "
                    "new files with later names, or append to the last one."
                )
            file.seek(start)
            while len(found) < MAX_LINES and (not found or position - start < MAX_BYTES):
                line = file.readline()
                if not line or (is_last and not line.endswith(b"\n")):
                    break  # nobody knows how it goes on
                position += len(line)
                if line.strip():
                    found.append((f"{position} {name}", self._parsed(line)))
        return found

    def _parsed(self, line: bytes) -> object:
        try:
            return self._parse(line.decode())
        except Exception as error:  # noqa: BLE001 - whatever it is, the line is no example
            return error

    def __repr__(self) -> str:
        return f"<FolderSource {self._folder / self._pattern}>"
