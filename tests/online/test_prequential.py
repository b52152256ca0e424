"""Prequential figures: each example is predicted once, before it is learned; drift is found."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import PoisonedExampleError
from aioreplica.online import OnlineLearner, Prequential
from tests.conftest import mirrored


class Mean:
    """Learns the mean of the targets, and predicts it; 1e9 is poison."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.total = ar.Variable(0.0, aggregation="sum")
            self.count = ar.Variable(0.0, aggregation="sum")
        self.seen: list[tuple[int, list[float]]] = []
        settings: dict[str, Any] = {"max_batch": 4, "max_delay_s": 0.0, "queue_size": 100}
        if folder is not None:
            settings["journal"] = folder / "journal.db"
            settings["checkpoints"] = ar.CheckpointManager(folder / "checkpoints")
        settings |= options
        judge = {"metrics": {"error": error}, "predict": self.predict} | settings.pop("judge", {})
        self.prequential = Prequential(**judge)
        self.learner = OnlineLearner(
            self.strategy, self.step, {"total": self.total, "count": self.count},
            prequential=self.prequential, **settings,
        )  # fmt: skip
        self._ends = AsyncExitStack()

    async def step(self, _ctx: ar.ReplicaContext, batch: Any) -> None:
        await self.total.assign_add(batch["target"].sum())
        if (batch["target"] == 1e9).any():
            raise ValueError("poison")
        await self.count.assign_add(float(len(batch["target"])))

    def predict(self, snapshot: Any, inputs: Any) -> Any:
        self.seen.append((snapshot.version, inputs.tolist()))
        return np.full(len(inputs), snapshot[self.total] / max(1.0, float(snapshot[self.count])))

    async def learn(self, *targets: float) -> None:
        """Learn some in batches that do not depend on time."""
        await self.learner.pause()
        first = self.learner.statistics().last_number + 1
        examples = [{"input": float(first + i), "target": x} for i, x in enumerate(targets)]
        tickets = await self.learner.submit_many(examples)
        self.learner.resume()
        for ticket, target in zip(tickets, targets, strict=True):
            if target == 1e9:
                with pytest.raises(PoisonedExampleError):
                    await ticket
            else:
                await ticket
        await self.learner.pause()
        self.learner.resume()

    def figures(self) -> Mapping[str, float]:
        return self.learner.statistics().figures

    async def __aenter__(self) -> Self:
        await self._ends.enter_async_context(self.strategy)
        await self._ends.enter_async_context(self.learner)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._ends.__aexit__(kind, error, trace)


def error(targets: Any, predictions: Any) -> float:
    return float(np.abs(targets - predictions).mean())


class Jump:
    """Finds a drift at a value above 10."""

    made = 0

    def __init__(self) -> None:
        self.values: list[float] = []
        type(self).made += 1

    @property
    def drift_detected(self) -> bool:
        return self.values[-1] > 10

    def update(self, x: float) -> None:
        self.values.append(x)


@pytest.mark.asyncio
async def test_a_batch_is_predicted_by_the_version_before_it() -> None:
    async with Mean() as program:
        await program.learn(1.0, 3.0, 5.0, 7.0)
        assert program.seen == [(0, [1.0, 2.0, 3.0, 4.0])]
        assert program.figures() == {"error": 4.0}  # the mean of nothing is 0
        await program.learn(4.0, 8.0)
        assert program.seen[1:] == [(1, [5.0, 6.0])]
        assert program.figures()["error"] == pytest.approx((16.0 + 0.0 + 4.0) / 6)
        assert program.learner.statistics().num_judged == 6


@pytest.mark.asyncio
async def test_the_figures_are_those_of_the_window() -> None:
    async with Mean(judge={"window": 3}, max_batch=1) as program:
        await program.learn(1.0, 1.0, 4.0, 2.0)
        assert program.figures()["error"] == pytest.approx((0.0 + 3.0 + 0.0) / 3)


@pytest.mark.asyncio
async def test_poison_counts_in_no_figure_and_the_others_once() -> None:
    async with Mean() as program:
        await program.learn(1.0, 1e9, 3.0, 2.0)
        now = program.learner.statistics()
        assert (now.num_judged, now.num_dead) == (3, 1)
        assert now.figures["error"] == 2.0  # all by the version before the batch


@pytest.mark.asyncio
async def test_metrics_of_the_library_and_of_others_stand_side_by_side() -> None:
    def predict(_snapshot: Any, inputs: Any) -> Any:
        return (inputs % 2 == 1).astype(float)

    metrics = {
        "accuracy": ar.metrics.Accuracy(),
        "auc": ar.metrics.AUC(),
        "share": lambda _targets, predictions: predictions.mean(),
    }
    async with Mean(judge={"predict": predict, "metrics": metrics}) as program:
        await program.learn(1.0, 0.0, 1.0, 1.0)
        found = program.figures()
        assert found["accuracy"] == 0.75
        assert found["auc"] == pytest.approx(5 / 6, abs=1e-3)
        assert found["share"] == 0.5
        await program.learn(0.0)
        assert program.figures()["accuracy"] == pytest.approx(3 / 5)


@pytest.mark.asyncio
async def test_inputs_may_be_split_otherwise_and_predictions_awaited() -> None:
    async def predict(_snapshot: Any, inputs: Any) -> Any:
        return await ar.run_on_host(np.add, inputs, 1.0)

    judge = {"predict": predict, "split": lambda batch: (batch["target"], batch["target"])}
    async with Mean(judge=judge) as program:
        await program.learn(5.0, 6.0)
        assert program.figures() == {"error": 1.0}


