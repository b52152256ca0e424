"""Metrics for Prometheus: of any number of strategies in one registry, read when it is scraped.

Example:
    >>> import asyncio
    >>> import aioreplica as ar
    >>> from aioreplica.integrations import prometheus
    >>> async def main(registry):
    ...     async with ar.OneDeviceStrategy("cpu:0") as strategy:
    ...         with prometheus.export(strategy, registry=registry, name="train"):
    ...             await strategy.run(lambda: None)
    ...             return registry.get_sample_value("aioreplica_runs_total", {"strategy": "train"})
    >>> from prometheus_client import CollectorRegistry  # doctest: +SKIP
    >>> asyncio.run(main(CollectorRegistry()))  # doctest: +SKIP
    1.0
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from ..checkpoint import CheckpointManager
from ..strategies import Strategy
from ._metrics import (
    METRICS,
    Export,
    Measurement,
    MeteredStrategies,
    MetricFamily,
    metered_of,
    missing,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

__all__ = ["export", "serve"]


def export(
    strategy: Strategy | CheckpointManager,
    *,
    registry: CollectorRegistry | None = None,
    name: str | None = None,
) -> Export:
    """Let a registry show metrics of a strategy or of checkpoints, until `close` or a block's end.

    Counting costs about a microsecond per merge; all else is read when the registry is scraped.

    Args:
        strategy: Whose: a strategy, or a CheckpointManager. Several may go to one registry.
        registry: None takes the registry of the process.
        name: The label "strategy" or "checkpoints"; None takes the class name, with a number if
            there are several.

    Raises:
        ImportError: If prometheus-client is not installed.
        TypeError: If this is neither.
        ValueError: If the registry shows another one by that name.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise missing("prometheus-client", error) from error
    chosen = prometheus_client.REGISTRY if registry is None else registry
    metered = metered_of("prometheus", chosen, lambda made: chosen.register(_Collector(made)))
    return metered.add(strategy, name)


@contextmanager
def serve(
    port: int, *, address: str = "127.0.0.1", registry: CollectorRegistry | None = None
) -> Iterator[int]:
    """Serve a registry over HTTP while a `with` block runs; gives the port.

    The client library answers in a daemon thread of its own, so scrapes do not wait for the loop.

    Args:
        port: 0 takes a free one.
        address: Where to listen; "0.0.0.0" lets other hosts in.
        registry: None takes the registry of the process.

    Raises:
        ImportError: If prometheus-client is not installed.
        OSError: If the port is in use, or the address is not this host's.
        ValueError: If the port is no number from 0 to 65535.
    """
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port must be a number from 0 to 65535, got {port!r}.")
    try:
        import prometheus_client
    except ImportError as error:
        raise missing("prometheus-client", error) from error
    chosen = prometheus_client.REGISTRY if registry is None else registry
    try:
        server, thread = prometheus_client.start_http_server(port, address, chosen)
    except OSError as error:
        advice = "Choose another one; 0 takes a free one"
        what = f"port {port} of {address} is in use. {advice}"
        if error.errno != errno.EADDRINUSE:
            what = f"cannot listen at port {port} of {address}: {error.strerror or error}"
        raise OSError(error.errno, f"Metrics are not served: {what}.") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@final
class _Collector:
    """Gives a registry the metrics of the strategies that are exported to it."""

    def __init__(self, metered: MeteredStrategies) -> None:
        self._metered = metered

    def collect(self) -> Iterable[Family]:
        """Return all metrics with their values; those without one too, so that names are known."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        families: dict[MetricFamily, Any] = {}  # Any: the three share no interface
        for metric in METRICS:
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            made = HistogramMetricFamily if metric.is_histogram else kind
            families[metric] = made(f"aioreplica_{metric.name}", metric.help, labels=metric.labels)
        found: Iterable[Measurement] = self._metered.measure()
        for metric, labels, value, buckets in found:
            if metric.is_histogram:
                families[metric].add_metric(labels, buckets, value)
            else:
                families[metric].add_metric(labels, value)
        return families.values()
