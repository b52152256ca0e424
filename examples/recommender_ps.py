"""Learn what users like, with embedding tables on a parameter server.

    pip install -e ".[examples,dask]" && python examples/recommender_ps.py

It starts a parameter server and two workers on this machine, as processes. A closure pulls the rows
of the users and items of its batch and pushes the gradients of these rows; Adagrad runs on the
server. The workers do not wait for each other: another one may have changed the rows in the
meantime.
The data are made: a user likes an item if their hidden tastes fit, more or less.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import autograd.numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sklearn.metrics import roc_auc_score, roc_curve

import aioreplica as ar
from aioreplica.autodiff import embedding_lookup as lookup
from aioreplica.strategies import CoordinatorStatistics

NUM_USERS, NUM_ITEMS, NUM_EXAMPLES, TASTES = 300, 1000, 60_000, 4
Array, Report = NDArray[Any], Callable[[int, int, float], None]  # closures done, of how many, loss
Data = tuple[Array, Array, Array]  # users, items, and whether they were liked


@dataclass(frozen=True)
class Result:
    scores: Array  # of the examples for testing
    liked: Array
    statistics: CoordinatorStatistics

    @property
    def area(self) -> float:  # the chance that a liked item has a higher score than another
        return float(roc_auc_score(self.liked, self.scores))


def make_data(seed: int) -> Data:
    rng = np.random.default_rng(seed)
    taste, kind = rng.normal(size=(NUM_USERS, TASTES)), rng.normal(size=(NUM_ITEMS, TASTES))
    popularity = 1 / np.arange(1, NUM_ITEMS + 1)  # Zipf: 2 % of the items have half of the views
    items = rng.choice(NUM_ITEMS, NUM_EXAMPLES, p=popularity / popularity.sum())
    users = rng.integers(0, NUM_USERS, NUM_EXAMPLES)
    fit = 1.5 * np.sum(taste[users] * kind[items], axis=1)
    return users, items, rng.random(NUM_EXAMPLES) < 1 / (1 + np.exp(-fit))


class Recommender:  # products of rows of two tables, plus how much an item is liked by all
    def __init__(self, rng: np.random.Generator) -> None:
        self.users = ar.Variable(rng.normal(0, 0.3, (NUM_USERS, 2 * TASTES)), name="users")
        self.items = ar.Variable(rng.normal(0, 0.3, (NUM_ITEMS, 2 * TASTES)), name="items")
        self.liking = ar.Variable(np.zeros(NUM_ITEMS), name="liking")
        self.optimizer = ar.optimizers.Adagrad(learning_rate=0.2)

    async def train(self, data: Data, chosen: Array) -> float:  # a closure: it runs on a worker
        users, items, liked = (column[chosen] for column in data)

        def loss() -> Any:  # a lookup pulls the rows it needs; their gradients are pushed
            of_user, of_item = lookup(self.users, users), lookup(self.items, items)
            scores = np.sum(of_user * of_item, axis=1) + lookup(self.liking, items)
            return np.sum(np.logaddexp(0, np.where(liked, -1, 1) * scores))

        return float(await self.optimizer.minimize(loss)) / len(users)

    async def scores(self, users: Array, items: Array) -> Array:  # on the coordinator
        of_user, of_item = await self.users.read(users), await self.items.read(items)
        return np.sum(of_user * of_item, axis=1) + await self.liking.read(items)


async def train(
    *, workers: int = 2, epochs: int = 3, batch_size: int = 256, seed: int = 0,
    address: Any = None, report: Report = lambda *_: None,
) -> Result:  # fmt: skip
    """Train on a local cluster, or on the one with this address."""
    users, items, liked = make_data(seed)
    tested = np.arange(NUM_EXAMPLES) % 5 == 0
    rng, trained = np.random.default_rng(seed), np.flatnonzero(~tested)
    strategy = ar.ParameterServerStrategy(address, num_ps=1, num_workers=workers)
    async with strategy, ar.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = Recommender(rng)
        data = coordinator.create_per_worker_resource(partial(make_data, seed))
        num_parts = len(trained) // batch_size
        for epoch in range(epochs):
            order = np.array_split(rng.permutation(trained), num_parts)
            losses = [await coordinator.schedule(model.train, args=(data, part)) for part in order]
            for i, loss in enumerate(losses):
                report(epoch * num_parts + i + 1, epochs * num_parts, await loss.fetch())
        await coordinator.join()
        scores = await model.scores(users[tested], items[tested])
        return Result(scores, liked[tested], coordinator.statistics())


def plot_roc(result: Result, path: Path) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")  # without pyplot, so drawn by Agg
    axes = figure.subplots()
    label = f"recommender, area {result.area:.3f}"
    axes.plot(*roc_curve(result.liked, result.scores)[:2], label=label)
    axes.plot([0, 1], [0, 1], linestyle=":", color="grey", label="chance, area 0.5")
    axes.set(xlabel="share of the others shown", ylabel="share of the liked ones shown")
    axes.set(title="Liked items of the test examples", aspect="equal", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, format="png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Learn what users like on parameter servers.")
    add = parser.add_argument
    add("--workers", type=int, default=2, help="processes that compute")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=256, help="examples per closure")
    add("--seed", type=int, default=0)
    add("--address", help="of a scheduler of Dask; without, a local cluster")
    add("--output", type=Path, default=Path("roc_curve.png"))
    options = vars(parser.parse_args(arguments))
    output, console = options.pop("output"), Console(highlight=False)
    with Progress(console=console) as progress:
        bar = progress.add_task("starting the cluster", total=None)

        def show(done: int, total: int, loss: float) -> None:
            progress.update(bar, completed=done, total=total, description=f"loss {loss:.3f}")

        try:
            result = asyncio.run(train(**options, report=show))
        except KeyboardInterrupt:
            console.print("Interrupted: the cluster is closed, nothing was saved.")
            return 130
    plot_roc(result, output)
    console.print(f"ROC curve: {output}\narea under it: {result.area:.3f}")
    pulled, pushed = result.statistics.bytes_pulled / 1e6, result.statistics.bytes_pushed / 1e6
    console.print(f"pulled: {pulled:.1f} MB, pushed: {pushed:.1f} MB")
    console.print(f"mean staleness: {result.statistics.mean_staleness:.2f} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