# ---- drift ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_drift_is_an_event_a_count_and_a_call() -> None:
    called: list[tuple[int, Mapping[str, float]]] = []

    async def on_drift(number: int, figures: Mapping[str, float]) -> None:
        called.append((number, figures))

    async with Mean(judge={"detector": Jump, "on_drift": on_drift}) as program:
        records = program.learner.records()
        await program.learn(1.0, 2.0, 1.0)
        await program.learn(1.0, 90.0)
        assert [(await anext(records)).drifts for _ in range(2)] == [(), (5,)]
        now = program.learner.statistics()
        assert (now.num_drifts, now.drift_number) == (1, 5)
        assert called == [(5, now.figures)]


@pytest.mark.asyncio
async def test_a_detector_of_river_finds_a_turn_of_the_stream() -> None:
    drift = pytest.importorskip("river.drift")
    rng = np.random.default_rng(0)
    async with Mean(judge={"detector": drift.ADWIN}, queue_size=1000) as program:
        await program.learn(*rng.normal(0, 1, 400))
        before = program.learner.statistics().num_drifts
        await program.learn(*rng.normal(9, 1, 200))
        now = program.learner.statistics()
        assert now.num_drifts > before
        assert now.drift_number > 400


# ---- what goes wrong -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"predict": lambda _s, _x: 1 / 0}, "predict has failed: ZeroDivisionError"),
        ({"predict": lambda _s, x: x[:1]}, "2 examples have 2 targets and 1 predictions"),
        ({"metrics": {"bad": lambda _t, _p: "x"}}, "A figure, the detector or on_drift has failed"),
        ({"detector": Jump, "error": lambda _t, _p: [99.0]}, "has failed: ValueError"),
    ],
)
async def test_errors_are_told_and_learning_goes_on(judge: dict[str, Any], said: str) -> None:
    async with Mean(judge=judge) as program:
        await program.learn(1.0, 2.0)
        now = program.learner.statistics()
        assert said in now.figures_error
        assert (now.num_learned, now.state) == (2, "running")


def test_a_prediction_that_hangs_ends_with_the_time_of_a_step() -> None:
    async def hang(_snapshot: Any, _inputs: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with Mean(judge={"predict": hang}, step_timeout_s=5.0) as program:
            await program.learn(1.0)
            assert "TimeoutError" in program.learner.statistics().figures_error
            assert program.total.value == 1.0

    art.run(main)


def test_a_hook_that_hangs_ends_too() -> None:
    async def hang(_number: int, _figures: Mapping[str, float]) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        judge = {"detector": Jump, "on_drift": hang}
        async with Mean(judge=judge, step_timeout_s=5.0) as program:
            await program.learn(99.0)
            now = program.learner.statistics()
            assert "TimeoutError" in now.figures_error
            assert (now.num_drifts, now.num_judged) == (1, 1)

    art.run(main)


@pytest.mark.parametrize(
    ("arguments", "error_kind", "said"),
    [
        ({"window": 0}, ValueError, "window"),
        ({"metrics": {"a b": error}}, ValueError, "identifier"),
        ({"metrics": {5: error}}, ValueError, "identifier, got 5"),
        ({"metrics": [error]}, TypeError, "metrics must be figures by name"),
        ({"metrics": {"a": 3}}, TypeError, "'a' must be callable"),
        ({"on_drift": "mail"}, TypeError, "on_drift must be callable"),
    ],
)
def test_wrong_arguments_are_said(
    arguments: dict[str, Any], error_kind: type[Exception], said: str
) -> None:
    with pytest.raises(error_kind, match=said):
        Mean(judge=arguments)


# ---- restarts and rollbacks ----------------------------------------------------------------


@pytest.mark.asyncio
async def test_figures_go_on_after_a_restart_and_go_back_with_a_rollback(folder: Path) -> None:
    async with Mean(folder, max_batch=1, judge={"detector": Jump}) as program:
        await program.learn(1.0, 2.0, 40.0)
        await program.learner.checkpoint()
        kept = program.learner.statistics()
        await program.learn(7.0, 500.0, 8.0)
        end = program.learner.statistics()
        assert (kept.num_drifts, end.num_drifts) == (1, 3)
    async with Mean(folder, max_batch=1, judge={"detector": Jump}) as again:
        now = again.learner.statistics()
        assert (now.figures, now.num_judged, now.num_drifts) == (end.figures, 6, 3)
        await again.learner.rollback(to=3, skip=[5])
        while not again.learner.is_ready:
            await asyncio.sleep(0)
        now = again.learner.statistics()
        assert (now.num_judged, now.num_drifts, now.drift_number) == (5, 1, 3)
    async with Mean(max_batch=1) as offline:
        await offline.learn(1.0, 2.0, 40.0, 7.0, 8.0)
        assert offline.figures() == now.figures


@pytest.mark.asyncio
async def test_a_checkpoint_from_before_there_were_figures(folder: Path) -> None:
    async with Mean(folder) as program:
        state = {"total": program.total, "count": program.count}
        await program.learn(1.0, 2.0)
        async with OnlineLearner(
            program.strategy, program.step, state, max_batch=4, max_delay_s=0.0, queue_size=9,
            checkpoints=ar.CheckpointManager(folder / "old"),
        ) as bare:  # fmt: skip
            await (await bare.submit({"input": 1.0, "target": 2.0}))
    async with Mean(checkpoints=ar.CheckpointManager(folder / "old")) as again:
        assert (again.figures(), again.learner.statistics().num_judged) == ({}, 0)
        await again.learn(4.0)
        assert again.learner.statistics().num_judged == 1
