"""Metrics of an online service: its requests, and the statistics of its learner or reader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..context import REGISTRY
from ..online import OnlineLearner, SnapshotReader
from ._predicting import Predicting

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

# Of `LearnerStatistics`: the field, its metric, and what it is.
COUNTERS = (
    ("num_taken", "taken", "Examples taken: with a journal, on disk."),
    ("num_duplicates", "duplicates", "Examples whose idempotency key was known."),
    ("num_refused", "refused", "Examples not taken: no room, or the journal could not."),
    ("num_expected", "expected", "Inputs kept until their labels come."),
    ("num_labelled", "labelled", "Examples made of these and their labels."),
    ("num_unknown_labels", "unknown_labels", "Labels without an input that waits for them."),
    ("num_learned", "learned", "Examples learned."),
    ("num_dead", "dead", "Examples set aside."),
    ("num_steps", "steps", "Steps published."),
    ("num_rollbacks", "rollbacks", "Steps rolled back."),
    ("step_s", "step_seconds", "Seconds spent in steps."),
    ("num_commits", "commits", "Transactions of the journal that took examples."),
    ("commit_s", "commit_seconds", "Seconds spent in these."),
    ("num_checkpoints", "checkpoints", "Checkpoints saved."),
    ("num_judged", "judged", "Examples predicted before they were learned."),
    ("num_drifts", "drifts", "Drifts found in the errors of predictions."),
    ("num_retries", "retries", "Steps that failed and are tried again."),
)
GAUGES = (
    ("queue_depth", "queue_depth", "Examples taken and not learned yet."),
    ("queue_size", "queue_size", "How many there may be."),
    ("backlog", "backlog", "Journalled examples of earlier processes, not learned yet."),
    ("last_number", "last_number", "Number of the last example taken."),
    ("learned_number", "learned_number", "Every example up to this one is learned or set aside."),
    ("checkpoint_number", "checkpoint_number", "That of the newest checkpoint."),
    ("newest_version", "newest_version", "The version after the last step that was kept."),
    ("generation", "rollbacks_to_checkpoints", "Rollbacks to a checkpoint, ever."),
    ("step_running_s", "step_running_seconds", "Seconds since the step under way has begun."),
)
FLAGS = (
    ("journal_error", "journal_failing", "1 while the journal takes nothing."),
    ("checkpoint_error", "checkpoint_failing", "1 after a checkpoint that failed."),
    ("publish_error", "publish_failing", "1 while snapshots do not reach other processes."),
    ("failure", "failed", "1 once the learner has given up."),
    ("figures_error", "figures_failing", "1 while the figures of predictions cannot be made."),
    ("held", "held", "1 while the newest version is held back by its gate."),
    ("is_pinned", "pinned", "1 while one version is served, whatever is learned."),
    ("retry_error", "retrying", "1 while the last step is tried again."),
)

OF_THE_FIRST = {
    "num_taken", "num_duplicates", "num_refused", "num_expected", "num_labelled",
    "num_unknown_labels", "num_commits", "commit_s", "journal_error", "publish_error",
}  # fmt: skip
"""Fields about the journal and what is published: of the first model, whichever is served."""

MODELS = (
    (CounterMetricFamily, "num_learned", "learned", "Examples that a model has learned."),
    (CounterMetricFamily, "num_dead", "dead", "Examples that it has set aside."),
    (GaugeMetricFamily, "learned_number", "learned_number", "How far it has learned."),
    (GaugeMetricFamily, "lag", "lag", "Examples taken that it has not learned."),
)
"""Of `LearnerStatistics`, for each of several models: the kind, the field, the metric, its text."""

PREFIX = "aioreplica_online"
VERSION = "The published version."


@final
class ServiceMetrics:
    """Counters of a service's requests; the statistics of its learner are read at each scrape.

    Args:
        learner: What is served.
        registry: What shows them; None makes one.
        model: Label of all of them; None for none.
        predicting: Counts what was predicted.

    Attributes:
        registry: What shows them.
        labels: The label, if there is one: the first of `requests`.
        requests: Counts requests, by route and status.
        seconds: Those of predictions.

    Raises:
        ValueError: If the registry shows those of another service, and not both have a label of
            their own.
    """

    def __init__(
        self,
        learner: OnlineLearner | SnapshotReader,
        registry: CollectorRegistry | None,
        model: str | None,
        predicting: Predicting,
    ) -> None:
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self.labels = () if model is None else (model,)
        known = REGISTRY.once("online metrics", WeakKeyDictionary[object, _Families])
        families = known.get(self.registry)
        if families is None:
            families = known[self.registry] = _Families(self.registry, len(self.labels))
        families.add(self.labels, learner, predicting)
        self.requests = families.requests
        self.seconds = families.seconds.labels(*self.labels) if self.labels else families.seconds


@final
class _Families:
    """The metrics of all services of a registry."""

    def __init__(self, registry: CollectorRegistry, num_labels: int) -> None:
        self._names = ("model",)[:num_labels]
        self._served: dict[tuple[str, ...], tuple[OnlineLearner | SnapshotReader, Predicting]] = {}
        self.requests = prometheus_client.Counter(
            f"{PREFIX}_requests",
            "Requests answered; 499 if the client went before its body was whole.",
            [*self._names, "route", "status"],
            registry=registry,
        )
        self.seconds = prometheus_client.Histogram(
            f"{PREFIX}_predict_seconds",
            "Seconds from the headers of a prediction's request to its answer.",
            self._names,
            buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0),
            registry=registry,
        )
        registry.register(self)

    def add(
        self,
        labels: tuple[str, ...],
        learner: OnlineLearner | SnapshotReader,
        predicting: Predicting,
    ) -> None:
        if len(labels) != len(self._names) or labels in self._served:
            shown = ", ".join(repr(*each) for each in self._served if each) or "one without a name"
            raise ValueError(
                f"The registry shows the metrics of another service already: {shown}. Give each "
                "service a name of its own, model=..., or a registry."
            )
        self._served[labels] = learner, predicting

    def describe(self) -> Iterable[Family]:
        """Return nothing: who wants to know names would have to wait for the learners."""
        return ()

    def collect(self) -> Iterable[Family]:
        """Return the statistics of all learners, and the versions that readers see."""
        families: dict[str, Any] = {}  # Any: the base class has no `add_metric`
        for labels, (learner, predicting) in list(self._served.items()):
            for kind, name, text, value in (*_of_predictions(predicting), *_values(learner)):
                if name not in families:
                    families[name] = kind(f"{PREFIX}_{name}", text, labels=self._names)
                families[name].add_metric(labels, value)
            for kind, name, text, model, value in _of_models(learner):
                if name not in families:
                    families[name] = kind(f"{PREFIX}_{name}", text, labels=("model",))
                families[name].add_metric(("/".join((*labels, model)),), value)
        return families.values()


def _of_predictions(predicting: Predicting) -> Iterable[tuple[Any, str, str, float]]:
    yield CounterMetricFamily, "predicted", "Inputs predicted.", predicting.num_inputs
    yield CounterMetricFamily, "predict_calls", "Calls of predict for these.", predicting.num_calls


def _values(learner: OnlineLearner | SnapshotReader) -> Iterable[tuple[Any, str, str, float]]:
    if isinstance(learner, SnapshotReader):
        yield from _of_reader(learner)
        return
    if learner.state == "new":
        return
    first = learner.statistics()
    now = first.challengers.get(first.champion, first)  # the one that is served
    yield GaugeMetricFamily, "version", VERSION, now.version
    for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, (*GAUGES, *FLAGS))):
        for field, name, text in table:
            value = getattr(first if field in OF_THE_FIRST else now, field)
            if value is not None:
                yield kind, name, text, bool(value) if isinstance(value, str) else value
    if first.sources:
        sources = first.sources.values()
        taken, refused = (
            sum(getattr(each, f"num_{name}") for each in sources) for name in ("taken", "refused")
        )
        yield CounterMetricFamily, "source_taken", "Examples taken from sources.", taken
        text = "Examples of sources that were none, or not what is needed."
        yield CounterMetricFamily, "source_refused", text, refused
        text = "1 while a source cannot be read."
        yield GaugeMetricFamily, "source_failing", text, any(each.error for each in sources)
    for name, value in now.figures.items():
        text = "A figure of the newest predictions, made before their examples were learned."
        yield GaugeMetricFamily, f"figure_{name}", text, value


def _of_models(
    learner: OnlineLearner | SnapshotReader,
) -> Iterable[tuple[Any, str, str, str, float]]:
    """Return the figures of several models side by side: kind, metric, text, model and value."""
    if isinstance(learner, SnapshotReader) or learner.state == "new":
        return
    main = learner.statistics()
    if not main.challengers and not main.not_open:
        return
    for name, now in {main.model: main, **main.challengers}.items():
        for kind, field, metric, text in MODELS:
            yield kind, f"model_{metric}", text, name, getattr(now, field)
        flags = {"served": name == main.champion, "detached": bool(now.detached)}
        for metric, flag in {**flags, "failed": bool(now.failure)}.items():
            yield GaugeMetricFamily, f"model_{metric}", f"1 while it is {metric}.", name, flag
        for figure, value in now.figures.items():
            text = "A figure of its newest predictions, made before it has learned them."
            yield GaugeMetricFamily, f"model_figure_{figure}", text, name, value
    for name in main.not_open:
        yield GaugeMetricFamily, "model_failed", "1 while it is failed.", name, True


def _of_reader(reader: SnapshotReader) -> Iterable[tuple[object, str, str, float]]:
    try:
        version = reader.read().version
    except OSError:  # nothing can be read: that is told, and there is no version
        pass
    else:
        yield GaugeMetricFamily, "version", VERSION, version
        text = "Seconds since the publisher said that the version is the newest."
        yield GaugeMetricFamily, "version_age_seconds", text, reader.age_s
    text = "1 while the published file cannot be read."
    yield GaugeMetricFamily, "reading_failing", text, bool(reader.error)
