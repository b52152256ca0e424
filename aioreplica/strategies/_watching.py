"""`strategy.telemetry`: seeing what a strategy is doing, and what it has done."""

from __future__ import annotations

import itertools
import logging
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, final

from ..devices import run_on_host
from ..replica import waits_of
from ..telemetry import Observers, ReplicaWait, skew_of, straggler_text
from ._lifecycle import StrategyStatistics
from ._runtime import Runtime

if TYPE_CHECKING:
    from ..telemetry._trace import TraceRecorder
    from ._loop_watch import LoopWatch

NUMBERS = itertools.count()
"""Of the files that traces are written to first."""


@final
class Telemetry:
    """The entry for watching a strategy; got as `strategy.telemetry`.

    Args:
        runtime: The strategy.

    Attributes:
        recorder: The newest merges of all runs.
        observers: Observers of the runs.
        events: Events that steps and device loops recorded, newest last.
    """

    __slots__ = ("_runtime", "events", "observers", "recorder")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.recorder = runtime.recorder
        self.observers = runtime.observers
        self.events = runtime.events

    def statistics(self) -> StrategyStatistics:
        """Return counts of runs and ops, the skew of the replicas, and how the loop keeps up."""
        runtime = self._runtime
        return runtime.lifecycle.statistics(
            skew_of(self.recorder.records(), runtime.num_local_replicas),
            0 if runtime.compiled is None else runtime.compiled.num_compiled,
        )

    def waiting(self) -> tuple[ReplicaWait, ...]:
        """Return who waits for whom, and where, in the runs in progress; on the event loop.

        In the order of steps and replicas. A replica that is not listed runs, or has ended.
        """
        groups = self._runtime.lifecycle.active_groups()
        return tuple(wait for group in groups for wait in waits_of(group))

    def straggler_report(self) -> str:
        """Say which replica the others wait for, how long and where: a sentence and a table.

        It is about the merges that `recorder` keeps.
        """
        names = self._runtime.device_names
        return straggler_text(skew_of(self.recorder.records(), len(names)), names)

    def trace(self, path: str | os.PathLike[str], *, capacity: int = 65_536) -> Tracing:
        """Record a time line while an `async with` block runs, and write it to a file.

        The file is opened by https://ui.perfetto.dev: a track for the steps, for each replica and
        each device; arrows lead through the replicas of a collective in the order of their
        arrival, and from a replica to the ops it made.

        Args:
            path: Ends in ".json"; the format is Chrome's.
            capacity: How many happenings are kept; older ones are dropped. A merge of 4 replicas
                takes about 700 bytes of memory.

        Raises:
            ValueError: If the path ends in another way, or the capacity is below 1.
            FileNotFoundError: If the folder does not exist.

        Example:
            >>> import asyncio, tempfile
            >>> import aioreplica as ar
            >>> async def step():
            ...     await ar.get_replica_context().barrier()
            >>> async def main(path):
            ...     strategy = ar.OneDeviceStrategy("cpu:0")
            ...     async with strategy, strategy.telemetry.trace(path):
            ...         await strategy.run(step)
            ...     return path.stat().st_size > 0
            >>> from pathlib import Path
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     asyncio.run(main(Path(folder) / "run.json"))
            True
        """
        from ..telemetry._trace import TraceRecorder

        names = self._runtime.device_names
        return Tracing(self.observers, TraceRecorder(names, capacity=capacity), path)

    def watch_loop(
        self, *, threshold_s: float = 0.1, logger: logging.Logger | None = None
    ) -> LoopWatch:
        """Warn of what holds the event loop or the GIL, while an `async with` block runs.

        A thread looks four times per threshold. A warning is logged when the hold is over, and
        names the function, or the op with its replica and device.

        Args:
            threshold_s: How long a hold must be, in seconds.
            logger: Where to; None takes the logger "aioreplica.telemetry".

        Raises:
            ValueError: If the threshold is not positive.
        """
        from ._loop_watch import LoopWatch

        return LoopWatch(self.observers, threshold_s, logger)

    def __repr__(self) -> str:
        return f"<Telemetry of {self._runtime!r} | {self.recorder!r}>"


@final
class Tracing:
    """Records what a strategy does while an `async with` block runs; got from `telemetry.trace`.

    The newest happenings are kept in memory. Leaving the block, and `save`, write them: on a host
    thread, into a new file that takes the name when it is complete.

    Args:
        observers: Those of the strategy.
        trace: What is recorded.
        path: Where to; ends in ".json".

    Raises:
        ValueError: If the name ends in another way.
        FileNotFoundError: If its folder does not exist.
    """

    def __init__(
        self, observers: Observers, trace: TraceRecorder, path: str | os.PathLike[str]
    ) -> None:
        self._path = Path(path)
        if self._path.suffix != ".json":
            raise ValueError(
                f"The name of a trace ends in .json, which Perfetto opens too, got {str(path)!r}."
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
        from ..telemetry._trace import chrome_json

        # Several may be written at once, also to one path.
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.{next(NUMBERS)}.part")
        try:
            with part.open("wb") as file:
                for piece in chrome_json(self._trace.timeline()):
                    file.write(piece)
            part.replace(self._path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def __repr__(self) -> str:
        return f"<Tracing {self._path.name} | {len(self._trace)} happenings>"
