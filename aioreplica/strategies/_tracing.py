"""Tracing: an observer while a block runs, then a file that a host thread writes."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

from ..devices import run_on_host
from ..telemetry import FORMATS, Observers, Trace


@final
class Tracing:
    """Records what a strategy does while an `async with` block runs; got from `strategy.trace`.

    The newest happenings are kept in memory. Leaving the block, and `save`, write them: on a host
    thread, into a new file that takes the name when it is complete.

    Args:
        observers: Those of the strategy.
        trace: What is recorded.
        path: Where to; the end of the name chooses the format.

    Raises:
        ValueError: If the name ends in another way.
        FileNotFoundError: If its folder does not exist.
    """

    def __init__(self, observers: Observers, trace: Trace, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if self._path.suffix not in FORMATS:
            raise ValueError(
                f"The name of a trace ends in {' or '.join(FORMATS)}, got {str(path)!r}."
            )
        if not self._path.absolute().parent.is_dir():
            raise FileNotFoundError(
                f"The folder of the trace {str(path)!r} does not exist. Make it first."
            )
        self._observers = observers
        self._trace = trace

    async def save(self) -> None:
        """Write what is kept so far.

        Raises:
            OSError: If the file cannot be written; one that is there stays as it is.

        Cancellation:
            A write that has begun is waited for; the file is the old one or complete.
        """
        await run_on_host(self._write)

    async def __aenter__(self) -> Self:
        self._observers.add(self._trace.observer)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording and write the file; if that fails, it is logged, and the block is not."""
        self._observers.remove(self._trace.observer)
        try:
            await self.save()
        except OSError as failure:
            logging.getLogger("aioreplica.telemetry").warning(
                "The trace %s was not written: %s. Free some space, or give trace() another path.",
                self._path, failure,
            )  # fmt: skip

    def _write(self) -> None:
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                for piece in FORMATS[self._path.suffix](self._trace.timeline()):
                    file.write(piece)
            part.replace(self._path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def __repr__(self) -> str:
        return f"<Tracing {self._path.name} | {len(self._trace)} happenings>"
