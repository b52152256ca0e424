"""Training on parameter servers beside training in this process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

import aioreplica as ar
from examples import recommender_ps as recommender

BATCH, NUM_STEPS, SEED = 256, 40, 0


@final
@dataclass(frozen=True, slots=True)
class Accuracies:
    """Accuracies on the test examples of the recommender, by the way it was trained.

    Attributes:
        asynchronous: Share that was right after training on two workers, and area under the ROC
            curve.
        one_by_one: The same after training in this process, in the same order.
        mean_staleness: Of the asynchronous pushes, in versions.
        num_examples: That each has seen.
        num_tested: That accuracies are of.
    """

    asynchronous: tuple[float, float]
    one_by_one: tuple[float, float]
    mean_staleness: float
    num_examples: int
    num_tested: int

    def __str__(self) -> str:
        return (
            f"recommender after {self.num_examples} examples: accuracy {self.asynchronous[0]:.4f} "
            f"on two workers (staleness {self.mean_staleness:.2f}), {self.one_by_one[0]:.4f} one "
            f"by one; area {self.asynchronous[1]:.4f} and {self.one_by_one[1]:.4f}"
        )

    @property
    def is_good(self) -> bool:
        """Whether asynchronous training is at most 1 % less accurate, but for the sample's error.

        Its pushes come in the order of the machine's mood: a share of examples that are right is
        given two standard errors, the area, which has a smaller one, none.
        """
        share, area = self.one_by_one
        error = (share * (1 - share) / self.num_tested) ** 0.5
        is_accurate = self.asynchronous[0] >= 0.99 * share - 2 * error
        return is_accurate and self.asynchronous[1] >= 0.99 * area


async def compare_accuracies(*, epochs: int) -> Accuracies:
    """Train the recommender both ways on the same examples in the same order."""
    found = await recommender.train(epochs=epochs, seed=SEED)
    alone = await recommender.train(
        epochs=epochs, seed=SEED, address=ar.cluster.LocalClosureEngine(num_workers=1)
    )
    return Accuracies(
        _accuracy(found),
        _accuracy(alone),
        float(found.statistics.mean_staleness),
        found.statistics.num_finished * BATCH,
        len(found.scores),
    )


def _accuracy(result: recommender.Result) -> tuple[float, float]:
    return float(np.mean((result.scores > 0) == (result.liked > 0))), result.area


async def compare_with_one_replica(*, num_steps: int = NUM_STEPS) -> float:
    """Return the largest distance of parameters from those of one replica here, relatively."""
    data = recommender.make_data(SEED)
    order = np.random.default_rng(1).permutation(len(data[0]))[: num_steps * BATCH]
    steps = np.array_split(order, num_steps)
    strategy = ar.ParameterServerStrategy(num_ps=1, num_workers=1)
    async with strategy, ar.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = recommender.Recommender(np.random.default_rng(SEED))
        made = coordinator.create_per_worker_resource(partial(recommender.make_data, SEED))
        for part in steps:  # the next one begins when this one is over
            await (await coordinator.schedule(model.train, (made, part))).fetch()
        found = [await each.read() for each in (model.users, model.items, model.liking)]
    expected = await _one_replica(data, steps)
    return max(
        float(np.max(np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))))
        for ours, theirs in zip(found, expected, strict=True)
    )


async def _one_replica(data: Any, steps: Any) -> list[Any]:
    async with ar.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            model = recommender.Recommender(np.random.default_rng(SEED))
        for part in steps:
            await strategy.run(model.train, args=(data, part))
        return [each.value for each in (model.users, model.items, model.liking)]
