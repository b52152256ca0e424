"""A learner that counts: how often each example was learned can be read from its variables."""

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import aioreplica as ar
from tests.conftest import mirrored

NUM_IDS = 200
RAISES, WRITES_NAN = 1.0, 2.0


class Counting:
    """`counts[i]` says how often example i was learned; `sums` must say the same, written later.

    An example is poisoned if its `mood` says so: it raises, or writes NaN, between the two writes.
    """

    def __init__(
        self, folder: Path | None = None, *, num_replicas: int = 2, **options: Any
    ) -> None:
        self.strategy = mirrored(num_replicas)
        with self.strategy.scope():
            self.counts = ar.Variable(np.zeros(NUM_IDS, np.int64), aggregation="sum")
            self.sums = ar.Variable(np.zeros(NUM_IDS), aggregation="sum")
            self.weight = ar.Variable(np.zeros(1))
            self.adam = ar.optimizers.Adam(0.1)
        self.batches: list[list[int]] = []
        manager = None if folder is None else ar.CheckpointManager(folder / "checkpoints")
        settings: dict[str, Any] = {
            "max_batch": 4, "max_delay_s": 0.01, "queue_size": 50, "checkpoints": manager
        }  # fmt: skip
        if folder is not None:
            settings["journal"] = folder / "journal.db"
        settings |= options
        self.manager = settings["checkpoints"]
        self.variables = {
            "counts": self.counts, "sums": self.sums, "weight": self.weight, "adam": self.adam
        }  # fmt: skip
        self.learner = ar.online.OnlineLearner(self.strategy, self.step, self.variables, **settings)
        self._ends = AsyncExitStack()

    async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
        ids, mood = batch["id"], batch["mood"]
        if ctx.replica_id_in_sync_group == 0:
            self.batches.append([])
        hits = np.bincount(ids, minlength=NUM_IDS)
        await self.counts.assign_add(hits)
        if (mood == RAISES).any():
            raise ValueError("a bad mood")
        gradient = np.full(1, len(ids), np.float64)
        await self.adam.apply_gradients([(gradient, self.weight)])
        if (mood == WRITES_NAN).any():
            hits = np.where(hits, np.nan, 0.0)
        await self.sums.assign_add(hits.astype(np.float64))
        return {"size": float(len(ids))}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as ends:
            await ends.enter_async_context(self.strategy)
            if self.manager is not None:
                await ends.enter_async_context(self.manager)
            await ends.enter_async_context(self.learner)
            self._ends = ends.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._ends.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        await self._ends.aclose()

    def learned(self) -> list[int]:
        """Return how often each example was learned, up to the last one that was."""
        counts = self.counts.value
        assert np.array_equal(counts, self.sums.value), "a step was not undone whole"
        return [int(n) for n in np.trim_zeros(counts, "b")]

    def is_one_version(self) -> bool:
        """Whether the published snapshot is one version, and finite."""
        snapshot = self.learner.snapshot()
        same = np.array_equal(snapshot[self.counts], snapshot[self.sums])
        return bool(same and np.isfinite(snapshot[self.weight]).all())


def example(number: int, mood: float = 0.0) -> dict[str, Any]:
    return {"id": number, "mood": mood, "x": np.full(2, float(number))}
