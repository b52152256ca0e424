"""Prequential figures: predictions of examples before they are learned, and drift in their errors.

Each example is predicted by the version before its batch, and counts once it is learned: what is
undone, set aside or learned again after a crash is never counted twice. The newest predictions are
in each checkpoint, so a restart and a rollback go on with the figures of what they restore.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from .._functions import require_no_yield
from ..metrics import Metric
from ..tree import Array, Tree
from ..values import Snapshot
from ._example import stack_examples
from ._failures import described
from ._intake import Taken

Figure = Callable[[Array, Array], Any]


class Detector(Protocol):
    """A detector of drift, as river has them."""

    @property
    def drift_detected(self) -> bool:
        """True if the last value was one too many."""

    def update(self, x: float) -> object:
        """Take one value."""


class Judged(NamedTuple):
    """Predictions of a batch, not counted yet.

    Attributes:
        rows: The row of each example, by its number.
        targets: What was to be predicted.
        predictions: What was.
    """

    rows: Mapping[int, int]
    targets: Array
    predictions: Array


@final
class Prequential:
    """Figures of a learner: it predicts each batch before it learns it.

    Args:
        predict: Called as `predict(snapshot, inputs)` with the version before a batch, and the
            batch's "input"; returns an array with one row per example. That of an `OnlineService`
            does, if it returns an array. It may be `async`.
        metrics: What is shown, by name: functions of the targets and the predictions of the window,
            or metrics of `ar.metrics`, which are for this alone.
        window: So many of the newest examples.
        split: Returns inputs and targets of a stacked batch, if these are not its "input" and
            "target".
        detector: Makes a detector of drift, such as `river.drift.ADWIN`; None for no detection.
        error: Called with targets and predictions, returns one number per example for the
            detector. The absolute difference if nothing is said.
        on_drift: Called with the number of the example at which a drift was found, and the figures;
            plain or `async`.

    Raises:
        ValueError: If a name is no identifier, or a number below 1.
        TypeError: If something is not callable, or the metrics are no mapping.
    """

    def __init__(
        self,
        predict: Callable[[Snapshot, Tree], object],
        metrics: Mapping[str, Figure | Metric],
        *,
        window: int = 1000,
        split: Callable[[Tree], tuple[object, object]] | None = None,
        detector: Callable[[], Detector] | None = None,
        error: Figure | None = None,
        on_drift: Callable[[int, Mapping[str, float]], Awaitable[object] | object] | None = None,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be an int of at least 1, got {window!r}.")
        functions = {"predict": predict, "split": split, "detector": detector, "error": error}
        for name, function in {**functions, "on_drift": on_drift}.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}.")
            require_no_yield(function, "Prequential")
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be figures by name, as {{'mae': fn}}, got {metrics!r}.")
        for name, metric in metrics.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"The name of a figure must be an identifier, got {name!r}.")
            if not isinstance(metric, Metric) and not callable(metric):
                raise TypeError(f"The figure {name!r} must be callable, got {metric!r}.")
        self.figures: Mapping[str, float] = {}
        self.num_judged = self.num_drifts = self.drift_number = 0
        self.failure = ""
        self._predict = predict
        self._metrics = dict(metrics)
        self._window = window
        self._split = _input_and_target if split is None else split
        self._make_detector = detector
        self._error = _difference if error is None else error
        self._on_drift = on_drift
        self._detector = None if detector is None else detector()
        self._newest: tuple[Array, Array] | None = None

    async def look(
        self, snapshot: Snapshot, batch: Sequence[Taken], limit_s: float | None
    ) -> Judged | None:
        """Predict a batch; None, and `failure`, if that is not possible.

        Cancellation:
            Changes nothing.
        """
        try:
            async with asyncio.timeout(limit_s):
                inputs, targets = self._split(stack_examples([each.example for each in batch]))
                found = self._predict(snapshot, inputs)
                if isawaitable(found):
                    found = await found
            predictions, targets = np.asarray(found), np.asarray(targets)
            if len(predictions) != len(batch) or len(targets) != len(batch):
                raise ValueError(
                    f"{len(batch)} examples have {len(targets)} targets and {len(predictions)} "
                    "predictions."
                )
        except Exception as error:  # noqa: BLE001 - it is the user's, and learning goes on
            self.failure = f"predict has failed: {described(error)}"
            return None
        self.failure = ""
        return Judged({each.number: row for row, each in enumerate(batch)}, targets, predictions)

    async def add(
        self, judged: Judged | None, learned: Sequence[Taken], limit_s: float | None
    ) -> tuple[int, ...]:
        """Count examples that were learned; return the numbers at which a drift was found."""
        if judged is None:
            return ()
        rows = [judged.rows[each.number] for each in learned]
        targets, predictions = judged.targets[rows], judged.predictions[rows]
        found: tuple[int, ...] = ()
        try:
            self._count(targets, predictions)
            found = self._detect(targets, predictions, [each.number for each in learned])
            for number in found:
                self.num_drifts, self.drift_number = self.num_drifts + 1, number
                async with asyncio.timeout(limit_s):
                    result = self._on_drift and self._on_drift(number, self.figures)
                    if isawaitable(result):
                        await result
        except Exception as error:  # noqa: BLE001 - as above
            self.failure = f"A figure, the detector or on_drift has failed: {described(error)}"
        return found

    def _count(self, targets: Array, predictions: Array) -> None:
        self.num_judged += len(targets)
        if self._newest is not None:
            targets = np.concatenate([self._newest[0], targets])
            predictions = np.concatenate([self._newest[1], predictions])
        self._newest = targets[-self._window :], predictions[-self._window :]
        self._show()

    def _show(self) -> None:
        newest = self._newest
        if newest is None:
            self.figures = {}
        else:
            self.figures = {name: _value(each, *newest) for name, each in self._metrics.items()}

    def _detect(
        self, targets: Array, predictions: Array, numbers: Sequence[int]
    ) -> tuple[int, ...]:
        detector, found = self._detector, list[int]()
        if detector is None:
            return ()
        errors = np.asarray(self._error(targets, predictions), np.float64)
        for number, error in zip(numbers, errors.tolist(), strict=True):
            if math.isfinite(error):
                detector.update(error)
                if detector.drift_detected:
                    found.append(number)
        return tuple(found)

    # ---- checkpoints ---------------------------------------------------------------------

    @property
    def kept(self) -> Mapping[str, Tree]:
        """Facts for a checkpoint."""
        facts = {name: getattr(self, name) for name in _COUNTS}
        if self._newest is None:
            return facts
        return {**facts, "targets": self._newest[0], "predictions": self._newest[1]}

    def load(self, kept: Mapping[str, Tree]) -> None:
        """Go on from a checkpoint; the detector begins anew with the errors of its window."""
        for name in _COUNTS:
            setattr(self, name, int(kept.get(name, 0)))
        self._newest = (kept["targets"], kept["predictions"]) if "targets" in kept else None
        self._detector = None if self._make_detector is None else self._make_detector()
        self.failure = ""
        try:
            if self._newest is not None:
                self._detect(*self._newest, range(len(self._newest[0])))
            self._show()
        except Exception as error:  # noqa: BLE001 - as above
            self.failure = f"A figure or the detector has failed: {described(error)}"

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"<Prequential | {told or 'no figures yet'}, {self.num_judged} examples>"


_COUNTS = ("num_judged", "num_drifts", "drift_number")


def _input_and_target(batch: Tree) -> tuple[object, object]:
    return batch["input"], batch["target"]


def _difference(targets: Array, predictions: Array) -> Array:
    gap: Array = np.abs(predictions - targets)
    return gap.reshape(len(gap), -1).mean(axis=1)  # type: ignore[no-any-return]


def _value(metric: Figure | Metric, targets: Array, predictions: Array) -> float:
    if not isinstance(metric, Metric):
        return float(metric(targets, predictions))
    metric.reset_state()
    metric.update_state(targets, predictions)  # type: ignore[attr-defined]
    return float(metric.result())
