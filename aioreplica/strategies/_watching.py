"""The methods of a strategy that say what it is doing."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod

from ..replica import waits_of
from ..telemetry import Recorder, ReplicaWait, Trace, skew_of, straggler_text
from ._lifecycle import Lifecycle, StrategyStatistics
from ._loop_watch import LoopWatch
from ._replica_set import Runner
from ._tracing import Tracing


class Watching(ABC):
    """The methods of a strategy for those who watch it; only `Strategy` inherits them."""

    _lifecycle: Lifecycle
    _recorder: Recorder

    @abstractmethod
    def _as_strategy(self) -> Runner:
        """Return the strategy that this is a part of."""

    def statistics(self) -> StrategyStatistics:
        """Return counts of runs and ops, the skew of the replicas, and how the loop keeps up."""
        names = self._as_strategy().device_names
        return self._lifecycle.statistics(skew_of(self._recorder.records(), len(names)))

    def waiting(self) -> tuple[ReplicaWait, ...]:
        """Return who waits for whom, and where, in the runs in progress; on the event loop.

        In the order of steps and replicas. A replica that is not listed runs, or has ended.
        """
        groups = self._lifecycle.active_groups()
        return tuple(wait for group in groups for wait in waits_of(group))

    def straggler_report(self) -> str:
        """Say which replica the others wait for, how long and where: a sentence and a table.

        It is about the merges that `recorder` keeps.
        """
        names = self._as_strategy().device_names
        return straggler_text(skew_of(self._recorder.records(), len(names)), names)

    def trace(self, path: str | os.PathLike[str], *, capacity: int = 65_536) -> Tracing:
        """Record a time line while an `async with` block runs, and write it to a file.

        The file is opened by https://ui.perfetto.dev: a track for the steps, for each replica and
        each device; arrows lead through the replicas of a collective in the order of their
        arrival, and from a replica to the ops it made.

        Args:
            path: Ends in ".json" (Chrome's format) or ".pftrace" (Perfetto's, which is smaller).
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
            ...     async with strategy, strategy.trace(path):
            ...         await strategy.run(step)
            ...     return path.stat().st_size > 0
            >>> from pathlib import Path
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     asyncio.run(main(Path(folder) / "run.json"))
            True
        """
        strategy = self._as_strategy()
        return Tracing(strategy.observers, Trace(strategy.device_names, capacity=capacity), path)

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
        return LoopWatch(self._as_strategy().observers, threshold_s, logger)
