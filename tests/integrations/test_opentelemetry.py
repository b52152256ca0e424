"""OpenTelemetry: spans in memory with the right parents, metrics with the right values."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aioreplica.checkpoint import SAVE_BOUNDS_S
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError, MergeMismatchError
from aioreplica.integrations.opentelemetry import export_metrics, export_spans
from aioreplica.telemetry import BOUNDS_S

WAITS = "aioreplica.collective_wait_seconds"

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


class Spans:
    """A provider, and what it exports to memory."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._memory = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = self.provider.get_tracer("test")

    def finished(self) -> list[Any]:
        return list(self._memory.get_finished_spans())

    def paths(self) -> list[str]:
        """Each span with its ancestors, outermost first; sorted."""
        spans = {span.context.span_id: span for span in self.finished()}

        def path(span: Any) -> str:
            name = span.name.rpartition(".")[2]
            above = spans[span.parent.span_id] if span.parent is not None else None
            return name if above is None else f"{path(above)}/{name}"

        return sorted(map(path, spans.values()))


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def test_parents_are_right_across_tasks_and_device_threads(
    pair: ar.MirroredStrategy, spans: Spans
) -> None:
    def work() -> None:
        with spans.tracer.start_as_current_span("inner"):
            pass

    async def child() -> None:
        with spans.tracer.start_as_current_span("child"):
            await me().run_on_device(work)

    async def step() -> None:
        ctx = me()
        with spans.tracer.start_as_current_span("forward"):
            await asyncio.gather(child(), ctx.run_on_device(work))
        await ctx.barrier()

    with (
        export_spans(pair, tracer_provider=spans.provider),
        spans.tracer.start_as_current_span("request"),
    ):
        await asyncio.gather(pair.run(step), pair.run(step))
        with spans.tracer.start_as_current_span("after"):
            pass

    one = [
        "request/step",
        *(
            f"request/step/replica {i}{rest}"
            for i in (0, 1)
            for rest in (
                "", "/barrier", "/forward", "/forward/child", "/forward/child/work",
                "/forward/child/work/inner", "/forward/work", "/forward/work/inner",
            )
        ),
    ]  # fmt: skip
    assert spans.paths() == sorted([*one, *one, "request", "request/after"])
    assert len({span.context.trace_id for span in spans.finished()}) == 1
    for span in spans.finished():
        assert span.end_time >= span.start_time


async def test_plain_steps_have_spans_in_their_device_threads(
    pair: ar.MirroredStrategy, spans: Spans
) -> None:
    def step() -> None:
        with spans.tracer.start_as_current_span("inner"):
            me().blocking.barrier()

    with export_spans(pair, tracer_provider=spans.provider):
        await pair.run(step)
        await pair.run(step)

    expected = [
        "step",
        *(
            f"step/replica {i}{rest}"
            for i in (0, 1)
            for rest in ("", "/barrier", "/step", "/step/inner")
        ),
    ]
    assert spans.paths() == sorted(expected * 2)


async def test_failures_are_recorded_where_they_are_raised(
    pair: ar.MirroredStrategy, spans: Spans
) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group == 1:
            raise KeyError("mine")
        await me().barrier()

    with export_spans(pair, tracer_provider=spans.provider), pytest.raises(KeyError):
        await pair.run(step)

    failed = {span.name: span for span in spans.finished() if not span.status.is_ok}
    (run,) = [name for name in failed if name.startswith("run ")]
    assert set(failed) == {run, "replica 1"}
    for span in failed.values():
        assert span.events[0].attributes["exception.type"] == "KeyError"
        assert span.status.description == "KeyError"
    assert len(spans.finished()) == 3  # the run and two replicas: no more


async def test_an_op_that_raises_has_its_exception(pair: ar.MirroredStrategy, spans: Spans) -> None:
    def fail() -> None:
        raise ValueError("bad")

    async def step() -> None:
        if me().replica_id_in_sync_group == 0:
            await me().run_on_device(int)
            await me().run_on_device(fail)

    with export_spans(pair, tracer_provider=spans.provider), pytest.raises(ValueError, match="bad"):
        await pair.run(step)

    failed = sorted(
        span.name.rpartition(".")[2] for span in spans.finished() if not span.status.is_ok
    )
    assert failed == ["fail", "replica 0", "step"]
    assert len(spans.finished()) == 5


async def test_a_run_that_is_ended_from_outside_has_the_error(
    pair: ar.MirroredStrategy, spans: Spans
) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group == 0:
            await me().barrier()

    with (
        export_spans(pair, tracer_provider=spans.provider),
        pytest.raises(MergeMismatchError),
    ):
        await pair.run(step)

    (run,) = [span for span in spans.finished() if span.name.startswith("run ")]
    assert not run.status.is_ok
    assert run.events[0].attributes["exception.type"].endswith("MergeMismatchError")


async def test_collectives_carry_their_place_and_may_be_left_out(
    pair: ar.MirroredStrategy, spans: Spans
) -> None:
    async def step() -> None:
        await me().all_reduce("sum", np.ones(1))

    with export_spans(pair, tracer_provider=spans.provider):
        await pair.run(step)
    with export_spans(pair, tracer_provider=spans.provider, collectives=False):
        await pair.run(step)

    found = [span for span in spans.finished() if span.name == "all_reduce (SUM)"]
    assert [span.attributes["aioreplica.replica"] for span in found] == [0, 1]
    assert {span.attributes["aioreplica.bytes"] for span in found} == {8}
    assert {span.attributes["code.file.path"] for span in found} == {__file__}
    assert pair.observers.replica_began is None


