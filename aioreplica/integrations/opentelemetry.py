"""Spans and metrics for OpenTelemetry, by its API: the program chooses SDK and exporters.

A run is a span, a child of what is current where it is awaited. Its replicas are children of it,
and current in the step function: spans that the step makes, in tasks and in ops on device threads,
have them as ancestors. Collectives are children of their replica, ops of what was current where
they were made. What fails has the status ERROR and its exception: the run, the replica, the
collective, the op. Saves and restores of checkpoints are children of what was current where they
were asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..checkpoint import CheckpointManager
from ..strategies import Strategy
from ..telemetry import (
    ObservedCheckpoint,
    ObservedMerge,
    ObservedOp,
    ObservedRun,
    Observer,
    printable,
    source_line,
)
from ._metrics import (
    METRICS,
    RUN_SECONDS,
    SAVE_SECONDS,
    WAITED,
    Export,
    Measurement,
    MeteredStrategies,
    MetricFamily,
    metered_of,
    missing,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["export_metrics", "export_spans"]

SCOPE = "aioreplica"


@contextmanager
def export_spans(
    strategy: Strategy | CheckpointManager,
    *,
    tracer_provider: TracerProvider | None = None,
    collectives: bool = True,
) -> Iterator[None]:
    """Make spans of what a strategy or a CheckpointManager does while a `with` block runs.

    Args:
        strategy: Whose.
        tracer_provider: None takes the provider of the process.
        collectives: Whether each replica's part in each collective is a span, too.

    Raises:
        ImportError: If opentelemetry-api is not installed.
        TypeError: If it is neither a strategy nor a CheckpointManager.
    """
    if not isinstance(strategy, (Strategy, CheckpointManager)):
        raise TypeError(f"Spans are those of a strategy or a CheckpointManager, got {strategy!r}.")
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise missing("opentelemetry-api", error) from error
    spans = _Spans(trace.get_tracer(SCOPE, tracer_provider=tracer_provider))
    remove = strategy.observers.add(spans.observer(collectives=collectives))
    try:
        yield
    finally:
        remove()


def export_metrics(
    strategy: Strategy | CheckpointManager,
    *,
    meter_provider: MeterProvider | None = None,
    name: str | None = None,
) -> Export:
    """Let a meter provider read metrics of a strategy or of checkpoints, until `close`.

    Args:
        strategy: Whose: a strategy, or a CheckpointManager. Several may go to one provider.
        meter_provider: None takes the provider of the process.
        name: The attribute "strategy" or "checkpoints"; None takes the class name, with a number
            if there are several.

    Raises:
        ImportError: If opentelemetry-api is not installed.
        TypeError: If this is not a strategy.
        ValueError: If the provider reads another strategy by that name.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise missing("opentelemetry-api", error) from error
    chosen = metrics.get_meter_provider() if meter_provider is None else meter_provider
    metered = metered_of("opentelemetry", chosen, partial(_make_instruments, chosen))
    return metered.add(strategy, name)


