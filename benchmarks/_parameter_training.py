"""What training on parameter servers comes to: beside synchronous steps, and beside one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

import aioreplica as ar
from examples import recommender_ps as recommender

NUM_REPLICAS, BATCH, NUM_STEPS = 2, 256, 40


@final
@dataclass(frozen=True, slots=True)
class Accuracies:
    """Of the test examples of the recommender, by the way it was trained.

    Attributes:
        asynchronous: Share that was right, and area under the ROC curve.
        synchronous: The same.
        mean_staleness: Of the asynchronous pushes, in versions.
        num_examples: That each has seen.
    """

    asynchronous: tuple[float, float]
    synchronous: tuple[float, float]
    mean_staleness: float
    num_examples: int

    def __str__(self) -> str:
        return (
            f"recommender after {self.num_examples} examples: accuracy {self.asynchronous[0]:.4f} "
            f"asynchronous (staleness {self.mean_staleness:.2f}), {self.synchronous[0]:.4f} "
            f"synchronous; area {self.asynchronous[1]:.4f} and {self.synchronous[1]:.4f}"
        )

    @property
    def is_good(self) -> bool:
        """Whether asynchronous training is at most 1 % less accurate."""
        return self.asynchronous[0] >= 0.99 * self.synchronous[0]


async def compare_accuracies(*, epochs: int) -> Accuracies:
    """Train the recommender both ways on the same examples in the same order."""
    found, staleness, num_closures = {}, 0.0, 0
    for is_sync in (False, True):
        result = await recommender.train(epochs=epochs, sync=is_sync)
        accuracy = float(np.mean((result.scores > 0) == (result.liked > 0)))
        found[is_sync] = (accuracy, result.area)
        if not is_sync:
            staleness = float(result.statistics.mean_staleness)
        num_closures = result.statistics.num_finished
    return Accuracies(found[False], found[True], staleness, num_closures * BATCH)


async def compare_with_mirrored(*, num_steps: int = NUM_STEPS) -> float:
    """Return the largest distance of parameters from those of a MirroredStrategy, relatively."""
    data = recommender.make_data(0)
    order = np.random.default_rng(1).permutation(len(data[0]))[: num_steps * BATCH]
    steps = [np.array_split(part, NUM_REPLICAS) for part in np.array_split(order, num_steps)]
    strategy = ar.ParameterServerStrategy(num_ps=1, num_workers=NUM_REPLICAS, mode="sync")
    async with strategy, ar.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = recommender.Recommender(np.random.default_rng(0))
        made = coordinator.create_per_worker_resource(partial(recommender.make_data, 0))
        for parts in steps:
            for part in parts:
                await coordinator.schedule(model.train, (made, part))
        await coordinator.join()
        found = [await each.read() for each in (model.users, model.items, model.liking)]
    expected = await _mirrored(data, steps)
    return max(
        float(np.max(np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))))
        for ours, theirs in zip(found, expected, strict=True)
    )


async def _mirrored(data: Any, steps: Any) -> list[Any]:
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)]) as strategy:
        with strategy.scope():
            model = recommender.Recommender(np.random.default_rng(0))

        for parts in steps:
            await strategy.run(model.train, args=(data, ar.PerReplica(parts)))
        return [each.value for each in (model.users, model.items, model.liking)]