async def test_metrics_of_two_strategies_are_read(
    pair: ar.MirroredStrategy, triple: ar.MirroredStrategy
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    async def step() -> None:
        await me().run_on_device(int)
        await me().barrier()

    with (
        export_metrics(pair, meter_provider=provider, name="a"),
        export_metrics(triple, meter_provider=provider, name="b"),
    ):
        await pair.run(step)
        await triple.run(step)
        await triple.run(step)
        data = reader.get_metrics_data()
    provider.shutdown()

    assert data is not None
    values: dict[Any, Any] = {
        (metric.name, tuple(sorted(point.attributes.items()))): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert values["aioreplica.runs", (("strategy", "a"),)].value == 1
    assert values["aioreplica.runs", (("strategy", "b"),)].value == 2
    barrier = (("collective", "barrier"), ("strategy", "b"))
    assert values["aioreplica.collectives", barrier].value == 2
    kind = (("kind", "MirroredStrategy"), ("strategy", "b"))
    assert values["aioreplica.replicas", kind].value == 3
    runs, waits = values["aioreplica.run_seconds", (("strategy", "b"),)], values[WAITS, barrier]
    assert (runs.count, waits.count) == (2, 6)
    assert runs.explicit_bounds == waits.explicit_bounds == BOUNDS_S
    assert runs.sum >= runs.max > 0 <= waits.sum
    assert pair.observers.run_ended is None


async def test_a_collection_measures_once(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    measure, calls = type(pair).statistics, list[object]()

    def counted(strategy: Any) -> Any:
        calls.append(strategy)
        return measure(strategy)

    monkeypatch.setattr(type(pair), "statistics", counted)

    async def step() -> None:
        pass

    def num_steps() -> Any:
        data = reader.get_metrics_data()
        assert data is not None
        [metric] = [
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "aioreplica.steps"
        ]
        [point] = metric.data.data_points
        return point.value

    with export_metrics(pair, meter_provider=provider):
        found = []
        for _ in range(3):  # one right behind the other, and none sees the values of the last
            await pair.run(step)
            found.append(num_steps())
    provider.shutdown()

    assert found == [1, 2, 3]
    assert calls == [pair] * 3


async def test_saves_are_a_histogram(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    state = {"model": [ar.Variable(1.0)]}
    manager = ar.CheckpointManager(tmp_path)

    with export_metrics(manager, meter_provider=provider, name="a"):
        await manager.save(1, state)
        await manager.restore(state)
        with pytest.raises(CheckpointError):
            await manager.restore(state, 7)
        await manager.save(2, state)
        data = reader.get_metrics_data()
    await manager.save(3, state)
    await manager.aclose()
    provider.shutdown()

    assert data is not None
    found: list[Any] = [
        metric.data.data_points
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "aioreplica.checkpoint_save_seconds"
    ]
    [[point]] = found
    assert dict(point.attributes) == {"checkpoints": "a"}
    assert point.count == 2
    assert point.explicit_bounds == SAVE_BOUNDS_S
    assert manager.observers.checkpoint_ended is None


async def test_saves_and_restores_are_spans_where_they_were_asked_for(
    spans: Spans, tmp_path: Path
) -> None:
    state = {"model": [ar.Variable(1.0)]}
    manager = ar.CheckpointManager(tmp_path)

    with export_spans(manager, tracer_provider=spans.provider):
        with spans.tracer.start_as_current_span("now"):
            await manager.save(1, state)
        with spans.tracer.start_as_current_span("behind"):
            await manager.save(2, state, wait=False)
        await manager.restore(state)
        with pytest.raises(CheckpointError, match="no step 7"):
            await manager.restore(state, 7)
        tmp_path.joinpath("step-0000000003").touch()
        with pytest.raises(CheckpointNotCommittedError):
            await manager.save(3, state)
    await manager.aclose()

    assert spans.paths() == [
        "behind", "behind/checkpoint save", "checkpoint restore", "checkpoint restore",
        "checkpoint save", "now", "now/checkpoint save",
    ]  # fmt: skip
    found = [span for span in spans.finished() if span.name.startswith("checkpoint")]
    assert [span.attributes["aioreplica.step"] for span in found] == [1, 2, 2, 7, 3]
    assert [span.status.is_ok for span in found] == [True, True, True, False, False]
    assert [span.status.description for span in found[3:]] == [
        "CheckpointError", "CheckpointNotCommittedError",
    ]  # fmt: skip
    assert all(len(span.events) == 1 for span in found[3:])
    assert found[0].attributes["aioreplica.bytes"] == manager.statistics().num_bytes / 2 > 0
    assert all(span.end_time >= span.start_time for span in found)


async def test_spans_of_anything_else_are_refused() -> None:
    with (
        pytest.raises(TypeError, match=r"Spans are those of a strategy .*, got None"),
        export_spans(None),  # type: ignore[arg-type]
    ):
        pass


async def test_a_missing_package_names_the_extra(
    solo: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ImportError, match=r'needs opentelemetry-api.*"aioreplica\[telemetry\]"'):
        export_metrics(solo)
    with (
        pytest.raises(ImportError, match=r'needs opentelemetry-api.*"aioreplica\[telemetry\]"'),
        export_spans(solo),
    ):
        pass