@final
class _Spans:
    """Makes the spans of one strategy."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._runs: dict[int, Span] = {}
        self._replicas: dict[tuple[int, int], Span] = {}
        self._ops: dict[int, Span] = {}
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def observer(self, *, collectives: bool) -> Observer:
        """Return the observer that makes them."""
        return Observer(
            replica_began=self._replica_began,
            replica_ended=self._replica_ended,
            run_ended=self._run_ended,
            merge_ended=self._merge_ended if collectives else None,
            checkpoint_ended=self._checkpoint_ended,
            op_started=self._op_started,
            op_ended=self._op_ended,
            fault=self._fault,
        )

    def _replica_began(self, run: ObservedRun, replica_id: int, context: Context) -> None:
        parent = self._runs.get(run.step)
        if parent is None or replica_id == 0:
            attributes = {"aioreplica.step": run.step}
            name = f"run {printable(run.fn_name)}"
            parent = self._runs[run.step] = self._tracer.start_span(name, attributes=attributes)
        where = {"aioreplica.step": run.step, "aioreplica.replica": replica_id}
        name = f"replica {replica_id}"
        span = self._tracer.start_span(name, context=_inside(parent), attributes=where)
        self._replicas[run.step, replica_id] = span
        context.run(_make_current, span)

    def _replica_ended(
        self, run: ObservedRun, replica_id: int, error: BaseException | None
    ) -> None:
        span = self._replicas.get((run.step, replica_id))
        if span is not None:
            if isinstance(error, Exception):
                _fail(span, error)
            span.end()

    def _run_ended(self, run: ObservedRun) -> None:
        for replica_id in range(len(run.works)):
            self._replicas.pop((run.step, replica_id), None)
        span = self._runs.pop(run.step, None)
        if span is not None:
            span.end()

    def _fault(self, step: int, error: BaseException) -> None:
        span = self._runs.get(step)
        if span is not None:
            _fail(span, error)

    def _merge_ended(self, merge: ObservedMerge, error: BaseException | None) -> None:
        _, step, sequence, collective, op, num_bytes, members, visits = merge.entry(0.0)
        title = collective if op is None else f"{collective} ({op.name})"
        for position, (member, (code, at, arrived_s)) in enumerate(
            zip(members, visits, strict=True)
        ):
            parent = self._replicas.get((step, member))
            if parent is None:
                continue
            span = self._tracer.start_span(
                title,
                context=_inside(parent),
                start_time=self._offset_ns + int(arrived_s * 1e9),
                attributes={
                    "aioreplica.step": step,
                    "aioreplica.replica": member,
                    "aioreplica.number": sequence,
                    "aioreplica.bytes": num_bytes[position if len(num_bytes) > 1 else 0],
                    "code.file.path": code.co_filename,
                    "code.line.number": source_line(code, at),
                },
            )
            if error is not None:
                _fail(span, error)
            span.end()

    def _op_started(self, op: ObservedOp, lane: str) -> None:
        attributes: dict[str, str | int] = {"aioreplica.device": lane}
        if op.replica_id is not None:
            attributes["aioreplica.replica"] = op.replica_id
        parent = op.context.run(_current)
        name = printable(op.fn_name)
        span = self._tracer.start_span(name, context=parent, attributes=attributes)
        op.context.run(_make_current, span)
        self._ops[threading.get_ident()] = span

    def _op_ended(self, op: ObservedOp, _lane: str) -> None:
        span = self._ops.pop(threading.get_ident(), None)
        if span is not None:
            if isinstance(op.error, Exception):
                _fail(span, op.error)
            span.end()

    def _checkpoint_ended(self, done: ObservedCheckpoint) -> None:
        attributes = {"aioreplica.bytes": done.num_bytes} if done.kind == "save" else {}
        if done.step is not None:
            attributes["aioreplica.step"] = done.step
        began_ns = self._offset_ns + int(done.began_s * 1e9)
        name = f"checkpoint {done.kind}"
        span = self._tracer.start_span(name, start_time=began_ns, attributes=attributes)
        if isinstance(done.error, Exception):
            _fail(span, done.error)
        span.end(began_ns + int(done.seconds * 1e9))


def _inside(span: Span) -> Any:  # Any: a context of OpenTelemetry
    from opentelemetry import trace

    return trace.set_span_in_context(span)


def _current() -> Any:
    from opentelemetry import context

    return context.get_current()


def _make_current(span: Span) -> None:
    """Make a span the current one, for good: of a context that ends with it."""
    from opentelemetry import context, trace

    context.attach(trace.set_span_in_context(span))


def _fail(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _make_instruments(provider: MeterProvider, metered: MeteredStrategies) -> None:
    meter = provider.get_meter(SCOPE)
    counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
    histograms: dict[MetricFamily, Histogram] = {}
    shared = _Shared(metered)
    for metric in METRICS:
        name = f"aioreplica.{metric.name}"
        if metric.is_histogram:
            histograms[metric] = meter.create_histogram(
                name, "s", metric.help, explicit_bucket_boundaries_advisory=metric.bounds
            )
        else:
            make = counter if metric.is_counter else gauge
            make(name, [_reader(shared, metric)], description=metric.help)
    metered.observe = partial(_recording, histograms)


def _recording(histograms: dict[MetricFamily, Histogram], name: str) -> Observer:
    """Return an observer that records how long each run, wait and save took."""
    begun: dict[int, float] = {}

    def run_began(run: ObservedRun) -> None:
        begun[run.step] = time.perf_counter()

    def run_ended(run: ObservedRun) -> None:
        begin = begun.pop(run.step, None)
        if begin is not None:
            seconds = time.perf_counter() - begin
            histograms[RUN_SECONDS].record(seconds, {"strategy": name})

    def merge_ended(merge: ObservedMerge, _error: BaseException | None) -> None:
        _, _, _, collective, _, _, _, visits = merge.entry(0.0)
        labels = {"strategy": name, "collective": collective}
        last_s = max(at_s for _, _, at_s in visits)
        for _, _, at_s in visits:
            histograms[WAITED].record(last_s - at_s, labels)

    def checkpoint_ended(done: ObservedCheckpoint) -> None:
        if done.kind == "save" and done.error is None:
            histograms[SAVE_SECONDS].record(done.seconds, {"checkpoints": name})

    return Observer(
        run_began=run_began,
        run_ended=run_ended,
        merge_ended=merge_ended,
        checkpoint_ended=checkpoint_ended,
    )


@final
class _Shared:
    """All values of one collection, for the instruments, of which each asks for its own.

    Who asks again begins another collection, so each sees values that it has not seen.
    """

    def __init__(self, metered: MeteredStrategies) -> None:
        self._metered = metered
        self._lock = threading.Lock()
        self._values: list[Measurement] = []
        self._told: set[MetricFamily] | None = None  # those that have seen them

    def values_for(self, metric: MetricFamily) -> list[Measurement]:
        """Return the values, measured now if this metric has seen the last ones; any thread."""
        with self._lock:
            if self._told is None or metric in self._told:
                self._values, self._told = list(self._metered.measure()), set()
            self._told.add(metric)
            return self._values


def _reader(
    shared: _Shared, metric: MetricFamily
) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def read(_options: CallbackOptions) -> Iterator[Observation]:
        from opentelemetry.metrics import Observation

        for found, labels, value, _ in shared.values_for(metric):
            if found is metric:
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

    return read
