"""Prometheus: scraped over HTTP and read with the client's own parser."""

import asyncio
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import SAVE_BOUNDS_S
from aioreplica.errors import CheckpointError
from aioreplica.telemetry import BOUNDS_S

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from aioreplica.integrations import prometheus  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[f"aioreplica_{name}", tuple(sorted(labels.items()))]


async def step() -> None:
    await me().run_on_device(int)
    await me().all_reduce("sum", np.ones(1))
    me().record("loss", 0.25)


async def test_a_coordinator_and_its_servers_are_measured(registry: Any) -> None:
    def add(w: Any) -> None:
        w.assign_add(np.ones(4))

    def fail() -> None:
        raise ValueError("by this test")

    engine = ar.cluster.LocalClosureEngine(num_workers=2)
    async with ar.ParameterServerStrategy(engine) as strategy:
        with prometheus.export(strategy, registry=registry, name="ps"):
            assert "closures_total{" not in generated(registry)  # no coordinator
            with strategy.scope():
                w = ar.Variable(np.zeros(4), name="w")
            async with ar.ClusterCoordinator(strategy) as coordinator:
                for _ in range(3):
                    await coordinator.schedule(add, (w,))
                await coordinator.join()
                await coordinator.schedule(fail)
                with pytest.raises(ValueError, match="by this test"):
                    await coordinator.join()
                samples = parse(generated(registry))

    assert of(samples, "closures_total", strategy="ps", result="finished") == 3
    assert of(samples, "closures_total", strategy="ps", result="failed") == 1
    assert of(samples, "closures_queued", strategy="ps") == 0
    assert of(samples, "closures_running", strategy="ps") == 0
    assert of(samples, "parameter_server_pushes_total", strategy="ps", result="applied") == 3
    assert of(samples, "parameter_server_pushes_total", strategy="ps", result="seen before") == 0
    assert of(samples, "parameter_server_bytes_total", strategy="ps", direction="pushed") == 96
    assert of(samples, "gradient_staleness_versions_max", strategy="ps") == 0


def generated(registry: Any) -> str:
    text: str = prometheus_client.generate_latest(registry).decode()
    return text


async def test_metrics_are_scraped_over_http(pair: ar.MirroredStrategy, registry: Any) -> None:
    with (
        prometheus.export(pair, registry=registry, name="train"),
        prometheus.serve(0, registry=registry) as port,
    ):
        for _ in range(3):
            await pair.run(step)
        samples = parse(await asyncio.to_thread(scrape, port))

    assert of(samples, "replicas", strategy="train", kind="MirroredStrategy") == 2
    assert of(samples, "steps_total", strategy="train") == 3
    assert of(samples, "runs_total", strategy="train") == 3
    assert of(samples, "active_runs", strategy="train") == 0
    assert of(samples, "collectives_total", strategy="train", collective="all_reduce") == 3
    assert of(samples, "collective_bytes_total", strategy="train", collective="all_reduce") == 48
    assert of(samples, "scalar", strategy="train", name="loss") == 0.25
    for device in pair._runtime.device_names:
        assert of(samples, "device_ops_total", strategy="train", device=device) >= 3
        assert of(samples, "device_ops_queued", strategy="train", device=device) == 0
    assert of(samples, "event_loop_lag_seconds", strategy="train") > 0
    assert of(samples, "strategies_total", kind="MirroredStrategy") >= 1
    assert pair.observers.run_began is None
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, port)


async def test_two_strategies_share_a_registry(
    pair: ar.MirroredStrategy, triple: ar.MirroredStrategy, registry: Any
) -> None:
    with (
        prometheus.export(pair, registry=registry) as first,
        prometheus.export(triple, registry=registry) as second,
    ):
        await triple.run(step)
        samples = parse(prometheus_client.generate_latest(registry).decode())

        assert (first.name, second.name) == ("MirroredStrategy", "MirroredStrategy 2")
        assert of(samples, "runs_total", strategy=first.name) == 0
        assert of(samples, "runs_total", strategy=second.name) == 1
        with pytest.raises(ValueError, match="named 'MirroredStrategy 2' go there already"):
            prometheus.export(pair, registry=registry, name="MirroredStrategy 2")
    assert b'strategy="' not in prometheus_client.generate_latest(registry)

    with prometheus.export(triple, registry=registry) as third:
        assert third.name == first.name
        first.close()
        assert b'strategy="MirroredStrategy"' in prometheus_client.generate_latest(registry)


async def test_a_name_with_control_characters_is_one_label(
    solo: ar.OneDeviceStrategy, registry: Any
) -> None:
    async def record() -> None:
        me().record('evil"\n# TYPE x counter\x1b\ud800', 1.0)

    with prometheus.export(solo, registry=registry, name='a"\n\ud800'):
        await solo.run(record)
        samples = parse(prometheus_client.generate_latest(registry).decode())

    names = {dict(labels).get("name") for name, labels in samples if name == "aioreplica_scalar"}
    assert names == {r'evil"\n# TYPE x counter\x1b\ud800'}


