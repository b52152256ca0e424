"""The metrics of a service that learns online: of its learner, and of its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from ..devices import run_on_host
from ..online import OnlineLearner, SnapshotReader

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Of `LearnerStatistics`: the field, its metric, and what it is.
COUNTERS = (
    ("num_taken", "taken", "Examples taken: with a journal, on disk."),
    ("num_duplicates", "duplicates", "Examples whose idempotency key was known."),
    ("num_refused", "refused", "Examples not taken: no room, or the journal could not."),
    ("num_learned", "learned", "Examples learned."),
    ("num_dead", "dead", "Examples set aside."),
    ("num_steps", "steps", "Steps published."),
    ("num_rollbacks", "rollbacks", "Steps rolled back."),
    ("step_s", "step_seconds", "Seconds spent in steps."),
    ("num_commits", "commits", "Transactions of the journal that took examples."),
    ("commit_s", "commit_seconds", "Seconds spent in these."),
    ("num_checkpoints", "checkpoints", "Checkpoints saved."),
)
GAUGES = (
    ("queue_depth", "queue_depth", "Examples taken and not learned yet."),
    ("queue_size", "queue_size", "How many there may be."),
    ("backlog", "backlog", "Journalled examples of earlier processes, not learned yet."),
    ("last_number", "last_number", "Number of the last example taken."),
    ("learned_number", "learned_number", "Every example up to this one is learned or set aside."),
    ("checkpoint_number", "checkpoint_number", "That of the newest checkpoint."),
)
FLAGS = (
    ("journal_error", "journal_failing", "1 while the journal takes nothing."),
    ("checkpoint_error", "checkpoint_failing", "1 after a checkpoint that failed."),
    ("publish_error", "publish_failing", "1 while snapshots do not reach other processes."),
    ("failure", "failed", "1 once the learner has given up."),
)


@final
class ServiceMetrics:
    """Counters of a service, and their text for Prometheus.

    Args:
        learner: Whose statistics are read when a registry is scraped.
        registry: None makes one.

    Raises:
        ImportError: If prometheus-client is not installed.
    """

    def __init__(
        self, learner: OnlineLearner | SnapshotReader, registry: CollectorRegistry | None
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "A service of online learning needs prometheus-client, which is not installed. "
                'Run: pip install "aioreplica[web]"'
            ) from error
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._generate = prometheus_client.generate_latest
        self._requests = prometheus_client.Counter(
            "aioreplica_online_requests",
            "Requests answered; 499 if the client went before its body was whole.",
            ["route", "status"],
            registry=self.registry,
        )
        self._seconds = prometheus_client.Histogram(
            "aioreplica_online_predict_seconds",
            "Seconds from the headers of a prediction's request to its answer.",
            buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0),
            registry=self.registry,
        )
        self.registry.register(_LearnerCollector(learner))

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        if route == "/predict" and status == 200:
            self._seconds.observe(seconds)

    async def text(self) -> bytes:
        """Return everything in the registry, written on a thread of the host."""
        found: bytes = await run_on_host(self._generate, self.registry)
        return found


@final
class _LearnerCollector:
    """Gives a registry the statistics of a learner, or the version that a reader sees."""

    def __init__(self, learner: OnlineLearner | SnapshotReader) -> None:
        self._learner = learner

    def describe(self) -> Iterable[Family]:
        return ()  # a registry that wants to know names would have to wait for the learner

    def collect(self) -> Iterable[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        prefix, text = "aioreplica_online", "The published version."
        if isinstance(self._learner, SnapshotReader):
            if self._learner.is_published:
                version = self._learner.read().version
                yield GaugeMetricFamily(f"{prefix}_version", text, value=version)
            return
        if self._learner.state == "new":
            return
        now = self._learner.statistics()
        yield GaugeMetricFamily(f"{prefix}_version", text, value=now.version)
        for field, name, text in COUNTERS:
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=getattr(now, field))
        for field, name, text in GAUGES:
            value = getattr(now, field)
            if value is not None:
                yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)
        for field, name, text in FLAGS:
            yield GaugeMetricFamily(f"{prefix}_{name}", text, value=bool(getattr(now, field)))
