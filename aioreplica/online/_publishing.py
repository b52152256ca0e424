"""Publication of a learner's newest snapshot for other processes, tried again if it failed."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import partial as bound
from pathlib import Path
from typing import final

from ..devices import run_on_host
from ..values import Snapshot
from ._failures import Backoff
from ._published import publish_snapshot, touch_snapshot
from ._ticket import Signal

PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Numbers of errors that do not mean that the path is wrong."""

TOUCH_S = 5.0
"""Seconds between two signs of life for readers, while nothing new is published."""


@final
class Publishing:
    """Writes what is published to a file.

    Args:
        path: The file; None for nowhere.
        newest: Returns the snapshot that is published.
        changed: Given when another one may be.
        spec_version: That of the program.

    Attributes:
        error: Why the last snapshot could not be written; "" if it was.
    """

    def __init__(
        self,
        path: Path | None,
        newest: Callable[[], Snapshot],
        changed: Signal,
        spec_version: int,
    ) -> None:
        self.error = ""
        self._path = path
        self._newest = newest
        self._changed = changed
        self._spec_version = spec_version
        self._version = -1
        self._touch_at = 0.0
        self._backoff = Backoff(0.5, 30.0)

    async def open(self) -> None:
        """Write the first snapshot; a full disk is asked again.

        Raises:
            OSError: If that failed for another reason.
        """
        await self._write(is_first=True)

    async def run(self) -> None:
        """Write new snapshots, of those that come while one is written the newest; give signs."""
        loop = asyncio.get_running_loop()
        while True:
            if self._version == self._newest().version and loop.time() < self._touch_at:
                await self._changed.wait(self._touch_at)
            elif self._version == self._newest().version:
                await self._touch()
            elif loop.time() < self._backoff.until:
                await self._changed.wait(self._backoff.until)
            else:
                await self._write()

    async def _touch(self) -> None:
        assert self._path is not None  # or nothing runs
        self._touch_at = asyncio.get_running_loop().time() + TOUCH_S
        try:
            await run_on_host(touch_snapshot, self._path)
        except FileNotFoundError:
            self._version = -1  # it was deleted: write it again
        except OSError as error:
            self.error = str(error)
        else:
            self.error = ""

    async def finish(self) -> None:
        """Write the last snapshot, if it is not written yet."""
        await self._write()

    async def _write(self, *, is_first: bool = False) -> None:
        snapshot = self._newest()
        if self._path is None or snapshot.version == self._version:
            return
        arrays = {key: snapshot[key] for key in snapshot.names}
        try:
            publish = bound(publish_snapshot, spec_version=self._spec_version)
            await run_on_host(publish, self._path, snapshot.version, arrays)
        except OSError as error:
            self.error = str(error)
            self._backoff.failed(asyncio.get_running_loop().time())
            if is_first and error.errno not in PASSING:
                raise
        else:
            self.error = ""
            self._backoff.succeeded()
            self._version = snapshot.version
            self._touch_at = asyncio.get_running_loop().time() + TOUCH_S