async def test_a_failing_run_is_a_fault(solo: ar.OneDeviceStrategy, registry: Any) -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with prometheus.export(solo, registry=registry, name="a"):
        with pytest.raises(KeyError):
            await solo.run(fail)
        samples = parse(prometheus_client.generate_latest(registry).decode())

    assert of(samples, "faults_total", strategy="a", error="KeyError") == 1


async def test_a_port_in_use_is_named(registry: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                OSError, match=rf"port {port} of 127\.0\.0\.1 is in use\. Choose another"
            ),
            prometheus.serve(port, registry=registry),
        ):
            pass


async def test_a_port_that_is_none_is_refused(registry: Any) -> None:
    for port in (-1, 65536, "80"):
        with (
            pytest.raises(ValueError, match=rf"port must be .* to 65535, got {port!r}\."),
            prometheus.serve(port, registry=registry),  # type: ignore[arg-type]
        ):
            pass


async def test_runs_and_waits_are_histograms(registry: Any, pair: ar.MirroredStrategy) -> None:
    with prometheus.export(pair, registry=registry, name="x"):
        for _ in range(3):
            await pair.run(step)
        found = parse(prometheus_client.generate_latest(registry).decode())
    for name, labels, count in (
        ("run_seconds", {"strategy": "x"}, 3),
        ("collective_wait_seconds", {"strategy": "x", "collective": "all_reduce"}, 6),
    ):
        assert of(found, f"{name}_count", **labels) == count
        assert of(found, f"{name}_sum", **labels) >= 0
        counts = [of(found, f"{name}_bucket", le=str(b), **labels) for b in (*BOUNDS_S, "+Inf")]
        assert counts == sorted(counts)
        assert counts[-1] == count


async def test_checkpoints_are_measured(registry: Any, tmp_path: Path) -> None:
    async with ar.CheckpointManager(tmp_path / "a") as manager, ar.CheckpointManager("b") as idle:
        with (
            prometheus.export(manager, registry=registry, name="model") as export,
            prometheus.export(idle, registry=registry),
        ):
            for step in (1, 2):
                await manager.save(step, {"w": np.ones(100)})
            with pytest.raises(TypeError):
                await manager.save(3, {"w": object()})  # refused: no save has begun
            (tmp_path / "a" / "step-0000000004").write_bytes(b"")
            with pytest.raises(CheckpointError):
                await manager.save(4, {"w": np.ones(100)})
            found = parse(prometheus_client.generate_latest(registry).decode())
            statistics = manager.statistics()
        assert export.name == "model"

    label = {"checkpoints": "model"}
    assert of(found, "checkpoint_saves_total", **label) == 2
    assert of(found, "checkpoint_failed_saves_total", **label) == 1
    assert of(found, "checkpoint_saved_bytes_total", **label) == statistics.num_bytes > 1600
    assert of(found, "checkpoint_last_step", **label) == 2
    assert of(found, "checkpoint_saving", **label) == 0
    assert of(found, "checkpoint_save_seconds_count", **label) == 2
    assert of(found, "checkpoint_save_seconds_sum", **label) == pytest.approx(statistics.save_s)
    assert of(found, "checkpoint_save_seconds_bucket", le="+Inf", **label) == 2
    buckets = [
        of(found, "checkpoint_save_seconds_bucket", le=str(bound), **label)
        for bound in SAVE_BOUNDS_S
    ]
    assert buckets == sorted(buckets) == [*statistics.save_counts]
    at, age = (
        of(found, f"checkpoint_{name}", **label)
        for name in ("last_success_timestamp_seconds", "age_seconds")
    )
    assert (at, age <= (statistics.age_s or 0)) == (statistics.last_saved_at, True)
    names = {name for name, labels in found if ("checkpoints", "CheckpointManager") in labels}
    assert "aioreplica_checkpoint_saves_total" in names
    assert "aioreplica_checkpoint_age_seconds" not in names  # nothing was saved yet
    assert b"checkpoint_saves_total{" not in prometheus_client.generate_latest(registry)


async def test_two_managers_of_one_name_are_refused(registry: Any) -> None:
    first, second = ar.CheckpointManager("a"), ar.CheckpointManager("b")
    with prometheus.export(first, registry=registry, name="x"):
        with pytest.raises(ValueError, match="Metrics of checkpoints named 'x' go there already"):
            prometheus.export(second, registry=registry, name="x")
        with prometheus.export(second, registry=registry) as export:
            assert export.name == "CheckpointManager"


async def test_an_argument_that_is_not_a_strategy_is_refused(registry: Any) -> None:
    with pytest.raises(TypeError, match="those of a strategy or a CheckpointManager, got 7"):
        prometheus.export(7, registry=registry)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a str, got 7"):
        prometheus.export(ar.DefaultStrategy(), registry=registry, name=7)  # type: ignore[arg-type]


async def test_a_missing_package_names_the_extra(
    solo: ar.OneDeviceStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(ImportError, match=r'needs prometheus-client.*"aioreplica\[telemetry\]"'):
        prometheus.export(solo)
    with (
        pytest.raises(ImportError, match=r'needs prometheus-client.*"aioreplica\[telemetry\]"'),
        prometheus.serve(0),
    ):
        pass
