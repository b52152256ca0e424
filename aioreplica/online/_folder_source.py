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
        self._seen = set[str]()  # names of all files that were ever there
        self._has_looked = False

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
        found: list[tuple[str, object]] = []
        ahead, left = self._files_ahead(current), MAX_BYTES
        for name in ahead:
            start = int(position) if name == current else 0
            try:
                left -= self._take_lines(found, name, start, left, is_last=name == ahead[-1])
            except OSError:
                if not found:
                    raise
                break  # the next read begins with that file
            if len(found) >= MAX_LINES or (found and left <= 0):
                break
        return found

    def _files_ahead(self, current: str) -> list[str]:
        """Return the names from the current one on, in order; warn of files that came too late."""
        ahead, seen = list[str](), self._seen
        for path in self._folder.glob(self._pattern):
            name, is_new = path.name, path.name not in seen
            if is_new and not path.is_file():
                continue
            if name >= current:
                ahead.append(name)
            elif is_new and self._has_looked:
                LOGGER.warning(
                    "%s is not read: a file with a later name was read before it came.", path
                )
            seen.add(name)
        self._has_looked = True
        return sorted(ahead)

    def _take_lines(
        self, found: list[tuple[str, object]], name: str, start: int, most: int, *, is_last: bool
    ) -> int:
        """Put the lines of a file behind those that were found; return how many bytes they have."""
        with (self._folder / name).open("rb") as file:
            size, position = os.fstat(file.fileno()).st_size, start
            if size < start:
                raise ValueError(
                    f"{self._folder / name} has {size} bytes, and {start} of it were read: write "
                    "new files with later names, or append to the last one."
                )
            file.seek(start)
            while len(found) < MAX_LINES and (not found or position - start < most):
                line = file.readline()
                if not line or (is_last and not line.endswith(b"\n")):
                    break  # nobody knows how it goes on
                position += len(line)
                if line.strip():
                    found.append((f"{position} {name}", self._parsed(line)))
        return position - start

    def _parsed(self, line: bytes) -> object:
        try:
            return self._parse(line.decode())
        except Exception as error:  # noqa: BLE001 - whatever it is, the line is no example
            return error

    def __repr__(self) -> str:
        return f"<FolderSource {self._folder / self._pattern}>"
